# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: `checkpoints/epoch_<E>_step_<S>/{model,trainer}/` and LATEST (design section 3).

A checkpoint is written beside its place and renamed, then LATEST is moved: a crash or a full disk leaves the one
before as it was.
"""

from __future__ import annotations

import ctypes
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Mapping

import torch
from safetensors import SafetensorError

from nemo_automodel.components.speculative.draft.io import save_draft
from nemo_automodel.components.speculative.draft.network import DraftNetwork
from nemo_automodel.components.speculative.draft.spec import DraftSpec
from nemo_automodel.components.speculative.train.resume import BEST, LATEST, STATE_FILE, latest_of
from nemo_automodel.errors import TrainError
from nemo_automodel.files import fsync_dir, point


@dataclass(frozen=True)
class Position:
    """Where a run stands: `step` optimiser steps done, next is micro batch `micro` of epoch `epoch` (both from 0)."""

    epoch: int = 0
    micro: int = 0
    step: int = 0


@dataclass(frozen=True)
class TrainerState:
    """Everything that makes resuming exact, besides the weights in `model/`.

    No random state: the draws of a micro batch follow from the seed and its place (`loop.micro_batch_seed`).
    """

    position: Position
    order: Mapping[str, Any]  # what the order of the data follows from; must be equal on resume
    optimizer: Mapping[str, Any]
    master: Mapping[str, torch.Tensor] | None  # fp32 weights, when `model/` holds rounded ones
    window: Mapping[str, Any] | None = None  # what has gathered for the next log line (`totals.Window`)


def capture_state(
    draft: DraftNetwork, optimizer: torch.optim.Optimizer, position: Position, order: Mapping[str, Any], *,
    keep_master: bool, window: Mapping[str, Any] | None = None,
) -> TrainerState:  # fmt: skip
    """Gather the state of a running training."""
    master = {name: p.detach() for name, p in draft.named_parameters()} if keep_master else None
    return TrainerState(position, dict(order), optimizer.state_dict(), master, window)


def restore_state(state: TrainerState, draft: DraftNetwork, optimizer: torch.optim.Optimizer) -> None:
    """Put everything back; `draft` already holds the weights of `model/`."""
    optimizer.load_state_dict(dict(state.optimizer))
    if state.master is not None:
        with torch.no_grad():
            for name, parameter in draft.named_parameters():
                parameter.copy_(state.master[name])


def load_state(checkpoint: Path) -> TrainerState:
    """Read `trainer/state.pt` (tensors and plain values only: `weights_only=True`).

    Raises:
        TrainError: the file is damaged or of another layout.
    """
    path = checkpoint / STATE_FILE
    try:
        values = torch.load(path, map_location="cpu", weights_only=True)
        return TrainerState(**{**values, "position": Position(**values["position"])})
    except Exception as error:  # torch.load raises a dozen types on a damaged file
        raise TrainError(
            f"cannot read {path}: {str(error).splitlines()[0] if str(error) else type(error).__name__}",
            where="train.resume",
            remedy="set train.resume=PATH to another checkpoint",
        ) from error


@dataclass(frozen=True)
class CheckpointStore:
    """Writes the checkpoints of one run."""

    root: Path  # .../checkpoints
    tokenizer: Any  # saved beside the draft

    def save(self, draft: DraftNetwork, spec: DraftSpec, state: TrainerState, *, epoch: int) -> Path:
        """Write one checkpoint whole, then point LATEST to it; `epoch` counts from 1. Returns its folder.

        Raises:
            TrainError: it could not be written (disk full, no permission); names the checkpoint that is still whole.
        """
        final = self.place_of(epoch, state.position.step)
        part = self.root / f".{final.name}.{os.getpid()}.part"
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            _write_parts(part, draft, spec, state, self.tokenizer)
            _put_in_place(part, final)
            point(self.root, LATEST, final.name)
        except (OSError, RuntimeError, SafetensorError) as error:  # torch.save turns a full disk into a RuntimeError
            shutil.rmtree(part, ignore_errors=True)
            whole = latest_of(self.root)
            raise TrainError(
                f"cannot write the checkpoint {final}: {error}",
                where="train",
                remedy=f"free some space, then train.resume={whole}" if whole else "free some space and start again",
            ) from error
        return final

    def place_of(self, epoch: int, step: int) -> Path:
        return self.root / f"epoch_{epoch}_step_{step}"

    def remove_leftovers(self) -> None:
        """What a killed run was writing when it ended; nobody else writes here."""
        for pattern in (".epoch_*.part", ".epoch_*.old"):
            for path in self.root.glob(pattern):
                shutil.rmtree(path, ignore_errors=True)
        for path in (*self.root.glob(f".{LATEST}.*.part"), *self.root.glob(f".{BEST}.*.part")):
            path.unlink(missing_ok=True)


def _write_parts(part: Path, draft: DraftNetwork, spec: DraftSpec, state: TrainerState, tokenizer: Any) -> None:
    shutil.rmtree(part, ignore_errors=True)
    (part / "model").mkdir(parents=True)
    save_draft(part / "model", draft, spec, getattr(torch, spec.dtype))
    tokenizer.save_pretrained(part / "model")
    (part / "trainer").mkdir()
    values = {field: getattr(state, field) for field in TrainerState.__dataclass_fields__}
    with (part / STATE_FILE).open("wb") as file:
        torch.save({**values, "position": asdict(state.position)}, file)
        file.flush()
        os.fsync(file.fileno())
    for folder in (part / "model", part / "trainer", part):
        fsync_dir(folder)


def _put_in_place(part: Path, final: Path) -> None:
    """Rename; a checkpoint of the same name (a run resumed from an older one) changes places with the new one."""
    if final.exists():
        old = final.with_name(f".{final.name}.{os.getpid()}.old")
        if not _exchange(part, final):
            os.rename(final, old)  # for a moment there is none of this name
            os.rename(part, final)
        else:
            os.rename(part, old)
        fsync_dir(final.parent)
        shutil.rmtree(old, ignore_errors=True)
        return
    os.rename(part, final)
    fsync_dir(final.parent)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two names at once (Linux's renameat2); False: this system or file system cannot."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return rename is not None and rename(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0
