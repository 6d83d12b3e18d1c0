# SPDX-License-Identifier: Apache-2.0
"""Rope in both spellings with one effective value, and a rope table that reaches as far as the served length."""

from __future__ import annotations

from typing import Any, Mapping

from nemo_automodel.components.speculative.draft.spec import RopeSpec
from nemo_automodel.components.speculative.serve.ledger import Ledger, as_mapping
from nemo_automodel.components.speculative.serve.types import ServeSpec, TargetFacts

# kinds whose table vLLM sizes by max_position_embeddings, so that raising it changes nothing below the old limit
_RAISABLE = {None, "llama3", "linear"}
# kinds that vLLM's get_rope knows, and what they cannot do without
_KINDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
    "ntk": ("factor",),
    "proportional": (),
}
_MULTIMODAL = ("mrope_section", "mrope_interleaved")
_SEEN_IN_0_32 = ("ntk", "proportional")  # served there (run); other releases were not read for them
_ORIGINAL = "original_max_position_embeddings"


def fix_positions(ledger: Ledger, target: TargetFacts | None, spec: ServeSpec, *, parallel: bool) -> None:
    """Write `rope_theta` and `rope_parameters` (and `rope_scaling` when scaled), then lift the length if need be."""
    _drop_nulls(ledger)
    sections: dict[str, Any] = {}
    if target is None or not {"vision_config", "audio_config"} & set(target.config):
        _flatten(ledger)
    elif not parallel:
        sections = _set_apart(ledger)
    if not _is_readable(ledger):
        return
    if _theta(ledger) is None:
        ledger.warn("the draft names no rope_theta: 10000 is assumed, the default of Llama")
    _fill_original(ledger)
    partial = as_mapping(ledger.config.get("rope_parameters")).get("partial_rotary_factor")
    rope = RopeSpec.from_config(ledger.config)
    for key, value in rope.to_config().items():
        ledger.set(key, value, "both spellings of rope, equal values: readers differ in which they read")
    if partial is not None and not rope.scaling:
        ledger.set("partial_rotary_factor", partial, "out of rope_parameters: transformers reads it here, too")
    if sections:
        _put_back(ledger, sections)
    elif not rope.scaling:
        ledger.drop("rope_scaling", "rope is not scaled")
    elif (kind := _kind(rope.scaling)) in _SEEN_IN_0_32:
        ledger.warn(f"rope type {kind!r} is one that vLLM 0.32 knows; whether other releases do was not looked up")
    _reach(ledger, rope, _target_length(target), spec.max_model_len)


def _drop_nulls(ledger: Ledger) -> None:
    """`"rope_type": null` is a kind of its own to vLLM's get_rope, which knows none of that name (run)."""
    for key in ("rope_parameters", "rope_scaling"):
        rope = as_mapping(ledger.config.get(key))
        if None in rope.values():
            kept = {name: value for name, value in rope.items() if value is not None}
            ledger.set(key, kept, "readers take a null for a value")


def _set_apart(ledger: Ledger) -> dict[str, Any]:
    """Multimodal rope's own keys, taken out of the config so that the rest is judged as any other rope."""
    sections: dict[str, Any] = {}
    for key in ("rope_parameters", "rope_scaling"):
        rope = as_mapping(ledger.config.get(key))
        if "mrope_section" in rope:
            sections |= {name: rope[name] for name in _MULTIMODAL if name in rope}
            kept = {name: value for name, value in rope.items() if name not in _MULTIMODAL}
            ledger.config[key] = {name: "default" if value == "mrope" else value for name, value in kept.items()}
    return sections


def _put_back(ledger: Ledger, sections: dict[str, Any]) -> None:
    """vLLM 0.32 has three positions a token for drafts of this rope (`llm_base_proposer.py`, `uses_mrope`)."""
    for key in ("rope_parameters", "rope_scaling"):
        ledger.config[key] = {**as_mapping(ledger.config.get(key, {"rope_type": "default"})), **sections}
    ledger.warn("rope is multimodal (mrope_section): read in vLLM 0.32's sources, which draft with it, not run here")


