# SPDX-License-Identifier: Apache-2.0
"""Cross-depth attention of P-EAGLE: a causal prefix of depth-0 elements plus the element's own chain.

Element (a, d) sees the depth-0 elements of its own row with anchor <= a and the elements (a, 1..d). A dense mask over
all elements would be quadratic in their number. Here queries go in chunks whose keys are the stretch of depth 0 that
the chunk reaches and the chunk's own chains; the backward pass makes a chunk's scores again, as FlashAttention does
(arXiv 2205.14135), so nothing but q, k, v, the output and one number per query is kept: memory is linear in the length.
On a GPU `flex` does the same in one kernel.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from nemo_automodel.components.speculative.methods import flex
from nemo_automodel.components.speculative.methods.cod import DepthElements

QUERY_CHUNK = {"cpu": 64, "cuda": 256}
LOG2_E = 1.4426950408889634
KEPT_COLUMNS = 256


@dataclass(frozen=True)
class Chunk:
    """Queries [begin, end) see among the depth-0 keys [low, high), of the chain's [own, end); the keys [low, open) are
    seen by all of them."""

    begin: int
    end: int
    low: int
    high: int
    open: int
    own: int


@dataclass(frozen=True)
class Queries:
    """Where queries stand: depth-0 elements, or those of the chains."""

    anchors: Tensor  # [B, N] int64, < T
    starts: Tensor  # [B, N] where the anchor's row begins
    depths: Tensor | None  # [B, N]; None: depth 0
    chunks: tuple[Chunk, ...]
    _kept: dict[Chunk, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    def bias(self, chunk: Chunk) -> Tensor:
        """[B, n, high - open + end - own] fp32: -inf for the chunk's keys from `open` on that a query does not see.

        Added, not filled in: a tenth of the time on a CPU. Kept for the other layers and the backward pass where it is
        narrow; a wide one (packing, rows of unlike lengths) is made anew, so that memory stays linear in the length.
        """
        if chunk in self._kept:
            return self._kept[chunk]
        hidden = self._hidden(chunk)
        bias = torch.zeros(hidden.shape, device=hidden.device).masked_fill_(hidden, float("-inf"))
        if bias.shape[2] <= KEPT_COLUMNS:
            self._kept[chunk] = bias
        return bias

    def _hidden(self, chunk: Chunk) -> Tensor:
        part = slice(chunk.begin, chunk.end)
        mine, device = self.anchors[:, part, None], self.anchors.device
        keys = torch.arange(chunk.open, chunk.high, device=device)
        ground = (keys > mine) | (keys < self.starts[:, part, None])
        if self.depths is None:
            return ground
        order = torch.arange(chunk.own, chunk.end, device=device)
        later = order > torch.arange(chunk.begin, chunk.end, device=device)[:, None]
        other = later | (self.anchors[:, None, chunk.own : chunk.end] != mine)
        return torch.cat((ground, other), dim=2)


class CrossDepthAttention:
    """Who sees whom in one step, shared by all layers: depth 0 through `ground`, deeper elements through `chain`."""

    def __init__(
        self, elements: DepthElements, depth0: int, starts: Tensor | None = None, *, chunk: int | None = None,
        kind: str = "auto",
    ) -> None:  # fmt: skip
        """
        Args:
            elements: the elements of depth >= 1, [B, M].
            depth0: T, the number of depth-0 positions.
            starts: [B, >= T] where the row that a position belongs to begins; None: every line is one row.
            chunk: queries at a time; None: the device's default.
            kind: "chunked", "flex", or "auto": flex where it can run.
        """
        anchors = elements.anchors.clamp(max=max(depth0 - 1, 0))  # padding (T) stays within the tables
        device, batch = anchors.device, len(anchors)
        self.depth0, self.num_chain = depth0, anchors.shape[1]
        places = torch.arange(depth0, device=device).expand(batch, depth0)
        packed = starts is not None and bool(starts.any())
        rows = starts[:, :depth0] if packed else torch.zeros_like(places)
        own = rows.gather(1, anchors) if depth0 else torch.zeros_like(anchors)
        self.ground_positions = places - rows  # [B, T]
        self.chain_positions = anchors - own + elements.depths  # [B, M]
        size = chunk or QUERY_CHUNK.get(device.type, QUERY_CHUNK["cuda"])
        reach = elements.num_depths - 2  # how far back a chain's first key lies
        self._ground = Queries(places, rows, None, _plan(places, rows, size, packed, None))
        self._chain = Queries(anchors, own, elements.depths, _plan(anchors, own, size, packed, reach))
        self._flex = flex.masks_of(self._ground, self._chain) if flex.is_wanted(kind, device) else None

    def ground(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Depth 0, rotated: q [B, T, heads, D], k and v [B, T, kv_heads, D] -> [B, T, heads, D]."""
        if self._flex is not None:
            return self._flex.ground(q, k, v)
        return _Chunked.apply(q, k, v, None, None, self._ground)

    def chain(self, q: Tensor, ground: tuple[Tensor, Tensor], k: Tensor, v: Tensor) -> Tensor:
        """Depths >= 1: q [B, M, heads, D], k and v [B, M, kv_heads, D], and depth 0's k and v -> [B, M, heads, D]."""
        if self.num_chain == 0:
            return q
        if self._flex is not None:
            return self._flex.chain(q, torch.cat((ground[0], k), 1), torch.cat((ground[1], v), 1))
        return _Chunked.apply(q, *ground, k, v, self._chain)


