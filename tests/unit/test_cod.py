# SPDX-License-Identifier: Apache-2.0
"""Which (anchor, depth) elements a step draws."""

from __future__ import annotations

import torch

from nemo_automodel.components.speculative.methods.cod import DepthElements, sample_depths


def draw(loss_mask: torch.Tensor, lengths: list[int], seed: int = 0, **changes: float) -> DepthElements:
    values = {"num_depths": 4, "ratio": 0.8, "ratio_min": 0.2} | changes
    return sample_depths(loss_mask, torch.tensor(lengths), generator=torch.Generator().manual_seed(seed), **values)


def pairs(elements: DepthElements, depth: int) -> set[tuple[int, int]]:
    if depth == 0:
        return set(map(tuple, elements.supervised.nonzero().tolist()))
    rows, slots = (elements.depths == depth).nonzero(as_tuple=True)
    return set(zip(rows.tolist(), elements.anchors[rows, slots].tolist(), strict=True))


def test_supervised_are_those_whose_predicted_token_is_marked_and_exists() -> None:
    mask = torch.tensor([[0, 0, 0, 1, 1, 0, 1, 1], [1, 1, 1, 1, 1, 1, 1, 1]], dtype=torch.bool)
    elements = draw(mask, [8, 4], ratio=1.0)
    assert elements.supervised.shape == (2, 7)
    # row 0 marks tokens 3 4 6 7; row 1 is 4 long, so only tokens 2 and 3 are predicted by anyone
    assert pairs(elements, 0) == {(0, 1), (0, 2), (0, 4), (0, 5), (1, 0), (1, 1)}
    assert pairs(elements, 1) == {(0, 1), (0, 4), (1, 0)}
    assert pairs(elements, 2) == set()  # (0, 1) at depth 2 would predict token 5, which is not marked


def test_ratio_one_keeps_every_element_of_a_marked_row() -> None:
    elements = draw(torch.ones(1, 20, dtype=torch.bool), [20], ratio=1.0)
    assert [len(pairs(elements, d)) for d in range(4)] == [18, 17, 16, 15]


def test_each_depth_keeps_its_fraction_nested_on_the_depth_before() -> None:
    mask = torch.ones(3, 402, dtype=torch.bool)
    elements = draw(mask, [402, 102, 402], num_depths=6, ratio=0.6, ratio_min=0.3)
    for depth in range(1, 6):
        kept = pairs(elements, depth)
        assert kept <= pairs(elements, depth - 1)
        for row, length in ((0, 402), (1, 102), (2, 402)):
            supervisable = length - 2 - depth
            wanted = round(max(0.6**depth, 0.3) * supervisable)
            found = sum(r == row for r, _ in kept)
            assert abs(found - wanted) <= depth  # candidates run out at the row's very end only


def test_the_draw_is_spread_over_the_row_and_follows_the_generator() -> None:
    mask = torch.ones(1, 1002, dtype=torch.bool)
    first, again, other = (draw(mask, [1002], seed=s, ratio=0.5) for s in (1, 1, 2))
    assert torch.equal(first.anchors, again.anchors) and torch.equal(first.depths, again.depths)
    assert pairs(first, 1) != pairs(other, 1)
    halves = [sum(a < 500 for _, a in pairs(first, 1)), sum(a >= 500 for _, a in pairs(first, 1))]
    assert min(halves) > 200


def test_a_chain_is_contiguous_and_ascending_in_the_packed_rows() -> None:
    elements = draw(torch.rand(4, 60, generator=torch.Generator().manual_seed(3)) < 0.7, [60, 9, 33, 60])
    for row in range(4):
        packed = zip(elements.anchors[row].tolist(), elements.depths[row].tolist(), strict=True)
        listed = [(a, d) for a, d in packed if d > 0]
        assert listed == sorted(listed) and len(listed) == int(elements.valid[row].sum())
        for a, d in listed:
            assert d == 1 or listed[listed.index((a, d)) - 1] == (a, d - 1)


def test_nothing_marked_draws_nothing() -> None:
    elements = draw(torch.zeros(2, 6, dtype=torch.bool), [6, 4])
    assert not elements.supervised.any() and elements.anchors.shape == (2, 0)
