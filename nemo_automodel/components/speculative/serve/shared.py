# SPDX-License-Identifier: Apache-2.0
"""`serve.export_shared=omit`: leave out of the export what is byte for byte the target's, and what vLLM then shares.

vLLM shares the target's embeddings with a draft that has none, or equal ones, and its head likewise
(`_maybe_share_embeddings`, `_maybe_share_lm_head`; 0.14 to 0.33). Equal ones it finds out by comparing: every rank
copies both tables to the CPU, after the draft's was loaded to the GPU. Left out, there is nothing to load or compare.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Iterator

from nemo_automodel.components.speculative.serve.ledger import as_mapping
from nemo_automodel.components.speculative.serve.shards import read_tensors, same_bytes, weight_files
from nemo_automodel.components.speculative.serve.types import (
    Engine,
    Fixup,
    Fixups,
    Resolved,
    ServeSpec,
    ShardTensor,
    SharedTensors,
    TargetFacts,
)
from nemo_automodel.errors import ResolveError

EMBED, HEAD = "embed_tokens.weight", "lm_head.weight"
_WRAPPERS = ("", "model.", "language_model.", "model.language_model.", "language_model.model.")
_KEPT = "serve.export_shared=omit, but nothing is left out"


def omit_shared(fixups: Fixups, resolved: Resolved, target: TargetFacts | None, spec: ServeSpec) -> Fixups:
    """The plan without the draft's embeddings and full-vocabulary head where they equal the target's bytes.

    Reads both in pieces of 4 MiB, up to the first difference. Where it cannot be safe, everything is kept and a warning
    of the plan says why.
    """
    if spec.export_shared is SharedTensors.keep:
        return fixups
    reason = _unsafe(target, spec)
    if reason is not None:
        return _warned(fixups, reason)
    assert target is not None and target.folder is not None
    try:
        theirs = {tensor.name: tensor for tensor in read_tensors(target.folder, weight_files(target.folder))}
    except ResolveError as error:
        return _warned(fixups, f"the target's weights cannot be read here ({error.found})")
    ours = {name: tensor for name, tensor in _exported(fixups, resolved)}
    omitted = [name for name in (EMBED, HEAD) if name in ours and _is_shared(name, ours[name], theirs, target, fixups)]
    if EMBED in omitted and HEAD in fixups.copies and HEAD not in omitted:
        omitted.remove(EMBED)  # the head is made from it
    return _without(fixups, omitted) if omitted else _warned(fixups, "no tensor equals the target's")


def _unsafe(target: TargetFacts | None, spec: ServeSpec) -> str | None:
    extra = {key.replace("_", "-"): value for key, value in spec.extra_args.items()}
    if spec.engine is not Engine.vllm:
        return f"{spec.engine.value} has rules of its own"
    if target is None or target.folder is None:
        return "the target is not here to compare with"
    if target.config.get("quantization_config") or extra.get("quantization"):
        return "the target is quantised"
    if str(extra.get("pipeline-parallel-size", 1)) != "1":
        return "with pipeline parallelism vLLM shares no embeddings"
    return None


def _exported(fixups: Fixups, resolved: Resolved) -> Iterator[tuple[str, ShardTensor]]:
    by_source = {tensor.name: tensor for tensor in resolved.tensors}
    for source, name in fixups.renames.items():
        yield name, by_source[source]
    for name, source in fixups.copies.items():
        yield name, by_source[source]


def _is_shared(
    name: str, ours: ShardTensor, theirs: dict[str, ShardTensor], target: TargetFacts, fixups: Fixups
) -> bool:
    """vLLM would use the target's, of the very shape and bytes."""
    config: dict[str, Any] = dict(fixups.config)
    ids = config.get("vocab_size") if name == EMBED else config.get("draft_vocab_size")
    if ids != target.vocab_size or config.get("hidden_size") != target.hidden_size:
        return False
    found = next((theirs[wrap + name] for wrap in _WRAPPERS if wrap + name in theirs), None)
    if found is None and name == HEAD and _tied(target):
        found = next((theirs[wrap + EMBED] for wrap in _WRAPPERS if wrap + EMBED in theirs), None)
    if found is None or found.info.dtype != ours.info.dtype or name in fixups.rows:
        return False
    return found.info.shape == ours.info.shape and same_bytes(ours, found)


def _tied(target: TargetFacts) -> bool:
    text = as_mapping(target.config.get("text_config"))
    return bool(target.config.get("tie_word_embeddings", text.get("tie_word_embeddings")))


def _without(fixups: Fixups, omitted: list[str]) -> Fixups:
    why = "equal to the target's, which vLLM uses when the draft has none (serve.export_shared=omit)"
    sources = {name: source for source, name in fixups.renames.items()}
    gone = [sources[name] for name in omitted if name in sources]
    return replace(
        fixups,
        renames={source: name for source, name in fixups.renames.items() if name not in omitted},
        copies={name: source for name, source in fixups.copies.items() if name not in omitted},
        dropped=tuple(sorted((*fixups.dropped, *gone))),
        changes=(*fixups.changes, *(Fixup(f"tensor {name}", sources.get(name, name), None, why) for name in omitted)),
    )


def _warned(fixups: Fixups, reason: str) -> Fixups:
    return replace(fixups, warnings=(*fixups.warnings, f"{_KEPT}: {reason}"))