def _flatten(ledger: Ledger) -> None:
    """In a text all three positions of multimodal rope are the same, so it turns as plain rope does (run)."""
    for key in ("rope_parameters", "rope_scaling"):
        rope = as_mapping(ledger.config.get(key))
        if "mrope_section" not in rope:
            continue
        plain = {name: value for name, value in rope.items() if name not in _MULTIMODAL}
        plain = {name: "default" if value == "mrope" else value for name, value in plain.items()}
        ledger.set(key, plain, "multimodal rope, over a target of text alone: the same as plain rope")


def _fill_original(ledger: Ledger) -> None:
    """Readers take max_position_embeddings for an absent original length; as that one may be lifted, it is written."""
    length = ledger.config.get(_ORIGINAL) or ledger.config.get("max_position_embeddings")
    for key in ("rope_parameters", "rope_scaling"):
        rope = as_mapping(ledger.config.get(key))
        if _kind(rope) in ("llama3", "yarn", "longrope", "deepseek_yarn") and rope.get(_ORIGINAL) is None and length:
            ledger.config[key] = {**rope, _ORIGINAL: length}


def _target_length(target: TargetFacts | None) -> int:
    """The longest text vLLM serves the target with by itself: a scaled rope reaches beyond max_position_embeddings."""
    if target is None:
        return 0
    length = target.max_position_embeddings
    for key in ("rope_parameters", "rope_scaling"):
        rope = as_mapping(target.config.get(key))
        factor, original = rope.get("factor"), rope.get(_ORIGINAL)
        if _kind(rope) == "yarn" and type(factor) in (int, float) and type(original) is int:
            length = max(length, int(original * factor))
    return length


def _theta(ledger: Ledger) -> float | None:
    nested = as_mapping(ledger.config.get("rope_parameters")).get("rope_theta")
    return ledger.config.get("rope_theta") if nested is None else nested


def _is_readable(ledger: Ledger) -> bool:
    """One rope for all layers, numbers where numbers belong, and the two spellings agree; else a problem."""
    both, scaling = as_mapping(ledger.config.get("rope_parameters")), as_mapping(ledger.config.get("rope_scaling"))
    nested, flat = both.get("rope_theta"), ledger.config.get("rope_theta")
    if any(isinstance(value, dict) for value in both.values()):
        ledger.problem("rope_parameters differ by layer type", remedy="vLLM's draft layers share one rope")
    elif "mrope_section" in both or "mrope_section" in scaling:
        found = "rope is multimodal (mrope_section), and so is the target: vLLM refuses that for P-EAGLE"
        ledger.problem(found, remedy="name an EAGLE-3 draft, or one with plain rope")
    elif not all(value is None or (type(value) in (int, float) and value > 0) for value in (nested, flat)):
        ledger.problem(f"rope_theta is {nested if flat is None else flat!r}", remedy="set it to a positive number")
    elif nested is not None and flat is not None and nested != flat:
        found = f"rope_theta is {flat}, rope_parameters.rope_theta is {nested}"
        ledger.problem(found, remedy="keep the one it was trained with")
    elif both and scaling and _kind(both) != _kind(scaling):
        found = f"rope_parameters say {_kind(both)}, rope_scaling says {_kind(scaling)}"
        ledger.problem(found, remedy="keep the one it was trained with")
    elif type(part := both.get("partial_rotary_factor", 1.0)) not in (int, float):
        ledger.problem(f"partial_rotary_factor is {part!r}", remedy="write a number, or remove it")
    elif (
        fault := _scaling_fault(both) or _scaling_fault(scaling) or _factors_fault(ledger, both or scaling)
    ) is not None:
        ledger.problem(fault, remedy="keep what it was trained with")
    else:
        return True
    return False


