# SPDX-License-Identifier: Apache-2.0
"""The parent's side: results and errors come back as values, signals stop, and no worker is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from tiny_train import losses_of, make_job

import nemo_automodel.components.speculative.train.trackers as trackers
import nemo_automodel.components.speculative.train.worker as worker_module
import nemo_automodel.components.speculative.train.workers as workers
from nemo_automodel.components.speculative.train.checkpoint import load_state
from nemo_automodel.components.speculative.train.outcome import OUTCOME_FILE, last_checkpoint, read_outcome
from nemo_automodel.components.speculative.train.placement import Placement
from nemo_automodel.components.speculative.train.worker import ORPHAN_SECONDS
from nemo_automodel.components.speculative.train.workers import WORKER_MODULE, SignalRelay, run_training
from nemo_automodel.errors import ConfigError, DataError, Interrupted, TrainError

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


def is_worker(pid: int) -> bool:
    return WORKER_MODULE.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")


@contextmanager
def training_parent(folder, **train):
    """A parent process training for ever, past its third step, and its only child."""
    job = make_job(folder, "run", num_epochs=100_000, **train)
    path = job.run_dir / "job.json"
    job.save(path)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PARENT, str(path)]
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    metrics = job.run_dir / "metrics.jsonl"
    try:
        wait_for(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= 3, "three steps")
        (child,) = children_of(process.pid)
        yield job, process, child
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def parent(tmp_path):
    with training_parent(tmp_path) as running:
        yield running


@pytest.fixture
def pair(tmp_path):
    """The same with two workers, which an agent holds: the job, the parent and the pids of agent and workers."""
    with training_parent(tmp_path, nproc_per_node=2) as (job, process, agent):
        yield job, process, [agent, *children_of(agent)]


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


def assert_saved(job):
    with pytest.raises(Interrupted, match="saved"):
        read_outcome(job.run_dir)
    checkpoint = last_checkpoint(job.run_dir)
    assert load_state(checkpoint).position.step >= 3
    assert json.loads((job.run_dir / OUTCOME_FILE).read_text())["checkpoint"] == str(checkpoint)


def test_killing_the_parent_leaves_no_worker_and_loses_no_step(parent):
    job, process, worker = parent
    process.kill()
    process.stderr.close()  # the terminal is gone too: the worker's next line has no reader
    wait_for(lambda: not is_running(worker), "the worker's end", ORPHAN_SECONDS)
    assert_saved(job)


def test_a_dropped_terminal_saves_and_stops(parent):
    job, process, worker = parent
    process.stderr.close()
    process.send_signal(signal.SIGHUP)
    assert process.wait(60) == 130
    assert not is_running(worker)
    assert_saved(job)


def test_only_a_second_int_or_term_kills(own_signals):
    code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); signal.pause()"
    deaf = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
    try:
        deaf.stdout.readline()
        with SignalRelay() as relay:
            relay.connect(deaf)
            # A dropped terminal is announced by the kernel and by the shell, and logind may add one SIGTERM.
            for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGTERM, signal.SIGHUP):
                os.kill(os.getpid(), number)
            assert is_running(deaf.pid)
            os.kill(os.getpid(), signal.SIGINT)
            assert deaf.wait(10) == -signal.SIGKILL
    finally:
        deaf.kill()
        deaf.wait()


def test_a_worker_that_cannot_stop_is_ended_at_the_deadline(tmp_path):
    code = (
        "import signal, nemo_automodel.components.speculative.train.worker as worker\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); worker.ORPHAN_SECONDS = 0.2\n"
        "worker.end_with_parent(); signal.pause()"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", code], env=env, stdin=subprocess.PIPE)
    process.stdin.close()
    assert process.wait(60) == -signal.SIGKILL


def test_a_hang_up_that_nohup_ignores_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with SignalRelay():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


# A worker that ends well after the parent was told to stop.
LATE = """
import os, signal, sys
from pathlib import Path
from nemo_automodel.components.speculative.train.job import TrainJob, TrainResult
from nemo_automodel.components.speculative.train.outcome import write_result
job = TrainJob.load(Path(sys.argv[1]))
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
os.kill(os.getppid(), signal.SIGINT)
signal.sigwait([signal.SIGTERM])
checkpoint = job.run_dir / "checkpoints" / "epoch_1_step_9"
checkpoint.mkdir(parents=True)
(checkpoint.parent / "LATEST").symlink_to(checkpoint.name)
write_result(job.run_dir, TrainResult("done", checkpoint, 9, 1.0, 0.5, None))
"""


def test_a_worker_that_ends_well_after_ctrl_c_is_an_interruption(tmp_path, monkeypatch):
    (tmp_path / "late_worker.py").write_text(LATE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(workers, "WORKER_MODULE", "late_worker")
    job = make_job(tmp_path, "run")
    with pytest.raises(Interrupted, match="epoch_1_step_9"):
        run_training(job)
    outcome = json.loads((job.run_dir / OUTCOME_FILE).read_text())
    assert outcome["status"] == "interrupted" and outcome["checkpoint"].endswith("epoch_1_step_9")


@pytest.fixture
def own_signals():
    """The worker's code in this process; its signal handlers go with the test."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before):
        signal.signal(number, handler)


