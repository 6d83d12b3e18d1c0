# SPDX-License-Identifier: Apache-2.0
"""A draft whose vocabulary is the target's with another padding: one of the two is rounded up (151,669 -> 151,936).

vLLM compares no vocabularies (`llm_base_proposer.py`, 0.32): it builds the draft's embeddings by the draft's
`vocab_size`, and takes draft ids for target ids unless there is a `d2t`. So a draft of another family serves and is
never right, and one that is merely padded differently serves well: the two must be told apart here.
"""

from __future__ import annotations

from nemo_automodel.components.speculative.serve.fixup_tensors import Names
from nemo_automodel.components.speculative.serve.ledger import Ledger
from nemo_automodel.components.speculative.serve.target_facts import tokenizer_size
from nemo_automodel.components.speculative.serve.types import Fixup, TargetFacts

EMBED, HEAD = "embed_tokens.weight", "lm_head.weight"
_PADDING = 64  # vLLM's and most trainers' unit; some models round up much further
_SHARE = 0.02  # Qwen 0.3 %, gpt-oss 0.6 %; other families' vocabularies differ by more


def fix_padding(ledger: Ledger, names: Names, target: TargetFacts | None) -> None:
    """Make `vocab_size` say what the embeddings hold, and the draft fit the target's number of ids.

    Rows beyond the target's ids are cut; a head over fewer ids than the target's gets a `d2t` of zeros (vLLM then
    spreads its logits over the target's ids); a draft without embeddings takes the target's size.
    """
    size = _held(ledger, names, target)
    if size is None or target is None or size == target.vocab_size:
        return
    used = tokenizer_size(target.folder)
    if not is_padding(size, target.vocab_size, used):
        found = f"the draft's vocab_size is {size}, the target's {target.vocab_size}"
        found += f" (its tokenizer uses {used} ids)" if used else ""
        remedy = "serve the draft with the target it was trained for"
        ledger.problem(found, where="serve.target", remedy=remedy)
    elif size > target.vocab_size:
        _cut(ledger, names, size, target.vocab_size)
    else:
        _widen(ledger, names, size, target.vocab_size, used)


def _held(ledger: Ledger, names: Names, target: TargetFacts | None) -> int | None:
    """Rows of the draft's own embeddings, else its `vocab_size`; a config cloned from the target may say another."""
    said, shape = ledger.config.get("vocab_size"), names.shape(EMBED)
    if type(said) is not int or said < 1:
        return None  # a problem of its own
    if target is not None and _is_drafts_own(ledger, names, said, target.vocab_size):
        ledger.set("draft_vocab_size", said, "as many as the rows of lm_head")
        ledger.set("vocab_size", target.vocab_size, "the target's: it held the size of the draft's own vocabulary")
        return target.vocab_size
    if shape is None or len(shape) != 2 or shape[0] == said:
        return said
    if not is_padding(shape[0], said, tokenizer_size(target.folder) if target else None):
        return said
    head = names.shape(HEAD)
    if ledger.config.get("draft_vocab_size") == said and head is not None and head[0] == shape[0]:
        ledger.set("draft_vocab_size", shape[0], "as many as the rows of lm_head")
    ledger.set("vocab_size", shape[0], "as many as the rows of embed_tokens")
    return shape[0]


def _is_drafts_own(ledger: Ledger, names: Names, said: int, wanted: int) -> bool:
    """Does `vocab_size` count the draft's reduced vocabulary, while its tables are for the target's?"""
    sizes = [shape[0] for name in (EMBED, "t2d") if (shape := names.shape(name))]
    own = [shape[0] for name in (HEAD, "d2t") if (shape := names.shape(name))]
    reduced = own == [said, said] and ledger.config.get("draft_vocab_size") in (None, said)
    return reduced and said < wanted and bool(sizes) and all(size == wanted for size in sizes)


def is_padding(one: int, other: int, used: int | None) -> bool:
    """Are the two sizes of one vocabulary, padded differently? `used`: as many ids as the tokenizer has, when known."""
    small, large = sorted((one, other))
    if used is not None and used <= small:
        return True
    missing = large - small
    return missing <= _SHARE * large or (large % _PADDING == 0 and missing < min(_PADDING, large / 8))


def _is_full(ledger: Ledger, names: Names, size: int) -> bool:
    head = names.shape(HEAD)
    return ledger.config.get("draft_vocab_size") in (None, size) and (head is None or head[0] == size)


def _cut(ledger: Ledger, names: Names, size: int, wanted: int) -> None:
    masks = [ledger.config.get(key) for key in ("mask_token_id", "pard_token", "ptd_token_id")]
    mask = next((mask for mask in masks if type(mask) is int), 0)
    if mask >= wanted and names.has(EMBED):
        ledger.warn(
            f"the draft has {size} ids, the target {wanted}: kept, because its mask token {mask} is one of the others; "
            "vLLM fails when it drafts one of those"
        )
        _identity_map(ledger, names, size)
        return
    why = f"the target has {wanted} ids; what the draft has beyond them is padding"
    tables = [EMBED, HEAD] if _is_full(ledger, names, size) else [EMBED]
    for name in tables:
        if names.has(name) and len(names.shape(name) or ()) == 2:
            names.rows[name] = wanted
            ledger.changes.append(Fixup(f"tensor {name}", f"{size} rows", f"{wanted} rows", why))
    if len(tables) == 2 and ledger.config.get("draft_vocab_size") is not None:
        ledger.set("draft_vocab_size", wanted, why)
    for name in ("t2d", *(("d2t",) if len(tables) == 2 and names.shape("d2t") == (size,) else ())):
        if names.shape(name) == (size,):
            names.rows[name] = wanted
    ledger.set("vocab_size", wanted, why)


def _widen(ledger: Ledger, names: Names, size: int, wanted: int, used: int | None) -> None:
    full = _is_full(ledger, names, size)
    if names.has(EMBED):
        if used is not None and used > size:
            found = f"the draft has embeddings for {size} ids, the target's tokenizer uses {used}"
            ledger.problem(found, where="serve.target", remedy="save the draft with embeddings for all of them")
            return
        ledger.warn(
            f"the draft has embeddings for {size} of the target's {wanted} ids: right as long as the others are "
            "padding (one of them in a request is beyond the draft's table, and ends the engine)"
        )
    elif full and not names.has(HEAD):
        ledger.set("vocab_size", wanted, "embeddings and head are the target's")
        if ledger.config.get("draft_vocab_size") is not None:
            ledger.set("draft_vocab_size", wanted, "embeddings and head are the target's")
        return
    else:
        ledger.set("vocab_size", wanted, "the embeddings are the target's; the other ids are padding")
    if full:
        ledger.set("draft_vocab_size", size, f"the head has {size} rows; the target's other ids are padding")
        _identity_map(ledger, names, size)


def _identity_map(ledger: Ledger, names: Names, size: int) -> None:
    if not names.has("d2t") and _is_full(ledger, names, size):
        names.zeros["d2t"] = ("I64", (size,))
        why = "draft ids are target ids; vLLM wants the map when the two vocabularies differ in size"
        ledger.changes.append(Fixup("tensor d2t", None, f"zeros ({size})", why))
