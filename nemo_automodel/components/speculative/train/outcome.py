# SPDX-License-Identifier: Apache-2.0
"""The worker's last word to its parent: one small JSON file in the run dir. No torch."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import nemo_automodel.errors as errors
from nemo_automodel.components.speculative.train.job import TrainResult
from nemo_automodel.components.speculative.train.resume import latest_of
from nemo_automodel.files import is_path_like, read_json, write_json

OUTCOME_FILE = "train_status.json"
LOG_FILE = "train.log"
LOST_PEERS = 75  # exit code of a training process whose connection to another one broke


def write_result(run_dir: Path, result: TrainResult) -> None:
    best = None if result.best is None else str(result.best)
    write_json(run_dir / OUTCOME_FILE, {**asdict(result), "checkpoint": str(result.checkpoint), "best": best})


def write_failure(run_dir: Path, error: errors.UserError) -> None:
    """A user's mistake (or an interruption) in its three parts; `checkpoint`: see `last_checkpoint`, or null."""
    parts = {"kind": type(error).__name__, "found": error.found, "where": error.where, "remedy": error.remedy}
    status = "interrupted" if isinstance(error, errors.Interrupted) else "failed"
    write_json(run_dir / OUTCOME_FILE, {"status": status, "error": parts, "checkpoint": _last_saved(run_dir)})


def has_outcome(run_dir: Path) -> bool:
    return (run_dir / OUTCOME_FILE).is_file()


def write_crash(run_dir: Path, last_line: str) -> None:
    """An error that is nobody's mistake but ours: its traceback is in train.log."""
    values = {"status": "crashed", "last_line": last_line, "checkpoint": _last_saved(run_dir)}
    write_json(run_dir / OUTCOME_FILE, values)


def last_checkpoint(run_dir: Path) -> Path | None:
    """The checkpoint that LATEST of this run names; None: it saved none. Reads only."""
    latest = latest_of(run_dir / "checkpoints")
    return latest if latest is not None and latest.is_dir() else None


def _last_saved(run_dir: Path) -> str | None:
    latest = last_checkpoint(run_dir)
    return None if latest is None else str(latest)


def read_outcome(run_dir: Path) -> TrainResult:
    """The result, or the error that the worker met.

    Raises:
        UserError: of the worker's own kind; TrainError when the worker crashed.
        ValueError, OSError: there is no outcome.
    """
    values = read_json(run_dir / OUTCOME_FILE)
    if values["status"] == "crashed":
        saved = values["checkpoint"]
        resume = f"the last checkpoint is intact: train.resume={saved}" if saved else "nothing was saved yet"
        raise errors.TrainError(
            f"the training worker crashed: {values['last_line']}",
            where="train",
            remedy=f"read the traceback in {run_dir / LOG_FILE}; {resume}",
        )
    if "error" in values:
        error = values["error"]
        raise getattr(errors, error["kind"])(error["found"], where=error["where"], remedy=error["remedy"])
    best = None if values["best"] is None else Path(values["best"])
    return TrainResult(**{**values, "checkpoint": Path(values["checkpoint"]), "best": best})


def target_of_run(checkpoint: Path) -> str | None:
    """The target that the run around this checkpoint was trained for.

    None: no run of ours is around it, or its target has moved since.
    """
    resolved = checkpoint.resolve()
    for folder in (resolved, *resolved.parents[:4]):  # run/checkpoints/epoch_*/model/consolidated
        job = folder / "train_job.json"
        if job.is_file():
            target = read_json(job)["target"]["path"]
            return target if Path(target).exists() or not is_path_like(target) else None
    return None
