# SPDX-License-Identifier: Apache-2.0
"""The draft vocabulary: its size, and the map `d2t` from draft ids to target ids, checked against `t2d`.

`d2t` is in offset form: target_id = i + d2t[i] (vLLM: `draft_id_to_target_id`). Its bytes are read here without torch.
"""

from __future__ import annotations

import struct
import sys
from array import array
from typing import Sequence

from nemo_automodel.components.speculative.serve.fixup_padding import is_padding
from nemo_automodel.components.speculative.serve.fixup_tensors import Names
from nemo_automodel.components.speculative.serve.ledger import Ledger
from nemo_automodel.components.speculative.serve.shards import read_bytes
from nemo_automodel.components.speculative.serve.types import Fixup, ShardTensor, TargetFacts

# any of these is cast to int64 by vLLM's loader; a float is exact up to 2**24
_CODES = {"I64": "q", "I32": "i", "I16": "h", "I8": "b", "U64": "Q", "U32": "I", "U16": "H", "U8": "B", "BOOL": "B"}
_CODES |= {"F32": "f", "F64": "d"}
_EXACT = {"F16": 2**11, "BF16": 2**8}  # whole numbers up to these are all there


def untie(ledger: Ledger, names: Names) -> None:
    """A head that the config ties to the draft's own embeddings is written out: without an `lm_head.weight` vLLM takes
    the target's, whatever `tie_word_embeddings` says (report 2.4; all of 0.14 to 0.33).

    The embeddings stand in the export twice. Refusing such drafts would cost users a conversion for the same bytes.
    """
    if not ledger.config.get("tie_word_embeddings") or names.has("lm_head.weight"):
        return
    size, draft = ledger.config.get("vocab_size"), ledger.config.get("draft_vocab_size")
    if not names.has("embed_tokens.weight") or draft not in (None, size):
        return  # a reduced head cannot be tied: `check_weights` names it as missing
    embed = names.kept["embed_tokens.weight"]
    names.kept["lm_head.weight"] = embed
    names.copied.add("lm_head.weight")
    why = "tied to the draft's embeddings; vLLM would take the target's head"
    ledger.changes.append(Fixup("tensor lm_head.weight", None, embed.name, why))


def fix_vocabulary(ledger: Ledger, names: Names, target: TargetFacts | None) -> None:
    """`draft_vocab_size` present and right; `d2t` valid when reduced, left out when full (vLLM >= 0.30 refuses it).

    Full is what vLLM takes for it: as many ids as the target has.
    """
    size = ledger.number("vocab_size")
    if size is None:
        return
    head = names.shape("lm_head.weight") or names.shape("d2t")
    if ledger.config.get("draft_vocab_size") is None:
        rows = head[0] if head else size
        ledger.set("draft_vocab_size", rows, "absent: the rows of lm_head or d2t, else the whole vocabulary")
    draft = ledger.number("draft_vocab_size")
    if draft is None:
        return
    if draft > size:
        ledger.problem(f"draft_vocab_size {draft} is above vocab_size {size}", remedy="mend the draft's config.json")
    elif draft == (target.vocab_size if target else size) or (draft == size and not _has_map(names)):
        _leave_out_full_map(ledger, names)
    else:
        _check_map(ledger, names, draft, size)
    if draft == size and not names.has("lm_head.weight"):
        found = "there is no lm_head: the target's head is used, which is right only if the draft was trained with it"
        ledger.warn(found, where="tensors")


def _has_map(names: Names) -> bool:
    return names.has("d2t") or "d2t" in names.zeros


def _leave_out_full_map(ledger: Ledger, names: Names) -> None:
    if names.has("d2t"):
        offsets = _integers(ledger, names.kept["d2t"])
        if offsets is not None and any(offsets):
            found = "d2t maps a full draft vocabulary to other ids"
            ledger.problem(
                found, where="tensors", remedy="vLLM takes draft ids for target ids then: reorder lm_head, drop d2t"
            )
            return
        names.leave_out("d2t", ledger, "the draft vocabulary is full: d2t is zero, and vLLM >= 0.30 refuses it")
    if names.has("t2d"):
        names.leave_out("t2d", ledger, "the draft vocabulary is full; vLLM never reads t2d")


