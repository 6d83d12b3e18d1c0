# SPDX-License-Identifier: Apache-2.0
"""Is this an EAGLE-3 or P-EAGLE draft of the Llama or Qwen3 layout at all? If not, that is the one reason to give."""

from __future__ import annotations

import re
from typing import Any, Mapping

from nemo_automodel.components.speculative.serve.fixup_tensors import Names
from nemo_automodel.components.speculative.serve.ledger import Ledger

# Class names that stand for vLLM's llama_eagle3.py or qwen3_eagle3.py (report 2.1), and those of the trainers.
OURS = {
    *("LlamaEagle3DraftModel", "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM"),
    *("Eagle3Qwen2_5vlForCausalLM", "Eagle3Qwen3vlForCausalLM", "Eagle3MiniMaxM2ForCausalLM"),
    *("Eagle3Qwen3ForCausalLM", "PEagleDraftModel", "PeagleLlamaForCausalLM", "PeagleQwen3ForCausalLM"),
    *("Eagle3DraftModel", "Eagle3Speculator"),
}
PEAGLE = {"PEagleDraftModel", "PeagleLlamaForCausalLM", "PeagleQwen3ForCausalLM"}
_OTHER_KINDS = (
    (re.compile(r"^Eagle3Deepseek"), "a DeepSeek EAGLE-3 draft (multi-head latent attention, vLLM >= 0.18)"),
    (re.compile(r"DFlash"), "a DFlash draft"),
    (re.compile(r"DSpark"), "a DSpark draft"),
    (re.compile(r"MTP"), "a multi-token-prediction head"),
    (re.compile(r"Medusa"), "a Medusa head"),
    (re.compile(r"MLPSpeculator"), "an MLP speculator"),
    (re.compile(r"^Eagle(?!3)"), "an EAGLE-1 or EAGLE-2 draft"),
    (re.compile(r"^Eagle3|Eagle3"), "an EAGLE-3 draft of another layout"),
)
# families whose decoder layer is Llama's, but for what tensors and config tell (biases, q_norm, sliding windows)
_LLAMA_LIKE = re.compile(r"^(Eagle3)?(Mistral|Qwen2|Qwen2_5|Qwen3|Phi3)ForCausalLM(Eagle3)?$")
_MLA = re.compile(r"\.(kv_a_proj_with_mqa|kv_b_proj|q_a_proj|q_b_proj)\.")
_EXPERTS = re.compile(r"\.experts\.\d+\.|\.block_sparse_moe\.")
_REMEDY = "name an EAGLE-3 or P-EAGLE draft of the Llama or Qwen3 layout; vLLM may serve this one without this tool"


def class_names(config: Mapping[str, Any]) -> list[str]:
    """`architectures` as a list of strings, whatever stands there."""
    found = config.get("architectures")
    if isinstance(found, str):
        return [found]
    return [name for name in found if isinstance(name, str)] if isinstance(found, (list, tuple)) else []


def check_draft_family(ledger: Ledger, names: Names) -> bool:
    """False (and one problem) when the draft is of a family that this tool does not export.

    Tensors tell before the class name does: a config cloned from the target names the target's class. An unknown class
    name over tensors of our layout is a caution.
    """
    named = class_names(ledger.config)
    foreign = next((name for name in named if name not in OURS), None)
    kind = _told_by_tensors(ledger, names) or _told_by_name(foreign)
    if kind is not None:
        via = f" (architectures: {foreign})" if foreign else ""
        ledger.problem(f"this is {kind}{via}, a family that this tool does not export", remedy=_REMEDY)
        return False
    kind = ledger.config.get("speculators_model_type")
    if kind is not None and kind not in ("eagle3", "peagle"):
        found = f"speculators_model_type is {kind!r}, a family that this tool does not export"
        ledger.problem(found, remedy="name an eagle3 or peagle draft")
        return False
    nested = ledger.config.get("eagle_config")
    if isinstance(nested, Mapping) and nested.get("use_aux_hidden_state") is False:
        found = "eagle_config.use_aux_hidden_state is false: a draft without aux layers"
        ledger.problem(f"{found}, a family that this tool does not export", remedy=_REMEDY)
        return False
    if not names.has("fc.weight"):
        found = f"no fc.weight among {len(names.kept)} tensors: this is no EAGLE-3 draft"
        remedy = "name an EAGLE-3 or P-EAGLE draft (an ordinary language model has no fc.weight)"
        ledger.problem(found, where="tensors", remedy=remedy)
        return False
    if foreign is not None and names.has("layers.0.hidden_norm.weight"):
        ledger.warn(
            f"architectures names {foreign}, which is no draft's; the tensors are an EAGLE-3 draft's: taken for one"
        )
    elif foreign is not None:
        ledger.problem(f"architectures names {foreign}, a family that this tool does not export", remedy=_REMEDY)
        return False
    return True


def _told_by_tensors(ledger: Ledger, names: Names) -> str | None:
    if names.any_like(_MLA.pattern):
        return "a draft with multi-head latent attention (DeepSeek's layout)"
    if names.any_like(_EXPERTS.pattern):
        return "a draft with mixture-of-experts layers"
    fc, norm = names.shape("fc.weight"), names.has("layers.0.hidden_norm.weight")
    if fc is not None and len(fc) == 2 and fc[1] == 2 * fc[0] and not norm and not names.has("mask_hidden"):
        return "an EAGLE-1 or EAGLE-2 draft (fc takes an embedding and one hidden state)"
    return None


def _told_by_name(foreign: str | None) -> str | None:
    if foreign is None or _LLAMA_LIKE.match(foreign):
        return None
    return next((kind for pattern, kind in _OTHER_KINDS if pattern.search(foreign)), None)
