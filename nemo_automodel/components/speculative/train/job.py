# SPDX-License-Identifier: Apache-2.0
"""What one training run is told, and what it answers: plain values and their JSON files. No torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Mapping

from nemo_automodel.config.schema import (
    AppConfig, DataConfig, DraftConfig, DraftKind, OptimizerKind, Precision, TargetConfig, TrainConfig,
)  # fmt: skip
from nemo_automodel.files import read_json, write_json

TRAIN_ENUMS = {"precision": Precision, "optimizer": OptimizerKind}


@dataclass(frozen=True)
class TrainJob:
    """One training run; the sections are those of the configuration."""

    target: TargetConfig
    data: DataConfig
    draft: DraftConfig
    train: TrainConfig
    run_dir: Path

    def save(self, path: Path) -> None:
        """Write the job as JSON; `load` gives it back."""
        write_json(path, job_values(self))

    @classmethod
    def load(cls, path: Path) -> TrainJob:
        """Raises ValueError, KeyError or TypeError when the file is not one that `save` wrote."""
        values = read_json(path)
        draft, train = values["draft"], values["train"]
        return cls(
            TargetConfig(**values["target"]),
            DataConfig(**values["data"]),
            DraftConfig(**{**draft, "kind": DraftKind(draft["kind"])}),
            TrainConfig(**{**train, **{key: kind(train[key]) for key, kind in TRAIN_ENUMS.items()}}),
            Path(values["run_dir"]),
        )


def job_values(job: TrainJob) -> dict[str, Any]:
    """The job as plain values."""
    values = asdict(job)
    values["run_dir"] = str(job.run_dir)
    values["draft"]["kind"] = job.draft.kind.value
    values["train"]["precision"] = job.train.precision.value
    values["train"]["optimizer"] = job.train.optimizer.value
    return values


@dataclass(frozen=True)
class TrainResult:
    """How a run ended well. `status`: "done", or "nothing_to_do" when it was resumed after its last step."""

    status: str
    checkpoint: Path  # .../checkpoints/epoch_<E>_step_<S>
    step: int
    seconds: float
    loss: float | None  # of the last logged steps; None when no step was run
    validation: Mapping[str, Any] | None  # loss, accuracy_per_depth, acceptance_length
    best: Path | None = None  # the checkpoint of the highest validation acceptance; None: none was validated


def build_train_job(app: AppConfig, run_dir: Path) -> TrainJob:
    """The job of a parsed configuration. Pure."""
    return TrainJob(app.target, app.data, app.draft, app.train, Path(run_dir).absolute())
