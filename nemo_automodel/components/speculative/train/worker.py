# SPDX-License-Identifier: Apache-2.0
"""A training process: `python -m nemo_automodel.components.speculative.train.worker [JOB.json | --dismiss]`.

Started by `workers.run_training`, or by `agent` for several of them; whoever it is holds the other end of our stdin:
when that end closes, this process saves and ends. With RANK and WORLD_SIZE set it is one of a group, whose first
process has the job and hands it to the others (`--dismiss`: tells them that there is none).
torch is imported only after the signal handlers are there: it takes seconds, and Ctrl-C may come within them.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any, Callable

from nemo_automodel.components.speculative.train.job import TrainJob
from nemo_automodel.components.speculative.train.outcome import (
    LOG_FILE, LOST_PEERS, OUTCOME_FILE, has_outcome, last_checkpoint, write_crash, write_failure, write_result,
)  # fmt: skip
from nemo_automodel.components.speculative.train.placement import PeerFailed, PeerLost
from nemo_automodel.errors import Interrupted, TrainError, UserError

logger = logging.getLogger("nemo_automodel.train")
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EACCES, errno.EPERM)
DISMISS = "--dismiss"
ORPHAN_SECONDS = 300.0  # for the step in progress and the last checkpoint, once the parent is gone


class StopNow(BaseException):
    """Leaves the set-up at once. No Exception: libraries catch these and make a download error of them."""


class StopRequest:
    """Remembers SIGINT/SIGTERM. Before the loop there is nothing to save: there the first one raises StopNow."""

    def __init__(self) -> None:
        self.received = False
        self.in_loop = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def __call__(self) -> bool:
        return self.received

    def enter_loop(self) -> None:
        self.in_loop = True
        if self.received:  # raised before, but swallowed by a library
            raise StopNow

    def _on_signal(self, _signum: int, _frame: object) -> None:
        first, self.received = not self.received, True
        if first and not self.in_loop:
            raise StopNow


def end_with_parent(pipe: int = 0) -> None:
    """When the parent's end of our stdin closes, stop as after SIGTERM: the work is saved, though nobody waits for it.

    A process that has not ended ORPHAN_SECONDS later is killed: it would keep the GPU for ever.
    """

    def wait_for_the_end() -> None:
        while os.read(pipe, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(ORPHAN_SECONDS)  # the process ends, and this thread with it, unless it hangs
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait_for_the_end, name="parent-watch", daemon=True).start()


class UntilItCloses:
    """A text stream whose reader may go away (a dropped ssh session, `| head`): what follows is discarded.

    Training goes on; its lines are in train.log and metrics.jsonl as well.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()


def run(job: TrainJob | None) -> int:
    """Train and leave the outcome for the parent; the exit code says the same where there is one process.

    In a group a process that ends in order returns 0: a launcher ends all others when one returns anything else.
    """
    rank, in_group = int(os.environ.get("RANK", 0)), False
    try:
        stop = StopRequest()
        from nemo_automodel.components.speculative.train.world import join

        world = join()
        in_group = world.size > 1
        job = world.share(job)
        if job is not None:
            _log_to(job, rank)
            _train(job, stop, world)
        world.leave()
        return 0
    except StopNow:
        return _end(job, rank, _stopped_early())
    except PeerFailed:
        return 0
    except PeerLost as error:
        logger.error("the connection to another process broke: %s", error)
        return LOST_PEERS
    except UserError as error:
        code = _end(job, rank, error)
        return 0 if in_group else code
    except OSError as error:
        return _end(job, rank, _unwritable(job, error)) if error.errno in DISK_ERRORS else _crash(job, rank)
    except Exception:
        return _crash(job, rank)


def _train(job: TrainJob, stop: StopRequest, world: Any) -> None:
    from nemo_automodel.components.speculative.train.run import train

    result = train(job, stop, world)
    if world.is_first:
        write_result(job.run_dir, result)


def _log_to(job: TrainJob, rank: int) -> None:
    """train.log has what the first process says and what the others complain of."""
    there = job.run_dir.is_dir()
    logging.basicConfig(
        **({"filename": job.run_dir / LOG_FILE} if there else {"stream": sys.stderr}),
        level=logging.WARNING if rank else logging.INFO,
        format="%(asctime)s %(levelname)s " + (f"process {rank}: " if rank else "") + "%(message)s",
    )


def _stopped_early() -> Interrupted:
    return Interrupted("training was stopped before its first step", where="train", remedy="run the command again")


def _unwritable(job: TrainJob, error: OSError) -> TrainError:
    whole = last_checkpoint(job.run_dir)
    then = f"train.resume={whole}" if whole else "start again"
    return TrainError(f"cannot write: {error}", where="train", remedy=f"free some space, then {then}")


def _end(job: TrainJob | None, rank: int, error: UserError) -> int:
    logger.error("%s", error)
    _leave_word(job, rank, lambda: write_failure(job.run_dir, error), str(error))
    return error.exit_code


def _crash(job: TrainJob | None, rank: int) -> int:
    text = traceback.format_exc()
    logger.error("%s", text)
    last = text.strip().splitlines()[-1]
    _leave_word(job, rank, lambda: write_crash(job.run_dir, f"process {rank}: {last}" if rank else last), last)
    return 1


def _leave_word(job: TrainJob | None, rank: int, write: Callable[[], None], text: str) -> None:
    """The outcome for the parent. Of a group the first process's word goes before those of the others."""
    if job is None or (rank and (has_outcome(job.run_dir) or not job.run_dir.is_dir())):
        print(f"process {rank}: {text}", file=sys.stderr)
        return
    try:
        write()
    except OSError as error:  # a full disk
        print(f"{text} (and no {OUTCOME_FILE}: {error})", file=sys.stderr)


def main(argv: list[str]) -> int:
    sys.stdout, sys.stderr = UntilItCloses(sys.stdout), UntilItCloses(sys.stderr)
    end_with_parent()
    return run(TrainJob.load(Path(argv[0])) if argv and argv[0] != DISMISS else None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
