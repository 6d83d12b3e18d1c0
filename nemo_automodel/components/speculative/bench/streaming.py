# SPDX-License-Identifier: Apache-2.0
"""One request, timed: when its first token came, when each piece of the answer came, and how many tokens it brought.

With speculation several tokens come in one piece ("chunk"): a chunk is what one verification step returned. vLLM puts
two steps into one chunk when the reader is slow, so chunks are counted and never taken for steps without a check.
`continuous_usage_stats` (vLLM >= 0.6; other servers ignore it) makes each chunk say how many tokens there are so far.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any, Mapping, Sequence

import httpx

from nemo_automodel.components.speculative.serve.client import ServerClient
from nemo_automodel.errors import LaunchError

DONE = b"data: [DONE]"


@dataclass(frozen=True)
class Asking:
    """How every request of a benchmark is made."""

    max_new_tokens: int
    temperature: float = 0.0
    stream: bool = True
    stall_s: float | None = None  # longest silence that is waited for
    template_kwargs: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Answer:
    """The server's answer to one request. Times in seconds from the moment the request was sent."""

    text: str
    completion_tokens: int  # end-of-turn token included, as the server counts
    seconds: float  # until the answer was complete
    prompt_tokens: int = 0
    finish_reason: str | None = None
    chunk_s: tuple[float, ...] = ()  # arrival of each chunk that brought tokens; empty when not streamed
    chunk_tokens: tuple[int, ...] = ()  # tokens in each; empty when the server does not say

    @property
    def ttft_s(self) -> float | None:
        """Time to first token."""
        return self.chunk_s[0] if self.chunk_s else None

    @property
    def itl_s(self) -> float | None:
        """Inter-token latency: (last chunk - first chunk) / tokens after the first chunk's."""
        later = self.completion_tokens - (self.chunk_tokens[0] if self.chunk_tokens else 1)
        return (self.chunk_s[-1] - self.chunk_s[0]) / later if len(self.chunk_s) > 1 and later > 0 else None

    @property
    def steps(self) -> int | None:
        """Chunks after the first one, which comes from the prefill."""
        return len(self.chunk_tokens) - 1 if self.chunk_tokens else None


def request_body(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], asking: Asking, seed: int
) -> dict[str, Any]:
    """`tools` are in the prompt, but the answer is text, never a parsed call."""
    body: dict[str, Any] = {
        "messages": list(messages),
        "max_tokens": asking.max_new_tokens,
        "temperature": asking.temperature,
    }
    if asking.temperature > 0:
        body["seed"] = seed
    if tools:
        body |= {"tools": list(tools), "tool_choice": "none"}
    if asking.template_kwargs:
        body["chat_template_kwargs"] = dict(asking.template_kwargs)
    if asking.stream:
        body |= {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    return body


def ask(
    client: ServerClient,
    messages: Sequence[Mapping[str, Any]],
    asking: Asking,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    seed: int = 0,
) -> Answer:
    """Make one request. The lines are only stamped while they come in and read afterwards: parsing takes no time
    from the measured ones.

    Raises:
        LaunchError: the server refuses it, stops answering, or is silent for `stall_s`.
    """
    body = request_body(messages, tools, asking, seed)
    stamped: list[tuple[float, bytes]] = []
    start = time.perf_counter()
    try:
        for line in client.chat_lines(body, stall_s=asking.stall_s):
            if line:
                stamped.append((time.perf_counter() - start, line))
        seconds = time.perf_counter() - start
        return _read_stream(stamped, seconds) if asking.stream else _read_whole(stamped, seconds)
    except httpx.ReadTimeout as error:
        raise _failed(
            f"no sign of life for {asking.stall_s:g} s", "serve.benchmark.stall_s=SECONDS waits longer"
        ) from error
    except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
        raise _failed(
            str(error) or type(error).__name__, "see the server's log; prompt and answer must fit serve.max_model_len"
        ) from error


def _failed(what: str, remedy: str) -> LaunchError:
    return LaunchError(f"the server failed on a prompt: {what}", where="serve.benchmark", remedy=remedy)


def _read_whole(stamped: list[tuple[float, bytes]], seconds: float) -> Answer:
    reply = json.loads(b"".join(line for _, line in stamped))
    choice, usage = reply["choices"][0], reply["usage"]
    text = choice["message"]["content"] or ""
    tokens = usage["completion_tokens"]
    return Answer(text, tokens, seconds, usage.get("prompt_tokens", 0), choice.get("finish_reason"))


def _read_stream(stamped: list[tuple[float, bytes]], seconds: float) -> Answer:
    """Server-sent events -> `Answer`; events without new tokens (the role, the closing usage) are no chunks."""
    text, total, prompt_tokens, finish, told = "", 0, 0, None, True
    times: list[float] = []
    tokens: list[int] = []
    finished = False
    for at, line in stamped:
        if not line.startswith(b"data:") or line.strip() == DONE:
            finished = finished or line.strip() == DONE
            continue
        event = json.loads(line[5:])
        if "error" in event:
            raise ValueError(str(event["error"].get("message", event["error"]))[:300])
        usage, choices = event.get("usage"), event.get("choices") or []
        piece = choices[0]["delta"].get("content") or "" if choices else ""
        text += piece
        finish = choices[0].get("finish_reason") or finish if choices else finish
        told = told and (usage is not None or not choices)
        counted = usage["completion_tokens"] if usage else total
        if counted > total and choices:
            tokens.append(counted - total)
        if counted > total and choices or piece and usage is None:
            times.append(at)
        total = max(total, counted)
        prompt_tokens = usage.get("prompt_tokens", prompt_tokens) if usage else prompt_tokens
    if not finished:
        raise ValueError("the answer broke off")
    complete = told and sum(tokens) == total
    return Answer(text, total, seconds, prompt_tokens, finish, tuple(times), tuple(tokens) if complete else ())
