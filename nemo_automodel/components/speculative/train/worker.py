# SPDX-License-Identifier: Apache-2.0
"""The training process: `python -m nemo_automodel.components.speculative.train.worker JOB.json`.

Started by `workers.run_training`, which holds the other end of our stdin: when that end closes, this process saves
and ends.
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
from typing import Any

from nemo_automodel.components.speculative.train.job import TrainJob
from nemo_automodel.components.speculative.train.outcome import LOG_FILE, write_crash, write_failure, write_result
from nemo_automodel.errors import Interrupted, TrainError, UserError

logger = logging.getLogger("nemo_automodel.train")
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EACCES, errno.EPERM)
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


def end_with_parent() -> None:
    """When the parent's end of our stdin closes, stop as after SIGTERM: the work is saved, though nobody waits for it.

    A process that has not ended ORPHAN_SECONDS later is killed: it would keep the GPU for ever.
    """

    def wait_for_the_end() -> None:
        while os.read(sys.stdin.fileno(), 4096):
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


def run(job: TrainJob) -> int:
    """Train and leave the outcome for the parent; the exit code says the same."""
    try:
        stop = StopRequest()
        from nemo_automodel.components.speculative.train.run import train

        write_result(job.run_dir, train(job, stop))
        return 0
    except StopNow:
        return _fail(job, Interrupted(
            "training was stopped before its first step", where="train", remedy="run the command again",
        ))  # fmt: skip
    except UserError as error:
        return _fail(job, error)
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            return _crash(job)
        return _fail(job, TrainError(f"cannot write: {error}", where="train", remedy="free some space, then resume"))
    except Exception:
        return _crash(job)


def _fail(job: TrainJob, error: UserError) -> int:
    logger.error("%s", error)
    write_failure(job.run_dir, error)
    return error.exit_code


def _crash(job: TrainJob) -> int:
    text = traceback.format_exc()
    logger.error("%s", text)
    write_crash(job.run_dir, text.strip().splitlines()[-1])
    return 1


def main(argv: list[str]) -> int:
    job = TrainJob.load(Path(argv[0]))
    sys.stdout, sys.stderr = UntilItCloses(sys.stdout), UntilItCloses(sys.stderr)
    end_with_parent()
    logging.basicConfig(
        filename=job.run_dir / LOG_FILE, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s"
    )
    return run(job)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
