# SPDX-License-Identifier: Apache-2.0
"""The parent's side: results and errors come back as values, signals stop, and no worker is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_train import losses_of, make_job

from nemo_automodel.components.speculative.train.outcome import read_outcome
from nemo_automodel.components.speculative.train.workers import JOB_FILE, run_training
from nemo_automodel.errors import DataError, Interrupted, TrainError

ROOT = Path(__file__).parents[2]
# A parent as the recipe is one: runs the job, prints the worker's pid, ends with the error's exit code.
PARENT = """
import sys
from pathlib import Path
from nemo_automodel.components.speculative.train.job import TrainJob
from nemo_automodel.components.speculative.train.workers import run_training
from nemo_automodel.errors import UserError
assert "torch" not in sys.modules
try:
    run_training(TrainJob.load(Path(sys.argv[1])))
except UserError as error:
    print(error)
    sys.exit(error.exit_code)
"""


def wait_for(condition, what, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def children_of(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.fixture
def parent(tmp_path):
    """A parent process training for ever, past its third step."""
    job = make_job(tmp_path, "run", num_epochs=100_000)
    path = job.run_dir / "job.json"
    job.save(path)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "-c", PARENT, str(path)], env=env, stdout=subprocess.PIPE, text=True)
    metrics = job.run_dir / "metrics.jsonl"
    try:
        wait_for(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= 3, "three steps")
        (worker,) = children_of(process.pid)
        yield job, process, worker
    finally:
        process.kill()
        process.wait()


def test_result_and_files_of_a_whole_run(tmp_path):
    job = make_job(tmp_path, "run", max_steps=2)
    result = run_training(job)
    assert (result.status, result.step) == ("done", 2)
    assert result.checkpoint == job.run_dir / "checkpoints" / "epoch_1_step_2"
    assert result.loss == losses_of(job)[-1] and result.validation["acceptance_length"] >= 1
    assert "step 2/2" in (job.run_dir / "train.log").read_text()


def test_a_users_mistake_comes_back_whole(tmp_path, capfd):
    job = make_job(tmp_path, "run", data={"train": "/no/rows.jsonl"})
    with pytest.raises(DataError) as caught:
        run_training(job)
    assert caught.value.where == "data.train" and "no file or folder at /no/rows.jsonl" in str(caught.value)
    assert "Traceback" not in "".join(capfd.readouterr())


def test_a_crash_names_its_last_line_and_the_log(tmp_path, capfd):
    job = make_job(tmp_path, "run")
    job.data.chat_template_kwargs = None  # a value that the typed config never lets through
    with pytest.raises(TrainError, match=r"crashed: TypeError: .*train\.log"):
        run_training(job)
    assert "Traceback" in (job.run_dir / "train.log").read_text()
    assert "Traceback" not in "".join(capfd.readouterr())


def test_ctrl_c_saves_and_stops(parent):
    job, process, worker = parent
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert not is_running(worker)
    with pytest.raises(Interrupted, match="saved"):
        read_outcome(job.run_dir)
    latest = (job.run_dir / "checkpoints" / "LATEST").resolve()
    step = int(latest.name.rsplit("_", 1)[1])
    assert step >= 3 and step == json.loads((job.run_dir / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    assert str(latest) in process.stdout.read()


def test_killing_the_parent_leaves_no_worker(parent):
    _, process, worker = parent
    process.kill()
    wait_for(lambda: not is_running(worker), "the worker's end")


def test_killing_the_worker_is_reported(parent):
    job, process, worker = parent
    os.kill(worker, signal.SIGKILL)
    assert process.wait(60) == 1
    said = process.stdout.read()
    assert "killed by SIGKILL" in said and str(job.run_dir) in said


@pytest.fixture
def starting(tmp_path):
    """A parent process whose worker has just begun to start."""
    job = make_job(tmp_path, "run")
    job.save(job.run_dir / "job.json")
    command = [sys.executable, "-c", PARENT, str(job.run_dir / "job.json")]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        wait_for(lambda: (job.run_dir / JOB_FILE).exists() and children_of(process.pid), "the worker's start")
        yield process, children_of(process.pid)[0]
    finally:
        process.kill()
        process.wait()


def test_ctrl_c_during_the_start_is_one_line(starting):
    process, worker = starting
    process.send_signal(signal.SIGINT)
    said, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and "training was stopped" in said and "Traceback" not in errors
    assert not is_running(worker)


def test_the_second_signal_kills(starting):
    process, worker = starting
    os.kill(worker, signal.SIGSTOP)  # a worker that does not answer
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 130
    assert not is_running(worker)
