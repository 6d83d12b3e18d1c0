# SPDX-License-Identifier: Apache-2.0
"""Where, in a rendered conversation, the assistant speaks: character spans.

Templates with `{% generation %}` markers say it themselves. For the others each assistant turn is found by rendering
the conversation a second time with that turn's content replaced by a sentinel: what precedes the sentinel is the
header, what follows it is the end of the turn, and both must agree with the true rendering to the character, else the
row is refused. So templates that drop old thinking or insert an empty think block (Qwen3) are handled without knowing
them. A span runs from the end of the generation prompt to the end-of-turn token, inclusive: what a model would sample.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Mapping, Sequence

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

Span = tuple[int, int]  # [begin, end) in characters
Messages = Sequence[Mapping[str, Any]]

SENTINEL = "x9Qz7sentinel7zQ9x"  # letters and digits only: no template trims, escapes or splits it
GENERATION_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")
THINK_OPEN, THINK_CLOSE = "<think>", "</think>"


class TemplateFault(Exception):
    """A row that the template refuses, or whose spans are not certain; says what to do."""

    def __init__(self, found: str, remedy: str) -> None:
        super().__init__(found)
        self.remedy = remedy


@dataclass(frozen=True)
class ChatTemplate:
    """The tokenizer's chat template with fixed tools and keyword arguments."""

    tokenizer: Any
    tools: Sequence[Mapping[str, Any]] = ()
    kwargs: Mapping[str, Any] | None = None

    @cached_property
    def source(self) -> str:
        return self.tokenizer.get_chat_template(tools=list(self.tools) or None)

    def render(self, messages: Messages, *, add_generation_prompt: bool = False) -> str:
        """The conversation as text. Raises TemplateFault where the template itself refuses it."""
        return self._render(messages, add_generation_prompt, with_spans=False)[0]

    def assistant_spans(self, messages: Messages) -> tuple[str, tuple[Span, ...]]:
        """The rendered text and the spans of its assistant turns, ascending."""
        if GENERATION_MARKER.search(self.source):
            return self._render(messages, False, with_spans=True)
        text = self.render(messages)
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if not turns:
            return text, ()
        prompt = self._generation_prompt(messages[: turns[0]] or [{"role": "user", "content": SENTINEL}])
        return text, tuple(self._turn_span(messages, index, text, prompt) for index in turns)

    def _render(self, messages: Messages, prompt: bool, *, with_spans: bool) -> tuple[str, tuple[Span, ...]]:
        kwargs = {**self.tokenizer.special_tokens_map, **(self.kwargs or {})}
        try:
            texts, spans = render_jinja_template(
                conversations=[[dict(message) for message in messages]],
                tools=list(self.tools) or None,
                chat_template=self.source,
                return_assistant_tokens_mask=with_spans,
                add_generation_prompt=prompt,
                **kwargs,
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise TemplateFault(
                f"the chat template refuses it: {error}", "mend or delete these rows, or set data.chat_template_kwargs"
            ) from error
        return texts[0], tuple((int(a), int(b)) for a, b in spans[0]) if with_spans else ()

    def _generation_prompt(self, before: Messages) -> str:
        """What the template appends for the assistant to go on, e.g. `<|im_start|>assistant\\n`; may be empty."""
        plain, prompted = self.render(before), self.render(before, add_generation_prompt=True)
        return prompted[len(os.path.commonprefix([plain, prompted])) :]

    def _turn_span(self, messages: Messages, index: int, text: str, prompt: str) -> Span:
        replaced = [dict(message) for message in messages]
        replaced[index]["content"] = SENTINEL
        head, found, tail = self.render(replaced).partition(SENTINEL)
        if not found:
            raise self._unsure(index, "the template does not show its content")
        header_at = self._header_start(head, prompt)
        if text[:header_at] != head[:header_at]:
            raise self._unsure(index, "its content changes the text before it")
        begin = header_at + len(os.path.commonprefix([text[header_at:], head[header_at:], prompt]))
        has_calls = bool(messages[index].get("tool_calls"))
        # Templates put a newline between content and tool calls only where there is content.
        for after in (tail, tail.lstrip("\n")) if has_calls else (tail,):
            content_end = len(text) - len(after)
            if text.endswith(after) and content_end >= begin:
                return begin, content_end + self._end_of_turn(after, prompt, has_calls)
        raise self._unsure(index, "its content changes the text after it")

    def _header_start(self, head: str, prompt: str) -> int:
        """Where the header of the turn begins: the last place at which the generation prompt's opening stands.

        The opening is the prompt's first special token, or its first line in templates of plain text; not the whole
        prompt, which may go on (`<think>`) where earlier turns do not.
        """
        opening = next((token for token in self._special_tokens if prompt.startswith(token)), "")
        opening = opening or prompt[: re.match(r"\s*[^\n]*\n?", prompt).end()]
        at = head.rfind(opening) if opening else -1
        return at if at >= 0 else len(head)

    def _end_of_turn(self, tail: str, prompt: str, has_calls: bool) -> int:
        """Characters of `tail` up to and with the end-of-turn token; 0 when the template has none.

        Only white space (or the turn's tool calls) may stand before it; a token that also opens the generation prompt
        (`<|im_start|>`) opens the next turn and ends nothing.
        """
        positions = [(tail.find(token), token) for token in self._special_tokens if token in tail]
        if not positions:
            return 0
        at, token = min(positions, key=lambda pair: (pair[0], -len(pair[1])))
        if prompt.startswith(token) or (tail[:at].strip() and not has_calls):
            return 0
        return at + len(token)

    @cached_property
    def _special_tokens(self) -> tuple[str, ...]:
        added = self.tokenizer.added_tokens_decoder.values()
        return tuple({str(t) for t in added if t.special} | set(self.tokenizer.all_special_tokens))

    @staticmethod
    def _unsure(index: int, reason: str) -> TemplateFault:
        return TemplateFault(
            f"cannot tell the assistant's part of turn {index} for sure: {reason}",
            "put {% generation %} ... {% endgeneration %} around the assistant's text in the target's chat template",
        )


def reasoning_spans(text: str, spans: Sequence[Span]) -> tuple[Span, ...]:
    """The `<think> ... </think>` parts, tags included, of the given spans.

    A span that begins inside the thinking (templates that force `<think>` in the generation prompt) or ends inside it
    (an answer cut short) is reasoning from its beginning or to its end.
    """
    found: list[Span] = []
    for begin, end in spans:
        at = begin
        while at < end:
            opened, closed = text.find(THINK_OPEN, at, end), text.find(THINK_CLOSE, at, end)
            if opened < 0 and closed < 0:
                break
            start = at if closed >= 0 and not 0 <= opened < closed else opened
            stop = closed + len(THINK_CLOSE) if closed >= 0 else end
            found.append((start, stop))
            at = stop
    return tuple(found)
