# SPDX-License-Identifier: Apache-2.0
"""Sizes: the layer count always from the weights, and what a config with little in it leaves out from the shapes."""

from __future__ import annotations

from typing import Any, Callable

from nemo_automodel.components.speculative.serve.fixup_tensors import Names
from nemo_automodel.components.speculative.serve.ledger import Ledger
from nemo_automodel.components.speculative.serve.types import TargetFacts

_WHY = "absent: told by the shapes of the tensors"
_LLAMA_EPS = 1e-6  # LlamaConfig's and Qwen3Config's own default, which vLLM would take


_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
_SIZES += ("vocab_size", "draft_vocab_size", "max_position_embeddings")
_MLP = ("gate", "up", "down")
_MAPPINGS = ("rope_parameters", "rope_scaling", "eagle_config", "dflash_config")
_FLAGS = ("tie_word_embeddings", "norm_output", "norm_before_residual", "fc_norm", "norm_before_fc", "mlp_bias")
_FLAGS += ("attention_bias", "bias", "is_causal", "use_sliding_window")


# Of no use for drafting; with another type transformers' config classes refuse the whole file.
_IDLE: dict[str, Callable[[Any], bool]] = {
    "use_cache": lambda value: type(value) is bool,
    "initializer_range": lambda value: type(value) is float and 0 <= value <= 1,
    "attention_dropout": lambda value: type(value) in (int, float),
    "pretraining_tp": lambda value: type(value) is int,
    "bos_token_id": lambda value: type(value) is int,
    "pad_token_id": lambda value: type(value) is int,
    "eos_token_id": lambda value: all(type(i) is int for i in (value if isinstance(value, list) else [value])),
    "dtype": lambda value: value in _DTYPES,
    "torch_dtype": lambda value: value in _DTYPES,
    "id2label": lambda value: isinstance(value, dict) and all(key.isdigit() for key in value),
    "label2id": lambda value: isinstance(value, dict),
    "num_labels": lambda value: type(value) is int and value > 0,
    "per_layer_config": lambda value: False,
    "pruned_heads": lambda value: value == {},
}
_DTYPES = ("float16", "bfloat16", "float32", "float64", "half", "float")


def drop_idle(ledger: Ledger) -> None:
    """Keys that nothing here needs, where their value would keep the config from being read."""
    for key, fits in _IDLE.items():
        if ledger.config.get(key) is not None and not fits(ledger.config[key]):
            ledger.drop(key, "of no use for drafting, and readers differ in what they take there")


def check_types(ledger: Ledger) -> None:
    """Values of a kind that no reader can use are problems, and taken out so that the rest can be judged."""
    wanted: dict[str, tuple[str, tuple[type, ...]]] = dict.fromkeys(_MAPPINGS, ("an object", (dict,)))
    wanted |= dict.fromkeys(_FLAGS, ("true or false", (bool,)))
    wanted |= dict.fromkeys(("layer_types", "eagle_aux_hidden_state_layer_ids"), ("a list", (list,)))
    wanted["hidden_act"] = ("a string", (str,))
    wanted |= {"target_hidden_size": ("a positive whole number", (int,))}
    wanted |= dict.fromkeys(("logit_scale", "partial_rotary_factor"), ("a number", (int, float)))
    for key, (name, kinds) in wanted.items():
        value = ledger.config.get(key)
        fits = type(value) in kinds and (type(value) is not int or value > 0)
        if value is not None and not fits:
            ledger.problem(f"{key} is {value!r}", remedy=f"write {name}, or remove it")
            del ledger.config[key]


def fix_sizes(ledger: Ledger, names: Names, target: TargetFacts | None) -> None:
    """Write the layer count and every size that is absent; one that contradicts its tensors is judged later."""
    for key in _SIZES:
        if type(ledger.config.get(key)) is int and ledger.config[key] <= 0:
            ledger.drop(key, "no size: the shapes of the tensors tell it")
    count = names.layer_count()
    if count == 0:
        ledger.problem("the weights hold no decoder layer", where="tensors", remedy="name an EAGLE-3 or P-EAGLE draft")
    else:
        ledger.set("num_hidden_layers", count, "the weights hold that many; vLLM leaves surplus layers uninitialised")
    _fill(ledger, "hidden_size", _side(names, "norm.weight", 0))
    _fix_inner(ledger, names, count)
    _fill(ledger, "vocab_size", _side(names, "embed_tokens.weight", 0) or (target.vocab_size if target else None))
    _fix_heads(ledger, names)
    _fix_draft_vocab(ledger, names)
    _fix_target_hidden(ledger, names, target)
    eps = ledger.config.get("rms_norm_eps")
    if eps is None:
        ledger.warn(f"the draft names no rms_norm_eps: {_LLAMA_EPS} is assumed, vLLM's default")
        ledger.set("rms_norm_eps", _LLAMA_EPS, "absent: vLLM's own default, written out")
    elif type(eps) not in (int, float) or not 0 < eps < 1:
        ledger.problem(f"rms_norm_eps is {eps!r}", remedy="set it to the draft's own")


