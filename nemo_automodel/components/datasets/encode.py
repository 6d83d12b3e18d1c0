# SPDX-License-Identifier: Apache-2.0
"""Chat rows -> token ids and a loss mask on what the assistant says, by the tokenizer's own chat template.

A token is supervised when it begins inside an assistant span of the rendered text (`chat_spans`), the end-of-turn
token included. Token boundaries come from the tokenizer's offsets, so the mask is exact to the character.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Callable, Iterable, Mapping

import numpy as np

from nemo_automodel.components.datasets.bad_rows import BadRows
from nemo_automodel.components.datasets.chat_spans import AssistantSpans
from nemo_automodel.components.datasets.chat_template import ChatTemplate, Messages, Span, TemplateFault
from nemo_automodel.components.datasets.encode_parallel import encode_all
from nemo_automodel.components.datasets.encoded_rows import EncodedRow, EncodedRows, RowWriter
from nemo_automodel.components.datasets.reasoning import check_all_found, reasoning_spans
from nemo_automodel.components.datasets.rows import BadRow, ChatRow
from nemo_automodel.errors import DataError

# The draft's first prediction is token 2: at position t it is trained towards token t+2 (design section 5).
FIRST_PREDICTED = 2


@dataclass(frozen=True)
class EncodedSet:
    """All usable rows of one source, and what became of the others."""

    rows: EncodedRows
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
    kwargs: Mapping[str, Any] = field(default_factory=dict)  # of the chat template

    def spans_of(self, row: ChatRow) -> tuple[str, tuple[Span, ...], tuple[Span, ...]]:
        """The rendered text, the assistant's spans, and the spans of thinking that is not trained on.

        Raises:
            TemplateFault: the template refuses the row, or its spans cannot be told for sure.
        """
        finder = AssistantSpans(ChatTemplate(self.tokenizer, row.tools, self.kwargs)) if row.tools else self._plain
        text, spans = finder(row.messages)
        _check_text(text)
        spans = _weighted(spans, row.messages)
        if not self.mask_reasoning_content:
            return text, spans, ()
        hidden = reasoning_spans(text, spans)
        check_all_found(text, spans, hidden, row.messages)
        return text, spans, hidden

    @cached_property
    def _plain(self) -> AssistantSpans:
        return AssistantSpans(ChatTemplate(self.tokenizer, (), self.kwargs))

    def encode(self, row: ChatRow) -> tuple[EncodedRow, bool]:
        """The encoded row, and whether it was cut.

        Raises:
            TemplateFault: as `spans_of`.
        """
        text, spans, hidden = self.spans_of(row)
        encoded = self.tokenizer(text, add_special_tokens=False, return_attention_mask=False, verbose=False)
        ids = np.array(encoded["input_ids"], dtype=np.int32)
        mask = np.zeros(len(ids), dtype=bool)
        for value, places in ((True, spans), (False, hidden)):
            for begin, end in places:
                mask[_first_token(encoded, text, begin) : _first_token(encoded, text, end)] = value
        cut = len(ids) > self.seq_length
        return EncodedRow(row.number, ids[: self.seq_length], mask[: self.seq_length]), cut

    def encode_or_fault(self, row: ChatRow | BadRow) -> tuple[EncodedRow, bool] | BadRow:
        """`encode`, or what is bad about the row."""
        if isinstance(row, BadRow):
            return row
        try:
            return self.encode(row)
        except TemplateFault as fault:
            return BadRow(row.number, str(fault), fault.remedy, row.place)


def _weighted(spans: tuple[Span, ...], messages: Messages) -> tuple[Span, ...]:
    """Without the turns whose `weight` is 0 (OpenAI's fine-tuning form). Raises TemplateFault where the template's
    marked parts are not one for each assistant turn."""
    weights = [message.get("weight", 1) for message in messages if message["role"] == "assistant"]
    if all(weights):
        return spans
    if len(spans) != len(weights):
        raise TemplateFault(
            f"it has a turn of weight 0, but the template marks {len(spans)} parts in {len(weights)} assistant turns",
            "leave the weights out of these rows, or delete the rows",
        )
    return tuple(span for span, weight in zip(spans, weights) if weight)


def _check_text(text: str) -> None:
    """Raises TemplateFault when the text holds half of a surrogate pair: JSON can spell it, no tokenizer takes it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise TemplateFault(
            f"it holds half an emoji ({text[error.start : error.end]!r})", "mend or delete these rows"
        ) from error


def _first_token(encoded: Any, text: str, place: int) -> int:
    """Index of the first token that begins at character `place` or later; their count when none does.

    Asked of the tokenizer's encoding, character by character: a list of all offsets would cost a third of the time.
    """
    count = len(encoded["input_ids"])
    for at in range(place, len(text)):
        token = encoded.char_to_token(at)  # the first that covers the character; None: none does (dropped white space)
        if token is None:
            continue
        while token < count and encoded.token_to_chars(token).start < place:
            token += 1
        return token
    return count


def encode_rows(
    rows: Iterable[ChatRow | BadRow], encoder: RowEncoder, *, where: str, max_bad_row_share: float = 0.0,
    on_row: Callable[[int], None] | None = None, workers: int = 1, writer: RowWriter | None = None,
) -> EncodedSet:  # fmt: skip
    """Encode every row; bad rows, and rows in which nothing is supervised, are dropped and counted.

    `workers`: processes that encode; the result is the same. `writer` takes the rows that are kept; the set's own
    `rows` are those that it gathered in memory (none when it wrote them to files).

    Raises:
        DataError: the tokenizer has no chat template or no offsets, a larger share of the rows than
            `max_bad_row_share` is bad (up to five are named), or nothing at all is supervised (shows the first row as
            rendered).
    """
    check_tokenizer(encoder.tokenizer)
    bad = BadRows(max_bad_row_share, where)
    kept = RowWriter() if writer is None else writer
    first: ChatRow | None = None  # that can be rendered
    read = cut = 0
    for row, outcome in encode_all(rows, encoder.encode_or_fault, workers):
        read += 1
        if isinstance(outcome, BadRow):
            bad.add(outcome.number, outcome.reason, outcome.remedy, outcome.place)
            bad.refuse_early(read)
        else:
            first = first or row
            cut += outcome[1]
            if outcome[0].loss_mask[FIRST_PREDICTED:].any():
                kept.add(outcome[0])
        if on_row is not None:
            on_row(read)
    bad.refuse_too_many(read)
    if not len(kept):
        raise _nothing_supervised(first, encoder, where)
    dropped = read - bad.count - len(kept)
    return EncodedSet(kept.rows(), read, cut, dropped, kept.tokens, kept.supervised_tokens, bad.count, tuple(bad.named))


def check_tokenizer(tokenizer: Any) -> None:
    """Raises DataError unless the tokenizer has a chat template and reports offsets."""
    name = getattr(tokenizer, "name_or_path", "the tokenizer")
    if not getattr(tokenizer, "chat_template", None):
        raise DataError(
            f"the tokenizer of {name} has no chat template", where="target.path",
            remedy="put a chat_template.jinja beside the target's tokenizer.json",
        )  # fmt: skip
    try:
        tokenizer.get_chat_template()
    except ValueError as error:  # templates under several names, and none of them is the default
        raise DataError(
            f"the tokenizer of {name} has chat templates ({', '.join(tokenizer.chat_template)}), but no default one",
            where="target.path", remedy="put the one to use as chat_template.jinja beside the target's tokenizer.json",
        ) from error  # fmt: skip
    if not tokenizer.is_fast:
        raise DataError(
            f"the tokenizer of {name} is a slow one: it reports no character offsets", where="target.path",
            remedy="put a tokenizer.json beside the weights (AutoTokenizer.from_pretrained(...).save_pretrained(...))",
        )  # fmt: skip


def _nothing_supervised(first: ChatRow | None, encoder: RowEncoder, where: str) -> DataError:
    if first is None:
        return DataError("the data set has no rows", where=where, remedy=f"set {where}=PATH to a file with chat rows")
    text = encoder.spans_of(first)[0]
    shown = repr(text if len(text) <= 600 else text[:400] + " ... " + text[-200:])
    roles = ", ".join(str(message["role"]) for message in first.messages)
    return DataError(
        f"no token of any row would be trained on; row {first.number} has the roles {roles} and is rendered as {shown}",
        where=where,
        remedy=f"rows need an assistant turn that begins within train.seq_length={encoder.seq_length} tokens"
        + (" and is not all reasoning (data.mask_reasoning_content=false)" if encoder.mask_reasoning_content else ""),
    )