def _check_map(ledger: Ledger, names: Names, draft: int, size: int) -> None:
    """`t2d` stays where `d2t` does: every vLLM skips it, and other readers use it."""
    where = "tensor d2t"
    if "d2t" in names.zeros:
        return
    if not names.has("d2t"):
        found = f"draft_vocab_size is {draft} of {size}, but there is no d2t: vLLM would take draft ids for target ids"
        ledger.problem(found, where="tensors", remedy="save the draft again with its d2t")
        return
    shape = names.shape("d2t")
    if shape != (draft,):
        ledger.problem(f"d2t is {list(shape)}, draft_vocab_size is {draft}", where=where, remedy="make the two agree")
        return
    offsets = _integers(ledger, names.kept["d2t"])
    if offsets is None:
        return
    ids = [i + offset for i, offset in enumerate(offsets)]
    marked = _marked(ledger, names, size)
    if marked is not None and len(marked) != draft:
        found = f"t2d marks {len(marked)} ids, d2t has {draft}: it is left out, and cannot confirm d2t"
        ledger.warn(found, where="tensor t2d")
        names.leave_out("t2d", ledger, "vLLM never reads it")
        marked = None
    if _valid(ids, size) and (marked is None or marked == sorted(ids)):
        if marked is None and not any(offsets):
            ledger.warn(f"d2t is all zeros and there is no t2d: draft ids are taken for the first {draft} target ids")
        return
    plain = list(offsets)
    if _valid(plain, size) and (marked is None or marked == sorted(plain)):
        found, remedy = "d2t holds target ids, not offsets", "save it as target id minus draft id (target = i + d2t[i])"
    elif not _valid(ids, size):
        found, remedy = f"d2t leads to ids that repeat or leave 0..{size - 1}", "save the draft again with its own d2t"
    else:
        found, remedy = "d2t and t2d mark different target ids", "save the draft again with the map it was trained with"
    ledger.problem(found, where=where, remedy=remedy)


def _valid(ids: list[int], size: int) -> bool:
    return min(ids) >= 0 and max(ids) < size and len(set(ids)) == len(ids)


def _marked(ledger: Ledger, names: Names, size: int) -> list[int] | None:
    """The target ids that `t2d` [vocab] marks, ascending; None without a usable one, which no vLLM reads anyway."""
    if not names.has("t2d"):
        return None
    tensor, shape = names.kept["t2d"], names.shape("t2d") or ()
    if tensor.info.dtype not in ("BOOL", "U8") or len(shape) != 1 or not is_padding(shape[0], size, None):
        found = f"t2d is {tensor.info.dtype} {list(tensor.info.shape)}, not a mark for each of {size} ids"
        ledger.warn(f"{found}: it is left out, and cannot confirm d2t", where="tensor t2d")
        names.leave_out("t2d", ledger, "vLLM never reads it")
        return None
    return [i for i, mark in enumerate(read_bytes(tensor)) if mark]


def _integers(ledger: Ledger, tensor: ShardTensor) -> list[int] | None:
    values = _values(tensor)
    if values is None:
        ledger.problem(f"d2t is {tensor.info.dtype}", where="tensor d2t", remedy="save it as int64")
        return None
    exact = _EXACT.get(tensor.info.dtype)
    if exact is not None and any(abs(value) > exact for value in values):
        found = f"d2t is {tensor.info.dtype}, which rounds whole numbers above {exact}"
        ledger.problem(found, where="tensor d2t", remedy="save it again, as int64")
        return None
    if not all(-(2**24) < value < 2**24 and value == int(value) for value in values):
        ledger.problem("d2t does not hold whole numbers", where="tensor d2t", remedy="save it again, as int64")
        return None
    return [int(value) for value in values]


def _values(tensor: ShardTensor) -> Sequence[float] | None:
    raw, dtype = read_bytes(tensor), tensor.info.dtype
    if dtype == "F16":
        return [value for (value,) in struct.iter_unpack("<e", raw)]
    if dtype == "BF16":  # the upper half of a float32
        return [struct.unpack("<f", b"\0\0" + raw[i : i + 2])[0] for i in range(0, len(raw), 2)]
    code = _CODES.get(dtype)
    if code is None:
        return None
    values = array(code, raw)
    if sys.byteorder == "big":
        values.byteswap()
    return values
