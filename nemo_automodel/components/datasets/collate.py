# SPDX-License-Identifier: Apache-2.0
"""Which rows make which batch, in which order, and the padded tensors of one batch.

The order of an epoch depends on (seed, epoch) alone, so a run resumes by its position in the list.
"""

from __future__ import annotations

from typing import NamedTuple, Sequence

import numpy as np
import torch

from nemo_automodel.components.datasets.encoded_rows import EncodedRow
from nemo_automodel.components.datasets.packing import PackedRow

BATCHES_PER_BUCKET = 32  # rows of this many batches are sorted by length together: little padding, still random


class Batch(NamedTuple):
    """Right-padded lines: one row each, or several (packed)."""

    input_ids: torch.Tensor  # [B, T] int64
    loss_mask: torch.Tensor  # [B, T] bool, False on padding
    lengths: torch.Tensor  # [B] int64: tokens in the line
    # [B, T] int64: where in the line the row of a position begins; 0 everywhere without packing. Position t of the line
    # is position t - starts of its row, and attends to nothing before starts. Padding continues the last row.
    starts: torch.Tensor


def plan_epoch(lengths: Sequence[int], *, micro_batch_size: int, seed: int, epoch: int) -> tuple[tuple[int, ...], ...]:
    """Row indices of every micro batch of one epoch; each row once, the last batch may be smaller.

    Rows are shuffled, sorted by length within buckets, and the batches shuffled again.
    """
    rng = np.random.default_rng([seed, epoch])
    order = rng.permutation(len(lengths))
    by_length = np.asarray(lengths)
    span = micro_batch_size * BATCHES_PER_BUCKET
    batches = []
    for start in range(0, len(order), span):
        bucket = order[start : start + span]
        bucket = bucket[np.argsort(by_length[bucket], kind="stable")]
        batches += [bucket[i : i + micro_batch_size] for i in range(0, len(bucket), micro_batch_size)]
    return tuple(tuple(int(i) for i in batches[k]) for k in rng.permutation(len(batches)))


def collate(rows: Sequence[EncodedRow | PackedRow], *, pad_token_id: int) -> Batch:
    """Pad to the longest line."""
    longest = max(len(row) for row in rows)
    input_ids = torch.full((len(rows), longest), pad_token_id, dtype=torch.int64)
    loss_mask = torch.zeros((len(rows), longest), dtype=torch.bool)
    starts = torch.zeros((len(rows), longest), dtype=torch.int64)
    for i, row in enumerate(rows):
        input_ids[i, : len(row)] = torch.from_numpy(row.input_ids.astype(np.int64))
        loss_mask[i, : len(row)] = torch.from_numpy(np.array(row.loss_mask))  # a copy: mapped files are read-only
        if isinstance(row, PackedRow):
            for begin in row.begins.tolist():
                starts[i, begin:] = begin
    return Batch(input_ids, loss_mask, torch.tensor([len(row) for row in rows], dtype=torch.int64), starts)
