# SPDX-License-Identifier: Apache-2.0
"""What one training run is told, and what it answers: plain values and their JSON files. No torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Mapping

from nemo_automodel.config.schema import (
    AppConfig, DataConfig, DraftConfig, DraftKind, Precision, TargetConfig, TrainConfig,
)  # fmt: skip
from nemo_automodel.errors import ConfigError
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
    """The job of a parsed configuration. Pure.

    Raises:
        ConfigError: a number of `train` that no run can work with.
    """
    check_train_config(app.train)
    return TrainJob(app.target, app.data, app.draft, app.train, Path(run_dir).absolute())


def check_train_config(train: TrainConfig) -> None:
    """Raises ConfigError naming the first key of `train` that is out of range."""
    at_least = {
        "num_epochs": 1, "max_steps": 1, "seq_length": 4, "micro_batch_size": 1, "grad_accumulation_steps": 1,
        "num_threads": 1, "log_every_steps": 1, "save_every_steps": 1, "seed": 0,
    }  # fmt: skip
    for key, least in at_least.items():
        value = getattr(train, key)
        if value is not None and value < least:
            raise _refuse(key, f"{value} is below {least}", f"{least} or more")
    for key, usual in (("lr", "1.0e-4"), ("max_grad_norm", "1.0")):
        if not getattr(train, key) > 0:
            raise _refuse(key, f"{getattr(train, key)} is not above 0", usual)
    for key in ("warmup_ratio", "min_lr_ratio"):
        if not 0 <= getattr(train, key) <= 1:
            raise _refuse(key, f"{getattr(train, key)} is not within 0..1", "0.05")
    if len(train.betas) != 2 or not all(0 <= beta < 1 for beta in train.betas):
        raise _refuse("betas", f"{list(train.betas)} are not two numbers in [0, 1)", "[0.9,0.95]")


def _refuse(key: str, found: str, value: str) -> ConfigError:
    return ConfigError(found, where=f"train.{key}", remedy=f"set train.{key}={value}")
