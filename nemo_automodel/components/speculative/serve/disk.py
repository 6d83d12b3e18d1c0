# SPDX-License-Identifier: Apache-2.0
"""The disk that a training and its export will take, told from the target's config.json before the first step."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from nemo_automodel.components.speculative.serve.gpus import visible_gpus
from nemo_automodel.components.speculative.serve.types import ServeSpec, TargetFacts
from nemo_automodel.config.schema import DraftConfig, Precision, TrainConfig
from nemo_automodel.errors import PreflightError
from nemo_automodel.files import expand_user

SPARE_BYTES = 64 * 1024 * 1024  # tokenizers, logs


@dataclass(frozen=True)
class DiskNeed:
    """Bytes at the fullest moment."""

    checkpoints: int  # in the run's folder
    export: int  # beside the weights, or under serve.export_dir


def disk_need(draft: DraftConfig, train: TrainConfig, target: TargetFacts) -> DiskNeed:
    """Weights of every save, trainer states of the newest (one more while it is written), one export; pure.

    A state holds AdamW's two fp32 moments of each trained parameter and, in bf16, fp32 weights of all. How many steps
    an epoch has is known only once the data are read: without `max_steps` one save an epoch is reckoned, with it the
    saves of `save_every_steps` and the last one.
    """
    every = train.save_every_steps
    saves = train.num_epochs if train.max_steps is None else 1 + (train.max_steps // every if every else 0)
    states = min(saves, train.keep_trainer_states + 1)
    total, frozen = _parameters(draft, target)
    bf16 = _is_bf16(train.precision)
    weights = (2 if bf16 else 4) * total
    state = 8 * (total - frozen) + (4 * total if bf16 else 0)
    return DiskNeed(saves * weights + states * state, weights)


def _is_bf16(precision: Precision) -> bool:
    return bool(visible_gpus()) if precision is Precision.auto else precision is Precision.bf16


def _parameters(draft: DraftConfig, target: TargetFacts) -> tuple[int, int]:
    """(all parameters of the draft, those that are not trained); sizes are the target's."""
    hidden, vocab = target.hidden_size, target.vocab_size
    head_dim = target.config.get("head_dim") or hidden // target.num_attention_heads
    inner = target.config.get("intermediate_size") or 4 * hidden
    queries, keys = target.num_attention_heads * head_dim, target.num_key_value_heads * head_dim
    layer = (queries + 2 * keys) * hidden + queries * hidden + 3 * hidden * inner + 3 * hidden
    first = (queries + 2 * keys) * hidden  # the first layer reads [norm(embed), norm(hidden)], 2H
    embeddings, head = vocab * hidden, (draft.draft_vocab_size or vocab) * hidden
    rest = 3 * hidden * hidden + 3 * hidden + hidden  # fc, mask_hidden, norm
    return embeddings + head + rest + draft.num_layers * layer + first, embeddings if draft.freeze_embeddings else 0


def check_disk(spec: ServeSpec, draft: DraftConfig, train: TrainConfig, target: TargetFacts, base_dir: Path) -> None:
    """Hold the need against what is free where the checkpoints (`spec.checkpoint`) and the export will lie.

    Raises:
        PreflightError: it does not fit; the folder, the need and what is free are named.
    """
    need = disk_need(draft, train, target)
    run_dir = base_dir / expand_user(spec.checkpoint)
    export_dir = run_dir if spec.export_dir is None else base_dir / expand_user(spec.export_dir)
    elsewhere = "free space, hydra.run.dir=PATH on another disk, or a smaller train.keep_trainer_states"
    beside = "free space, or serve.export_dir=PATH on another disk"
    if _same_disk(_existing(run_dir), _existing(export_dir)):
        _check_place(run_dir, need.checkpoints + need.export, "checkpoints and export take", elsewhere)
    else:
        _check_place(run_dir, need.checkpoints, "the checkpoints take", elsewhere)
        _check_place(export_dir, need.export, "the export takes", beside)


def _check_place(folder: Path, needed: int, what: str, remedy: str) -> None:
    free, wanted = _free_bytes(folder), needed + SPARE_BYTES
    if free is not None and free < wanted:
        found = f"{free / 1e9:.1f} GB free, {what} up to {wanted / 1e9:.1f} GB"
        raise PreflightError(found, where=str(folder), remedy=remedy)


def _free_bytes(folder: Path) -> int | None:
    """None where the file system (some of FUSE's) tells no sizes: all zeros."""
    usage = shutil.disk_usage(_existing(folder))
    return usage.free if usage.total else None


def _same_disk(a: Path, b: Path) -> bool:
    return a.stat().st_dev == b.stat().st_dev


def _existing(folder: Path) -> Path:
    return next(place for place in (folder, *folder.parents) if place.exists())
