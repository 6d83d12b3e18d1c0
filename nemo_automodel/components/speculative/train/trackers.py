# SPDX-License-Identifier: Apache-2.0
"""TensorBoard and W&B: the figures of metrics.jsonl once more. Neither is needed, neither is imported unless used."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, Iterator, Mapping, Protocol

from nemo_automodel.components.speculative.train.job import TrainJob, job_values
from nemo_automodel.config.schema import TrainConfig
from nemo_automodel.errors import ConfigError

PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb"}
TENSORBOARD_DIR = "tensorboard"


class Tracker(Protocol):
    """Takes the lines of metrics.jsonl as they are written."""

    def log(self, metrics: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


def check_trackers(train: TrainConfig) -> None:
    """Raises ConfigError when a tracker is asked for and its package is not installed."""
    if train.tensorboard and not _is_installed("tensorboard"):
        raise _missing("tensorboard", "train.tensorboard", "true")
    if train.wandb_project is not None and not _is_installed("wandb"):
        raise _missing("wandb", "train.wandb_project", train.wandb_project)


def _is_installed(tracker: str) -> bool:
    return find_spec(PACKAGES[tracker]) is not None


def _missing(tracker: str, key: str, value: str) -> ConfigError:
    package = PACKAGES[tracker]
    remedy = f"pip install {package}, or set {key}=null"
    return ConfigError(f"{package} is not installed", where=f"{key}={value}", remedy=remedy)


def open_trackers(job: TrainJob) -> tuple[Tracker, ...]:
    """Those that the job asks for; TensorBoard also when nothing is said and it is there."""
    check_trackers(job.train)
    found: list[Tracker] = []
    if job.train.tensorboard or (job.train.tensorboard is None and _is_installed("tensorboard")):
        found.append(TensorBoard(job))
    if job.train.wandb_project is not None:
        found.append(WandB(job))
    return tuple(found)


class TensorBoard:
    """Event files in RUN/tensorboard; see them with `tensorboard --logdir outputs`."""

    def __init__(self, job: TrainJob) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(job.run_dir / TENSORBOARD_DIR))

    def log(self, metrics: Mapping[str, Any]) -> None:
        for name, value in scalars(metrics):
            self._writer.add_scalar(name, value, metrics["step"])

    def close(self) -> None:
        self._writer.close()


class WandB:
    """A W&B run named as the run's folder; WANDB_MODE=offline keeps it on disk."""

    def __init__(self, job: TrainJob) -> None:
        import wandb

        self._run = wandb.init(
            project=job.train.wandb_project, name=job.run_dir.name, dir=str(job.run_dir), config=job_values(job)
        )

    def log(self, metrics: Mapping[str, Any]) -> None:
        self._run.log(dict(scalars(metrics)), step=metrics["step"])

    def close(self) -> None:
        self._run.finish(quiet=True)


def scalars(metrics: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """(name, value) of one line: `train/loss`, `train/accuracy/depth_0`, `validation/acceptance_length`, ..."""
    group = next((name for name in ("validation", "decode") if name in metrics), "train")
    for key, value in metrics.get(group, metrics).items():
        if key == "accuracy_per_depth":
            yield from ((f"{group}/accuracy/depth_{depth}", accuracy) for depth, accuracy in enumerate(value))
        elif key == "acceptance_per_position":
            yield from ((f"{group}/acceptance/position_{place}", share) for place, share in enumerate(value))
        elif isinstance(value, list):
            continue  # counts: those of metrics.jsonl
        elif key != "step":
            yield f"{group}/{key}", value
