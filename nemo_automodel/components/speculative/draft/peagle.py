# SPDX-License-Identifier: Apache-2.0
"""The P-EAGLE draft (arXiv 2602.01469): EAGLE-3's network, asked for K tokens in one forward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Sequence

import torch
from torch import Tensor, nn

from nemo_automodel.components.speculative.draft.layers import apply_rotary
from nemo_automodel.components.speculative.draft.network import DraftNetwork
from nemo_automodel.components.speculative.draft.spec import DraftSpec

if TYPE_CHECKING:
    from nemo_automodel.components.speculative.methods.attention import CrossDepthAttention

MASK_STD = 0.02


@dataclass(frozen=True)
class Ground:
    """What depth 0 gives: its own final states, and what the elements above it need."""

    last: Tensor  # [B, T, H], or [selected, H]
    slot: tuple[Tensor, ...]  # the mask slot in layer 0: q, k, v [heads or kv_heads, D], not rotated, and residual [H]
    keys: tuple[Tensor, ...]  # [B, T, kv_heads, D] per layer, rotated
    values: tuple[Tensor, ...]

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.last, *self.slot, *self.keys, *self.values)

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> Ground:
        """The inverse of `tensors`."""
        layers = (len(tensors) - 5) // 2
        return cls(tensors[0], tuple(tensors[1:5]), tuple(tensors[5 : 5 + layers]), tuple(tensors[5 + layers :]))


class PEagleDraft(DraftNetwork):
    """The network and the mask slot's state, which stands where the target's is not known yet."""

    def __init__(self, spec: DraftSpec) -> None:
        super().__init__(spec)
        self.mask_hidden = nn.Parameter(MASK_STD * torch.randn(1, 1, 3 * spec.target_hidden_size))

    def forward(self, next_ids: Tensor, aux: Tensor, attention: CrossDepthAttention) -> Tensor:
        """Final hidden states (after the last norm, the input of `lm_head`) of all elements.

        Args:
            next_ids: [B, T] the token after each depth-0 position.
            aux: [B, T, 3H] the target's states at each depth-0 position.
            attention: the elements of depth >= 1 ([B, M]) and who sees whom.

        Returns:
            [B, T + M, H]: depth-0 elements first.
        """
        ground = self.ground(next_ids, aux, attention)
        return torch.cat((ground.last, self.chain(ground, attention)), dim=1)

    def ground(
        self, next_ids: Tensor, aux: Tensor, attention: CrossDepthAttention, select: Tensor | None = None
    ) -> Ground:
        """Depth 0 alone, which sees nothing deeper. `select`: indices into the flat [B * T] positions whose final
        state is wanted; None: all. See `forward` for the rest."""
        cos, sin = self.angles(attention.ground_positions)
        fused, residual = self._inputs(next_ids, aux)
        shape = next_ids.shape
        slot: tuple[Tensor, ...] = ()
        keys, values = [], []
        for index, layer in enumerate(self.model.layers):
            q, k, v = layer.self_attn.project(fused if index == 0 else layer.input_layernorm(residual))
            if index == 0:  # the last row is the mask slot's: one input for all chain elements, projected once
                slot = tuple(t[0, -1] for t in (q, k, v, residual))
                q, k, v, residual = (t[0, :-1].unflatten(0, shape) for t in (q, k, v, residual))
            q, k = apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)
            keys.append(k)
            values.append(v)
            residual = self._finish(index, attention.ground(q, k, v), residual, select)
        return Ground(self.model.norm(residual), slot, tuple(keys), tuple(values))

    def chain(self, ground: Ground, attention: CrossDepthAttention, select: Tensor | None = None) -> Tensor:
        """Final states of the elements of depth >= 1: [B, M, H], or [len(select), H]; `select` as in `ground`."""
        cos, sin = self.angles(attention.chain_positions)
        shape = attention.chain_positions.shape  # [B, M]
        residual = ground.slot[3].expand(*shape, -1)
        for index, layer in enumerate(self.model.layers):
            if index == 0:
                q, k, v = (t.expand(*shape, *t.shape) for t in ground.slot[:3])
            else:
                q, k, v = layer.self_attn.project(layer.input_layernorm(residual))
            q, k = apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)
            mixed = attention.chain(q, (ground.keys[index], ground.values[index]), k, v)
            residual = self._finish(index, mixed, residual, select)
        return self.model.norm(residual)

    def _finish(self, index: int, mixed: Tensor, residual: Tensor, select: Tensor | None) -> Tensor:
        """The rest of a layer; in the last one for the selected elements alone: elsewhere all are needed as keys."""
        if select is not None and index == len(self.model.layers) - 1:
            mixed, residual = (t.flatten(0, 1).index_select(0, select) for t in (mixed, residual))
        return self.model.layers[index].finish(mixed, residual)

    def _inputs(self, next_ids: Tensor, aux: Tensor) -> tuple[Tensor, Tensor]:
        """First layer's input [1, B * T + 1, 2H] and residual [1, B * T + 1, H]; the last row is the mask slot's."""
        ids = torch.cat((next_ids.flatten(), next_ids.new_tensor([self.spec.mask_token_id])))
        states = torch.cat((aux.flatten(0, 1).to(self.mask_hidden.dtype), self.mask_hidden.flatten(0, 1)))
        return self.model.layers[0].fuse(self.model.embed_tokens(ids)[None], self.model.combine(states)[None])
