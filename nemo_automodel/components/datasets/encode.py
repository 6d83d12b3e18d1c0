# SPDX-License-Identifier: Apache-2.0
"""Chat rows -> token ids and a loss mask on what the assistant says, by the tokenizer's own chat template.

A token is supervised when it begins inside an assistant span of the rendered text (`chat_spans`), the end-of-turn
token included. Token boundaries come from the tokenizer's offsets, so the mask is exact to the character.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Callable, Iterable, Mapping, Sequence

import numpy as np

from nemo_automodel.components.datasets.chat_spans import ChatTemplate, Span, TemplateFault, reasoning_spans
from nemo_automodel.components.datasets.bad_rows import BadRows
from nemo_automodel.components.datasets.rows import BadRow, ChatRow
from nemo_automodel.errors import DataError

# The draft's first prediction is token 2: at position t it is trained towards token t+2 (design section 5).
FIRST_PREDICTED = 2


@dataclass(frozen=True)
class EncodedRow:
    """One row, cut to the sequence length."""

    number: int  # in the source, from 1
    input_ids: np.ndarray  # [T] int32
    loss_mask: np.ndarray  # [T] bool; True: a token the assistant wrote

    def __len__(self) -> int:
        return len(self.input_ids)


@dataclass(frozen=True)
class EncodedSet:
    """All usable rows of one source, and what became of the others."""

    rows: tuple[EncodedRow, ...]
    rows_read: int
    rows_cut: int  # longer than the sequence length
    rows_dropped: int  # nothing supervised is left in them
    tokens: int
    supervised_tokens: int
    rows_bad: int  # no conversation, or refused by the template
    bad_rows: tuple[str, ...]  # the first of these: "row N: reason"


@dataclass(frozen=True)
class RowEncoder:
    """A tokenizer with its settings; `encode` is pure."""

    tokenizer: Any
    seq_length: int
    mask_reasoning_content: bool = False
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def template(self, tools: Sequence[Mapping[str, Any]] = ()) -> ChatTemplate:
        """The chat template as it is applied to rows with these tools."""
        return ChatTemplate(self.tokenizer, tools, self.chat_template_kwargs) if tools else self._plain_template

    @cached_property
    def _plain_template(self) -> ChatTemplate:
        return ChatTemplate(self.tokenizer, (), self.chat_template_kwargs)

    def encode(self, row: ChatRow) -> tuple[EncodedRow, bool]:
        """The encoded row, and whether it was cut.

        Raises:
            TemplateFault: the template refuses the row, or its assistant spans cannot be told for sure.
        """
        text, spans = self.template(row.tools).assistant_spans(row.messages)
        hidden = reasoning_spans(text, spans) if self.mask_reasoning_content else ()
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        starts = np.array([begin for begin, _ in encoded["offset_mapping"]], dtype=np.int64)  # [T]
        mask = _inside(starts, spans) & ~_inside(starts, hidden)
        ids = np.array(encoded["input_ids"], dtype=np.int32)
        cut = len(ids) > self.seq_length
        return EncodedRow(row.number, ids[: self.seq_length], mask[: self.seq_length]), cut


def _inside(starts: np.ndarray, spans: Iterable[Span]) -> np.ndarray:
    """[T] bool: the character at which the token begins lies in one of the spans."""
    inside = np.zeros(len(starts), dtype=bool)
    for begin, end in spans:
        inside |= (starts >= begin) & (starts < end)
    return inside


def encode_rows(
    rows: Iterable[ChatRow | BadRow], encoder: RowEncoder, *, where: str, max_bad_row_share: float = 0.0,
    on_row: Callable[[int], None] | None = None,
) -> EncodedSet:  # fmt: skip
    """Encode every row; bad rows, and rows in which nothing is supervised, are dropped and counted.

    Raises:
        DataError: the tokenizer has no chat template or no offsets, a larger share of the rows than
            `max_bad_row_share` is bad (up to five are named), or nothing at all is supervised (shows the first row as
            rendered).
    """
    check_tokenizer(encoder.tokenizer)
    bad = BadRows(max_bad_row_share, where)
    kept: list[EncodedRow] = []
    first: ChatRow | None = None  # that can be rendered
    read = cut = 0
    for row in rows:
        read += 1
        encoded = _encode_or_note(row, encoder, bad)
        if encoded is None:
            bad.refuse_early(read)
        else:
            first = first or row
            cut += encoded[1]
            if encoded[0].loss_mask[FIRST_PREDICTED:].any():
                kept.append(encoded[0])
        if on_row is not None:
            on_row(read)
    bad.refuse_too_many(read)
    if not kept:
        raise _nothing_supervised(first, encoder, where)
    tokens = sum(len(row) for row in kept)
    supervised = sum(int(row.loss_mask.sum()) for row in kept)
    dropped = read - bad.count - len(kept)
    return EncodedSet(tuple(kept), read, cut, dropped, tokens, supervised, bad.count, tuple(bad.named))


def check_tokenizer(tokenizer: Any) -> None:
    """Raises DataError unless the tokenizer has a chat template and reports offsets."""
    name = getattr(tokenizer, "name_or_path", "the tokenizer")
    if not getattr(tokenizer, "chat_template", None):
        raise DataError(
            f"the tokenizer of {name} has no chat template", where="target.path",
            remedy="put a chat_template.jinja beside the target's tokenizer.json",
        )  # fmt: skip
    if not tokenizer.is_fast:
        raise DataError(
            f"the tokenizer of {name} is a slow one: it reports no character offsets", where="target.path",
            remedy="put a tokenizer.json beside the weights (AutoTokenizer.from_pretrained(...).save_pretrained(...))",
        )  # fmt: skip


def _encode_or_note(row: ChatRow | BadRow, encoder: RowEncoder, bad: BadRows) -> tuple[EncodedRow, bool] | None:
    """The encoded row and whether it was cut; None: it is bad, and noted."""
    if isinstance(row, BadRow):
        bad.add(row.number, row.reason, row.remedy)
        return None
    try:
        return encoder.encode(row)
    except TemplateFault as fault:
        bad.add(row.number, str(fault), fault.remedy)
        return None


def _nothing_supervised(first: ChatRow | None, encoder: RowEncoder, where: str) -> DataError:
    if first is None:
        return DataError("the data set has no rows", where=where, remedy=f"set {where}=PATH to a file with chat rows")
    text = encoder.template(first.tools).render(first.messages)
    shown = repr(text if len(text) <= 600 else text[:400] + " ... " + text[-200:])
    roles = ", ".join(str(message["role"]) for message in first.messages)
    return DataError(
        f"no token of any row would be trained on; row {first.number} has the roles {roles} and is rendered as {shown}",
        where=where,
        remedy=f"rows need an assistant turn that begins within train.seq_length={encoder.seq_length} tokens"
        + (" and is not all reasoning (data.mask_reasoning_content=false)" if encoder.mask_reasoning_content else ""),
    )
