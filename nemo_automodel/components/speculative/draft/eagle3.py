# SPDX-License-Identifier: Apache-2.0
"""The EAGLE-3 draft (arXiv 2503.01840) as vLLM 0.32 runs it: one token per forward, fed back K times."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_automodel.components.speculative.draft.layers import apply_rotary
from nemo_automodel.components.speculative.draft.network import DraftNetwork
from nemo_automodel.components.speculative.draft.spec import DraftSpec


class Eagle3Draft(DraftNetwork):
    """`norm_output`: the state that is fed back is the one after the last norm, not the one before it."""

    def __init__(self, spec: DraftSpec, *, norm_output: bool = False) -> None:
        super().__init__(spec)
        self.norm_output = norm_output

    @torch.no_grad()
    def propose(self, next_ids: Tensor, aux: Tensor, first: int, depths: int) -> Tensor:
        """Greedy proposals after every anchor from `first` on, of one row.

        As vLLM's `v1/spec_decode/llm_base_proposer.py`: depth d of anchor a sits at position a + d, reads the token and
        the state of depth d - 1, and sees the depth-0 keys of positions up to a and its own chain's.

        Args:
            next_ids: [T] the token after each position.
            aux: [T, 3H] the target's states.

        Returns:
            [T - first, K] target ids.
        """
        tokens, hidden = next_ids, self.model.fc(aux.to(self.model.fc.weight.dtype))
        positions = torch.arange(len(next_ids), device=next_ids.device)
        caches = [_Chains(positions[first:]) for _ in self.model.layers]
        proposal: list[Tensor] = []
        for depth in range(depths):
            last, hidden = self._step(tokens, hidden, positions, caches)
            if depth == 0:
                last, hidden, positions = last[first:], hidden[first:], positions[first:]
            tokens, positions = self.choose(last), positions + 1
            proposal.append(tokens)
        return torch.stack(proposal, dim=1)

    def _step(self, tokens: Tensor, hidden: Tensor, positions: Tensor, caches: list[_Chains]) -> tuple[Tensor, Tensor]:
        """Tokens [N], states [N, H] -> final states [N, H] and those to feed back [N, H]."""
        cos, sin = (t[0] for t in self.angles(positions[None]))  # [N, 1, D]
        x, residual = self.model.layers[0].fuse(self.model.embed_tokens(tokens), hidden)
        for index, (layer, cache) in enumerate(zip(self.model.layers, caches, strict=True)):
            q, k, v = layer.self_attn.project(x if index == 0 else layer.input_layernorm(residual))
            residual = layer.finish(cache(apply_rotary(q, cos, sin), apply_rotary(k, cos, sin), v), residual)
        last = self.model.norm(residual)
        return last, last if self.norm_output else residual


class _Chains:
    """Keys and values of one layer: depth 0 of the whole row, then one more per anchor and depth."""

    def __init__(self, anchors: Tensor) -> None:
        self.anchors = anchors  # [A]
        self.ground: tuple[Tensor, Tensor] | None = None  # [T, kv_heads, D] each
        self.chain: list[tuple[Tensor, Tensor]] = []  # [A, kv_heads, D] each

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [N, heads, D], k and v [N, kv_heads, D] -> [N, heads, D]; N = T at the first call (depth 0), then A."""
        groups = q.shape[1] // k.shape[1]
        k, v = (t.repeat_interleave(groups, dim=1) for t in (k, v))
        if self.ground is None:
            self.ground = (k, v)
            swapped = (t.transpose(0, 1)[None] for t in (q, k, v))  # [1, heads, T, D]
            return F.scaled_dot_product_attention(*swapped, is_causal=True)[0].transpose(0, 1)
        self.chain.append((k, v))
        return self._deeper(q.float() * q.shape[-1] ** -0.5).to(v.dtype)

    def _deeper(self, q: Tensor) -> Tensor:
        """q [A, heads, D], scaled, fp32 -> [A, heads, D], fp32."""
        keys, values = (t.float() for t in self.ground)
        # [A, d, heads, D]
        own_keys, own_values = (torch.stack(t, dim=1).float() for t in zip(*self.chain, strict=True))
        ground = torch.einsum("ahx,thx->aht", q, keys)
        later = torch.arange(len(keys), device=q.device) > self.anchors[:, None]
        ground = ground.masked_fill(later[:, None], float("-inf"))
        weights = torch.cat((ground, torch.einsum("ahx,adhx->ahd", q, own_keys)), dim=-1).softmax(dim=-1)
        shared, own = weights.split((len(keys), own_keys.shape[1]), dim=-1)
        return torch.einsum("aht,thx->ahx", shared, values) + torch.einsum("ahd,adhx->ahx", own, own_values)
