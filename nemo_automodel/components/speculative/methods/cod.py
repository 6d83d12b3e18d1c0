# SPDX-License-Identifier: Apache-2.0
"""Conditional drop (COD) sampling of (anchor, depth) elements (P-EAGLE, arXiv 2602.01469)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class DepthElements:
    """Which (anchor, depth) elements a step computes.

    Depth 0 is the dense grid of positions 0..T-1 of each row; deeper elements are packed per row, ascending by
    (anchor, depth), so that the chain of one anchor is contiguous. Packing pads rows to the longest.
    """

    supervised: Tensor  # [B, T] bool: the depth-0 elements that bear loss
    anchors: Tensor  # [B, M] int64; padding: T
    depths: Tensor  # [B, M] int64, 1..K-1; padding: 0
    num_depths: int  # K

    @property
    def valid(self) -> Tensor:
        """[B, M] bool: not padding."""
        return self.depths > 0


def keep_fraction(depth: int, ratio: float, ratio_min: float) -> float:
    """The fraction of supervised positions that depth d keeps: max(ratio ** d, ratio_min)."""
    return 1.0 if depth == 0 else max(ratio**depth, ratio_min)


def sample_depths(
    loss_mask: Tensor,
    lengths: Tensor,
    *,
    num_depths: int,
    ratio: float,
    ratio_min: float,
    generator: torch.Generator,
    starts: Tensor | None = None,
) -> DepthElements:
    """Draw the elements of one step.

    Element (a, d) sits at position p = a + d and predicts token p + 2; it can be supervised when `loss_mask` marks
    that token and it lies in the anchor's own row. Depth 0 keeps every position with real inputs (0..len-2). Of the
    supervisable elements of depth d >= 1 `keep_fraction` are kept, only such whose parent (a, d - 1) is supervised and
    was kept: a chain has no gap.

    Args:
        loss_mask: [B, L] bool, True on tokens to be learnt.
        lengths: [B] true lengths of the rows.
        generator: a CPU generator; the draw is the same on every device.
        starts: [B, L] where the row that a position belongs to begins (packing); None: every line is one row.

    Returns:
        Elements over T = max(lengths) - 1 depth-0 positions.
    """
    device = loss_mask.device
    longest = int(lengths.max())
    places = torch.arange(longest, device=device)
    marked = loss_mask[:, :longest].bool() & (places < lengths.to(device)[:, None])  # [B, L]
    size = max(longest - 1, 0)  # T
    noise = torch.rand(loss_mask.shape[0], size, generator=generator).to(device)
    padded = torch.nn.functional.pad(marked, (0, num_depths + 1))
    row = None if starts is None else torch.nn.functional.pad(starts[:, :longest], (0, num_depths + 1), value=-1)

    def supervisable(depth: int) -> Tensor:  # [B, T] by anchor
        wanted = padded[:, depth + 2 : depth + 2 + size]
        return wanted if row is None else wanted & (row[:, depth + 2 : depth + 2 + size] == row[:, :size])

    kept = [supervisable(0)]
    for depth in range(1, num_depths):
        shifted = supervisable(depth)
        wanted = (shifted.sum(1) * keep_fraction(depth, ratio, ratio_min)).round().long()  # [B]
        candidates = kept[-1] & shifted
        rank = noise.masked_fill(~candidates, 2.0).argsort(dim=1).argsort(dim=1)
        kept.append(candidates & (rank < wanted[:, None]))
    return pack_elements(torch.stack(kept, dim=-1))


def pack_elements(kept: Tensor) -> DepthElements:
    """Pack a dense choice kept [B, T, K] bool (row, anchor, depth; depth 0 = bears loss) into `DepthElements`."""
    batch, size, num_depths = kept.shape
    flat = kept[..., 1:].flatten(1)  # [B, T * (K - 1)], already ascending by (anchor, depth)
    longest = int(flat.sum(1).max()) if flat.numel() else 0
    slots = flat.cumsum(1) - 1
    rows, columns = flat.nonzero(as_tuple=True)
    anchors = torch.full((batch, longest), size, dtype=torch.int64, device=kept.device)
    depths = torch.zeros_like(anchors)
    places = slots[rows, columns]
    anchors[rows, places] = columns // max(num_depths - 1, 1)
    depths[rows, places] = columns % max(num_depths - 1, 1) + 1
    return DepthElements(kept[..., 0], anchors, depths, num_depths)


def split_elements(elements: DepthElements, parts: int) -> tuple[DepthElements, ...]:
    """Cut into at most `parts` stretches of anchors with about as many elements each; a chain stays whole.

    Every element is in exactly one part; no part is empty unless there is nothing at all.
    """
    batch, size = elements.supervised.shape
    counts = elements.supervised.sum(0)  # [T] elements of each anchor, over all rows
    counts = counts + torch.bincount(elements.anchors[elements.valid], minlength=size)[:size]
    done = counts.cumsum(0).cpu()
    total = int(done[-1]) if size else 0
    cuts = [int(torch.searchsorted(done, total * part / parts)) + 1 for part in range(1, parts)]
    edges = sorted({0, size, *(min(cut, size) for cut in cuts)})
    split = [_stretch(elements, low, high) for low, high in zip(edges, edges[1:])]
    return tuple(part for part in split if part.anchors.shape[1] or bool(part.supervised.any())) or (elements,)


def _stretch(elements: DepthElements, low: int, high: int) -> DepthElements:
    """The elements with anchors in [low, high), packed again."""
    size = elements.supervised.shape[1]
    places = torch.arange(size, device=elements.supervised.device)
    inside = elements.valid & (elements.anchors >= low) & (elements.anchors < high)  # [B, M], contiguous in each row
    longest = int(inside.sum(1).max()) if inside.numel() else 0
    order = (~inside).to(torch.uint8).argsort(dim=1, stable=True)[:, :longest]
    taken = inside.gather(1, order)
    return DepthElements(
        elements.supervised & (places >= low) & (places < high),
        elements.anchors.gather(1, order).masked_fill(~taken, size),
        elements.depths.gather(1, order).masked_fill(~taken, 0),
        elements.num_depths,
    )
