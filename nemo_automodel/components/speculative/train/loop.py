# SPDX-License-Identifier: Apache-2.0
"""The training loop: epochs, accumulated steps, logging, validation, checkpoints, stopping."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Callable, Mapping, Sequence

import numpy as np
import torch

from nemo_automodel.components.datasets.collate import plan_epoch
from nemo_automodel.components.datasets.encoded_rows import EncodedRow, EncodedRows
from nemo_automodel.components.datasets.packing import PackedRows
from nemo_automodel.components.speculative.methods.method import method_of
from nemo_automodel.components.speculative.train.checkpoint import (
    CheckpointStore, Position, TrainerState, capture_state, restore_state,
)  # fmt: skip
from nemo_automodel.components.speculative.train.decode import DecodeCheck
from nemo_automodel.components.speculative.train.optim import build_optimizer, lr_at, set_lr
from nemo_automodel.components.speculative.train.placement import PeerLost
from nemo_automodel.components.speculative.train.progress import RunReport, memory_gb
from nemo_automodel.components.speculative.train.retention import (
    drop_old_checkpoints, drop_old_states, is_decoded, is_validated, point_best, record_decode, record_validation,
)  # fmt: skip
from nemo_automodel.components.speculative.train.setup import Models
from nemo_automodel.components.speculative.train.totals import Totals, Window
from nemo_automodel.components.speculative.train.validation import validate
from nemo_automodel.components.speculative.train.world import World
from nemo_automodel.config.schema import TrainConfig
from nemo_automodel.errors import TrainError


@dataclass(frozen=True)
class LoopEnd:
    """Why and where the loop stopped."""

    finished: bool  # False: it was asked to stop
    checkpoint: Path
    position: Position
    validation: Mapping[str, Any] | None
    decoded: Mapping[str, Any] | None = None  # in the first process


def micro_batch_seed(seed: int, epoch: int, micro: int) -> int:
    """Of what is drawn for micro batch `micro` of `epoch`: the same whichever process runs it, resumed or not."""
    return int(np.random.SeedSequence([seed, epoch, micro]).generate_state(1, np.uint64)[0] >> np.uint64(1))


class TrainLoop:
    """One run over `rows`. `order` is stored with the state and must be equal when the run is resumed.

    Of the micro batches of a step each process of `world` takes every size-th; gradients are sums over all of them, so
    that n processes do what one with n times the accumulation does.
    """

    def __init__(
        self, models: Models, rows: EncodedRows | PackedRows, held_out: Sequence[EncodedRow], train: TrainConfig,
        *, order: Mapping[str, Any], store: CheckpointStore, report: RunReport, stop: Callable[[], bool],
        world: World = World(), decoding: DecodeCheck | None = None,
    ) -> None:  # fmt: skip
        self.models, self.rows, self.held_out, self.train = models, rows, held_out, train
        self.order, self.store, self.report, self.stop, self.world = order, store, report, stop, world
        self.decoding = decoding
        self.method = method_of(models.spec, partitions=models.partitions, attention=models.attention)
        self.optimizer = build_optimizer(models.draft, train)
        self.generator = torch.Generator()
        self.position = Position()
        self.lengths = rows.lengths.tolist()
        micro_batches = -(-len(rows) // train.micro_batch_size)
        self.per_step = train.grad_accumulation_steps * world.size  # micro batches of one optimiser step
        self.steps_per_epoch = -(-micro_batches // self.per_step)
        planned = train.num_epochs * self.steps_per_epoch
        self.total_steps = planned if train.max_steps is None else min(train.max_steps, planned)
        self.window = Window()
        self.figures: Mapping[str, Any] | None = None
        self.decoded: Mapping[str, Any] | None = None
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
        restore_state(state, self.models.draft, self.optimizer)
        self.window = Window.of(state.window, self.models.device)
        self.position = state.position
        self.saved = (state.position.step, checkpoint)

    @property
    def is_finished(self) -> bool:
        return self.position.step >= self.total_steps

    def owes_validation(self) -> bool:
        """The run was killed between an epoch's checkpoint and the end of its validation."""
        ended = self.position.micro == 0 or self.is_finished
        owes = bool(self.held_out) and self.saved is not None and ended and not is_validated(self.saved[1])
        return self.world.share(owes)

    def owes_decode(self) -> bool:
        """The run was killed between a checkpoint within an epoch and the end of the decoding that was due there; in
        the first process."""
        every, step = self.train.decode_every_steps, self.position.step
        due = every and self.position.micro and step % every == 0 and not self.is_finished
        at = self.saved[1] if self.saved is not None and self.saved[0] == step else None
        return bool(due and at) and self.decoding is not None and not is_decoded(at)

    def run(self) -> LoopEnd:
        """Train to the end, or until `stop()` in any process; either way the last state is saved.

        Raises:
            PeerLost: another process died; the state of the last whole step is saved.
        """
        self.report.begin(total=self.total_steps, done=self.position.step)
        self.window.began += time.monotonic()
        try:
            if self.owes_validation():
                self._validate()
            elif self.owes_decode():
                self._decode()
            while not self.is_finished and not self._stopping():
                self._epoch()
            if self.saved is None or self.saved[0] != self.position.step:
                self._save()
        except PeerLost:  # before the optimiser's step: nothing has changed since the step before
            if self.world.is_first and (self.saved is None or self.saved[0] != self.position.step):
                self.saved = (self.position.step, self._write())
            raise
        return LoopEnd(self.is_finished, self.saved[1], self.position, self.figures, self.decoded)

    def _stopping(self) -> bool:
        return self.world.any(self.stop())

    def _epoch(self) -> None:
        plan = plan_epoch(
            self.lengths, micro_batch_size=self.train.micro_batch_size, seed=self.train.seed, epoch=self.position.epoch
        )
        while self.position.micro < len(plan) and not self.is_finished and not self._stopping():
            chosen = plan[self.position.micro : self.position.micro + self.per_step]
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
        totals = Totals.zeros(self.models.spec.num_depths, self.models.device)
        for place in range(self.world.rank, len(micro_batches), self.world.size):
            totals = totals + self._gradients(micro_batches[place], micro=self.position.micro + place)
        trained = [p for group in self.optimizer.param_groups for p in group["params"]]
        totals = self.world.sum_gradients(trained, totals)
        self._update([p for p in trained if p.grad is not None], totals)
        self.window.add(totals, sum(self.lengths[i] for indices in micro_batches for i in indices))

    def _gradients(self, indices: tuple[int, ...], *, micro: int) -> Totals:
        """Add the gradients of one micro batch's loss sum to the parameters'."""
        seed = micro_batch_seed(self.train.seed, self.position.epoch, micro)
        torch.manual_seed(seed)
        self.generator.manual_seed(seed)
        models = self.models
        batch, states = models.prepare([self.rows[i] for i in indices])
        with models.autocast():
            out = self.method.train_loss(models.draft, batch, states, models.teacher_weight, self.generator)
        out.loss_sum.backward()
        return Totals.of(out)

    def _update(self, trained: list[torch.nn.Parameter], totals: Totals) -> None:
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
        every = self.train.decode_every_steps
        if every and step % every == 0 and not epoch_ends and not self.is_finished:
            self._decode()

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
        rows = max(8, self.train.micro_batch_size)
        self.figures = validate(self.models, self.held_out, micro_batch_size=rows, world=self.world)
        self.report.validation({"step": self.position.step, "epoch": self._epoch_number(), "validation": self.figures})
        self.window.began += time.monotonic() - began  # tokens/s speaks of training alone
        self._decode()
        self._keep_house(lambda: record_validation(self.saved[1], self.figures), "BEST cannot be moved")

    def _decode(self) -> None:
        """The first process's work; the others wait for it where they next meet."""
        if self.decoding is None:
            return
        began, step = time.monotonic(), self.position.step
        self.decoded = None
        try:
            self.decoded = self.decoding.figures()
        except torch.OutOfMemoryError:  # of a GPU that training itself fills: no reason to end it
            self.report.message("warning: too little GPU memory to decode: set train.decode_prompts=4, or 0 for none")
            return
        finally:
            self.window.began += time.monotonic() - began
        self.report.decode({"step": step, "epoch": self._epoch_number(), "decode": self.decoded})
        if self.saved is not None and self.saved[0] == step:
            self._keep_house(lambda: record_decode(self.saved[1], self.decoded), "BEST cannot be moved")

    def _epoch_number(self) -> int:
        """The epoch in progress, from 1; at an epoch's end the one just ended."""
        return self.position.epoch + (1 if self.position.micro else 0)

    def _save(self) -> None:
        """The first process writes; all go on when it is done, or end with its error."""
        folder = self.store.place_of(max(1, self._epoch_number()), self.position.step)
        self.world.together(self._write if self.world.is_first else lambda: folder)
        self.saved = (self.position.step, folder)

    def _write(self) -> Path:
        state = capture_state(
            self.models.draft, self.optimizer, self.position, self.order, keep_master=self.models.bf16,
            window=self.window.saved(),
        )  # fmt: skip
        folder = self.store.save(self.models.draft, self.models.spec, state, epoch=max(1, self._epoch_number()))
        self.report.message(f"saved {folder}")
        self._keep_house(lambda: drop_old_states(self.store.root, self.train.keep_trainer_states), "an old state stays")
        return folder

    def tidy(self) -> None:
        """Finish what a killed run into the same folder left undone."""
        if self.world.is_first:
            self.store.remove_leftovers()
        self._keep_house(lambda: point_best(self.store.root), "BEST cannot be moved")

    def _keep_house(self, work: Callable[[], Any], otherwise: str) -> None:
        """What costs space, not the run, when it fails; the first process's work."""
        if not self.world.is_first:
            return
        try:
            work()
            drop_old_checkpoints(self.store.root, self.train.keep_last_checkpoints)
        except OSError as error:
            self.report.message(f"warning: {otherwise}: {error}")
