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
    more: str  # what the generation prompt has beyond `before`: where the content itself opens so, it is prompt too
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
            self._check_calls_shown(messages)
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

    def _check_calls_shown(self, messages: Messages) -> None:
        """Raises TemplateFault when a call leaves no trace: an empty answer would be trained on in its place."""
        for index, message in enumerate(messages):
            if not message.get("tool_calls"):
                continue
            silent = {key: value for key, value in message.items() if key != "tool_calls"}
            if self._rendered([*messages[:index], silent]) == self._rendered(messages[: index + 1]) is not None:
                raise TemplateFault(
                    f"the template does not show the tool calls of turn {index}", "mend or delete these rows"
                )

    def _rendered(self, messages: Messages) -> str | None:
        """None: the template refuses them."""
        try:
            return self.template.render(messages)
        except TemplateFault:
            return None

    def _frame(self, bare: tuple[Mapping[str, Any], ...]) -> dict[int, Turn]:
        """The assistant turns of a conversation of which only roles and tool calls are known."""
        filled = [_filled(message, index) for index, message in enumerate(bare)]
        text = self.template.render(filled)
        hidden = [i for i, m in enumerate(filled) if sentinel(i) not in text and m.get("tool_calls")]
        if hidden:  # Llama 3.1 and Mistral: a call takes the place of the content; Kimi K2 names calls by id alone
            for index in hidden:
                filled[index] = _filled(bare[index], index, other=True)
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
                prompt = self._prompt(filled, index, last_index, before)
                turns[index] = Turn(before, *prompt, self._end_of_turn(after, filled, index))
        return turns

    def _prompt(self, filled: Messages, index: int, last_index: int | None, before: str) -> tuple[int, str]:
        """`Turn.prompt` and `Turn.more`, by the prompt from which the engine would have generated the turn."""
        agreed, rest = 0, ""
        if last_index is not None:
            prompt = self.template.render(filled[:index], add_generation_prompt=True)
            _, found, rest = prompt.rpartition(sentinel(last_index))
            agreed = self._agreed(before, rest) if found else 0
            if found and agreed == min(len(before), len(rest)):
                return agreed, rest[agreed:]
        # The template closes its last turn in another way than earlier ones, or begins with this turn.
        opening, header = self._opening, self._generation_prompt
        at = -1 if not opening else before.rfind(opening) if last_index is None else before.find(opening)
        if at < 0:
            return agreed or len(before), ""
        same = self._agreed(before[at:], header)
        return max(agreed, at + same), header[same:] if at + same == len(before) else ""

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

    def _end_of_turn(self, after: str, filled: Messages, index: int) -> int | None:
        """Characters of the template's text after a content that belong to the turn; 0: it has no end-of-turn token.

        Only white space may stand before the token; one that also opens the generation prompt (`<|im_start|>`) opens
        the next turn and ends nothing. After tool calls, tokens of all kinds may stand: there it must be a token that
        ends ordinary turns as well, behind the last call, and nobody else may have spoken before it.
        """
        if filled[index].get("tool_calls"):
            calls = filled[index]["tool_calls"]
            spelled = json.dumps(calls, ensure_ascii=False)
            ends = [(after.find(token), token) for token in self._end_tokens if token in after and token not in spelled]
            at, token = min(ends, default=(-1, ""))
            opened = self._opening and self._opening in after[: max(at, 0)]
            if at >= 0 and not opened and calls[-1]["function"]["name"] not in after[at + len(token) :]:
                return at + len(token)
            return self._end_of_own_text(after, filled, index)
        token = self._token_at(after)
        return 0 if not token else after.index(token) + len(token)

    def _end_of_own_text(self, after: str, filled: Messages, index: int) -> int | None:
        """The end of what the template writes while the turn is the last: with the special token there, or the one that
        follows (GLM: `<|observation|>` is what ends a call). None: it writes something else when others follow."""
        _, found, own = (self._rendered(filled[: index + 1]) or "").partition(sentinel(index))
        if not found or not after.startswith(own):
            return None
        end = len(own.rstrip())
        if own[:end].endswith(self.template.special_tokens):
            return end
        token = self._token_at(after[end:])
        return end if not token else after.index(token, end) + len(token)

    def _token_at(self, after: str) -> str:
        """The token that ends a turn, if it follows, white space aside; empty: none does, or one that opens the next
        turn. It is a special one, or an added one that stands there at the end of a conversation too."""
        rest = after.lstrip()
        tokens = (*self.template.special_tokens, *filter(None, (self._closing,)))
        token = max((t for t in tokens if rest.startswith(t)), key=len, default="")
        return "" if token and self._generation_prompt.startswith(token) else token

    @cached_property
    def _closing(self) -> str:
        """The added token, special or not, that follows the answer at the end of a conversation; may be empty."""
        chat = [{"role": role, "content": sentinel(i)} for i, role in enumerate(("user", "assistant"))]
        rest = self.template.render(chat).partition(sentinel(1))[2].lstrip()
        return max((t for t in self.template.added_tokens if rest.startswith(t)), key=len, default="")

    @cached_property
    def _end_tokens(self) -> tuple[str, ...]:
        """The tokens after plain answers: the last of a conversation, and one before another question."""
        chat = [{"role": role, "content": sentinel(i)} for i, role in enumerate(("user", "assistant", "user"))]
        texts = [self.template.render(chat[:2]), self.template.render(chat)]
        found = {self._token_at(text.partition(sentinel(1))[2]) for text in texts}
        return tuple(sorted(found - {""}))

    def _span(self, messages: Messages, text: str, index: int, turn: Turn) -> Span:
        head, tail, bare = self._parted(messages, text, index)
        gap = len(head) - len(turn.before)
        if not head.endswith(turn.before) or text[:gap] != head[:gap]:
            raise self._unsure(index, "its content changes the text before it", text, head)
        whole = text.startswith(turn.before[: turn.prompt], gap)
        begin = gap + (turn.prompt if whole else self._agreed(text[gap:], turn.before))
        if turn.more and text.startswith(turn.more, begin):
            begin += len(turn.more)
        if turn.end is None:
            raise self._unsure(index, "where its tool calls end is not clear", text, text[:begin])
        # Templates put a newline between content and tool calls only where there is content.
        for after, end in ((tail, turn.end), (tail.lstrip("\n"), turn.end - len(tail) + len(tail.lstrip("\n")))):
            content_end = len(text) - len(after)
            if text.endswith(after) and content_end >= begin and (after == tail or bare.get("tool_calls")):
                return begin, content_end + end
        raise self._unsure(index, "its content changes the text after it", text, text[:begin])

    def _parted(self, messages: Messages, text: str, index: int) -> tuple[str, str, Mapping[str, Any]]:
        """What stands before and after the turn's sentinel in the conversation with nothing else replaced; the turn."""
        bare = {key: value for key, value in messages[index].items() if key not in REASONING_FIELDS}
        replaced = [*messages[:index], _filled(bare, index), *messages[index + 1 :]]
        head, found, tail = self.template.render(replaced).partition(sentinel(index))
        if not found and bare.get("tool_calls"):
            replaced[index] = _filled(bare, index, other=True)
            head, found, tail = self.template.render(replaced).partition(sentinel(index))
        if not found:
            raise self._unsure(index, "the template does not show its content", text)
        if bare.get("tool_calls"):  # gpt-oss names the tool again above its answer
            tail = tail.replace(sentinel(index), bare["tool_calls"][0]["function"]["name"])
        return head, tail, bare

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
    """The messages without what they say: roles, tool calls, and the ids that tie calls to their answers. An empty
    content beside calls stays: some templates (gpt-oss) write another frame there."""
    said = ("content", *REASONING_FIELDS)
    bare = []
    for message in messages:
        kept = {key: value for key, value in message.items() if key not in said}
        bare.append({**kept, "content": ""} if _only_calls(message) else kept)
    return tuple(bare)


def _only_calls(message: Mapping[str, Any]) -> bool:
    """Says nothing beside its tool calls; where the content is not known: no."""
    return bool(message.get("tool_calls")) and not message.get("content", "?").strip()


def _filled(message: Mapping[str, Any], index: int, *, other: bool = False) -> dict[str, Any]:
    """The message with the sentinel in place of its content, or of its first call's name where it only calls; `other`:
    the other of the two."""
    if _only_calls(message) is not other:
        return _with_named_call(message, sentinel(index))
    return {**message, "content": sentinel(index)}


def _with_named_call(message: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The message with another name in its first tool call."""
    first, *others = message["tool_calls"]
    return {**message, "tool_calls": [{**first, "function": {**first["function"], "name": name}}, *others]}
