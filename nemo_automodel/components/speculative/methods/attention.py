# SPDX-License-Identifier: Apache-2.0
"""Cross-depth attention of P-EAGLE: a causal prefix of depth-0 elements plus the element's own chain.

Element (a, d) sees the depth-0 elements with anchor <= a and the elements (a, 1..d). A dense mask over all elements
would be quadratic in their number; here depth 0 is plain causal attention, and deeper elements go in chunks of queries
whose keys are the prefix up to the chunk's last anchor and the chunk's own elements. A chunk's mask is made again in
the backward pass and the kernel keeps no scores, so memory is linear in the sequence length.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from nemo_automodel.components.speculative.methods.cod import DepthElements

QUERY_CHUNK = {"cpu": 128, "cuda": 1024}


class CrossDepthAttention:
    """The mask of one step, shared by all layers: `attention(q, k, v)` over [B, T + M] elements, depth 0 first."""

    def __init__(self, elements: DepthElements, depth0: int, chunk: int | None = None) -> None:
        """`depth0` = T, the number of depth-0 positions; `chunk`: queries at a time, null for the device's default."""
        anchors, depths = elements.anchors, elements.depths  # [B, M]
        self.depth0 = depth0
        self.num_chain = anchors.shape[1]
        self.anchors = anchors
        self.max_chain = elements.num_depths - 1
        ground = torch.arange(depth0, device=anchors.device).expand(anchors.shape[0], depth0)
        # padding stays inside the rope table: its anchor is T, its depth 0
        self.positions = torch.cat((ground, anchors + depths), dim=1)  # [B, T + M]
        self.chunks = self._plan(chunk or QUERY_CHUNK.get(anchors.device.type, QUERY_CHUNK["cuda"]))

    def _plan(self, chunk: int) -> list[tuple[int, int, int, int]]:
        """(low, start, end, prefix) of each chunk: queries [start, end), keys [low, end); depth-0 keys [0, prefix)."""
        if self.num_chain == 0:
            return []
        real = self.anchors.masked_fill(self.anchors >= self.depth0, -1).amax(0)  # [M]
        starts = range(0, self.num_chain, chunk)
        last = [int(part.max()) + 1 for part in real.cpu().split(chunk)]
        return [
            (max(0, s - self.max_chain + 1), s, min(s + chunk, self.num_chain), max(p, 1)) for s, p in zip(starts, last)
        ]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [B, T + M, heads, D], k and v [B, T + M, kv_heads, D], rotated -> [B, T + M, heads, D]."""
        groups = q.shape[2] // k.shape[2]
        # heads are repeated here because the memory-efficient kernel of CUDA has no grouped heads with a mask
        q, k, v = (t.transpose(1, 2) for t in (q, _repeat(k, groups), _repeat(v, groups)))  # [B, heads, T + M, D]
        size = self.depth0
        outs = [F.scaled_dot_product_attention(q[:, :, :size], k[:, :, :size], v[:, :, :size], is_causal=True)]
        outs += [  # nothing here is random, so the backward pass needs no copy of the RNG's state
            checkpoint(self._chunk, q, k, v, *bounds, use_reentrant=False, preserve_rng_state=False)
            for bounds in self.chunks
        ]
        return torch.cat(outs, dim=2).transpose(1, 2)

    def _chunk(self, q: Tensor, k: Tensor, v: Tensor, low: int, start: int, end: int, prefix: int) -> Tensor:
        """[B, heads, end - start, D]"""
        size = self.depth0
        keys, values = (torch.cat((t[:, :, :prefix], t[:, :, size + low : size + end]), dim=2) for t in (k, v))
        mask = self._mask(low, start, end, prefix)
        return F.scaled_dot_product_attention(q[:, :, size + start : size + end], keys, values, attn_mask=mask)

    def _mask(self, low: int, start: int, end: int, prefix: int) -> Tensor:
        """[B, 1, queries, prefix + chain keys] bool; no row is empty, an element always sees itself."""
        device = self.anchors.device
        mine = self.anchors[:, start:end, None]  # [B, queries, 1]
        ground = torch.arange(prefix, device=device) <= mine
        order = torch.arange(low, end, device=device) <= torch.arange(start, end, device=device)[:, None]
        chain = (self.anchors[:, None, low:end] == mine) & order  # earlier in the same chain, or itself
        return torch.cat((ground, chain), dim=2)[:, None]


def _repeat(x: Tensor, groups: int) -> Tensor:
    return x if groups == 1 else x.repeat_interleave(groups, dim=2)
