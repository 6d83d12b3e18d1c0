# SPDX-License-Identifier: Apache-2.0
"""Starts the training worker or workers, passes signals on, and turns their end into a value or an error.

The model lives in the workers only: when `run_training` returns, its memory is free for the server. No torch here.
Under an outer launcher (torchrun, Slurm) every process of it starts one worker; the first one has the job.
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
from nemo_automodel.components.speculative.train.outcome import (
    LOG_FILE, LOST_PEERS, OUTCOME_FILE, read_outcome, write_failure,
)  # fmt: skip
from nemo_automodel.components.speculative.train.placement import Placement, without_placement
from nemo_automodel.components.speculative.train.trackers import check_trackers
from nemo_automodel.components.speculative.train.worker import DISMISS
from nemo_automodel.errors import ConfigError, Interrupted, TrainError

JOB_FILE = "train_job.json"
AGENT_MODULE = "nemo_automodel.components.speculative.train.agent"
WORKER_MODULE = "nemo_automodel.components.speculative.train.worker"


def run_training(job: TrainJob, placement: Placement | None = None) -> TrainResult:
    """Train in child processes and wait for them; the first one shows its progress on our terminal.

    The first SIGINT, SIGTERM or SIGHUP is passed on (the workers finish their step, save and stop); a second SIGINT or
    SIGTERM kills. Should this process die, the workers do the same by themselves (worker.end_with_parent).

    Args:
        placement: what an outer launcher says; the other processes of it must call `follow_training`.

    Raises:
        Interrupted: a signal came, even if the worker had ended well by then; what it saved is named, here and in
            train_status.json.
        UserError: the worker's own (data, configuration, training).
        TrainError: a worker crashed or was killed.
    """
    check_start(job, placement)
    job.run_dir.mkdir(parents=True, exist_ok=True)
    job.save(job.run_dir / JOB_FILE)
    (job.run_dir / OUTCOME_FILE).unlink(missing_ok=True)
    several = job.train.nproc_per_node > 1
    code, stopped = _run_child(
        [sys.executable, "-m", AGENT_MODULE if several else WORKER_MODULE, str(job.run_dir / JOB_FILE)],
        _child_env(placement, job.train.num_threads),
    )
    return _outcome(job.run_dir, code, stopped=stopped)


def follow_training(placement: Placement) -> int:
    """Be one of the others under an outer launcher: train what the first process says, if anything. The exit code."""
    code, _ = _run_child([sys.executable, "-m", WORKER_MODULE], _child_env(placement, None))
    return code if code >= 0 else 128 - code


def dismiss_followers(placement: Placement) -> None:
    """Tell the processes in `follow_training` that nothing will be trained."""
    _run_child([sys.executable, "-m", WORKER_MODULE, DISMISS], _child_env(placement, None))


def check_start(job: TrainJob, placement: Placement | None) -> None:
    """Raises ConfigError for what can be refused before any process starts."""
    check_trackers(job.train)
    if placement is not None and job.train.nproc_per_node > 1:
        raise ConfigError(
            f"{placement.launcher} has started {placement.world_size} processes already",
            where=f"train.nproc_per_node={job.train.nproc_per_node}",
            remedy=f"set train.nproc_per_node=1, or do without {placement.launcher}",
        )


def _run_child(command: list[str], env: dict[str, str]) -> tuple[int, bool]:
    """Its exit code, and whether a signal came for it."""
    with SignalRelay() as relay:
        child = subprocess.Popen(
            command,
            # The child reads this pipe in a thread: its end means that we are gone, however we went.
            stdin=subprocess.PIPE,
            env=env,
            # Ctrl-C reaches every process of the terminal's group: in its own session the worker gets it once, from us.
            start_new_session=True,
        )
        try:
            relay.connect(child)
            code = child.wait()
        finally:
            if child.poll() is None:
                _kill_group(child)
                child.wait()
            child.stdin.close()
    return code, relay.received


def _child_env(placement: Placement | None, num_threads: int | None) -> dict[str, str]:
    env = without_placement(os.environ) if placement is None else {**os.environ, **placement.environment()}
    package_root = str(Path(nemo_automodel.__file__).parent.parent)
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [package_root, env.get("PYTHONPATH")]))
    env.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else a lost connection is announced in C++ as well
    env.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # torch: huge pages; else page faults take a third of a CPU step
    if num_threads is not None:
        env["OMP_NUM_THREADS"] = str(num_threads)
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
    """Kill the child, and the workers of an agent, which have sessions of their own."""
    for group in (*_children_of(worker.pid), worker.pid):
        try:
            os.killpg(group, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass  # it ended between the question and the signal, or leads no group


def _children_of(pid: int) -> list[int]:
    """Where the kernel does not say, none: they end when the pipe from their parent closes."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _outcome(run_dir: Path, code: int, *, stopped: bool) -> TrainResult:
    try:
        result = read_outcome(run_dir)
    except (OSError, ValueError) as error:
        resume = f"go on from the last checkpoint, if there is one, with train.resume={run_dir}"
        if stopped:
            stop = Interrupted("training was stopped and saved nothing more", where="train", remedy=resume)
            write_failure(run_dir, stop)
            raise stop from error
        if code == LOST_PEERS:
            raise TrainError(
                "the connection to another training process broke: it has died", where="train",
                remedy=f"see what its launcher says; {resume}",
            ) from error  # fmt: skip
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
