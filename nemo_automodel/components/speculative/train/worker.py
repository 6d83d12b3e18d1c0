# SPDX-License-Identifier: Apache-2.0
"""The training process: `python -m nemo_automodel.components.speculative.train.worker JOB.json`.

Started by `workers.run_training`, which holds the other end of our stdin: when that end closes, this process ends.
torch is imported only after the signal handlers are there: it takes seconds, and Ctrl-C may come within them.
"""

from __future__ import annotations

import errno
import logging
import os
import signal
import sys
import threading
import traceback
from pathlib import Path

from nemo_automodel.components.speculative.train.job import TrainJob
from nemo_automodel.components.speculative.train.outcome import LOG_FILE, write_crash, write_failure, write_result
from nemo_automodel.errors import Interrupted, TrainError, UserError

logger = logging.getLogger("nemo_automodel.train")
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EACCES, errno.EPERM)


class StopRequest:
    """Remembers SIGINT/SIGTERM. Before the loop there is nothing to save: there it raises Interrupted at once."""

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
            raise self._too_early()

    def _on_signal(self, _signum: int, _frame: object) -> None:
        self.received = True
        if not self.in_loop:
            raise self._too_early()

    @staticmethod
    def _too_early() -> Interrupted:
        return Interrupted("training was stopped before its first step", where="train", remedy="run the command again")


def end_with_parent() -> None:
    """Kill this process when the parent's end of our stdin closes: the parent is gone, nobody waits for us."""

    def wait_for_the_end() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait_for_the_end, name="parent-watch", daemon=True).start()


def run(job: TrainJob) -> int:
    """Train and leave the outcome for the parent; the exit code says the same."""
    try:
        stop = StopRequest()
        from nemo_automodel.components.speculative.train.run import train

        write_result(job.run_dir, train(job, stop))
        return 0
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
    end_with_parent()
    logging.basicConfig(
        filename=job.run_dir / LOG_FILE, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s"
    )
    return run(job)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
