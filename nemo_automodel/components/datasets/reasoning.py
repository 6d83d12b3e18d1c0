# SPDX-License-Identifier: Apache-2.0
"""Which part of what the assistant says is thinking: character spans, for `data.mask_reasoning_content`."""

from __future__ import annotations

from typing import Sequence

from nemo_automodel.components.datasets.chat_spans import REASONING_FIELDS
from nemo_automodel.components.datasets.chat_template import Messages, Span, TemplateFault

# Opening and closing tags as templates write them: Qwen3, DeepSeek-R1, QwQ; Magistral; Command A; Seed-OSS; gpt-oss.
TAGS = (
    ("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<seed:think>", "</seed:think>"), ("<|channel|>analysis<|message|>", "<|end|>"),
)  # fmt: skip
SHARED_CLOSINGS = ("<|end|>",)  # these end other things as well


def reasoning_spans(text: str, spans: Sequence[Span]) -> tuple[Span, ...]:
    """The thinking within the given spans, tags included.

    A span that begins inside the thinking (templates that force `<think>` in the generation prompt) or ends inside it
    (an answer cut short) is reasoning from its beginning or to its end.
    """
    found: list[Span] = []
    for opening, closing in TAGS:
        for span in spans:
            found += _between(text, span, opening, closing)
    return tuple(sorted(found))


def check_all_found(text: str, spans: Sequence[Span], hidden: Sequence[Span], messages: Messages) -> None:
    """Raises TemplateFault when thinking that a row holds in a field of its own is rendered, but in no known tag."""
    if hidden:
        return
    for index, message in enumerate(messages):
        for field in REASONING_FIELDS:
            thought = message.get(field)
            words = thought.strip() if isinstance(thought, str) else ""
            if words and any(text.find(words, begin, end) >= 0 for begin, end in spans):
                raise TemplateFault(
                    f"the {field} of turn {index} is rendered without a thinking tag that is known",
                    "set data.mask_reasoning_content=false, or leave that field out of the rows",
                )


def _between(text: str, span: Span, opening: str, closing: str) -> list[Span]:
    found: list[Span] = []
    at, end = span
    while at < end:
        opened = text.find(opening, at, end)
        if opened < 0 and closing in SHARED_CLOSINGS:
            break
        closed = text.find(closing, opened if closing in SHARED_CLOSINGS else at, end)
        if opened < 0 and closed < 0:
            break
        start = at if closed >= 0 and not 0 <= opened < closed else opened
        stop = closed + len(closing) if closed >= 0 else end
        found.append((start, stop))
        at = stop
    return found
