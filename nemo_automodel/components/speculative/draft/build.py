# SPDX-License-Identifier: Apache-2.0
"""A draft from its spec: which class it is, and what its weights are before the first step."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nemo_automodel.components.speculative.draft.eagle3 import Eagle3Draft
from nemo_automodel.components.speculative.draft.network import DraftNetwork
from nemo_automodel.components.speculative.draft.peagle import PEagleDraft
from nemo_automodel.components.speculative.draft.spec import DraftSpec
from nemo_automodel.errors import ConfigError


def empty_draft(spec: DraftSpec) -> DraftNetwork:
    """The network of this kind, on the CPU in fp32, with torch's own random weights: fill it."""
    return PEagleDraft(spec) if spec.parallel_drafting else Eagle3Draft(spec)


def check_heads(spec: DraftSpec) -> None:
    """Raises ConfigError for a Llama config that transformers refuses (`LlamaConfig.validate_architecture`, 5.x), and
    vLLM with it: GLM-4.5 and others have a hidden size that is no multiple of their heads."""
    if not spec.qk_norm and spec.hidden_size % spec.num_attention_heads:
        raise ConfigError(
            f"a draft of hidden size {spec.hidden_size} with the target's {spec.num_attention_heads} attention heads: "
            "no multiple of them, which vLLM cannot load in a Llama draft",
            where="target.path", remedy="take a target whose hidden size is a multiple of its attention heads",
        )  # fmt: skip


def build_draft(
    spec: DraftSpec,
    *,
    embed_weight: Tensor,
    lm_head_weight: Tensor,
    vocab_ids: Tensor | None = None,
    freeze_embeddings: bool = False,
) -> DraftNetwork:
    """A fresh draft in fp32 on the CPU: embeddings and head copied from the target, the rest random (torch's RNG).

    Args:
        embed_weight: [V, H] the target's input embeddings.
        lm_head_weight: [V, H] the target's output head.
        vocab_ids: [draft_vocab] ascending target ids; needed exactly when the draft vocabulary is reduced.

    Raises:
        ValueError: `vocab_ids` does not fit the spec.
        ConfigError: vLLM could not load such a draft.
    """
    check_heads(spec)
    draft = empty_draft(spec)
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
