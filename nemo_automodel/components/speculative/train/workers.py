# SPDX-License-Identifier: Apache-2.0
"""Starts the training worker, passes signals on, and turns its end into a value or an error.

The model lives in the worker only: when `run_training` returns, its memory is free for the server. No torch here.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import nemo_automodel
from nemo_automodel.components.speculative.train.job import TrainJob, TrainResult
from nemo_automodel.components.speculative.train.outcome import LOG_FILE, OUTCOME_FILE, read_outcome, write_failure
from nemo_automodel.errors import Interrupted, TrainError

JOB_FILE = "train_job.json"
WORKER_MODULE = "nemo_automodel.components.speculative.train.worker"


def run_training(job: TrainJob) -> TrainResult:
    """Train in a child process and wait for it; the child shows its progress on our terminal.

    The first SIGINT, SIGTERM or SIGHUP is passed on (the worker finishes its step, saves and stops); a second SIGINT or
    SIGTERM kills. Should this process die, the worker does the same by itself (worker.end_with_parent).

    Raises:
        Interrupted: a signal came, even if the worker had ended well by then; what it saved is named, here and in
            train_status.json.
        UserError: the worker's own (data, configuration, training).
        TrainError: the worker crashed or was killed.
    """
    job.run_dir.mkdir(parents=True, exist_ok=True)
    job.save(job.run_dir / JOB_FILE)
    (job.run_dir / OUTCOME_FILE).unlink(missing_ok=True)
    with SignalRelay() as relay:
        worker = subprocess.Popen(
            [sys.executable, "-m", WORKER_MODULE, str(job.run_dir / JOB_FILE)],
            # The worker reads this pipe in a thread: its end means that we are gone, however we went.
            stdin=subprocess.PIPE,
            env=_worker_env(job),
            # Ctrl-C reaches every process of the terminal's group: in its own session the worker gets it once, from us.
            start_new_session=True,
        )
        try:
            relay.connect(worker)
            code = worker.wait()
        finally:
            if worker.poll() is None:
                _kill_group(worker)
                worker.wait()
            worker.stdin.close()
    return _outcome(job.run_dir, code, stopped=relay.received)


def _worker_env(job: TrainJob) -> dict[str, str]:
    env = dict(os.environ)
    package_root = str(Path(nemo_automodel.__file__).parent.parent)
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [package_root, env.get("PYTHONPATH")]))
    if job.train.num_threads is not None:
        env["OMP_NUM_THREADS"] = str(job.train.num_threads)
    return env


class SignalRelay:
    """While it is entered, the first signal is passed to the worker and a second SIGINT or SIGTERM kills it.

    SIGHUP never kills: a dropped terminal sends it twice (kernel and shell). Where it is ignored (nohup), it stays so.
    In a thread other than the main one Python allows no handlers: there the caller's stay in charge.
    """

    def __init__(self) -> None:
        self.received = False
        self._demands = 0  # SIGINT and SIGTERM alone
        self._worker: subprocess.Popen | None = None
        self._before: dict[int, object] = {}

    def __enter__(self) -> SignalRelay:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def connect(self, worker: subprocess.Popen) -> None:
        """From now on signals go to this worker; one that came before is passed on now."""
        self._worker = worker
        if self.received:
            self._pass_on()

    def _on_signal(self, number: int, _frame: object) -> None:
        self.received = True
        self._demands += number != signal.SIGHUP
        if self._worker is not None:
            self._pass_on()

    def _pass_on(self) -> None:
        if self._demands > 1:
            _kill_group(self._worker)
        else:
            # SIGTERM for all: while Python starts, before the worker's handlers stand, SIGINT would be a traceback.
            self._worker.terminate()


def _kill_group(worker: subprocess.Popen) -> None:
    try:
        os.killpg(worker.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # it ended between the question and the signal


def _outcome(run_dir: Path, code: int, *, stopped: bool) -> TrainResult:
    try:
        result = read_outcome(run_dir)
    except (OSError, ValueError) as error:
        resume = f"go on from the last checkpoint, if there is one, with train.resume={run_dir}"
        if stopped:
            stop = Interrupted("training was stopped and saved nothing more", where="train", remedy=resume)
            write_failure(run_dir, stop)
            raise stop from error
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        memory = " (out of memory?)" if code == -signal.SIGKILL else ""
        raise TrainError(
            f"the training worker {how}{memory} and left no word", where="train",
            remedy=f"read {run_dir / LOG_FILE}; {resume}",
        ) from error  # fmt: skip
    if stopped:  # the signal came too late for the worker, and in time for what would follow
        late = Interrupted(
            f"training was stopped when its last step was done; saved {result.checkpoint}",
            where="train",
            remedy=f"serve it with train.enabled=false serve.enabled=true serve.checkpoint={result.checkpoint}",
        )
        write_failure(run_dir, late)
        raise late
    return result
