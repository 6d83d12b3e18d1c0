# SPDX-License-Identifier: Apache-2.0
"""Config keys: draft kind, class name, sizes and flags that follow the tensors, rope, mask token, aux layers."""

from __future__ import annotations

from typing import Any

from nemo_automodel.components.speculative.draft.spec import default_aux_layer_ids
from nemo_automodel.components.speculative.serve.fixup_family import PEAGLE, class_names
from nemo_automodel.components.speculative.serve.fixup_sizes import check_heads
from nemo_automodel.components.speculative.serve.fixup_tensors import FLOATS, Names, add_biases
from nemo_automodel.components.speculative.serve.ledger import Ledger, as_mapping
from nemo_automodel.components.speculative.serve.types import Fixup, TargetFacts
from nemo_automodel.components.speculative.serve.vllm_release import VllmRelease

LLAMA, QWEN3 = "LlamaForCausalLMEagle3", "Eagle3Qwen3ForCausalLM"
_LENGTHS = ("n_positions", "max_seq_len", "seq_length", "model_max_length", "max_target_positions")
_LENGTHS += ("max_sequence_length", "max_seq_length", "seq_len")
_MASK_KEYS = ("mask_token_id", "pard_token", "ptd_token_id", "dspark_noise_token_id")


def read_kind(ledger: Ledger, names: Names) -> bool:
    """True for P-EAGLE. An explicit flag decides; without one, the format, class name or `mask_hidden` tells."""
    flag = ledger.config.get("parallel_drafting")
    if isinstance(flag, bool):
        return flag
    if flag is not None:
        ledger.problem(f"parallel_drafting is {flag!r}", remedy="write true or false")
    config = ledger.config
    named = config.get("speculators_model_type") == "peagle" or PEAGLE & set(class_names(config))
    has_mask = any(config.get(key) is not None for key in _MASK_KEYS)
    parallel = bool(named) or (names.has("mask_hidden") and has_mask)
    if parallel and not named:
        ledger.warn(
            "the config names no parallel_drafting, but mask_hidden and a mask token are there: taken for P-EAGLE"
        )
    if parallel:
        ledger.set("parallel_drafting", True, "a P-EAGLE draft, told by its class name, format or mask_hidden")
    return parallel


def un_nest_speculators(ledger: Ledger) -> None:
    """speculators format -> plain: its sizes go to the top, its defaults are written out.

    Defaults as in vLLM 0.32 `transformers_utils/configs/speculators/algos.py` (an absent norm_before_residual is
    true for eagle3, false for peagle).
    """
    kind = ledger.config.get("speculators_model_type")
    if kind is None:
        return
    layer = ledger.config.get("transformer_layer_config")
    if not isinstance(layer, dict):
        ledger.problem("transformer_layer_config is missing", remedy="save the draft again with speculators")
        return
    proposals = as_mapping(ledger.config.get("speculators_config")).get("proposal_methods")
    first = proposals[0] if isinstance(proposals, list) and proposals else None
    tokens = as_mapping(first).get("speculative_tokens")
    top = {
        k: v for k, v in ledger.config.items() if not k.startswith("speculators_") and k != "transformer_layer_config"
    }
    top = {k: v for k, v in top.items() if v is not None}
    top.setdefault("norm_before_residual", kind == "eagle3")
    if tokens is not None:
        top.setdefault("num_depths" if kind == "peagle" else "ttt_steps", tokens)
    ledger.config = {**layer, **top}
    why = "nested speculators format -> plain config, which more vLLM releases load"
    ledger.changes.append(Fixup("transformer_layer_config", "nested", "top level", why))


def fix_architecture(ledger: Ledger, names: Names, release: VllmRelease) -> None:
    """The one class name that every vLLM from 0.14 loads, or the Qwen3 form for drafts with q_norm and k_norm."""
    qk_norm = names.any_like(r"\.self_attn\.[qk]_norm\.weight$")
    if qk_norm and not release.qwen3_draft:
        found_text = f"this draft has q_norm and k_norm, which vLLM {release.version} cannot load"
        ledger.problem(found_text, remedy="use vLLM >= 0.24", where="serve.vllm.version", needs_newer_vllm=True)
    why = "the class name that vLLM registers; a plain config with another one is refused or served without speculation"
    ledger.set("architectures", [QWEN3 if qk_norm else LLAMA], why)
    ledger.set(
        "model_type", "qwen3" if qk_norm else "llama", "the draft's own form, told by its tensors, not the target's"
    )
    check_heads(ledger)


