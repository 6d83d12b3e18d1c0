# SPDX-License-Identifier: Apache-2.0
"""The P-EAGLE draft (arXiv 2602.01469): EAGLE-3's network, asked for K tokens in one forward."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from nemo_automodel.components.speculative.draft.layers import apply_rotary
from nemo_automodel.components.speculative.draft.network import DraftNetwork
from nemo_automodel.components.speculative.draft.spec import DraftSpec

if TYPE_CHECKING:
    from nemo_automodel.components.speculative.methods.attention import CrossDepthAttention

MASK_STD = 0.02


class PEagleDraft(DraftNetwork):
    """The network and the mask slot's state, which stands where the target's is not known yet."""

    def __init__(self, spec: DraftSpec) -> None:
        super().__init__(spec)
        self.mask_hidden = nn.Parameter(MASK_STD * torch.randn(1, 1, 3 * spec.target_hidden_size))

    def forward(
        self, next_ids: Tensor, aux: Tensor, attention: CrossDepthAttention, select: Tensor | None = None
    ) -> Tensor:
        """Final hidden states (after the last norm, the input of `lm_head`) of all elements.

        Args:
            next_ids: [B, T] the token after each depth-0 position.
            aux: [B, T, 3H] the target's states at each depth-0 position.
            attention: the elements of depth >= 1 ([B, M]) and who sees whom.
            select: indices into the flat [B * (T + M)] elements whose output is wanted; None: all.

        Returns:
            [len(select), H], or [B, T + M, H]: depth-0 elements first.
        """
        cos, sin = self.angles(attention.positions)
        fused, residual = self._inputs(next_ids, aux)
        depth0, chain = next_ids.shape[1], attention.num_chain
        for index, layer in enumerate(self.model.layers):
            x = fused if index == 0 else layer.input_layernorm(residual)
            q, k, v = layer.self_attn.project(x)
            if index == 0:  # every mask slot has one and the same input: project it once, then repeat it
                batch = next_ids.shape[0]
                q, k, v, residual = (_spread(t, batch, depth0, chain) for t in (q, k, v, residual))
            attended = attention(apply_rotary(q, cos, sin), apply_rotary(k, cos, sin), v)
            if select is not None and index == len(self.model.layers) - 1:  # elsewhere all are needed as keys
                attended, residual = attended.flatten(0, 1)[select], residual.flatten(0, 1)[select]
            residual = layer.finish(attended, residual)
        return self.model.norm(residual)

    def _inputs(self, next_ids: Tensor, aux: Tensor) -> tuple[Tensor, Tensor]:
        """First layer's input [1, B * T + 1, 2H] and residual [1, B * T + 1, H]; the last row is the mask slot's."""
        weight = self.model.fc.weight
        ids = torch.cat((next_ids.flatten(), next_ids.new_tensor([self.spec.mask_token_id])))
        states = torch.cat((aux.flatten(0, 1).to(weight.dtype), self.mask_hidden.flatten(0, 1).to(weight.dtype)))
        return self.model.layers[0].fuse(self.model.embed_tokens(ids)[None], self.model.fc(states)[None])


def _spread(rows: Tensor, batch: int, depth0: int, chain: int) -> Tensor:
    """[1, B * T + 1, ...] -> [B, T + M, ...]: depth-0 rows in their places, the last row repeated M times."""
    own = rows[0, :-1].unflatten(0, (batch, depth0))
    slots = rows[0, -1].expand(batch, chain, *rows.shape[2:])
    return torch.cat((own, slots), dim=1)


def build_draft(
    spec: DraftSpec,
    *,
    embed_weight: Tensor,
    lm_head_weight: Tensor,
    vocab_ids: Tensor | None = None,
    freeze_embeddings: bool = False,
) -> PEagleDraft:
    """A fresh draft in fp32 on the CPU: embeddings and head copied from the target, the rest random (torch's RNG).

    Args:
        embed_weight: [V, H] the target's input embeddings.
        lm_head_weight: [V, H] the target's output head.
        vocab_ids: [draft_vocab] ascending target ids; needed exactly when the draft vocabulary is reduced.

    Raises:
        ValueError: `vocab_ids` does not fit the spec.
    """
    draft = PEagleDraft(spec)
    for module in draft.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)  # keeps the scale at any width
    rows = lm_head_weight
    if spec.draft_vocab_size < spec.vocab_size:
        if vocab_ids is None or vocab_ids.shape != (spec.draft_vocab_size,) or not bool((vocab_ids.diff() > 0).all()):
            raise ValueError(f"vocab_ids: {spec.draft_vocab_size} ascending target ids are wanted")
        ids = vocab_ids.cpu()
        draft.d2t.copy_(ids - torch.arange(len(ids)))
        draft.t2d.zero_()[ids] = True
        rows = lm_head_weight[vocab_ids.to(lm_head_weight.device)]
    elif vocab_ids is not None:
        raise ValueError("vocab_ids: the draft vocabulary is full, no map is wanted")
    with torch.no_grad():
        draft.model.embed_tokens.weight.copy_(embed_weight)
        draft.lm_head.weight.copy_(rows)
    draft.model.embed_tokens.weight.requires_grad_(not freeze_embeddings)
    return draft
