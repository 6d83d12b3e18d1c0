# SPDX-License-Identifier: Apache-2.0
"""Every case that vLLM was tried or read with (shared/vllm/report.md), and the verdict and reason it must get.

Those marked "run" were served, or refused, by vLLM 0.32 itself with drafts made from real checkpoints.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from drafts import HEAD, HEADS, KV, H, V, draft_config, draft_tensors

GONE: Any = ...
LAYER = "layers.0.self_attn."


def bare(**changes: Any) -> dict[str, Any]:
    """vLLM's own names; a value of `GONE` takes the tensor out."""
    tensors = draft_tensors(prefix="") | changes
    return {name: value for name, value in tensors.items() if value is not GONE}


def named(**changes: Any) -> dict[str, Any]:
    return {name.replace("__", "."): value for name, value in changes.items()}


def ones(*shape: int, dtype: str = "float32") -> Any:
    return np.ones(shape, dtype)


def served(**changes: Any) -> dict[str, Any]:
    """A config that vLLM loads as it is."""
    return draft_config(**({"architectures": ["LlamaForCausalLMEagle3"], "pard_token": 3} | changes))


def eagle3(**changes: Any) -> dict[str, Any]:
    return served(**({"parallel_drafting": False, "mask_token_id": GONE, "pard_token": GONE, "ttt_steps": 4} | changes))


SEQUENTIAL = bare(mask_hidden=GONE)
REDUCED = draft_tensors(draft_vocab=32, prefix="")
NO_EMBED = named(embed_tokens__weight=GONE)


