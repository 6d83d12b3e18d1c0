# SPDX-License-Identifier: Apache-2.0
"""vLLM's loader without vLLM: which names of an exported draft it would not know, miss, write twice or refuse.

Rules as read in vLLM 0.32 `model_executor/models/{llama_eagle3,qwen3_eagle3,llama,qwen3,utils}.py`: `t2d` is skipped,
`d2t` becomes `draft_id_to_target_id`, everything but those, `lm_head` and `mask_hidden` gets `model.` in front,
`midlayer.` is layer 0, and q/k/v and gate/up are parts of one parameter. It shares no code with the planning, so that
the two check each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Iterable, Mapping

from nemo_automodel.components.speculative.serve.fixup_tensors import Names
from nemo_automodel.components.speculative.serve.ledger import Ledger
from nemo_automodel.components.speculative.serve.types import TargetFacts

Shape = tuple[int, ...]
_ROTARY = ("rotary_pos_emb.inv_freq", "rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")
_PARTS = {".q_proj": ".qkv_proj", ".k_proj": ".qkv_proj", ".v_proj": ".qkv_proj"}
_PARTS |= {".gate_proj": ".gate_up_proj", ".up_proj": ".gate_up_proj"}
_D2T, _MASK = "draft_id_to_target_id", "mask_hidden"


@dataclass(frozen=True)
class Replay:
    """What the loader would meet. Names are the draft's own, those of `missing` vLLM's."""

    unknown: tuple[str, ...] = ()  # refused (or, for a bias, ignored without a word)
    missing: tuple[str, ...] = ()  # left as they were born
    colliding: tuple[tuple[str, str], ...] = ()  # both are written to one parameter
    misshapen: tuple[tuple[str, Shape, Shape], ...] = ()  # name, its shape, the parameter's

    @property
    def clean(self) -> bool:
        return not (self.unknown or self.missing or self.colliding or self.misshapen)


def replay(
    config: Mapping[str, Any],
    tensors: Iterable[tuple[str, Shape]],
    *,
    parallel: bool,
    target_vocab: int | None = None,
) -> Replay:
    """Load (name, shape) pairs into the parameters that vLLM builds for a plain `config` with every size in it."""
    wanted = parameters(config, parallel, target_vocab)
    optional = _optional(config, wanted)
    seen: dict[str, str] = {}
    unknown, colliding, misshapen = [], [], []
    for name, shape in tensors:
        place = parameter_of(name, config)
        if place is None or (place == _MASK and not parallel):
            continue
        if place not in wanted and (parts := _parts(place, wanted)):
            if any(part in seen for part in parts):
                colliding.append((next(seen[part] for part in parts if part in seen), name))
            seen |= dict.fromkeys(parts, name)
            whole = (sum(wanted[part][0] for part in parts), *wanted[parts[0]][1:])
            if tuple(shape) != whole:
                misshapen.append((name, shape, whole))
        elif place not in wanted:
            unknown.append(name)
        elif place in seen:
            colliding.append((seen[place], name))
        else:
            seen[place] = name
            if not _fits(place, shape, wanted[place]):
                misshapen.append((name, shape, wanted[place]))
    missing = [place for place in wanted if place not in seen and place not in optional]
    return Replay(tuple(unknown), tuple(missing), tuple(colliding), tuple(misshapen))


def _parts(place: str, wanted: Mapping[str, Shape]) -> list[str]:
    """The parts of a packed parameter that a file holds as one tensor, under vLLM's own name."""
    stem, _, kind = place.rpartition(".")
    return [part for part in wanted if part.startswith(f"{stem}[") and part.endswith(f"].{kind}")]


def parameter_of(name: str, config: Mapping[str, Any]) -> str | None:
    """The parameter that a tensor is written to, the part of a packed one in brackets; None: it is skipped."""
    if "t2d" in name:
        return None
    if "d2t" in name:
        return name.replace("d2t", _D2T)
    if _MASK in name:
        return _MASK
    if "lm_head" in name:
        return name
    if any(part in name for part in _ROTARY):
        return None
    nested = _nested(config)
    if "fc." in name and nested.get("use_aux_hidden_state", True) is False:
        return None
    if "input_norm." in name and not _norm_before_fc(config):
        return None
    name = "model." + name.replace("midlayer.", "layers.0.", 1)
    for part, packed in _PARTS.items():
        if part in name:
            return name.replace(part, f"{packed}[{part[1:]}]", 1)
    return name


