# SPDX-License-Identifier: Apache-2.0
"""The tokenizer's own chat template, as it is applied to the rows of a data set."""

from __future__ import annotations

import datetime
import json
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Mapping, Sequence

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

Span = tuple[int, int]  # [begin, end) in characters
Messages = Sequence[Mapping[str, Any]]

GENERATION_MARKER = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
# Llama 3.2 and others print today's date. A run resumed tomorrow must see the same tokens, so the day is fixed.
TODAY = datetime.datetime(2024, 7, 26)


class TemplateFault(Exception):
    """A row that the template refuses, or whose spans are not certain; says what to do."""

    def __init__(self, found: str, remedy: str) -> None:
        super().__init__(found)
        self.remedy = remedy


@dataclass(frozen=True)
class ChatTemplate:
    """The template with fixed tools and keyword arguments. Rendering is pure: "today" is always `TODAY`."""

    tokenizer: Any
    tools: Sequence[Mapping[str, Any]] = ()
    kwargs: Mapping[str, Any] | None = None

    @cached_property
    def source(self) -> str:
        return self.tokenizer.get_chat_template(tools=list(self.tools) or None)

    @cached_property
    def has_generation_markers(self) -> bool:
        return GENERATION_MARKER.search(self.source) is not None

    @cached_property
    def special_tokens(self) -> tuple[str, ...]:
        """Texts of the tokens that are marked special."""
        added = self.tokenizer.added_tokens_decoder.values()
        return tuple({str(t) for t in added if t.special} | set(self.tokenizer.all_special_tokens))

    @cached_property
    def added_tokens(self) -> tuple[str, ...]:
        """Texts of all added tokens, special or not (DeepSeek's turn tokens are not)."""
        return tuple({str(t) for t in self.tokenizer.added_tokens_decoder.values()} | set(self.special_tokens))

    def render(self, messages: Messages, *, add_generation_prompt: bool = False) -> str:
        """The conversation as text.

        Raises:
            TemplateFault: the template itself refuses it.
        """
        return self._render(messages, add_generation_prompt, with_spans=False)[0]

    def render_marked(self, messages: Messages) -> tuple[str, tuple[Span, ...]]:
        """The text, and the spans between `{% generation %}` and `{% endgeneration %}`, ascending."""
        return self._render(messages, False, with_spans=True)

    def _render(self, messages: Messages, prompt: bool, *, with_spans: bool) -> tuple[str, tuple[Span, ...]]:
        try:
            return self._render_once(messages, prompt, with_spans)
        except TypeError as error:  # DeepSeek-R1's template wants a call's arguments as text, most others an object
            spelled = _with_text_arguments(messages)
            if spelled is None:
                raise _refused(error) from error
        except Exception as error:  # a template is a program of others: it may raise anything
            raise _refused(error) from error
        try:
            return self._render_once(spelled, prompt, with_spans)
        except Exception as error:
            raise _refused(error) from error

    def _render_once(self, messages: Messages, prompt: bool, with_spans: bool) -> tuple[str, tuple[Span, ...]]:
        texts, spans = render_jinja_template(
            conversations=[[dict(message) for message in messages]],
            tools=list(self.tools) or None,
            chat_template=self.source,
            return_assistant_tokens_mask=with_spans,
            add_generation_prompt=prompt,
            **{"strftime_now": TODAY.strftime, **self.tokenizer.special_tokens_map, **(self.kwargs or {})},
        )
        return texts[0], tuple((int(a), int(b)) for a, b in spans[0]) if with_spans else ()


def _refused(error: Exception) -> TemplateFault:
    if isinstance(error, jinja2.TemplateSyntaxError):
        return TemplateFault(
            f"the target's chat template is broken (line {error.lineno}: {error})",
            "mend chat_template.jinja, or chat_template in tokenizer_config.json, beside the target's tokenizer.json",
        )
    said = str(error) if isinstance(error, (jinja2.TemplateError, TypeError, ValueError)) else repr(error)
    return TemplateFault(
        f"the chat template refuses it: {said}", "mend or delete these rows, or set data.chat_template_kwargs"
    )


def _with_text_arguments(messages: Messages) -> list[dict[str, Any]] | None:
    """The messages with every tool call's arguments as JSON text; None: no call has an object there."""
    changed, spelled = False, []
    for message in messages:
        calls = []
        for call in message.get("tool_calls") or ():
            function = call.get("function")
            if isinstance(function, Mapping) and isinstance(function.get("arguments"), Mapping):
                text = json.dumps(function["arguments"], ensure_ascii=False)
                call, changed = {**call, "function": {**function, "arguments": text}}, True
            calls.append(call)
        spelled.append({**message, "tool_calls": calls} if calls else dict(message))
    return spelled if changed else None