def fix_features(ledger: Ledger, names: Names, release: VllmRelease) -> None:
    """Flags follow the tensors."""
    add_biases(ledger, names)
    qkv = names.any_like(r"self_attn\.(q|k|v|qkv)_proj\.bias$")
    _follow(ledger, "attention_bias", qkv or names.any_like(r"self_attn\.o_proj\.bias$"))
    _follow(ledger, "mlp_bias", names.any_like(r"mlp\..*_proj\.bias$"))
    _follow(ledger, "fc_norm", names.any_like(r"^fc_norm\."))
    _follow(ledger, "norm_before_fc", names.has("input_norm.weight"))
    for key in ("bias", "qkv_bias"):
        ledger.drop(key, "another name for attention_bias, cloned from the target: llama.py would build a bias from it")
    nested = as_mapping(ledger.config.get("eagle_config"))
    if "norm_before_fc" in nested and bool(nested["norm_before_fc"]) != names.has("input_norm.weight"):
        ledger.problem("eagle_config.norm_before_fc speaks against the tensors", remedy="mend or remove that key")
    if nested.get("norm_before_residual") is True and not ledger.config.get("norm_before_residual"):
        ledger.set("norm_before_residual", True, "eagle_config names it, where no vLLM reads it")
    if ledger.config.get("hidden_act", "silu") != "silu":
        ledger.problem(f"hidden_act is {ledger.config['hidden_act']!r}", remedy="vLLM's draft layers know silu only")
    check_features(ledger, release)


def check_features(ledger: Ledger, release: VllmRelease) -> None:
    """What the chosen release would silently ignore is refused."""
    since = {"attention_bias": "0.16", "norm_before_fc": "0.18", "fc_norm": "0.22", "norm_output": "0.22"}
    for key, first in since.items():
        if ledger.config.get(key) and not getattr(release, key):
            found = f"{key} is set, which vLLM {release.version} ignores"
            ledger.problem(found, remedy=f"use vLLM >= {first}", where="serve.vllm.version", needs_newer_vllm=True)


def _follow(ledger: Ledger, key: str, present: bool) -> None:
    if key in ledger.config and ledger.config[key] is not present or present:
        ledger.set(key, present, "the flag follows the tensors that are there")


def fix_mask_token(ledger: Ledger, parallel: bool) -> None:
    """One id under each of the names that releases read."""
    if not parallel:
        return
    found = {key: ledger.config[key] for key in _MASK_KEYS if ledger.config.get(key) is not None}
    nested = as_mapping(ledger.config.get("dflash_config")).get("mask_token_id")
    if nested is not None:
        found["dflash_config.mask_token_id"] = nested
    if not found:
        ledger.problem(
            "a P-EAGLE draft without mask_token_id", remedy="write the id it was trained with as mask_token_id"
        )
        return
    value = next(iter(found.values()))
    if any(other != value for other in found.values()):
        listed = ", ".join(f"{key}={value}" for key, value in found.items())
        ledger.problem(f"mask token ids disagree: {listed}", remedy="keep the one it was trained with")
        return
    size = ledger.config.get("vocab_size")
    if type(value) is not int or value < 0 or (type(size) is int and value >= size):
        ledger.problem(
            f"mask_token_id is {value!r}, the vocabulary has {size} ids", remedy="set the id it was trained with"
        )
        return
    why = "vLLM 0.16-0.27 reads pard_token or ptd_token_id, later ones mask_token_id first"
    for key in ("mask_token_id", "pard_token", "ptd_token_id"):
        ledger.set(key, value, why)


