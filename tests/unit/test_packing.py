# SPDX-License-Identifier: Apache-2.0
"""Packing: every row once, lines nearly full, and each row knows where it begins."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_train import make_job, metrics_of

from nemo_automodel.components.datasets.collate import collate, plan_epoch
from nemo_automodel.components.datasets.encoded_rows import EncodedRow, EncodedRows
from nemo_automodel.components.datasets.packing import PackedRows, plan_lines
from nemo_automodel.components.speculative.target import Target
from nemo_automodel.components.speculative.train.run import train
from nemo_automodel.config.schema import DraftKind
from nemo_automodel.errors import ConfigError

LENGTHS = np.random.default_rng(0).lognormal(4.0, 0.8, 3000).astype(np.int64).clip(4, 500)


def test_every_row_once_and_no_line_too_long():
    lines = plan_lines(LENGTHS, capacity=512, seed=1)
    assert sorted(i for line in lines for i in line) == list(range(3000))
    assert max(LENGTHS[list(line)].sum() for line in lines) <= 512


def test_lines_are_nearly_full():
    lines = plan_lines(LENGTHS, capacity=512, seed=1)
    assert LENGTHS.sum() / (512 * len(lines)) > 0.98


def test_the_plan_follows_from_seed_and_lengths():
    assert plan_lines(LENGTHS, capacity=512, seed=1) == plan_lines(LENGTHS, capacity=512, seed=1)
    assert plan_lines(LENGTHS, capacity=512, seed=1) != plan_lines(LENGTHS, capacity=512, seed=2)


def test_a_row_as_long_as_a_line_has_one_of_its_own():
    assert sorted(plan_lines(np.array([8, 8, 3, 5]), capacity=8, seed=0)) in ([(0,), (1,), (3, 2)],)


def test_a_packed_batch_holds_the_rows_and_where_each_begins():
    rows = EncodedRows.of(
        EncodedRow(i, np.arange(10 * i, 10 * i + n, dtype=np.int32), np.arange(n) >= 2) for i, n in enumerate((3, 4, 5))
    )
    packed = PackedRows(rows, ((1, 0), (2,)))
    assert packed.lengths.tolist() == [7, 5]
    batch = collate([packed[0], packed[1]], pad_token_id=9)
    assert batch.input_ids.tolist() == [[10, 11, 12, 13, 0, 1, 2], [20, 21, 22, 23, 24, 9, 9]]
    assert batch.starts.tolist() == [[0, 0, 0, 0, 4, 4, 4], [0] * 7]
    assert batch.loss_mask.tolist() == [
        [False, False, True, True, False, False, True], [False, False, True, True, True, False, False],
    ]  # fmt: skip
    assert batch.lengths.tolist() == [7, 5]


@pytest.mark.parametrize("size", [1, 4])
def test_less_padding_than_sorting_by_length(size):
    """What a batch costs is its lines times the longest of them."""

    def cost(lengths):
        plan = plan_epoch(lengths, micro_batch_size=size, seed=1, epoch=0)
        return sum(len(batch) * max(lengths[i] for i in batch) for batch in plan)

    lines = plan_lines(LENGTHS, capacity=512, seed=1)
    packed = [int(LENGTHS[list(line)].sum()) for line in lines]
    assert cost(packed) <= cost(LENGTHS.tolist())
    assert len(plan_epoch(packed, micro_batch_size=size, seed=1, epoch=0)) < len(LENGTHS) / size / 5


def test_rows_without_packing_all_begin_at_zero():
    row = EncodedRow(1, np.array([5, 6], dtype=np.int32), np.array([0, 1], dtype=bool))
    longer = EncodedRow(2, np.array([5, 6, 7], dtype=np.int32), np.array([0, 1, 1], dtype=bool))
    assert not torch.any(collate([row, longer], pad_token_id=0).starts)


def first_loss(tmp_path, run, *, packing: bool, kind: DraftKind) -> dict:
    """Figures of one step over all rows."""
    job = make_job(
        tmp_path, run, rows=12, micro_batch_size=12, max_steps=1, seq_length=96,
        data={"packing": packing, "validation": None}, draft={"kind": kind, "down_sample_ratio": 1.0, "ttt_steps": 3},
    )  # fmt: skip
    train(job, Stop())
    return next(line for line in metrics_of(job) if "loss" in line)


class Stop:
    """Nobody stops the run."""

    def __call__(self) -> bool:
        return False

    def enter_loop(self) -> None:
        pass


@pytest.mark.parametrize("kind", list(DraftKind))
def test_the_loss_over_all_rows_is_that_without_packing(tmp_path, kind):
    packed = first_loss(tmp_path, "packed", packing=True, kind=kind)
    plain = first_loss(tmp_path, "plain", packing=False, kind=kind)
    assert packed["loss"] == pytest.approx(plain["loss"], rel=1e-5)
    assert packed["accuracy_per_depth"] == plain["accuracy_per_depth"]


def test_a_target_that_lets_packed_rows_see_each_other_is_refused(tmp_path, monkeypatch):
    whole = Target.states
    monkeypatch.setattr(Target, "states", lambda self, ids, mask, starts=None: whole(self, ids, mask))
    with pytest.raises(ConfigError, match=r"see each other .*data.packing=false"):
        first_loss(tmp_path, "run", packing=True, kind=DraftKind.peagle)
