# SPDX-License-Identifier: Apache-2.0
"""The reduced draft vocabulary: the tokens that the assistant uses most, or those of an earlier draft.

Every checkpoint with a reduced vocabulary holds its map (`d2t`, `t2d`); that is where it is saved.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nemo_automodel.components.datasets.encoded_rows import EncodedRows
from nemo_automodel.errors import ConfigError


@dataclass(frozen=True)
class VocabMap:
    """Draft id i stands for target id i + d2t[i]; both in the form that EAGLE-3 checkpoints carry."""

    d2t: np.ndarray  # [draft_vocab] int64 offsets; the target ids i + d2t[i] ascend
    t2d: np.ndarray  # [V] bool; True: the target id has a draft id
    coverage: float  # share of the supervised tokens that the draft can say


def build_vocab_map(rows: EncodedRows, *, vocab_size: int, draft_vocab_size: int | None) -> VocabMap | None:
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
    counts = rows.supervised_counts(vocab_size)
    order = np.argsort(-counts, kind="stable")  # most frequent first, lower id first among equals
    return _map_of(np.sort(order[:draft_vocab_size]), counts)


def reuse_vocab_map(
    d2t: np.ndarray | None, rows: EncodedRows, *, vocab_size: int, draft_vocab_size: int | None, where: str
) -> VocabMap:
    """The map of an earlier draft, with its coverage of these rows. d2t: [draft_vocab] offsets; `where`: its folder.

    Raises:
        ConfigError: the draft has none, or one of another size or for another target.
    """
    if d2t is None or draft_vocab_size != len(d2t):
        found = "has the full vocabulary" if d2t is None else f"has a draft vocabulary of {len(d2t)} tokens"
        raise ConfigError(
            f"the draft in {where} {found}, wanted are {draft_vocab_size or vocab_size}", where="draft.vocab_map",
            remedy="draft.vocab_map=null" if d2t is None else f"set draft.draft_vocab_size={len(d2t)}",
        )  # fmt: skip
    chosen = d2t.astype(np.int64) + np.arange(len(d2t))
    if (np.diff(chosen) <= 0).any() or not 0 <= chosen[0] <= chosen[-1] < vocab_size:
        raise ConfigError(
            f"the draft in {where} maps to {chosen.min()}..{chosen.max()}, not ascending within a target vocabulary of "
            f"{vocab_size}", where="draft.vocab_map", remedy="name a draft that was trained for this target",
        )  # fmt: skip
    return _map_of(chosen, rows.supervised_counts(vocab_size))


def _map_of(chosen: np.ndarray, counts: np.ndarray) -> VocabMap:
    """chosen: [draft_vocab] target ids, ascending; counts: [V]."""
    t2d = np.zeros(len(counts), dtype=bool)
    t2d[chosen] = True
    total = int(counts.sum())
    coverage = float(counts[chosen].sum()) / total if total else 0.0
    return VocabMap(chosen - np.arange(len(chosen), dtype=np.int64), t2d, coverage)
