# SPDX-License-Identifier: Apache-2.0
"""The other processes of an outer launcher (torchrun, Slurm), which wait to be told whether there is training."""

from __future__ import annotations

from nemo_automodel.components.speculative.train.job import TrainJob, TrainResult
from nemo_automodel.components.speculative.train.placement import Placement
from nemo_automodel.components.speculative.train.workers import check_start, dismiss_followers, run_training
from nemo_automodel.errors import ConfigError


class Followers:
    """Held by the first process, which alone composes, writes and serves. None: there is no outer launcher."""

    def __init__(self, placement: Placement | None) -> None:
        self._placement = placement
        self._waiting = placement is not None

    def train(self, job: TrainJob, *, multirun: bool) -> TrainResult:
        """Train with them, or alone where there are none; afterwards they have ended. Errors: see `run_training`.

        Raises:
            ConfigError: a sweep, for which they would have to stay, or settings that do not fit the launcher's.
        """
        if multirun and self._placement is not None:
            raise ConfigError(
                f"a sweep that trains was started by {self._placement.launcher} {self._placement.world_size} times",
                where="-m", remedy="start it once, with train.nproc_per_node=N",
            )  # fmt: skip
        check_start(job, self._placement)
        self._waiting = False
        return run_training(job, self._placement)

    def dismiss(self) -> None:
        """Let them end, if they still wait."""
        if self._waiting:
            self._waiting = False
            dismiss_followers(self._placement)
