# SPDX-License-Identifier: Apache-2.0
"""`draft.sequence_partitions` and packing change what a step costs, never its loss or gradient."""

from __future__ import annotations

import pytest
import torch
from test_alignment import DRAFT_VOCAB, H, V, small_spec

from nemo_automodel.components.speculative.draft.build import build_draft
from nemo_automodel.components.speculative.draft.peagle import PEagleDraft
from nemo_automodel.components.speculative.methods.batch import LossOut, TrainBatch
from nemo_automodel.components.speculative.methods.cod import (
    DepthElements,
    pack_elements,
    sample_depths,
    split_elements,
)
from nemo_automodel.components.speculative.methods.peagle import forward_to_loss, loss_of_elements
from nemo_automodel.components.speculative.target import TargetStates

LENGTHS = (40, 25, 33)


def make_case() -> tuple[PEagleDraft, TrainBatch, TargetStates, torch.Tensor]:
    torch.manual_seed(5)
    spec = small_spec(num_layers=2)
    draft = build_draft(spec, embed_weight=torch.randn(V, H), lm_head_weight=torch.randn(V, H), vocab_ids=DRAFT_VOCAB)
    mask = torch.rand(len(LENGTHS), max(LENGTHS)) < 0.7
    batch = TrainBatch(
        torch.randint(0, V, mask.shape), mask, torch.tensor(LENGTHS), torch.zeros(mask.shape, dtype=torch.int64)
    )
    states = TargetStates(torch.randn(*mask.shape, 3 * H), torch.randn(*mask.shape, H))
    return draft, batch, states, torch.randn(len(DRAFT_VOCAB), H)


def gradients(draft: PEagleDraft) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in draft.named_parameters() if p.grad is not None}


def assert_same(draft: PEagleDraft, out: LossOut, want: LossOut, expected: dict[str, torch.Tensor]) -> None:
    assert out.count_per_depth.tolist() == want.count_per_depth.tolist()
    assert out.correct_per_depth.tolist() == want.correct_per_depth.tolist()
    torch.testing.assert_close(out.loss_sum, want.loss_sum, atol=1e-5, rtol=1e-5)
    got = gradients(draft)
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        scale = max(1.0, float(gradient.abs().max()))
        torch.testing.assert_close(got[name], gradient, atol=1e-5 * scale, rtol=0.0, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("partitions", [2, 3, 7, 1000])
def test_any_number_of_parts_gives_the_gradient_of_one_also_accumulated(partitions: int) -> None:
    draft, batch, states, teacher = make_case()

    def run(parts: int) -> LossOut:
        draft.zero_grad(set_to_none=True)
        generator = torch.Generator().manual_seed(1)
        for factor in (0.5, 2.0):  # two micro batches
            out = forward_to_loss(draft, batch, states, teacher, generator, partitions=parts)
            (out.loss_sum * factor).backward()
        return out

    want = run(1)
    expected = gradients(draft)
    assert_same(draft, run(partitions), want, expected)
    with torch.no_grad():
        bare = forward_to_loss(draft, batch, states, teacher, torch.Generator().manual_seed(1), partitions=partitions)
        again = forward_to_loss(draft, batch, states, teacher, torch.Generator().manual_seed(1))
    torch.testing.assert_close(bare.loss_sum, again.loss_sum, atol=1e-5, rtol=1e-5)


def listed(elements: DepthElements) -> set[tuple[int, int, int]]:
    rows, anchors = elements.supervised.nonzero(as_tuple=True)
    found = {(r, a, 0) for r, a in zip(rows.tolist(), anchors.tolist(), strict=True)}
    rows, slots = elements.valid.nonzero(as_tuple=True)
    anchors, depths = elements.anchors[rows, slots], elements.depths[rows, slots]
    return found | set(zip(rows.tolist(), anchors.tolist(), depths.tolist(), strict=True))


def test_parts_hold_every_element_once_and_are_of_like_size() -> None:
    whole = sample_depths(
        torch.ones(2, 200, dtype=torch.bool), torch.tensor([200, 90]), num_depths=4, ratio=0.8, ratio_min=0.2,
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    parts = [listed(part) for part in split_elements(whole, 4)]
    assert len(parts) == 4 and set().union(*parts) == listed(whole) and sum(map(len, parts)) == len(listed(whole))
    assert max(map(len, parts)) < 1.2 * len(listed(whole)) / 4
    assert all(anchors.isdisjoint(other) for anchors, other in zip(
        *[[{(r, a) for r, a, _ in part} for part in half] for half in (parts, parts[1:])], strict=False
    ))  # fmt: skip


def test_nothing_supervised_has_no_loss_however_many_parts() -> None:
    draft, batch, states, teacher = make_case()
    empty = TrainBatch(batch.input_ids, torch.zeros_like(batch.loss_mask), batch.lengths, batch.starts)
    out = forward_to_loss(draft, empty, states, teacher, torch.Generator(), partitions=3)
    out.loss_sum.backward()
    assert out.loss_sum.item() == 0.0 and int(out.count) == 0


@pytest.mark.parametrize("partitions", [1, 3])
def test_rows_packed_into_one_line_have_the_loss_and_gradient_they_have_apart(partitions: int) -> None:
    draft, batch, states, teacher = make_case()
    apart = sample_depths(
        batch.loss_mask, batch.lengths, num_depths=4, ratio=0.8, ratio_min=0.5,
        generator=torch.Generator().manual_seed(1),
    )  # fmt: skip
    want = loss_of_elements(draft, batch, states, teacher, apart)
    want.loss_sum.backward()
    expected = gradients(draft)
    draft.zero_grad(set_to_none=True)

    total = sum(LENGTHS)
    offsets = [sum(LENGTHS[:i]) for i in range(len(LENGTHS))]
    kept = torch.zeros(1, total - 1, 4, dtype=torch.bool)
    for row, anchor, depth in listed(apart):
        kept[0, offsets[row] + anchor, depth] = True

    def line(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x[row, :n] for row, n in enumerate(LENGTHS)])[None]

    starts = torch.cat([torch.full((n,), at) for n, at in zip(LENGTHS, offsets, strict=True)])[None]
    packed = TrainBatch(line(batch.input_ids), line(batch.loss_mask), torch.tensor([total]), starts)
    out = loss_of_elements(
        draft, packed, TargetStates(line(states.aux), line(states.last)), teacher, pack_elements(kept),
        partitions=partitions,
    )  # fmt: skip
    out.loss_sum.backward()
    assert_same(draft, out, want, expected)


def test_a_chain_that_would_run_into_the_next_row_is_not_supervised() -> None:
    starts = torch.tensor([[0] * 6 + [6] * 6])
    drawn = sample_depths(
        torch.ones(1, 12, dtype=torch.bool), torch.tensor([12]), num_depths=3, ratio=1.0, ratio_min=1.0,
        generator=torch.Generator(), starts=starts,
    )  # fmt: skip
    assert {(a, d) for _, a, d in listed(drawn)} == {
        (begin + a, d) for begin in (0, 6) for d in range(3) for a in range(6 - 2 - d)
    }