def fix_aux_layers(ledger: Ledger, target: TargetFacts | None, release: VllmRelease) -> None:
    """`eagle_aux_hidden_state_layer_ids` in vLLM's convention: id k is the residual stream that enters layer k."""
    layers = target.num_hidden_layers if target else None
    ids = _named_aux(ledger, layers)
    if ids is None:
        ids = _guess_aux(ledger, layers)
    if ids is None:
        return
    ids = _whole(ids)
    if not all(type(i) is int for i in ids) or list(ids) != sorted(set(ids)) or not ids:
        found = f"eagle_aux_hidden_state_layer_ids is {list(ids)}, not distinct and ascending (vLLM sorts them)"
        ledger.problem(found, remedy="list them ascending, in the order of fc's columns")
        return
    if not _aux_in_range(ledger, ids, layers, release):
        return
    if len(ids) != 3 and not release.aux_count_free:
        found = f"{len(ids)} aux layers, vLLM {release.version} takes 3"
        ledger.problem(found, remedy="use vLLM >= 0.22", where="serve.vllm.version", needs_newer_vllm=True)
    nested = as_mapping(ledger.config.get("eagle_config")).get("eagle_aux_hidden_state_layer_ids")
    if len(ids) != 3 or nested or ledger.config.get("num_aux_hidden_states") is not None:
        ledger.set("num_aux_hidden_states", len(ids), "llama_eagle3.py assumes 3 when it is absent")
    ledger.drop("num_aux_layers", "qwen3_eagle3.py would take it before the number of ids")
    ledger.set(
        "eagle_aux_hidden_state_layer_ids", list(ids), "vLLM reads the ids at the top level, else it guesses them"
    )


def _whole(ids: list[Any]) -> list[Any]:
    """4.0 and "4" as 4, where all can be read so; vLLM compares them with whole numbers as they are."""
    try:
        whole = [int(i) for i in ids]
    except (TypeError, ValueError, OverflowError):
        return ids
    fits = all(type(i) in (int, float, str) and (type(i) is str or i == n) for i, n in zip(ids, whole, strict=True))
    return whole if fits else ids


def _aux_in_range(ledger: Ledger, ids: list[int], layers: int | None, release: VllmRelease) -> bool:
    """0..n are layer inputs, n being what the last layer hands to the final norm; not every release takes the ends."""
    if ids[0] < 0 or (layers is not None and ids[-1] > layers):
        found = f"eagle_aux_hidden_state_layer_ids is {list(ids)}, the target's layer inputs are 0..{layers or 'n'}"
        ledger.problem(found, remedy="serve the draft with the target it was trained for (serve.target)")
        return False
    last = None if layers is None else layers + release.aux_id_last_offset
    if ids[0] < release.aux_id_min or (last is not None and ids[-1] > last):
        takes = f"{release.aux_id_min}..{'n-1' if last is None else last}"
        found = f"eagle_aux_hidden_state_layer_ids is {list(ids)}, vLLM {release.version} takes {takes}"
        ledger.problem(found, remedy="use vLLM >= 0.18", where="serve.vllm.version", needs_newer_vllm=True)
        return False
    if layers is not None and ids[-1] == layers:
        ledger.warn(
            f"aux layer {layers} is the residual stream before the final norm in vLLM; a draft that was trained on "
            f"Hugging Face's hidden_states[{layers}], which is behind it, is served wrongly"
        )
    return True


