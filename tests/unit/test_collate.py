# SPDX-License-Identifier: Apache-2.0
"""Every row once per epoch, in an order that only the seed and the epoch decide."""

from __future__ import annotations

import numpy as np
import torch

from nemo_automodel.components.datasets.collate import collate, plan_epoch
from nemo_automodel.components.datasets.encoded_rows import EncodedRow

LENGTHS = [(i * 37) % 90 + 10 for i in range(203)]


def test_each_row_once_and_the_rest_in_a_smaller_batch():
    plan = plan_epoch(LENGTHS, micro_batch_size=4, seed=1, epoch=0)
    assert sorted(i for batch in plan for i in batch) == list(range(203))
    assert sorted(map(len, plan)) == [3] + [4] * 50


def test_order_depends_on_seed_and_epoch_alone():
    plan = plan_epoch(LENGTHS, micro_batch_size=4, seed=1, epoch=0)
    assert plan == plan_epoch(LENGTHS, micro_batch_size=4, seed=1, epoch=0)
    assert plan != plan_epoch(LENGTHS, micro_batch_size=4, seed=1, epoch=1)
    assert plan != plan_epoch(LENGTHS, micro_batch_size=4, seed=2, epoch=0)


def test_rows_of_a_batch_are_of_like_length():
    def padded(plan):
        return sum(len(batch) * max(LENGTHS[i] for i in batch) for batch in plan)

    plain = [list(range(i, min(i + 4, 203))) for i in range(0, 203, 4)]
    assert padded(plan_epoch(LENGTHS, micro_batch_size=4, seed=1, epoch=0)) < 1.1 * sum(LENGTHS) < padded(plain)


def test_padding_is_never_supervised():
    rows = [
        EncodedRow(1, np.array([5, 6, 7], dtype=np.int32), np.array([0, 1, 1], dtype=bool)),
        EncodedRow(2, np.array([8], dtype=np.int32), np.array([1], dtype=bool)),
    ]
    batch = collate(rows, pad_token_id=0)
    assert torch.equal(batch.input_ids, torch.tensor([[5, 6, 7], [8, 0, 0]]))
    assert torch.equal(batch.loss_mask, torch.tensor([[False, True, True], [True, False, False]]))
    assert batch.lengths.tolist() == [3, 1]