def parameters(config: Mapping[str, Any], parallel: bool, target_vocab: int | None) -> dict[str, Shape]:
    """Every parameter vLLM builds, q/k/v and gate/up as parts, with its shape."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    draft = config.get("draft_vocab_size") or vocab
    out: dict[str, Shape] = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    out["lm_head.weight"] = (draft, hidden)
    if draft != (target_vocab or vocab):
        out[_D2T] = (draft,)
    if _nested(config).get("use_aux_hidden_state", True):
        aux, wide = _aux_count(config), config.get("target_hidden_size", hidden)
        out["model.fc.weight"] = (hidden, aux * wide)
        if _norm_before_fc(config):
            out["model.input_norm.weight"] = (aux * wide,)
        if config.get("fc_norm", False):
            out |= {f"model.fc_norm.{i}.weight": (wide,) for i in range(aux)}
        if parallel:
            out[_MASK] = (aux * wide,)
    for i in range(config["num_hidden_layers"]):
        out |= {f"model.layers.{i}.{name}": shape for name, shape in _layer(i, config).items()}
    return out


def _layer(i: int, config: Mapping[str, Any]) -> dict[str, Shape]:
    hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    head = config.get("head_dim") or hidden // heads
    queries, keys = heads * head, (config.get("num_key_value_heads") or heads) * head
    wide, qwen = (2 * hidden if i == 0 else hidden), _is_qwen(config)
    out: dict[str, Shape] = {
        f"{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm", "hidden_norm")
    }
    bias = bool(config.get("attention_bias", False))
    for part, rows in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
        out[f"self_attn.qkv_proj[{part}].weight"] = (rows, wide)
        if bias:
            out[f"self_attn.qkv_proj[{part}].bias"] = (rows,)
    out["self_attn.o_proj.weight"] = (hidden, queries)
    if not qwen and (bias or config.get("bias", False)):
        out["self_attn.o_proj.bias"] = (hidden,)
    if qwen:
        out |= {f"self_attn.{name}.weight": (head,) for name in ("q_norm", "k_norm")}
    for part, rows, columns in (("gate_proj", inner, hidden), ("up_proj", inner, hidden), ("down_proj", hidden, inner)):
        stem = f"mlp.{part}" if part == "down_proj" else f"mlp.gate_up_proj[{part}]"
        out[f"{stem}.weight"] = (rows, columns)
        if not qwen and config.get("mlp_bias", False):
            out[f"{stem}.bias"] = (rows,)
    return out


def _optional(config: Mapping[str, Any], wanted: Mapping[str, Shape]) -> set[str]:
    """What may be absent: modules that only layer 0 uses, and what is then shared with the target."""
    out = {f"model.layers.{i}.hidden_norm.weight" for i in range(1, config["num_hidden_layers"])}
    if config.get("target_hidden_size", config["hidden_size"]) == config["hidden_size"]:
        out.add("model.embed_tokens.weight")
        if _D2T not in wanted or (config.get("draft_vocab_size") or config["vocab_size"]) == config["vocab_size"]:
            out.add("lm_head.weight")  # of its own vocabulary it has all ids: the first rows of the target's head
    return out


def _fits(place: str, shape: Shape, wanted: Shape) -> bool:
    if place != _MASK:
        return tuple(shape) == wanted
    count = 1
    for side in shape:
        count *= side
    return count == wanted[0]  # any shape: vLLM flattens it


def _is_qwen(config: Mapping[str, Any]) -> bool:
    return any(name in ("Eagle3Qwen3ForCausalLM", "PeagleQwen3ForCausalLM") for name in config["architectures"])


def _nested(config: Mapping[str, Any]) -> Mapping[str, Any]:
    nested = config.get("eagle_config")
    return nested if isinstance(nested, Mapping) else {}


def _norm_before_fc(config: Mapping[str, Any]) -> bool:
    return bool(_nested(config).get("norm_before_fc", config.get("norm_before_fc", False)))


def _aux_count(config: Mapping[str, Any]) -> int:
    """The Qwen3 form also looks at `num_aux_layers` (first) and at the top-level ids; the Llama form does not."""
    keys = ("num_aux_layers", "num_aux_hidden_states") if _is_qwen(config) else ("num_aux_hidden_states",)
    told = next((config[key] for key in keys if config.get(key) is not None), None)
    if told is not None:
        return told
    top = config.get("eagle_aux_hidden_state_layer_ids") if _is_qwen(config) else None
    ids = top or _nested(config).get("eagle_aux_hidden_state_layer_ids")
    return len(ids) if ids else 3


def check_replay(ledger: Ledger, names: Names, parallel: bool, target: TargetFacts | None) -> None:
    """The planned export, through the loader: what it would stumble over although the planning did not is a problem."""
    planned = [(name, names.shape(name) or ()) for name in names.kept]
    planned += [(name, shape) for name, (_, shape) in names.zeros.items()]
    found = replay(ledger.config, planned, parallel=parallel, target_vocab=target.vocab_size if target else None)
    told = [f"does not know {name}" for name in found.unknown]
    told += [f"does not find {name}" for name in found.missing]
    told += [f"writes {first} and {second} to one parameter" for first, second in found.colliding]
    told += [f"takes {list(wanted)} for {name}, not {list(shape)}" for name, shape, wanted in found.misshapen]
    if told:
        shown = "; ".join(told[:4]) + ("; ..." if len(told) > 4 else "")
        ledger.problem(f"vLLM's loader {shown}", where="tensors", remedy="make config.json and weights agree")