def _named_aux(ledger: Ledger, layers: int | None) -> list[int] | None:
    """Ids the draft names itself. `eagle_config` may hold output numbering (output of layer k = input of layer k+1)."""
    top = ledger.config.get("eagle_aux_hidden_state_layer_ids")
    if isinstance(top, (list, tuple)) and top:
        return list(top)
    nested = as_mapping(ledger.config.get("eagle_config")).get("eagle_aux_hidden_state_layer_ids")
    if not isinstance(nested, (list, tuple)) or not nested:
        return _dflash_aux(ledger)
    nested = _whole(list(nested))
    if layers is not None and list(nested) == [1, layers // 2 - 1, layers - 4]:
        shifted = [i + 1 for i in nested]
        ledger.warn(f"eagle_config counts layer outputs ({list(nested)}): as inputs, vLLM's way, they are {shifted}")
        return shifted
    ledger.warn(
        f"eagle_config names aux layers {list(nested)}: taken as layer inputs, as vLLM >= 0.22 does",
        remedy="if its trainer counts layer outputs, as SpecForge and SGLang do, write them 1 higher as "
        "eagle_aux_hidden_state_layer_ids into config.json",
    )
    return list(nested)


def _dflash_aux(ledger: Ledger) -> list[int] | None:
    ids = as_mapping(ledger.config.get("dflash_config")).get("target_layer_ids")
    if not isinstance(ids, (list, tuple)) or not ids:
        return None
    ids = _whole(list(ids))
    if not all(type(i) is int for i in ids):
        return ids  # named, in no form that can be read: a problem, never a guess
    ledger.warn(f"dflash_config counts layer outputs ({list(ids)}): as inputs, vLLM's way, each is 1 higher")
    return [i + 1 for i in ids]


def _guess_aux(ledger: Ledger, layers: int | None) -> list[int] | None:
    if layers is None:
        ledger.warn(
            "the draft names no aux layers and the target is not known: vLLM will guess (2, n//2, n-3)",
            remedy="name the target, or write eagle_aux_hidden_state_layer_ids into config.json",
        )
        return None
    try:
        guess = [0, 1, 2] if layers == 3 else list(default_aux_layer_ids(layers))  # vLLM's own (2, 1, 0), sorted
    except ValueError as error:
        ledger.problem(str(error), remedy="write eagle_aux_hidden_state_layer_ids into the draft's config.json")
        return None
    usual = "the usual default" if guess == sorted((2, layers // 2, layers - 3)) else "vLLM's own default would collide"
    ledger.warn(
        f"the draft names no aux layers: {guess} of {layers} is assumed ({usual}); wrong ones cost acceptance silently"
    )
    return guess


def clean(ledger: Ledger, names: Names) -> None:
    """Leftovers of the cloned target config that change what vLLM does."""
    if all(tensor.info.dtype in FLOATS for name, tensor in names.kept.items() if name not in ("d2t", "t2d")):
        for key in ("quantization_config", "compression_config"):
            ledger.drop(key, "cloned from the target; the draft's tensors are plain")
    ledger.drop("auto_map", "points to Python code that is not here")
    ledger.drop("n_predict", "cloned from a multi-token-prediction model; vLLM would take only multiples of it for K")
    for key in ("text_config", "vision_config", "audio_config"):
        ledger.drop(key, "cloned from a multimodal target; vLLM would read the draft's sizes there")
    for key in _LENGTHS:
        ledger.drop(key, "another name for a length: vLLM takes the smallest, and drafts nothing beyond it")
    if ledger.config.get("is_causal") is False:
        ledger.problem("is_causal is false", remedy="remove it: drafts attend causally")
    _fix_layer_types(ledger)
    if names.has("lm_head.weight") and ledger.config.get("tie_word_embeddings"):
        ledger.set("tie_word_embeddings", False, "the draft has an lm_head of its own")
    nulls = sorted(key for key, value in ledger.config.items() if value is None)
    for key in nulls:
        del ledger.config[key]
    if nulls:
        ledger.changes.append(Fixup(", ".join(nulls), "null", None, "readers take a null for a value"))


def _fix_layer_types(ledger: Ledger) -> None:
    """Sliding attention that the draft was trained with stays, one entry per draft layer; anything else goes."""
    types: Any = ledger.config.get("layer_types")
    count = ledger.config.get("num_hidden_layers") or 0
    off = ledger.config.get("use_sliding_window") is False  # Qwen's switch, which vLLM's Llama layers do not ask
    if off or not isinstance(types, list) or "sliding_attention" not in types[:count]:
        ledger.drop("layer_types", "full attention in every draft layer, as vLLM builds them without it")
        for key in ("sliding_window", "use_sliding_window"):
            if ledger.config.get(key) not in (None, False):
                ledger.drop(key, "cloned from the target; no draft layer slides")
    elif not ledger.config.get("sliding_window"):
        ledger.warn(
            "layer_types has sliding_attention, but there is no sliding_window: full attention, as vLLM serves it",
            remedy="if it was trained with a window, write it as sliding_window into config.json",
        )
        ledger.drop("layer_types", "no window is named, so nothing slides")
    elif len(types) < count:
        found = f"layer_types names {len(types)} of {count} layers, and not all of them may slide"
        ledger.problem(found, remedy="write one entry for each layer, as it was trained")
    elif len(types) != count:
        ledger.set("layer_types", types[:count], "one entry for each draft layer")
