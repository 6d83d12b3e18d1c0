# SPDX-License-Identifier: Apache-2.0
"""What goes into a training method and what comes out, whichever method it is."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class TrainBatch:
    """Token rows, padded on the right. With packing one line holds several rows, one behind the other."""

    input_ids: Tensor  # [B, L] int64
    loss_mask: Tensor  # [B, L] bool: tokens to be learnt
    lengths: Tensor  # [B] int64: tokens that are no padding
    starts: Tensor  # [B, L] int64: where the row that a position belongs to begins; 0 without packing


@dataclass(frozen=True)
class LossOut:
    """Sums over the supervised elements: divide by counts of all micro batches together."""

    loss_sum: Tensor  # [] fp32, nats: what is trained (EAGLE-3 weighs its steps; a token the draft cannot say adds 0)
    count: Tensor  # [] int64, supervised elements
    correct_per_depth: Tensor  # [K] int64: the draft's first choice is the target's
    count_per_depth: Tensor  # [K] int64
