# SPDX-License-Identifier: Apache-2.0
"""Starts the training processes of this machine by torch elastic: `python -m ...train.agent JOB.json`.

A process of its own between the recipe and the workers, so that the recipe never imports torch. When one worker dies,
elastic ends the others; which one it was goes to the outcome file.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import uuid
from pathlib import Path

from nemo_automodel.components.speculative.train.job import TrainJob
from nemo_automodel.components.speculative.train.outcome import LOST_PEERS, has_outcome, last_checkpoint, write_failure
from nemo_automodel.components.speculative.train.worker import ORPHAN_SECONDS, end_with_parent
from nemo_automodel.components.speculative.train.workers import WORKER_MODULE
from nemo_automodel.errors import Interrupted, TrainError, UserError


def main(argv: list[str]) -> int:
    job_file = Path(argv[0])
    job = TrainJob.load(job_file)
    _hold_workers()
    logging.disable(logging.CRITICAL)  # elastic's own words: what happened is said once, by the recipe
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    try:
        with tempfile.TemporaryDirectory(prefix="train_then_serve_") as logs:
            config = LaunchConfig(
                min_nodes=1, max_nodes=1, nproc_per_node=job.train.nproc_per_node, run_id=uuid.uuid4().hex,
                rdzv_backend="c10d", rdzv_endpoint="127.0.0.1:0", local_addr="127.0.0.1", max_restarts=0,
                signals_to_handle="SIGTERM,SIGINT", shutdown_timeout=int(ORPHAN_SECONDS),
                logs_specs=DefaultLogsSpecs(log_dir=logs),
            )  # fmt: skip
            elastic_launch(config, sys.executable)("-m", WORKER_MODULE, str(job_file))
        return 0
    except SignalException:
        return Interrupted.exit_code
    except ChildFailedError as error:
        if not has_outcome(job.run_dir):
            write_failure(job.run_dir, _what_happened(job, error.failures))
        return 1


def _hold_workers() -> None:
    """Our stdin is the recipe's pipe; the workers' becomes one of ours, so that they notice when we die."""
    end_with_parent(os.dup(0))
    reader, _writer = os.pipe()  # the writer is inherited by nobody and closes with this process
    os.dup2(reader, 0)


def _what_happened(job: TrainJob, failures: dict) -> UserError:
    """The first worker that died by itself; those that only lost it are no news."""
    died = [f for f in failures.values() if f.exitcode != LOST_PEERS] or list(failures.values())
    first = min(died, key=lambda failure: failure.timestamp)
    saved = last_checkpoint(job.run_dir)
    resume = f"go on with train.resume={saved}" if saved else "nothing was saved yet: run the command again"
    if first.exitcode == Interrupted.exit_code:
        return Interrupted("training was stopped before its first step", where="train", remedy=resume)
    how = f"ended with exit code {first.exitcode}"
    if first.exitcode < 0:
        how = f"was killed by {signal.Signals(-first.exitcode).name}"
    memory = " (out of memory?)" if first.exitcode == -signal.SIGKILL else ""
    return TrainError(
        f"training process {first.local_rank} of {job.train.nproc_per_node} {how}{memory}, the others were ended",
        where="train", remedy=resume,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
