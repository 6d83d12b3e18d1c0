# SPDX-License-Identifier: Apache-2.0
"""Rope in both spellings with one effective value, and a rope table that reaches as far as the served length."""

from __future__ import annotations

from nemo_automodel.components.speculative.draft.spec import RopeSpec
from nemo_automodel.components.speculative.serve.ledger import Ledger, as_mapping
from nemo_automodel.components.speculative.serve.types import ServeSpec, TargetFacts

# kinds whose table vLLM sizes by max_position_embeddings, so that raising it changes nothing below the old limit
_RAISABLE = {None, "llama3", "linear"}


def fix_positions(ledger: Ledger, target: TargetFacts | None, spec: ServeSpec) -> None:
    """Write `rope_theta` and `rope_parameters` (and `rope_scaling` when scaled), then lift the length if need be."""
    if not _is_readable(ledger):
        return
    if _theta(ledger) is None:
        ledger.warn("the draft names no rope_theta: 10000 is assumed, the default of Llama")
    rope = RopeSpec.from_config(ledger.config)
    for key, value in rope.to_config().items():
        ledger.set(key, value, "both spellings of rope, equal values: readers differ in which they read")
    if not rope.scaling:
        ledger.drop("rope_scaling", "rope is not scaled")
    _reach(ledger, rope, target.max_position_embeddings if target else 0, spec.max_model_len)


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
        ledger.problem("rope is multimodal (mrope_section)", remedy="vLLM drafts with plain rope only")
    elif not all(value is None or (type(value) in (int, float) and value > 0) for value in (nested, flat)):
        ledger.problem(f"rope_theta is {nested if flat is None else flat!r}", remedy="set it to a positive number")
    elif nested is not None and flat is not None and nested != flat:
        found = f"rope_theta is {flat}, rope_parameters.rope_theta is {nested}"
        ledger.problem(found, remedy="keep the one it was trained with")
    elif both and scaling and _kind(both) != _kind(scaling):
        found = f"rope_parameters say {_kind(both)}, rope_scaling says {_kind(scaling)}"
        ledger.problem(found, remedy="keep the one it was trained with")
    else:
        return True
    return False


def _kind(rope: object) -> str:
    return as_mapping(rope).get("rope_type") or as_mapping(rope).get("type") or "default"


def _reach(ledger: Ledger, rope: RopeSpec, target_length: int, asked: int | None) -> None:
    """`max_position_embeddings` sizes vLLM's rope table: too short, and long answers read beyond its end."""
    trained = ledger.number("max_position_embeddings")
    if trained is None:
        return
    kind = _kind(rope.scaling) if rope.scaling else None
    reach, served = max(target_length, asked or 0), asked or target_length
    if kind in _RAISABLE and trained < reach:
        why = f"sizes vLLM's rope table; the draft was made for {trained}, the target reaches {reach}"
        ledger.set("max_position_embeddings", reach, why)
    elif kind not in _RAISABLE and trained < served:
        found = f"max_position_embeddings is {trained} with {kind} rope, the served length is {served}"
        ledger.problem(found, remedy=f"serve.max_model_len={trained}, or set the draft's rope for {served}")