def sized(size: int, draft: int | None = None, **changes: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """A draft with embeddings for `size` ids and a head for `draft` of them (None: for all)."""
    rows = size if draft is None else draft
    tensors = bare(**named(embed_tokens__weight=ones(size, H), lm_head__weight=ones(rows, H)))
    if draft is not None:
        tensors |= {"d2t": np.arange(draft), "t2d": np.isin(np.arange(size), np.arange(draft) * 2)}
    return served(**({"vocab_size": size, "draft_vocab_size": rows} | changes)), tensors


def without(name: str, tensors: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in tensors.items() if key != name}


def fused(tensors: dict[str, Any]) -> dict[str, Any]:
    """q, k, v and gate, up as the packed parameters that vLLM makes of them."""
    out = dict(tensors)
    for name, parts in (("self_attn.qkv_proj", "qkv"), ("mlp.gate_up_proj", ("gate", "up"))):
        stem = f"layers.0.{name.split('.')[0]}"
        out[f"layers.0.{name}.weight"] = np.concatenate([out.pop(f"{stem}.{part}_proj.weight") for part in parts])
    return out


BIASES = {LAYER + f"{x}_proj.bias": ones(size) for x, size in (("q", HEADS * HEAD), ("k", KV * HEAD), ("v", KV * HEAD))}
WIDE_HEADS = {
    LAYER + f"{x}_proj.weight": ones(*size)
    for x, size in (("q", (32, 32)), ("k", (16, 32)), ("v", (16, 32)), ("o", (16, 32)))
}
MROPE = {"rope_type": "default", "mrope_section": [1, 1]}
TWICE = {"norm.weight": draft_tensors()["model.norm.weight"]}
MIXED = {"architectures": ["Qwen3ForCausalLM"], "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}
IMAGES = {"vision_config": {}}
PHI, OLMO3, GEMMA2 = ({"architectures": [f"{x}ForCausalLM"]} for x in ("Phi", "Olmo3", "Gemma2"))
SPECULATORS = {
    "speculators_model_type": "peagle",
    "speculators_config": {"proposal_methods": [{"speculative_tokens": 4}], "verifier": {"name_or_path": "x"}},
    "transformer_layer_config": {
        k: v for k, v in draft_config().items() if k.endswith(("_size", "heads", "dim", "eps"))
    }
    | {"rope_theta": 1e4, "max_position_embeddings": 256},
    "architectures": ["PEagleDraftModel"],
    "mask_token_id": 3,
    "draft_vocab_size": V,
    "eagle_aux_hidden_state_layer_ids": [2, 3, 5],
}
TINY = {"architectures": ["Qwen3ForCausalLM"], "num_attention_heads": 2, "eagle_aux_hidden_state_layer_ids": [2, 3, 5]}

# (name, config, tensors, options, exit code, the severity and part of a finding)
CASES: list[tuple[str, Any, Any, dict[str, Any], int, str, str]] = [
    # report section 3, the experiments on 0.32.0
    ("base", served(), bare(), {}, 0, "", ""),
    ("a: model. prefix", served(), draft_tensors(), {}, 0, "note", "tensor names: model.embed_tokens.weight"),
    ("b: LlamaEagle3DraftModel", draft_config(), bare(), {}, 0, "note", "architectures: ['LlamaEagle3DraftModel']"),
    ("b2: PEagleDraftModel", served(architectures=["PEagleDraftModel"]), bare(), {}, 0, "note", "PEagleDraftModel"),
    ("b3: LlamaForCausalLM", served(architectures=["LlamaForCausalLM"]), bare(), {}, 0, "note", "LlamaForCausalLM"),
    (
        "c: only mask_token_id",
        served(pard_token=GONE),
        bare(),
        {"vllm": "0.22"},
        0,
        "note",
        "pard_token: (absent) -> 3",
    ),
    ("c2: no mask keys", draft_config(mask_token_id=GONE), bare(), {}, 1, "error", "without mask_token_id"),
    ("d: no ids", served(eagle_aux_hidden_state_layer_ids=GONE), bare(), {}, 0, "warning", "vLLM's own default would"),
    ("d2: equal ids", served(eagle_aux_hidden_state_layer_ids=[2, 3, 3]), bare(), {}, 1, "error", "not distinct"),
    ("d3: ids 0 and n", served(eagle_aux_hidden_state_layer_ids=[0, 3, 6]), bare(), {}, 0, "warning", "aux layer 6"),
    ("e: no mask_hidden", served(), SEQUENTIAL, {}, 1, "error", "there is no mask_hidden"),
    ("e2: mask_hidden of H", served(), bare(mask_hidden=ones(H)), {}, 1, "error", "mask_hidden has 16 elements"),
    ("f: reduced", served(draft_vocab_size=32), REDUCED, {}, 0, "", ""),
    ("f2: no d2t", served(draft_vocab_size=32), REDUCED | {"d2t": None}, {}, 1, "error", "there is no d2t"),
    ("f3: full and d2t", served(), bare(d2t=np.zeros(V, "int64")), {}, 0, "note", "tensor d2t: d2t -> (absent)"),
    ("f4: no head", served(draft_vocab_size=32), REDUCED | {"lm_head.weight": None}, {}, 1, "error", "lm_head.weight"),
    ("g: K=8 of 4", served(), bare(), {"num_speculative_tokens": 8}, 0, "warning", "above the trained depth 4"),
    ("h: no flag", served(parallel_drafting=GONE), bare(), {}, 0, "warning", "taken for P-EAGLE"),
    ("i: speculators", SPECULATORS, bare(), {}, 0, "note", "transformer_layer_config: nested -> top level"),
    ("j: no embeddings", served(), bare(**NO_EMBED), {}, 0, "", ""),
    ("full, no head", served(), bare(**named(lm_head__weight=GONE)), {}, 0, "warning", "the target's head is used"),
    ("method of another kind", served(), bare(), {"method": "draft_model"}, 1, "error", "method is draft_model"),
    (
        "k7: no o_proj.bias",
        served(attention_bias=True),
        bare() | BIASES,
        {},
        0,
        "note",
        "o_proj.bias: (absent) -> zeros (1 in all)",
    ),
    ("k7b: flag, no biases", served(attention_bias=True), bare(), {}, 0, "note", "attention_bias: True -> False"),
    # 2.1 class names
    ("no class name", served(architectures=GONE), bare(), {}, 0, "note", "architectures: (absent)"),
    ("no model_type", served(model_type=GONE), bare(), {}, 0, "note", "model_type: (absent) -> llama"),
    ("VL class", eagle3(architectures=["Eagle3Qwen3vlForCausalLM"]), SEQUENTIAL, {}, 0, "", ""),
    ("target's class", eagle3(architectures=["Qwen3ForCausalLM"]), SEQUENTIAL, {}, 0, "warning", "taken for one"),
    ("DeepSeek", served(architectures=["Eagle3DeepseekV2ForCausalLM"]), bare(), {}, 1, "error", "latent attention"),
    ("MLA tensors", served(), bare() | {LAYER + "kv_b_proj.weight": ones(4, 4)}, {}, 1, "error", "latent attention"),
    ("DFlash", served(architectures=["DFlashDraftModel"]), bare(), {}, 1, "error", "this is a DFlash draft"),
    ("EAGLE-1", served(architectures=["EagleLlamaForCausalLM"]), bare(), {}, 1, "error", "EAGLE-1 or EAGLE-2"),
    ("q/k norms", served(), bare() | {LAYER + f"{x}_norm.weight": ones(HEAD) for x in "qk"}, {}, 0, "note", "Qwen3For"),
    (
        "q/k norms, old",
        served(),
        bare() | {LAYER + f"{x}_norm.weight": ones(HEAD) for x in "qk"},
        {"vllm": "0.23"},
        2,
        "error",
        "q_norm and k_norm",
    ),
    # 2.2 speculative config, target
    ("P-EAGLE on 0.15", served(), bare(), {"vllm": "0.15"}, 2, "error", "cannot serve P-EAGLE"),
    ("EAGLE-3 on 0.14", eagle3(), SEQUENTIAL, {"vllm": "0.14"}, 0, "", ""),
    ("draft TP", served(), bare(), {"tp": 2, "draft_tp": 4}, 1, "error", "vLLM takes 1 or 2"),
    ("TP and heads", served(), bare(), {"tp": 4}, 1, "error", "4 does not divide the draft's num_attention_heads 2"),
    ("family, 0.21", served(), bare(), {"vllm": "0.21", "target": {"model_type": "smollm3"}}, 2, "error", "smollm3"),
    ("family, 0.22", served(), bare(), {"vllm": "0.22", "target": {"model_type": "smollm3"}}, 0, "", ""),
    ("images, 0.20", served(), bare(), {"vllm": "0.20", "target": IMAGES}, 2, "error", "multimodal target"),
    ("images, 0.21", served(), bare(), {"vllm": "0.21", "target": IMAGES}, 0, "", ""),
    ("Phi, 0.31", served(), bare(), {"vllm": "0.31", "target": PHI}, 2, "error", "use vLLM >= 0.32"),
    ("Phi, 0.32", served(), bare(), {"target": PHI}, 0, "", ""),
    ("OLMo 3, 0.29", served(), bare(), {"vllm": "0.29", "target": OLMO3}, 0, "warning", "whether it does in 0.29"),
    ("Gemma 2, 0.33", served(), bare(), {"vllm": "0.33", "target": GEMMA2}, 0, "warning", "whether it does in 0.33"),
    (
        "no SupportsEagle3",
        served(),
        bare(),
        {"target": {"architectures": ["Gemma2ForCausalLM"]}},
        1,
        "error",
        "SupportsEagle3",
    ),
    ("short", served(max_position_embeddings=64), bare(), {"vllm": "0.26"}, 0, "note", "max_position_embeddings: 64"),
    ("no length", served(max_position_embeddings=GONE), bare(), {}, 0, "warning", "names no max_position_embeddings"),
    # 2.3 mask token
    ("mask ids disagree", served(pard_token=5), bare(), {}, 1, "error", "mask token ids disagree"),
    ("mask id too high", draft_config(mask_token_id=V), bare(), {}, 1, "error", "the vocabulary has 64"),
    # 2.4 weights
    ("unknown tensor", served(), bare(foo=ones(2)), {}, 1, "error", "does not know: foo"),
    ("names meet", served(), bare() | {"model.norm.weight": ones(H) * 2}, {}, 1, "error", "both become norm.weight"),
    ("saved twice", served(), draft_tensors() | TWICE, {}, 0, "note", "byte for byte model.norm.weight"),
    (
        "hidden_norm missing",
        served(),
        bare(**named(layers__0__hidden_norm__weight=GONE)),
        {},
        1,
        "error",
        "hidden_norm",
    ),
    (
        "midlayer",
        served(),
        {k.replace("layers.0.", "midlayer."): v for k, v in bare().items()},
        {},
        0,
        "note",
        "midlayer",
    ),
    ("36 layers said", served(num_hidden_layers=36), bare(), {}, 0, "note", "num_hidden_layers: 36 -> 1"),
    ("two layers", served(), draft_tensors(layers=2, prefix=""), {"vllm": "0.16"}, 0, "note", "num_hidden_layers: 1"),
    ("wrong hidden", served(), bare(), {"target": {"hidden_size": 32}}, 1, "error", "the target's hidden_size is 32"),
    ("wrong vocabulary", served(), bare(), {"target": {"vocab_size": 99}}, 1, "error", "the target's 99"),
    (
        "fc_norm, old",
        served(),
        bare() | {f"fc_norm.{i}.weight": ones(H) for i in range(3)},
        {"vllm": "0.21"},
        2,
        "error",
        "fc_norm is set",
    ),
    (
        "input_norm, old",
        served(),
        bare() | {"input_norm.weight": ones(3 * H)},
        {"vllm": "0.17"},
        2,
        "error",
        "norm_before",
    ),
    ("float d2t", served(draft_vocab_size=32), REDUCED | {"d2t": np.arange(32, dtype="float32")}, {}, 0, "", ""),
    ("odd t2d", served(draft_vocab_size=32), REDUCED | {"t2d": ones(9, dtype="bool")}, {}, 0, "warning", "left out"),
    (
        "t2d of more",
        served(draft_vocab_size=32),
        REDUCED | {"t2d": ones(V, dtype="bool")},
        {},
        0,
        "warning",
        "marks 64",
    ),
    ("d2t of ids", served(draft_vocab_size=32), REDUCED | {"d2t": np.arange(32) * 2}, {}, 1, "error", "not offsets"),
    ("int8", served(), bare() | {LAYER + "q_proj.weight": ones(16, 32, dtype="int8")}, {}, 1, "error", "plain floats"),
    # 2.5 aux layers
    (
        "id 0, 0.17",
        served(eagle_aux_hidden_state_layer_ids=[0, 3, 5]),
        bare(),
        {"vllm": "0.17"},
        2,
        "error",
        "takes 1..",
    ),
    ("id above n", served(eagle_aux_hidden_state_layer_ids=[2, 3, 9]), bare(), {}, 1, "error", "layer inputs are 0..6"),
    ("ids not sorted", served(eagle_aux_hidden_state_layer_ids=[5, 3, 2]), bare(), {}, 1, "error", "ascending"),
    (
        "four ids",
        served(eagle_aux_hidden_state_layer_ids=[1, 2, 3, 4]),
        bare(**named(fc__weight=ones(H, 4 * H), mask_hidden=ones(4 * H))),
        {},
        0,
        "note",
        "num_aux_hidden_states",
    ),
    (
        "four ids, old",
        served(eagle_aux_hidden_state_layer_ids=[1, 2, 3, 4]),
        bare(**named(fc__weight=ones(H, 4 * H), mask_hidden=ones(4 * H))),
        {"vllm": "0.21"},
        2,
        "error",
        "4 aux layers",
    ),
    # 2.9 constraints
    ("K=9, 0.27", served(num_depths=9), bare(), {"vllm": "0.27"}, 1, "error", "(K-1) x max_num_seqs"),
    ("K=9, 0.28", served(num_depths=9), bare(), {"vllm": "0.28"}, 0, "", ""),
    ("padded batch off", served(), bare(), {"extra": {"disable_padded_drafter_batch": True}}, 1, "error", "padded"),
    ("mrope", served(rope_scaling=MROPE), bare(), {}, 0, "note", "the same as plain rope"),
    ("mrope, older name", served(rope_scaling=MROPE | {"rope_type": "mrope"}), bare(), {}, 0, "note", "as plain rope"),
    ("mrope, images, EAGLE-3", eagle3(rope_scaling=MROPE), SEQUENTIAL, {"target": IMAGES}, 0, "warning", "multimodal"),
    ("mrope, images", served(rope_scaling=MROPE), bare(), {"target": IMAGES}, 1, "error", "mrope_section"),
    # configs with little in them, and sizes told by the tensors
    ("tiny config", TINY, SEQUENTIAL, {}, 0, "note", "intermediate_size: (absent) -> 24"),
    ("head_dim from q_proj", served(head_dim=GONE), bare() | WIDE_HEADS, {}, 0, "note", "head_dim: (absent) -> 16"),
    ("heads and hidden", served(num_attention_heads=3, head_dim=GONE), bare(), {}, 1, "error", "no multiple"),
    (
        "yarn reaches",
        served(max_position_embeddings=64, rope_scaling={"rope_type": "yarn", "factor": 4.0}),
        bare(),
        {},
        0,
        "",
        "",
    ),
    (
        "yarn too short",
        served(max_position_embeddings=64, rope_scaling={"rope_type": "yarn", "factor": 2.0}),
        bare(),
        {},
        1,
        "error",
        "which reaches 128",
    ),
    ("ntk rope", served(rope_scaling={"type": "ntk", "factor": 2.0}), bare(), {}, 0, "warning", "vLLM 0.32 knows"),
    ("no rope_theta", served(rope_theta=GONE), bare(), {}, 0, "warning", "names no rope_theta"),
    # a vocabulary padded to another size (run: each of them serves, or fails as said; vLLM itself compares nothing)
    ("60 of 64", *sized(60), {}, 0, "warning", "has embeddings for 60 of the target's 64"),
    ("60 of 64, map", *sized(60), {}, 0, "note", "tensor d2t: (absent) -> zeros (60)"),
    ("60 of 64, reduced", *sized(60, 20), {"tokenizer": 60}, 0, "warning", "has embeddings for 60"),
    ("60 of 64, used", *sized(60), {"tokenizer": 62}, 1, "error", "the target's tokenizer uses 62"),
    ("60, shared", sized(60, 20)[0], without("embed_tokens.weight", sized(60, 20)[1]), {}, 0, "note", "size: 60 -> 64"),
    (
        "60, no head",
        sized(60)[0],
        without("lm_head.weight", sized(60)[1]),
        {},
        0,
        "warning",
        "the target's head is used",
    ),
    ("60, cloned config", sized(60)[0] | {"vocab_size": V}, sized(60)[1], {}, 0, "note", "vocab_size: 64 -> 60"),
    ("65 of 64", *sized(65), {}, 0, "note", "tensor lm_head.weight: 65 rows -> 64 rows"),
    ("65 of 64, reduced", *sized(65, 20), {}, 0, "note", "tensor embed_tokens.weight: 65 rows -> 64 rows"),
    ("65, mask token 64", *sized(65, mask_token_id=64, pard_token=64), {}, 0, "warning", "its mask token 64"),
    ("48 of 64", *sized(48), {}, 1, "error", "the draft's vocab_size is 48, the target's 64"),
    ("48 of 64, tokenizer", *sized(48), {"tokenizer": 40}, 0, "warning", "has embeddings for 48"),
    # tensors that vLLM takes, skips or drops (run)
    ("another length", served(max_seq_len=16), bare(), {}, 0, "note", "max_seq_len: 16 -> (absent)"),
    ("n_predict", served(n_predict=3), bare(), {}, 0, "note", "n_predict: 3 -> (absent)"),
    ("fused", served(), fused(bare()), {}, 0, "", ""),
    ("fused, short", served(), fused(bare()) | {LAYER + "qkv_proj.weight": ones(30, 32)}, {}, 1, "error", "[128, 32]"),
    ("bias of zeros", served(), bare() | {"fc.bias": np.zeros(H, "float32")}, {}, 0, "note", "all zeros"),
    ("bias", served(), bare() | {"fc.bias": ones(H)}, {}, 1, "error", "does not know: fc.bias"),
    ("q bias", served(), bare() | {LAYER + "q_proj.bias": ones(HEADS * HEAD)}, {}, 0, "note", "zeros (3 in all)"),
    ("up bias", served(), bare() | {"layers.0.mlp.up_proj.bias": ones(24)}, {}, 0, "note", "zeros (2 in all)"),
    ("t2d of another name", served(), bare() | {"x.t2d_y": ones(2)}, {}, 0, "note", "skips every name with t2d"),
    ("inv_freq", served(), bare() | {"rotary_emb.inv_freq": ones(4)}, {}, 0, "note", "computes its own"),
    ("verifier", served(), bare() | {"verifier_norm.weight": ones(H)}, {}, 0, "note", "only the trainer needs"),
    ("half d2t", served(draft_vocab_size=32), REDUCED | {"d2t": np.arange(32, dtype="float16")}, {}, 0, "", ""),
    ("byte d2t", served(draft_vocab_size=32), REDUCED | {"d2t": np.arange(32, dtype="uint8")}, {}, 0, "", ""),
    ("ids as text", served(eagle_aux_hidden_state_layer_ids=["2", 3.0, 5]), bare(), {}, 0, "note", "-> [2, 3, 5]"),
    ("ids in one text", served(eagle_aux_hidden_state_layer_ids="2,3,5"), bare(), {}, 0, "note", "2,3,5 -> [2, 3, 5]"),
    ("ids, no list", served(eagle_aux_hidden_state_layer_ids="2;3;5"), bare(), {}, 1, "error", "write a list"),
    ("bias of embeddings", served(), bare() | {"embed_tokens.bias": ones(H)}, {}, 0, "warning", "vLLM ignores one"),
    ("mask", served(), bare() | {LAYER + "bias": ones(1, 1, 4, 4, dtype="bool")}, {}, 0, "note", "a buffer"),
    ("counter", served(), bare(global_step=np.array(7)), {}, 0, "note", "a buffer"),
    # sizes that all tensors tell alike, against the config
    ("inner size", served(intermediate_size=99), bare(), {}, 0, "note", "intermediate_size: 99 -> 24"),
    ("one long up", served(), bare() | {"layers.0.mlp.up_proj.weight": ones(48, H)}, {}, 1, "error", "its first rows"),
    ("no size", served(head_dim=0, num_key_value_heads=-1), bare(), {}, 0, "note", "head_dim: 0 -> (absent)"),
    ("draft size", served(draft_vocab_size=40), REDUCED, {}, 0, "note", "draft_vocab_size: 40 -> 32"),
    (
        "three layers",
        served(eagle_aux_hidden_state_layer_ids=GONE),
        bare(),
        {"target": {"num_hidden_layers": 3}},
        0,
        "warning",
        "[0, 1, 2] of 3 is assumed",
    ),
    # the same value written as another kind. Raw (run): transformers 5.19 refuses sizes, eps and flags of another kind;
    # vLLM 0.32 a factor that is text or 0, and two kinds of rope; the others are read as they stand
    (
        "sizes as text",
        served(hidden_size="16", head_dim=32.0, rms_norm_eps="1e-6"),
        bare(),
        {},
        0,
        "note",
        "it was '16'",
    ),
    ("flags as numbers", eagle3(tie_word_embeddings=0, fc_norm="false"), SEQUENTIAL, {}, 0, "note", "it was 'false'"),
    ("half a head", served(head_dim=32.5), bare(), {}, 1, "error", "head_dim is 32.5"),
    ("swish", served(hidden_act="swish"), bare(), {}, 0, "note", "hidden_act: swish -> silu"),
    ("0 of its own", served(draft_vocab_size=0, target_hidden_size=0), bare(), {}, 0, "note", "0: none of its own"),
    ("rope as text", served(rope_theta="10000"), bare(), {}, 0, "note", "it was '10000'"),
    ("factor as text", served(rope_scaling={"type": "linear", "factor": "2"}), bare(), {}, 0, "note", "'factor': 2.0"),
    ("rope of null", served(rope_scaling={"rope_type": None, "factor": None}), bare(), {}, 0, "note", "a null for"),
    ("factor 0", served(rope_scaling={"type": "linear", "factor": 0}), bare(), {}, 1, "error", "no usable factor"),
    (
        "two kinds of rope",
        served(rope_scaling={"type": "linear", "rope_type": "dynamic", "factor": 2.0}),
        bare(),
        {},
        1,
        "error",
        "its older name, is 'linear'",
    ),
    # names of wrappers and of families whose layer is Llama's (run)
    *((x, served(), {f"{x}.{k}": v for k, v in bare().items()}, {}, 0, "note", x) for x in ("module", "draft_model")),
    ("Mistral", eagle3(architectures=["MistralForCausalLMEagle3"]), SEQUENTIAL, {}, 0, "warning", "taken for one"),
    ("Llama 4", eagle3(architectures=["Eagle3Llama4ForCausalLM"]), SEQUENTIAL, {}, 1, "error", "of another layout"),
    # sliding layers (run: no window serves as full attention; transformers refuses a list that is too short)
    (
        "no window",
        eagle3(layer_types=["sliding_attention"]),
        SEQUENTIAL,
        {},
        0,
        "warning",
        "there is no sliding_window",
    ),
    ("target slides in part", eagle3(), SEQUENTIAL, {"target": MIXED}, 1, "error", "mixes full and sliding layers"),
    (
        "one of two slides",
        eagle3(layer_types=["sliding_attention"], sliding_window=8),
        draft_tensors(layers=2, prefix="", mask=False),
        {},
        1,
        "error",
        "layer_types names 1 of 2 layers",
    ),
    (
        "sliding, switched off",
        eagle3(layer_types=["sliding_attention"], sliding_window=8, use_sliding_window=False),
        SEQUENTIAL,
        {},
        0,
        "note",
        "sliding_window: 8 -> (absent)",
    ),
    # aux layers under other keys, as text; one more than fc takes
    (
        "outputs as text",
        eagle3(eagle_aux_hidden_state_layer_ids=GONE, dflash_config={"target_layer_ids": ["1", 2.0, 4]}),
        SEQUENTIAL,
        {},
        0,
        "warning",
        "counts layer outputs ([1, 2, 4])",
    ),
    (
        "outputs, unreadable",
        eagle3(eagle_aux_hidden_state_layer_ids=GONE, dflash_config={"target_layer_ids": [1, "b", 4]}),
        SEQUENTIAL,
        {},
        1,
        "error",
        "not distinct and ascending",
    ),
    (
        "usual outputs as text",
        eagle3(
            eagle_aux_hidden_state_layer_ids=GONE, eagle_config={"eagle_aux_hidden_state_layer_ids": ["1", "3", "4"]}
        ),
        SEQUENTIAL,
        {"target": {"num_hidden_layers": 8}},
        0,
        "note",
        "(absent) -> [2, 4, 5]",
    ),
    (
        "one aux layer more",
        served(eagle_aux_hidden_state_layer_ids=[2, 3, 4, 5]),
        bare(),
        {},
        1,
        "error",
        "4 aux layers are named, fc.weight takes 3 hidden states of 16",
    ),
    # vocab_size holds the draft's own, reduced one
    ("own size", served(vocab_size=32, draft_vocab_size=GONE), REDUCED, {}, 0, "note", "vocab_size: 32 -> 64"),
    (
        "own size, shared",
        served(vocab_size=32, draft_vocab_size=32),
        without("embed_tokens.weight", REDUCED),
        {},
        0,
        "note",
        "vocab_size: 32 -> 64",
    ),
]
