# SPDX-License-Identifier: Apache-2.0
"""Where, in a rendered conversation, the assistant speaks: character spans.

Templates with `{% generation %}` markers say it themselves. The others are asked twice. First for the *frame*: the
same roles with a sentinel in place of every content, so that what stands between two sentinels is the template's own
text and nothing that a row could imitate. The part of it that the generation prompt has in common is the header of an
assistant's turn, what follows up to the end-of-turn token is its end. Then, for each assistant turn, for the
conversation with only that turn's content replaced: what precedes and follows the sentinel must agree with the true
rendering to the character, else the row is refused. So templates that drop old thinking or insert an empty think block
(Qwen3) are handled without knowing them. A span runs from the end of the generation prompt to the end-of-turn token,
inclusive: what a model would sample.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Mapping

from nemo_automodel.components.datasets.chat_template import ChatTemplate, Messages, Span, TemplateFault

REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
FRAMES_KEPT = 256  # frames of one template, by the roles of the conversation
SHOWN_CHARACTERS = 160  # of a rendering in a message, on either side of what it is about


def sentinel(index: int) -> str:
    """Stands for the content of message `index`: letters and digits, which no template trims, escapes or splits."""
    return f"x9Qz{index}sentinel{index}zQ9x"


@dataclass(frozen=True)
class Turn:
    """What the template writes around one assistant turn."""

    before: str  # between the content before it and its own; the header of the turn is in it
    prompt: int  # characters of `before` that the generation prompt has as well
    end: int | None  # characters after its content up to and with the end-of-turn token; None: not to be told


@dataclass(frozen=True)
class AssistantSpans:
    """Finds the assistant's spans by one template."""

    template: ChatTemplate

    def __call__(self, messages: Messages) -> tuple[str, tuple[Span, ...]]:
        """The rendered text and the spans of its assistant turns, ascending.

        Raises:
            TemplateFault: the template refuses the row, or a span is not certain.
        """
        if self.template.has_generation_markers:
            return self.template.render_marked(messages)
        text = self.template.render(messages)
        if not any(message["role"] == "assistant" for message in messages):
            return text, ()
        if any(message.get("tool_calls") for message in messages):
            turns = self._frame(_bare(messages))
        else:
            turns = self._frame_of_roles(tuple(message["role"] for message in messages))
        return text, tuple(self._span(messages, text, index, turn) for index, turn in turns.items())

    @cached_property
    def _known(self) -> dict[tuple[str, ...], dict[int, Turn]]:
        return {}

    def _frame_of_roles(self, roles: tuple[str, ...]) -> dict[int, Turn]:
        if roles not in self._known:
            if len(self._known) == FRAMES_KEPT:
                self._known.clear()
            self._known[roles] = self._frame(tuple({"role": role} for role in roles))
        return self._known[roles]

    def _frame(self, bare: tuple[Mapping[str, Any], ...]) -> dict[int, Turn]:
        """The assistant turns of a conversation of which only roles and tool calls are known."""
        filled = [{**message, "content": sentinel(index)} for index, message in enumerate(bare)]
        text = self.template.render(filled)
        hidden = [i for i, m in enumerate(filled) if sentinel(i) not in text and m.get("tool_calls")]
        if hidden:  # Llama 3.1 and Mistral: a call takes the place of the content
            for index in hidden:
                filled[index] = _with_named_call(filled[index], sentinel(index))
            text = self.template.render(filled)
        places = sorted((text.find(sentinel(i)), i) for i in range(len(filled)) if sentinel(i) in text)
        shown = {index for _, index in places}
        for index, message in enumerate(filled):
            if index not in shown and message["role"] == "assistant":
                raise self._unsure(index, "the template does not show its content", text)
            if index not in shown and message["role"] != "system":
                raise TemplateFault(
                    f"the template does not show what turn {index} ({message['role']}) says",
                    "mend or delete these rows",
                )
        turns: dict[int, Turn] = {}
        for slot, (at, index) in enumerate(places):
            if filled[index]["role"] == "assistant":
                last, last_index = places[slot - 1] if slot else (0, None)
                before = text[last + len(sentinel(last_index)) : at] if slot else text[:at]
                stop = places[slot + 1][0] if slot + 1 < len(places) else len(text)
                after = text[at + len(sentinel(index)) : stop]
                turns[index] = Turn(before, self._prompt(filled, index, last_index, before),
                                    self._end_of_turn(after, filled[index]))  # fmt: skip
        return turns

    def _prompt(self, filled: Messages, index: int, last_index: int | None, before: str) -> int:
        """Characters of `before` that stand in the prompt from which the engine would have generated the turn."""
        if last_index is not None:
            prompt = self.template.render(filled[:index], add_generation_prompt=True)
            _, found, rest = prompt.rpartition(sentinel(last_index))
            agreed = self._agreed(before, rest) if found else 0
            if agreed or (found and not rest):
                return agreed  # else the template closes its last turn in another way than earlier ones
        opening, header = self._opening, self._generation_prompt
        at = before.rfind(opening) if opening else -1
        return at + self._agreed(before[at:], header) if at >= 0 else len(before)

    def _agreed(self, first: str, second: str) -> int:
        """Characters in which two texts begin alike, not counting half a token: where they part before either ends
        (`<｜Assistant｜><think>` and `<｜Assistant｜><｜tool`), back to the last newline or added token in common."""
        common = os.path.commonprefix([first, second])
        if len(common) in (len(first), len(second)):
            return len(common)
        ends = (common.rfind(token) + len(token) for token in self.template.added_tokens if token in common)
        return max(common.rfind("\n") + 1, *ends, 0)

    @cached_property
    def _generation_prompt(self) -> str:
        """What the template appends for the assistant to go on, e.g. `<|im_start|>assistant\\n`; may be empty."""
        question = [{"role": "user", "content": sentinel(0)}]
        plain, prompted = self.template.render(question), self.template.render(question, add_generation_prompt=True)
        return prompted[len(os.path.commonprefix([plain, prompted])) :]

    @cached_property
    def _opening(self) -> str:
        """How a generation prompt begins: its first token beside the vocabulary, or its first line in plain text."""
        prompt = self._generation_prompt
        token = max((t for t in self.template.added_tokens if prompt.startswith(t)), key=len, default="")
        return token or prompt[: re.match(r"\s*[^\n]*\n?", prompt).end()]

    def _end_of_turn(self, after: str, message: Mapping[str, Any]) -> int | None:
        """Characters of the template's text after a content that belong to the turn; 0: it has no end-of-turn token.

        Only white space may stand before the token; one that also opens the generation prompt (`<|im_start|>`) opens
        the next turn and ends nothing. After tool calls, tokens of all kinds may stand: there it must be a token that
        ends ordinary turns as well, and nobody else may have spoken before it.
        """
        if message.get("tool_calls"):
            calls = json.dumps(message["tool_calls"], ensure_ascii=False)
            ends = [(after.find(token), token) for token in self._end_tokens if token in after and token not in calls]
            at, token = min(ends, default=(-1, ""))
            opened = self._opening and self._opening in after[: max(at, 0)]
            return None if at < 0 or opened else at + len(token)
        token = self._token_at(after)
        return 0 if not token else after.index(token) + len(token)

    def _token_at(self, after: str) -> str:
        """The special token that follows, white space aside; empty: none does, or one that opens the next turn."""
        rest = after.lstrip()
        token = max((t for t in self.template.special_tokens if rest.startswith(t)), key=len, default="")
        return "" if token and self._generation_prompt.startswith(token) else token

    @cached_property
    def _end_tokens(self) -> tuple[str, ...]:
        """The tokens after plain answers: the last of a conversation, and one before another question."""
        chat = [{"role": role, "content": sentinel(i)} for i, role in enumerate(("user", "assistant", "user"))]
        texts = [self.template.render(chat[:2]), self.template.render(chat)]
        found = {self._token_at(text.partition(sentinel(1))[2]) for text in texts}
        return tuple(sorted(found - {""}))

    def _span(self, messages: Messages, text: str, index: int, turn: Turn) -> Span:
        replaced = [dict(message) for message in messages]
        bare = {key: value for key, value in replaced[index].items() if key not in REASONING_FIELDS}
        replaced[index] = {**bare, "content": sentinel(index)}
        head, found, tail = self.template.render(replaced).partition(sentinel(index))
        if not found and bare.get("tool_calls"):
            replaced[index] = _with_named_call(bare, sentinel(index))
            head, found, tail = self.template.render(replaced).partition(sentinel(index))
        if not found:
            raise self._unsure(index, "the template does not show its content", text)
        gap = len(head) - len(turn.before)
        if not head.endswith(turn.before) or text[:gap] != head[:gap]:
            raise self._unsure(index, "its content changes the text before it", text, head)
        begin = gap + min(turn.prompt, self._agreed(text[gap:], turn.before))
        if turn.end is None:
            raise self._unsure(index, "where its tool calls end is not clear", text, text[:begin])
        # Templates put a newline between content and tool calls only where there is content.
        for after, end in ((tail, turn.end), (tail.lstrip("\n"), turn.end - len(tail) + len(tail.lstrip("\n")))):
            content_end = len(text) - len(after)
            if text.endswith(after) and content_end >= begin and (after == tail or bare.get("tool_calls")):
                return begin, content_end + end
        raise self._unsure(index, "its content changes the text after it", text, text[:begin])

    @staticmethod
    def _unsure(index: int, reason: str, text: str, head: str | None = None) -> TemplateFault:
        """`head`: what the guess is, the turn would begin after it."""
        at = len(text) if head is None else len(os.path.commonprefix([text, head]))
        shown = text[max(0, at - SHOWN_CHARACTERS) : at] + "⟦?⟧" + text[at : at + SHOWN_CHARACTERS]
        if head is None:
            shown = text[: 2 * SHOWN_CHARACTERS]
        return TemplateFault(
            f"cannot tell the assistant's part of turn {index} for sure: {reason}; rendered: {shown!r}",
            "put {% generation %} ... {% endgeneration %} around the assistant's text in the target's chat template",
        )


def _bare(messages: Messages) -> tuple[Mapping[str, Any], ...]:
    """The messages without what they say: roles, tool calls, and the ids that tie calls to their answers."""
    said = ("content", *REASONING_FIELDS)
    return tuple({key: value for key, value in message.items() if key not in said} for message in messages)


def _with_named_call(message: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The message with another name in its first tool call."""
    first, *others = message["tool_calls"]
    return {**message, "tool_calls": [{**first, "function": {**first["function"], "name": name}}, *others]}