def _plan(anchors: Tensor, starts: Tensor, size: int, packed: bool, reach: int | None) -> tuple[Chunk, ...]:
    """Chunks of `size` queries; anchors, starts [B, N]. `reach` None: depth 0, which has no chain."""
    count = anchors.shape[1]
    if anchors.numel() == 0:
        return ()
    first, last, low = (t.cpu() for t in (anchors.amin(0), anchors.amax(0), starts.amin(0)))  # [N] each
    chunks = []
    for begin in range(0, count, size):
        part = slice(begin, begin + size)
        bottom, end = int(low[part].min()), min(begin + size, count)
        seen_by_all = bottom if packed else int(first[part].min()) + 1
        own = end if reach is None else max(0, begin - reach)
        chunks.append(Chunk(begin, end, bottom, int(last[part].max()) + 1, seen_by_all, own))
    return tuple(chunks)


class _Chunked(torch.autograd.Function):
    """softmax(q k^T / sqrt(D)) v by chunks of queries; products in q's dtype, softmax in fp32.

    Inside, tensors are [B * kv_heads, ...]: the queries that share a key's head go through one product together.
    Powers are of 2, not of e: on a CPU torch's exp2 takes a quarter of exp's time, and of a hidden key's -inf a tenth.
    """

    @staticmethod
    def forward(ctx, q, k, v, own_k, own_v, queries):  # noqa: ANN001
        kv_heads = k.shape[2]
        keys, values, own_keys, own_values = (None if t is None else _by_head(t) for t in (k, v, own_k, own_v))
        grouped = _by_group(q * (LOG2_E * q.shape[-1] ** -0.5), kv_heads)
        out = torch.empty_like(grouped)
        norm = torch.empty(grouped.shape[:-1], dtype=torch.float32, device=q.device)  # log2 of the softmax's sum
        for chunk in queries.chunks:
            part, count = slice(chunk.begin, chunk.end), chunk.end - chunk.begin
            mine = grouped[:, :, part].flatten(1, 2)
            scores = _scores(mine, _seen(chunk, keys, own_keys), queries, chunk)
            top = scores.amax(-1, keepdim=True)
            total = scores.sub_(top).exp2_().sum(-1, keepdim=True)
            mixed = torch.bmm(scores.to(q.dtype), _seen(chunk, values, own_values)).div_(total)
            out[:, :, part] = mixed.unflatten(1, (-1, count))
            norm[:, :, part] = (top + total.log2())[..., 0].unflatten(1, (-1, count))
        ctx.save_for_backward(grouped, keys, values, own_keys, own_values, out, norm)
        ctx.queries, ctx.batch = queries, len(q)
        return _from_group(out, len(q))

    @staticmethod
    def backward(ctx, d_out):  # noqa: ANN001
        grouped, keys, values, own_keys, own_values, out, norm = ctx.saved_tensors
        d_out = _by_group(d_out, keys.shape[0] // ctx.batch)
        delta = (d_out.float() * out.float()).sum(-1)  # [B * kv_heads, group, N]
        d_q = torch.empty_like(grouped)
        d_keys, d_values, d_own_keys, d_own_values = (
            None if t is None else torch.zeros_like(t) for t in (keys, values, own_keys, own_values)
        )
        for chunk in ctx.queries.chunks:
            part = slice(chunk.begin, chunk.end)
            mine, d_mine = grouped[:, :, part].flatten(1, 2), d_out[:, :, part].flatten(1, 2)
            seen = _seen(chunk, keys, own_keys)
            weights = _scores(mine, seen, ctx.queries, chunk)
            weights.sub_(norm[:, :, part].flatten(1, 2)[..., None]).exp2_()
            slope = torch.bmm(d_mine, _seen(chunk, values, own_values).mT).float()
            slope.sub_(delta[:, :, part].flatten(1, 2)[..., None]).mul_(weights)
            slope, weights = slope.to(grouped.dtype), weights.to(grouped.dtype)
            d_q[:, :, part] = torch.bmm(slope, seen).unflatten(1, (-1, chunk.end - chunk.begin))
            _add_seen(chunk, torch.bmm(slope.mT, mine), d_keys, d_own_keys)
            _add_seen(chunk, torch.bmm(weights.mT, d_mine), d_values, d_own_values)
        d_q = _from_group(d_q.mul_(d_q.shape[-1] ** -0.5), ctx.batch)
        for d_any in (d_keys, d_own_keys):
            if d_any is not None:
                d_any.div_(LOG2_E)  # `grouped` carries the factor
        rest = (None if t is None else _from_head(t, ctx.batch) for t in (d_keys, d_values, d_own_keys, d_own_values))
        return d_q, *rest, None


def _seen(chunk: Chunk, ground: Tensor, own: Tensor | None) -> Tensor:
    """What the chunk reaches of depth 0's [B * kv_heads, T, D] and of the chain's, one behind the other."""
    wide = ground[:, chunk.low : chunk.high]
    return wide if own is None else torch.cat((wide, own[:, chunk.own : chunk.end]), dim=1)


def _add_seen(chunk: Chunk, more: Tensor, ground: Tensor, own: Tensor | None) -> None:
    """Add to the places that `_seen` reads."""
    count = chunk.high - chunk.low
    ground[:, chunk.low : chunk.high].add_(more[:, :count])
    if own is not None:
        own[:, chunk.own : chunk.end].add_(more[:, count:])


def _scores(mine: Tensor, keys: Tensor, queries: Queries, chunk: Chunk) -> Tensor:
    """[B * kv_heads, group * n, keys] fp32, -inf where hidden."""
    scores = torch.bmm(mine, keys.mT).float()
    bias = queries.bias(chunk)  # [B, n, the last keys]
    batch, count = bias.shape[:2]
    parted = scores.view(batch, len(scores) // batch, -1, count, scores.shape[-1])
    parted[..., chunk.open - chunk.low :].add_(bias[:, None, None])
    return scores


def _by_head(x: Tensor) -> Tensor:
    """[B, N, kv_heads, D] -> [B * kv_heads, N, D]"""
    return x.transpose(1, 2).flatten(0, 1)


def _from_head(x: Tensor, batch: int) -> Tensor:
    return x.unflatten(0, (batch, -1)).transpose(1, 2)


def _by_group(x: Tensor, kv_heads: int) -> Tensor:
    """[B, N, heads, D] -> [B * kv_heads, heads / kv_heads, N, D]"""
    return x.transpose(1, 2).unflatten(1, (kv_heads, -1)).flatten(0, 1)


def _from_group(x: Tensor, batch: int) -> Tensor:
    return x.unflatten(0, (batch, -1)).flatten(1, 2).transpose(1, 2)