def _scaling_fault(rope: Mapping[str, Any]) -> str | None:
    """An unknown kind of scaling, or one without a number it needs: vLLM's get_rope ends with it at start."""
    kind, older = _kind(rope), _kind({"type": rope.get("type")})
    if rope.get("type") is not None and older != kind:
        return f"rope_type is {kind!r}, but type, its older name, is {older!r}"
    if kind == "deepseek_yarn":
        return "deepseek_yarn rope is for latent attention: in these layers vLLM dies of it at the first request"
    if not isinstance(kind, str) or kind not in _KINDS:
        return f"rope type {kind!r} is none of {', '.join(_KINDS)}"
    if kind == "dynamic" and rope.get("alpha") is not None:
        return None
    lists = ("short_factor", "long_factor")
    bad = [
        key for key in _KINDS[kind] if not (isinstance(rope.get(key), list) if key in lists else _above_0(rope, key))
    ]
    return f"{kind} rope has no usable {', '.join(bad)}" if bad else None


def _factors_fault(ledger: Ledger, rope: Mapping[str, Any]) -> str | None:
    """longrope has one factor for each pair of a head that turns; vLLM's tables do not fit another number (run)."""
    head, part = (
        ledger.config.get("head_dim"),
        rope.get("partial_rotary_factor", ledger.config.get("partial_rotary_factor")),
    )
    if _kind(rope) != "longrope" or type(head) is not int:
        return None
    pairs = int(head * (part or 1.0)) // 2
    wrong = [key for key in ("short_factor", "long_factor") if len(rope[key]) != pairs]
    return f"longrope's {wrong[0]} has {len(rope[wrong[0]])} numbers for {pairs} pairs" if wrong else None


def _above_0(rope: Mapping[str, Any], key: str) -> bool:
    value = rope.get(key)
    return type(value) in (int, float) and value > 0


def _kind(rope: object) -> str:
    kind = as_mapping(rope).get("rope_type") or as_mapping(rope).get("type") or "default"
    return "longrope" if kind == "su" else kind  # Phi-3's first name for it, which vLLM translates, too


def _reach(ledger: Ledger, rope: RopeSpec, target_length: int, asked: int | None) -> None:
    """`max_position_embeddings` sizes vLLM's rope table: too short, and long answers read beyond its end."""
    if ledger.config.get("max_position_embeddings") is None and target_length:
        ledger.warn("the draft names no max_position_embeddings: the length it was trained for is not known")
        ledger.set("max_position_embeddings", target_length, "absent: the target's; sizes vLLM's rope table")
    trained = ledger.number("max_position_embeddings")
    if trained is None:
        return
    kind = _kind(rope.scaling) if rope.scaling else None
    reach, served = max(target_length, asked or 0), asked or target_length
    if kind in _RAISABLE and trained < reach:
        why = f"sizes vLLM's rope table; the draft was made for {trained}, the target reaches {reach}"
        ledger.set("max_position_embeddings", reach, why)
    elif kind not in _RAISABLE and (covered := _covered(rope.scaling or {}, kind, trained)) < served:
        found = f"max_position_embeddings is {trained} with {kind} rope"
        found += f", which reaches {covered}" if covered != trained else ""
        remedy = f"serve.max_model_len={covered}, or set the draft's rope for {served}"
        ledger.problem(f"{found}, the served length is {served}", remedy=remedy)


def _covered(scaling: Mapping[str, Any], kind: str | None, trained: int) -> int:
    """Positions in the rope table that vLLM builds (`rotary_embedding/*.py`)."""
    factor, original = scaling.get("factor"), scaling.get(_ORIGINAL)
    if kind in ("yarn", "deepseek_yarn") and type(factor) in (int, float) and type(original) is int:
        return int(original * factor)
    if kind == "dynamic" and type(factor) in (int, float):
        return int(trained * factor)
    return trained
