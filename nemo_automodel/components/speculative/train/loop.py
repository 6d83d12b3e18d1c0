# SPDX-License-Identifier: Apache-2.0
"""The training loop: epochs, accumulated steps, logging, validation, checkpoints, stopping."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Callable, Mapping

import torch

from nemo_automodel.components.datasets.collate import plan_epoch
from nemo_automodel.components.datasets.encode import EncodedRow
from nemo_automodel.components.speculative.methods.peagle import forward_to_loss
from nemo_automodel.components.speculative.train.checkpoint import (
    CheckpointStore, Position, TrainerState, capture_state, restore_state,
)  # fmt: skip
from nemo_automodel.components.speculative.train.optim import build_optimizer, lr_at, set_lr
from nemo_automodel.components.speculative.train.progress import RunReport, memory_gb
from nemo_automodel.components.speculative.train.setup import Models
from nemo_automodel.components.speculative.train.totals import Totals
from nemo_automodel.components.speculative.train.validation import validate
from nemo_automodel.config.schema import TrainConfig
from nemo_automodel.errors import TrainError


@dataclass(frozen=True)
class LoopEnd:
    """Why and where the loop stopped."""

    finished: bool  # False: it was asked to stop
    checkpoint: Path
    position: Position
    validation: Mapping[str, Any] | None


@dataclass
class Window:
    """What has gathered since the last log line."""

    totals: Totals | None = None
    tokens: int = 0
    began: float = 0.0

    def add(self, totals: Totals, tokens: int) -> None:
        self.totals = totals if self.totals is None else self.totals + totals
        self.tokens += tokens


class TrainLoop:
    """One run over `rows`. `order` is stored with the state and must be equal when the run is resumed."""

    def __init__(
        self, models: Models, rows: tuple[EncodedRow, ...], held_out: tuple[EncodedRow, ...], train: TrainConfig,
        *, order: Mapping[str, Any], store: CheckpointStore, report: RunReport, stop: Callable[[], bool],
    ) -> None:  # fmt: skip
        self.models, self.rows, self.held_out, self.train = models, rows, held_out, train
        self.order, self.store, self.report, self.stop = order, store, report, stop
        self.optimizer = build_optimizer(models.draft, train)
        self.generator = torch.Generator().manual_seed(train.seed)
        self.position = Position()
        self.lengths = [len(row) for row in rows]
        micro_batches = -(-len(rows) // train.micro_batch_size)
        self.steps_per_epoch = -(-micro_batches // train.grad_accumulation_steps)
        planned = train.num_epochs * self.steps_per_epoch
        self.total_steps = planned if train.max_steps is None else min(train.max_steps, planned)
        self.window = Window()
        self.figures: Mapping[str, Any] | None = None
        self.saved: tuple[int, Path] | None = None  # step and folder of the newest checkpoint

    def resume(self, state: TrainerState, checkpoint: Path) -> None:
        """Go on from a state of a run over the same rows in the same order.

        Raises:
            TrainError: something has changed that the losses follow from.
        """
        was = state.order
        changed = [f"{key} {was.get(key)} -> {now}" for key, now in self.order.items() if was.get(key) != now]
        if changed:
            raise TrainError(
                f"the run in {checkpoint} had other data or settings: {', '.join(changed)}",
                where="train.resume",
                remedy="give the data and settings it was trained with, or train.resume=null to start afresh",
            )
        restore_state(state, self.models.draft, self.optimizer, self.generator)
        self.position = state.position
        self.saved = (state.position.step, checkpoint)

    @property
    def is_finished(self) -> bool:
        return self.position.step >= self.total_steps

    def run(self) -> LoopEnd:
        """Train to the end, or until `stop()`; either way the last state is saved."""
        self.report.begin(total=self.total_steps, done=self.position.step)
        self.window = Window(began=time.monotonic())
        while not self.is_finished and not self.stop():
            self._epoch()
        if self.saved is None or self.saved[0] != self.position.step:
            self._save()
        return LoopEnd(self.is_finished, self.saved[1], self.position, self.figures)

    def _epoch(self) -> None:
        plan = plan_epoch(
            self.lengths, micro_batch_size=self.train.micro_batch_size, seed=self.train.seed, epoch=self.position.epoch
        )
        every = self.train.grad_accumulation_steps
        while self.position.micro < len(plan) and not self.is_finished and not self.stop():
            chosen = plan[self.position.micro : self.position.micro + every]
            self._step(chosen)
            self.position = replace(self.position, micro=self.position.micro + len(chosen), step=self.position.step + 1)
            self._after_step(epoch_ends=self.position.micro == len(plan))
        if self.position.micro == len(plan):
            self.position = replace(self.position, epoch=self.position.epoch + 1, micro=0)
            self._save()
            self._validate()
        elif self.is_finished:  # max_steps ends a run within an epoch
            self._save()
            self._validate()

    def _step(self, micro_batches: tuple[tuple[int, ...], ...]) -> None:
        """One optimiser step: gradients of loss sums, divided once by all supervised elements together."""
        set_lr(self.optimizer, lr_at(self.position.step, self.total_steps, self.train))
        self.optimizer.zero_grad(set_to_none=True)
        totals: Totals | None = None
        for indices in micro_batches:
            batch, states = self.models.prepare([self.rows[i] for i in indices])
            with self.models.autocast():
                out = forward_to_loss(self.models.draft, batch, states, self.models.teacher_weight, self.generator)
            out.loss_sum.backward()
            totals = Totals.of(out) if totals is None else totals + Totals.of(out)
        self._update(totals)
        self.window.add(totals, sum(self.lengths[i] for indices in micro_batches for i in indices))

    def _update(self, totals: Totals) -> None:
        trained = [p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        for parameter in trained:
            parameter.grad.div_(totals.count.clamp(min=1))
        norm = torch.nn.utils.clip_grad_norm_(trained, self.train.max_grad_norm)
        if not torch.isfinite(norm):
            raise TrainError(
                f"the gradient of step {self.position.step + 1} is not finite (loss sum {float(totals.loss_sum)})",
                where="train.lr",
                remedy=f"lower it: train.lr={self.train.lr / 3:.1e}"
                + (f", and go on with train.resume={self.saved[1]}" if self.saved else ""),
            )
        self.optimizer.step()

    def _after_step(self, *, epoch_ends: bool) -> None:
        step = self.position.step
        self.report.tick(step)
        if step % self.train.log_every_steps == 0 or step == self.total_steps:
            self._log()
        if self.train.save_every_steps and step % self.train.save_every_steps == 0 and not epoch_ends:
            self._save()

    def _log(self) -> None:
        now = time.monotonic()
        self.report.step({
            "step": self.position.step, "epoch": self.position.epoch + 1, **self.window.totals.summary(),
            "lr": self.optimizer.param_groups[0]["lr"],
            "tokens_per_s": round(self.window.tokens / max(now - self.window.began, 1e-9), 1),
            "memory_gb": round(memory_gb(), 3),
        })  # fmt: skip
        self.window = Window(began=now)

    def _validate(self) -> None:
        if not self.held_out:
            return
        began = time.monotonic()
        self.figures = validate(self.models, self.held_out, micro_batch_size=max(8, self.train.micro_batch_size))
        self.report.validation({"step": self.position.step, "epoch": self._epoch_number(), "validation": self.figures})
        self.window.began += time.monotonic() - began  # tokens/s speaks of training alone

    def _epoch_number(self) -> int:
        """The epoch in progress, from 1; at an epoch's end the one just ended."""
        return self.position.epoch + (1 if self.position.micro else 0)

    def _save(self) -> None:
        state = capture_state(
            self.models.draft, self.optimizer, self.generator, self.position, self.order, keep_master=self.models.bf16
        )
        folder = self.store.save(self.models.draft, self.models.spec, state, epoch=max(1, self._epoch_number()))
        self.saved = (self.position.step, folder)
        self.report.message(f"saved {folder}")
        self._drop_old_states()

    def _drop_old_states(self) -> None:
        try:
            self.store.drop_old_states(self.train.keep_trainer_states)
        except OSError as error:  # costs space, not the run
            self.report.message(f"warning: an old trainer state cannot be removed: {error}")
