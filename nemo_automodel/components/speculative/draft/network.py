# SPDX-License-Identifier: Apache-2.0
"""What EAGLE-3 and P-EAGLE drafts have in common: embeddings, fc, layers, norm, head and vocabulary map."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nemo_automodel.components.speculative.draft.layers import DraftLayer, RMSNorm, build_rotary
from nemo_automodel.components.speculative.draft.spec import DraftSpec


class DraftModel(nn.Module):
    """The weights that lie under `model.` in the checkpoint."""

    def __init__(self, spec: DraftSpec) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(spec.vocab_size, spec.hidden_size)
        self.fc = nn.Linear(3 * spec.target_hidden_size, spec.hidden_size, bias=False)
        self.layers = nn.ModuleList(DraftLayer(spec, index) for index in range(spec.num_layers))
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)


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

    def vocab_ids(self) -> Tensor | None:
        """Target ids of the draft vocabulary's rows [draft_vocab]; None when the vocabulary is full."""
        if self.spec.draft_vocab_size == self.spec.vocab_size:
            return None
        return torch.arange(self.d2t.shape[0], device=self.d2t.device) + self.d2t

    def choose(self, hidden: Tensor) -> Tensor:
        """First choice, as target ids: final states [..., H] -> [...]."""
        tokens, ids = self.lm_head(hidden).argmax(-1), self.vocab_ids()
        return tokens if ids is None else ids[tokens]

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [B, N, 1, D] of positions [B, N], in fp32."""
        cos, sin = self.rotary(torch.empty(0, dtype=torch.float32, device=positions.device), positions)
        return cos.unsqueeze(2), sin.unsqueeze(2)