def _fix_inner(ledger: Ledger, names: Names, layers: int) -> None:
    """gate, up and down of all layers tell it without doubt; vLLM would cut them to a smaller one without a word."""
    sides = {_side(names, f"layers.{i}.mlp.{x}_proj.weight", x == "down") for i in range(layers) for x in _MLP}
    told = sides.pop() if len(sides) == 1 else None
    _fill(ledger, "intermediate_size", told or _side(names, "layers.0.mlp.gate_proj.weight", 0))
    if told and (ledger.number("intermediate_size") or told) != told:
        ledger.set("intermediate_size", told, "gate, up and down of every layer have that many")


def _fix_draft_vocab(ledger: Ledger, names: Names) -> None:
    """lm_head and d2t that agree tell it without doubt."""
    said, head = ledger.config.get("draft_vocab_size"), _side(names, "lm_head.weight", 0)
    if type(said) is int and said > 0 and head and said != head and names.shape("d2t") == (head,):
        ledger.set("draft_vocab_size", head, "lm_head and d2t have that many rows")


def _fix_heads(ledger: Ledger, names: Names) -> None:
    rows, keys = (_side(names, f"layers.0.self_attn.{name}_proj.weight", 0) for name in "qk")
    head = ledger.config.get("head_dim")
    if type(head) is int and head > 0 and rows and rows % head == 0:
        _fill(ledger, "num_attention_heads", rows // head)
    hidden, heads = ledger.number("hidden_size"), ledger.number("num_attention_heads")
    if heads and head is None:
        told = rows // heads if rows and rows % heads == 0 else None
        ledger.set("head_dim", told or (hidden or 0) // heads, _WHY)
    head = ledger.config.get("head_dim")
    if heads and ledger.config.get("num_key_value_heads") is None:
        told = keys // head if type(head) is int and head > 0 and keys and keys % head == 0 else None
        ledger.set("num_key_value_heads", told or heads, _WHY)
    keys_heads = ledger.config.get("num_key_value_heads")
    if heads and type(keys_heads) is int and keys_heads > 0 and heads % keys_heads:
        found = f"{keys_heads} key-value heads do not divide {heads} attention heads"
        ledger.problem(found, remedy="set num_key_value_heads to the draft's own")


def check_heads(ledger: Ledger) -> None:
    """transformers' LlamaConfig refuses a hidden_size that is no multiple of the heads, even with a head_dim (run)."""
    hidden, heads = ledger.config.get("hidden_size"), ledger.config.get("num_attention_heads")
    head = ledger.config.get("head_dim")
    if type(head) is int and head % 2:
        ledger.problem(f"head_dim is {head}: rope turns pairs", remedy="vLLM cannot serve an odd head_dim")
    plain = type(hidden) is int and type(heads) is int and hidden > 0 and heads > 0
    if plain and hidden % heads and ledger.config.get("model_type") == "llama":
        found = f"hidden_size {hidden} is no multiple of num_attention_heads {heads}, which transformers refuses"
        ledger.problem(found, remedy="vLLM cannot read such a Llama config")


def _fix_target_hidden(ledger: Ledger, names: Names, target: TargetFacts | None) -> None:
    """A draft narrower or wider than its target: fc's columns are the target's hidden states, one per aux layer."""
    columns, hidden = _side(names, "fc.weight", 1), ledger.config.get("hidden_size")
    if not columns or type(hidden) is not int or hidden < 1:
        return
    ids, said = ledger.config.get("eagle_aux_hidden_state_layer_ids"), ledger.config.get("target_hidden_size")
    named = isinstance(ids, (list, tuple)) and len(ids) > 0
    aux = len(ids) if named else 3
    if named and target and (said or hidden) == target.hidden_size and columns % target.hidden_size == 0:
        told = columns // target.hidden_size
        if told != aux:
            found = f"{aux} aux layers are named, fc.weight takes {told} hidden states of {target.hidden_size}"
            ledger.problem(found, remedy="list those it was trained with as eagle_aux_hidden_state_layer_ids")
            return
    if said is not None or columns == aux * hidden or columns % aux:
        return
    if named or columns % hidden or (target and columns == aux * target.hidden_size):  # else: more aux layers than 3
        ledger.set("target_hidden_size", columns // aux, _WHY)


def _fill(ledger: Ledger, key: str, told: int | None) -> None:
    if ledger.config.get(key) is None and told:
        ledger.set(key, told, _WHY)


def _side(names: Names, name: str, axis: int) -> int | None:
    shape = names.shape(name)
    return shape[axis] if shape is not None and len(shape) > axis else None
