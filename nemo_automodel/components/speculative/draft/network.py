# SPDX-License-Identifier: Apache-2.0
"""What EAGLE-3 and P-EAGLE drafts have in common: embeddings, fc, layers, norm, head and vocabulary map."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nemo_automodel.components.speculative.draft.layers import DraftLayer, RMSNorm, build_rotary
from nemo_automodel.components.speculative.draft.spec import DraftSpec
from nemo_automodel.components.speculative.matmul import use_fast_linears


class DraftModel(nn.Module):
    """The weights that lie under `model.` in the checkpoint; `fc_norm.<i>` where the spec has it (vLLM >= 0.22)."""

    def __init__(self, spec: DraftSpec) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(spec.vocab_size, spec.hidden_size)
        self.fc = nn.Linear(3 * spec.target_hidden_size, spec.hidden_size, bias=False)
        if spec.fc_norm:
            norms = (RMSNorm(spec.target_hidden_size, spec.rms_norm_eps) for _ in spec.aux_layer_ids)
            self.fc_norm = nn.ModuleList(norms)
        self.layers = nn.ModuleList(DraftLayer(spec, index) for index in range(spec.num_layers))
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)

    def combine(self, aux: Tensor) -> Tensor:
        """The target's aux states [..., 3H] -> [..., H], as vLLM's `combine_hidden_states`."""
        aux = aux.to(self.fc.weight.dtype)
        if hasattr(self, "fc_norm"):
            chunks = aux.chunk(len(self.fc_norm), dim=-1)
            aux = torch.cat([norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)], dim=-1)
        return self.fc(aux)


class DraftNetwork(nn.Module):
    """Names of parameters and buffers are the checkpoint's (design section 3).

    `d2t` [draft_vocab] int64 (target id = i + d2t[i]) and `t2d` [V] bool exist when the draft vocabulary is reduced.
    """

    def __init__(self, spec: DraftSpec) -> None:
        super().__init__()
        self.spec = spec
        self.model = DraftModel(spec)
        self.lm_head = nn.Linear(spec.hidden_size, spec.draft_vocab_size, bias=False)
        self.rotary = build_rotary(spec)
        if spec.draft_vocab_size < spec.vocab_size:
            self.register_buffer("d2t", torch.zeros(spec.draft_vocab_size, dtype=torch.int64))
            self.register_buffer("t2d", torch.arange(spec.vocab_size) < spec.draft_vocab_size)
        use_fast_linears(self)

    def vocab_ids(self) -> Tensor | None:
        """Target ids of the draft vocabulary's rows [draft_vocab]; None when the vocabulary is full."""
        if self.spec.draft_vocab_size == self.spec.vocab_size:
            return None
        return torch.arange(self.d2t.shape[0], device=self.d2t.device) + self.d2t

    def sayable(self, ids: Tensor) -> Tensor | None:
        """Which of these target ids the draft vocabulary holds, bool of their shape; None: all, it is full."""
        return None if self.spec.draft_vocab_size == self.spec.vocab_size else self.t2d[ids]

    def choose(self, hidden: Tensor) -> Tensor:
        """First choice, as target ids: final states [..., H] -> [...]."""
        tokens, ids = self.lm_head(hidden).argmax(-1), self.vocab_ids()
        return tokens if ids is None else ids[tokens]

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [B, N, 1, D] of positions [B, N], in fp32."""
        cos, sin = self.rotary(torch.empty(0, dtype=torch.float32, device=positions.device), positions)
        return cos.unsqueeze(2), sin.unsqueeze(2)
