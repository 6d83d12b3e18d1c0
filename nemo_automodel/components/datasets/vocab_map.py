# SPDX-License-Identifier: Apache-2.0
"""The reduced draft vocabulary: the tokens that the assistant uses most."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterable

import numpy as np

from nemo_automodel.components.datasets.encode import EncodedRow
from nemo_automodel.errors import ConfigError


@dataclass(frozen=True)
class VocabMap:
    """Draft id i stands for target id i + d2t[i]; both in the form that EAGLE-3 checkpoints carry."""

    d2t: np.ndarray  # [draft_vocab] int64 offsets; the target ids i + d2t[i] ascend
    t2d: np.ndarray  # [V] bool; True: the target id has a draft id
    coverage: float  # share of the supervised tokens that the draft can say


def build_vocab_map(rows: Iterable[EncodedRow], *, vocab_size: int, draft_vocab_size: int | None) -> VocabMap | None:
    """Take the most frequent supervised tokens; ties and unseen tokens go to the lower id. None: full vocabulary.

    Raises:
        ConfigError: `draft_vocab_size` is not in 1..vocab_size.
    """
    if draft_vocab_size is None or draft_vocab_size == vocab_size:
        return None
    if not 1 <= draft_vocab_size < vocab_size:
        raise ConfigError(
            f"a draft vocabulary of {draft_vocab_size} tokens for a target of {vocab_size}",
            where="draft.draft_vocab_size",
            remedy=f"choose 1..{vocab_size}, or null for the full vocabulary",
        )
    counts = np.zeros(vocab_size, dtype=np.int64)
    for row in rows:
        np.add.at(counts, row.input_ids[row.loss_mask], 1)
    order = np.argsort(-counts, kind="stable")  # most frequent first, lower id first among equals
    chosen = np.sort(order[:draft_vocab_size])  # [draft_vocab]
    t2d = np.zeros(vocab_size, dtype=bool)
    t2d[chosen] = True
    total = int(counts.sum())
    coverage = float(counts[chosen].sum()) / total if total else 0.0
    return VocabMap(chosen - np.arange(draft_vocab_size, dtype=np.int64), t2d, coverage)
