# SPDX-License-Identifier: Apache-2.0
"""What one training run is told, and what it answers: plain values and their JSON files. No torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Mapping

from nemo_automodel.config.schema import (
    AppConfig, DataConfig, DraftConfig, DraftKind, Precision, TargetConfig, TrainConfig,
)  # fmt: skip
from nemo_automodel.files import read_json, write_json


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
        values = asdict(self)
        values["run_dir"] = str(self.run_dir)
        values["draft"]["kind"] = self.draft.kind.value
        values["train"]["precision"] = self.train.precision.value
        write_json(path, values)

    @classmethod
    def load(cls, path: Path) -> TrainJob:
        """Raises ValueError, KeyError or TypeError when the file is not one that `save` wrote."""
        values = read_json(path)
        draft, train = values["draft"], values["train"]
        return cls(
            TargetConfig(**values["target"]),
            DataConfig(**values["data"]),
            DraftConfig(**{**draft, "kind": DraftKind(draft["kind"])}),
            TrainConfig(**{**train, "precision": Precision(train["precision"])}),
            Path(values["run_dir"]),
        )


@dataclass(frozen=True)
class TrainResult:
    """How a run ended well. `status`: "done", or "nothing_to_do" when it was resumed after its last step."""

    status: str
    checkpoint: Path  # .../checkpoints/epoch_<E>_step_<S>
    step: int
    seconds: float
    loss: float | None  # of the last logged steps; None when no step was run
    validation: Mapping[str, Any] | None  # loss, accuracy_per_depth, acceptance_length


def build_train_job(app: AppConfig, run_dir: Path) -> TrainJob:
    """The job of a parsed configuration. Pure."""
    return TrainJob(app.target, app.data, app.draft, app.train, Path(run_dir).absolute())
