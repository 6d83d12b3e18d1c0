# SPDX-License-Identifier: Apache-2.0
"""Attention of an EAGLE-3 draft that is fed back: a causal prefix of depth-0 keys plus the keys of the own chain.

Step 0 is plain causal attention over the row. Step s >= 1 of anchor a sees the depth-0 keys of positions up to a and
the keys of steps 1..s of the same anchor. The scores of both parts share one softmax; queries go in chunks whose keys
are the prefix that the chunk reaches, so no mask over all elements is ever made, and the backward pass makes a chunk's
scores again: memory is linear in the row's length.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

QUERY_CHUNK = {"cpu": 128, "cuda": 256}


class ChainAttention:
    """Which anchors are unrolled and who sees whom, shared by all layers; attention never crosses a row's start."""

    def __init__(self, anchors: Tensor, starts: Tensor, chunk: int | None = None) -> None:
        """anchors [B, M]: positions whose chains are computed, each row's ascending but for padding, which repeats any
        position; starts [B, T]: where the row that each position belongs to begins; `chunk`: queries at a time, null
        for the device's default."""
        self.anchors, self.starts = anchors, starts
        self.places = torch.arange(starts.shape[1], device=starts.device)  # [T]
        self.anchor_starts = starts.gather(1, anchors)  # [B, M]
        self.chunk = chunk or QUERY_CHUNK.get(anchors.device.type, QUERY_CHUNK["cuda"])
        self.chain_chunks = self._plan(anchors, self.anchor_starts)
        packed = bool(starts.any())
        self.ground_chunks = self._plan(self.places.expand_as(starts), starts) if packed else None
        rows = torch.arange(anchors.shape[0], device=anchors.device)[:, None]
        self.flat = (rows * starts.shape[1] + anchors).flatten()  # [B * M] into [B * T]

    def _plan(self, places: Tensor, starts: Tensor) -> list[tuple[int, int, int, int]]:
        """(begin, end, low, high) of each chunk: queries [begin, end), depth-0 keys [low, high)."""
        lows = [int(part.min()) for part in starts.amin(0).cpu().split(self.chunk)]
        highs = [int(part.max()) + 1 for part in places.amax(0).cpu().split(self.chunk)]
        count = places.shape[1]
        begins = range(0, count, self.chunk)
        return [(b, min(b + self.chunk, count), low, high) for b, low, high in zip(begins, lows, highs, strict=True)]

    def positions(self, step: int) -> Tensor:
        """RoPE positions of a step's elements: [B, T] for step 0, else [B, M]."""
        return self.places - self.starts if step == 0 else self.anchors - self.anchor_starts + step

    def at_anchors(self, x: Tensor) -> Tensor:
        """[B, T, ...] -> [B, M, ...]"""
        return x.flatten(0, 1).index_select(0, self.flat).unflatten(0, self.anchors.shape)

    def hidden(self, places: Tensor, starts: Tensor, low: int, high: int) -> Tensor:
        """[B, n, high - low] bool: depth-0 keys that queries at `places` [B, n] of rows from `starts` on do not see."""
        keys = self.places[low:high]
        return (keys > places[..., None]) | (keys < starts[..., None])


class LayerCache:
    """One layer's keys and values: of the whole row after the first call (step 0), and one more per anchor and step."""

    def __init__(self, attention: ChainAttention) -> None:
        self.attention = attention
        self.ground: tuple[Tensor, Tensor] | None = None  # [B, kv_heads, T, D] each
        self.chain: list[tuple[Tensor, Tensor]] = []  # [B, kv_heads, M, D] each

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [B, N, heads, D], k and v [B, N, kv_heads, D], rotated -> [B, N, heads, D]; N = T for step 0, then M."""
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        if self.ground is None:
            self.ground = (k.contiguous(), v.contiguous())
            return self._step0(q).transpose(1, 2)
        self.chain.append((k, v))
        keys, values = (torch.stack(t, dim=2) for t in zip(*self.chain, strict=True))  # [B, kv_heads, s, M, D]
        q = q.unflatten(1, (k.shape[1], -1))  # [B, kv_heads, group, M, D]
        outs = [
            checkpoint(self._chain_chunk, q, *self.ground, keys, values, *bounds, use_reentrant=False,
                       preserve_rng_state=False)
            for bounds in self.attention.chain_chunks
        ]  # fmt: skip
        return torch.cat(outs, dim=3).flatten(1, 2).transpose(1, 2)

    def _step0(self, q: Tensor) -> Tensor:
        """[B, heads, T, D] -> the same"""
        groups = q.shape[1] // self.ground[0].shape[1]
        k, v = (t if groups == 1 else t.repeat_interleave(groups, dim=1) for t in self.ground)
        if self.attention.ground_chunks is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        outs = [
            checkpoint(self._ground_chunk, q, k, v, *bounds, use_reentrant=False, preserve_rng_state=False)
            for bounds in self.attention.ground_chunks
        ]
        return torch.cat(outs, dim=2)

    def _ground_chunk(self, q: Tensor, k: Tensor, v: Tensor, begin: int, end: int, low: int, high: int) -> Tensor:
        plan, part = self.attention, slice(begin, end)
        hidden = plan.hidden(plan.places[part].expand_as(plan.starts[:, part]), plan.starts[:, part], low, high)
        keys, values = k[:, :, low:high], v[:, :, low:high]
        return F.scaled_dot_product_attention(q[:, :, part], keys, values, attn_mask=~hidden[:, None])

    def _chain_chunk(
        self, q: Tensor, k: Tensor, v: Tensor, own_k: Tensor, own_v: Tensor, begin: int, end: int, low: int, high: int
    ) -> Tensor:
        """[B, kv_heads, group, end - begin, D]; scores and softmax in fp32."""
        plan, part = self.attention, slice(begin, end)
        hidden = plan.hidden(plan.anchors[:, part], plan.anchor_starts[:, part], low, high)
        q = q[:, :, :, part].float() * q.shape[-1] ** -0.5
        keys, values = k[:, :, low:high].float(), v[:, :, low:high].float()
        own_keys, own_values = own_k[:, :, :, part].float(), own_v[:, :, :, part].float()
        ground = (q.flatten(2, 3) @ keys.mT).unflatten(2, q.shape[2:4])  # [B, kv_heads, group, n, high - low]
        ground = ground.float().masked_fill(hidden[:, None, None], float("-inf"))
        chain = torch.einsum("bkgnd,bksnd->bkgns", q, own_keys).float()  # never hidden: no row is empty
        weights = torch.cat((ground, chain), dim=-1).softmax(dim=-1)
        shared, own = weights.split((high - low, own_keys.shape[2]), dim=-1)
        out = (shared.flatten(2, 3) @ values).unflatten(2, q.shape[2:4])
        return (out + torch.einsum("bkgns,bksnd->bkgnd", own, own_values)).to(v.dtype)