def test_ctrl_c_while_the_hub_downloads_is_an_interruption(tmp_path, monkeypatch, own_signals):
    import datasets

    def download(*_, **__):
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(60)
        except Exception as error:
            raise ConnectionError("download failed") from error

    monkeypatch.setattr(datasets, "load_dataset", download)
    job = make_job(tmp_path, "run", data={"train": "some-org/some-chats"})
    assert worker_module.run(job) == 130
    with pytest.raises(Interrupted, match="before its first step"):
        read_outcome(job.run_dir)


def test_a_signal_during_the_last_validation_ends_interrupted(tmp_path, monkeypatch, own_signals):
    import nemo_automodel.components.speculative.train.loop as loop_module

    inner = loop_module.validate

    def stopped_in(*args, **settings):
        os.kill(os.getpid(), signal.SIGTERM)
        return inner(*args, **settings)

    monkeypatch.setattr(loop_module, "validate", stopped_in)
    job = make_job(tmp_path, "run", max_steps=1)
    assert worker_module.run(job) == 130
    with pytest.raises(Interrupted, match="saved .*epoch_1_step_1"):
        read_outcome(job.run_dir)
    assert last_checkpoint(job.run_dir) == job.run_dir / "checkpoints" / "epoch_1_step_1"


def test_a_full_disk_names_the_checkpoint_that_is_whole(tmp_path, monkeypatch, own_signals):
    import nemo_automodel.components.speculative.train.progress as progress

    inner = progress.RunReport.step

    def full_disk(report, metrics):
        if metrics["step"] == 3:
            raise OSError(28, "No space left on device")
        inner(report, metrics)

    monkeypatch.setattr(progress.RunReport, "step", full_disk)
    job = make_job(tmp_path, "run", save_every_steps=2)
    assert worker_module.run(job) == 1
    with pytest.raises(TrainError, match="No space left") as caught:
        read_outcome(job.run_dir)
    assert f"train.resume={job.run_dir}/checkpoints/epoch_1_step_2" in caught.value.remedy


def test_where_not_even_the_outcome_can_be_written_it_is_said(tmp_path, monkeypatch, own_signals, capsys):
    def full_disk(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(worker_module, "write_failure", full_disk)
    job = make_job(tmp_path, "run", data={"train": "/no/rows.jsonl"})
    assert worker_module.run(job) == 1
    assert "/no/rows.jsonl" in (said := capsys.readouterr().err) and "No space left" in said


def test_a_tracker_that_is_not_installed_is_named_before_any_process_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises(ConfigError, match="nowhere_to_be_found is not installed") as caught:
        monkeypatch.setattr(trackers, "PACKAGES", {"tensorboard": "nowhere_to_be_found", "wandb": "wandb"})
        run_training(make_job(tmp_path, "run", tensorboard=True))
    assert caught.value.where == "train.tensorboard=true"


def test_a_launchers_processes_and_ones_own_do_not_multiply(tmp_path):
    place = Placement(0, 2, 0, "127.0.0.1", 1, "torchrun")
    with pytest.raises(ConfigError, match="torchrun has started 2 processes already"):
        run_training(make_job(tmp_path, "run", nproc_per_node=2), place)


def test_no_checkpoint_is_none(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    assert last_checkpoint(tmp_path) is None
    (tmp_path / "checkpoints" / "LATEST").write_text("epoch_1_step_1\n")
    assert last_checkpoint(tmp_path) is None  # it names a folder that is not there


def test_killing_the_worker_is_reported(parent):
    job, process, worker = parent
    os.kill(worker, signal.SIGKILL)
    assert process.wait(60) == 1
    said = process.stdout.read()
    assert "killed by SIGKILL" in said and str(job.run_dir) in said


def test_a_signal_to_one_of_two_workers_saves_and_stops_both(pair):
    job, process, (agent, first, second) = pair
    os.kill(second, signal.SIGTERM)
    assert process.wait(60) == 130
    assert not any(map(is_running, (agent, first, second)))
    assert_saved(job)


def test_killing_one_of_two_workers_names_it_and_loses_no_step(pair):
    job, process, (agent, first, second) = pair
    os.kill(second, signal.SIGKILL)
    assert process.wait(60) == 1
    assert not any(map(is_running, (agent, first)))
    said, errors = process.communicate()
    assert "process 1 of 2 was killed by SIGKILL" in said and "Traceback" not in said + errors
    saved = last_checkpoint(job.run_dir)
    assert f"train.resume={saved}" in said and load_state(saved).position.step >= 3


@pytest.fixture
def starting(tmp_path):
    """A parent process whose worker has just begun to start."""
    job = make_job(tmp_path, "run")
    job.save(job.run_dir / "job.json")
    command = [sys.executable, "-c", PARENT, str(job.run_dir / "job.json")]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        # not before exec: until then the parent waits inside Popen, and a stopped child would hold it there
        wait_for(lambda: any(map(is_worker, children_of(process.pid))), "the worker's start")
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
