# SPDX-License-Identifier: Apache-2.0
"""The EAGLE-3 draft (arXiv 2503.01840) as vLLM 0.32 runs it: one token per forward, fed back K times."""

from __future__ import annotations

import torch
from torch import Tensor

from nemo_automodel.components.speculative.draft.chain_attention import ChainAttention, LayerCache
from nemo_automodel.components.speculative.draft.layers import apply_rotary
from nemo_automodel.components.speculative.draft.network import DraftNetwork


class Eagle3Draft(DraftNetwork):
    """The network; `Unroll` runs it, in training and when drafting."""

    @torch.no_grad()
    def propose(self, next_ids: Tensor, aux: Tensor, first: int, depths: int) -> Tensor:
        """Greedy proposals after every anchor from `first` on, of one row.

        Args:
            next_ids: [T] the token after each position.
            aux: [T, 3H] the target's states.

        Returns:
            [T - first, K] target ids.
        """
        anchors = torch.arange(first, len(next_ids), device=next_ids.device)[None]
        unroll = Unroll(self, aux[None], ChainAttention(anchors, torch.zeros_like(next_ids)[None]))
        tokens, proposal = next_ids[None], []
        for _ in range(depths):
            tokens = self.choose(self.model.norm(unroll(tokens)))
            proposal.append(tokens[0])
        return torch.stack(proposal, dim=1)


class Unroll:
    """The draft fed back on its own states, one step per call.

    As vLLM's `v1/spec_decode/llm_base_proposer.py` (0.32): step s of anchor a sits at position a + s, reads a token and
    the state of step s - 1 (before the last norm, or after it with `norm_output`), and sees the depth-0 keys of
    positions up to a and its own chain's. Step 0 runs over the whole row, for its keys.
    """

    def __init__(self, draft: Eagle3Draft, aux: Tensor, attention: ChainAttention) -> None:
        """aux [B, T, 3H]: the target's states."""
        self.draft, self.attention = draft, attention
        self.caches = [LayerCache(attention) for _ in draft.model.layers]
        self.hidden = draft.model.combine(aux)  # [B, T, H], then [B, M, H]
        self.step = 0

    def __call__(self, tokens: Tensor) -> Tensor:
        """The tokens that this step reads ([B, T] at step 0, then [B, M]) -> states before the last norm [B, M, H]."""
        model, attention = self.draft.model, self.attention
        cos, sin = self.draft.angles(attention.positions(self.step))
        x, residual = model.layers[0].fuse(model.embed_tokens(tokens), self.hidden)
        for index, (layer, cache) in enumerate(zip(model.layers, self.caches, strict=True)):
            q, k, v = layer.self_attn.project(x if index == 0 else layer.input_layernorm(residual))
            attended = cache(apply_rotary(q, cos, sin), apply_rotary(k, cos, sin), v)
            if self.step == 0 and index == len(model.layers) - 1:  # elsewhere all are needed as keys
                attended, residual = attention.at_anchors(attended), attention.at_anchors(residual)
            residual = layer.finish(attended, residual)
        self.hidden = model.norm(residual) if self.draft.spec.norm_output else residual
        self.step += 1
        return residual
