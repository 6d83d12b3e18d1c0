# SPDX-License-Identifier: Apache-2.0
"""One conversation, answered by the target through an OpenAI-compatible server: turns, retries, refusals."""

from __future__ import annotations

import json
import random
import threading
from dataclasses import dataclass, field
from typing import Any, Mapping

import httpx

from nemo_automodel.components.datasets.regenerate_server import KEY_VARIABLE, auth_headers
from nemo_automodel.components.datasets.rows import ChatRow
from nemo_automodel.errors import Interrupted, LaunchError

WHERE = "--base-url"
RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504})
HOPELESS = {  # status -> remedy
    401: f"export {KEY_VARIABLE}=...",
    403: f"export {KEY_VARIABLE}=...",
    404: "check --model and the URL's /v1",
}
MOST_WAIT_S = 120.0  # whatever Retry-After says
SENT_KEYS = ("role", "content", "tool_calls", "tool_call_id", "name")


class RowRefused(Exception):
    """This row cannot be answered; the others can. The message says why."""


@dataclass(frozen=True)
class Backoff:
    """Waits of first_s, twice that, ... up to most_s seconds, each shortened by up to a half at random."""

    attempts: int = 8
    first_s: float = 0.5
    most_s: float = 30.0

    def wait_s(self, attempt: int, retry_after: str | None) -> float:
        """Seconds before attempt + 1 (the first attempt is 0); what the server asks for comes first."""
        if retry_after is not None and retry_after.strip().isdigit():  # the HTTP-date form: our own waits will do
            return min(float(retry_after), MOST_WAIT_S)
        return min(self.first_s * 2**attempt, self.most_s) * random.uniform(0.5, 1.0)


@dataclass(frozen=True)
class Sampling:
    """What every request asks for; tokens per assistant turn."""

    model: str
    max_tokens: int
    temperature: float
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Answered:
    """A conversation whose assistant turns are the target's."""

    row: ChatRow  # the source
    messages: tuple[Mapping[str, Any], ...]
    tokens: int  # of all answers, as the server counts
    cut: tuple[int, ...]  # indices of messages that max_tokens ended
    ended: str | None  # why later turns are missing


@dataclass(frozen=True)
class _Reply:
    message: dict[str, Any]
    tokens: int
    cut: bool


class Asker:
    """Thread-safe. `close` ends requests under way and waits."""

    def __init__(
        self, base_url: str, sampling: Sampling, *, connections: int, timeout_s: float, backoff: Backoff = Backoff()
    ) -> None:
        self.url, self.sampling, self.backoff = f"{base_url}/chat/completions", sampling, backoff
        self._stopped = threading.Event()
        # trust_env=False: a proxy variable must not send loopback requests elsewhere
        self._http = httpx.Client(
            headers=auth_headers(), trust_env=False, timeout=httpx.Timeout(timeout_s, connect=10.0, pool=None),
            limits=httpx.Limits(max_connections=connections, max_keepalive_connections=connections),
        )  # fmt: skip

    def close(self) -> None:
        self._stopped.set()
        self._http.close()

    def answer(self, row: ChatRow) -> Answered:
        """Replace each assistant turn by the target's answer to what stands before it, later user turns kept.

        A turn that calls tools stays: the result after it belongs to that call. An assistant turn that answers no
        user or tool turn (a greeting, a second answer) is left out. A conversation that ends with a question is
        answered. When a later turn is refused (it is too long by then), the turns before it are the result.

        Raises:
            RowRefused: nothing could be answered.
            LaunchError: the server is gone, or refuses everything.
        """
        done: list[Mapping[str, Any]] = []
        tokens, cut, ended = 0, [], None
        for message in [*row.messages, {"role": "assistant", "content": ""}]:
            if message["role"] != "assistant" or message.get("tool_calls"):
                done.append(message)
                continue
            if not done or done[-1]["role"] not in ("user", "tool"):
                continue
            try:
                reply = self._ask(done, row)
            except RowRefused as refused:
                if not tokens:
                    raise
                ended = str(refused)
                break
            cut += [len(done)] if reply.cut else []
            tokens += reply.tokens
            done.append(reply.message)
        if not any(message["role"] == "assistant" for message in done):
            raise RowRefused("no user turn to answer")
        if ended is not None:
            done = done[: 1 + max(i for i, message in enumerate(done) if message["role"] == "assistant")]
        return Answered(row, tuple(done), tokens, tuple(cut), ended)

    def _ask(self, history: list[Mapping[str, Any]], row: ChatRow) -> _Reply:
        body: dict[str, Any] = {
            "model": self.sampling.model, "max_tokens": self.sampling.max_tokens,
            "temperature": self.sampling.temperature,
            "messages": [_as_sent(message) for message in history],
        }  # fmt: skip
        if row.tools:  # in the prompt, but the answer is text: parsing calls is the server's choice, not the model's
            body |= {"tools": list(row.tools), "tool_choice": "none"}
        if self.sampling.template_kwargs:
            body["chat_template_kwargs"] = dict(self.sampling.template_kwargs)
        return _read_reply(self._post(body))

    def _post(self, body: Mapping[str, Any]) -> httpx.Response:
        """The first answer that is no error.

        Raises:
            RowRefused: this request is refused, or fails as often as is allowed.
            LaunchError: no connection as often as is allowed, or a refusal that every request would meet.
        """
        for attempt in range(self.backoff.attempts):
            trouble, retry_after = "", None
            try:
                answer = self._http.post(self.url, json=body)
            except (httpx.HTTPError, RuntimeError) as error:  # RuntimeError: the client was closed
                if self._stopped.is_set():
                    raise Interrupted("stopped", where="regenerate", remedy="run the command again") from error
                answer, trouble = None, f"{type(error).__name__} {error}".strip()
            if answer is not None:
                if answer.is_success:
                    return answer
                trouble, retry_after = _said(answer), answer.headers.get("retry-after")
                if answer.status_code in HOPELESS:
                    raise LaunchError(trouble, where=self.url, remedy=HOPELESS[answer.status_code])
                if answer.status_code not in RETRIED:
                    raise RowRefused(trouble)
            last = attempt + 1 == self.backoff.attempts
            if not last and self._stopped.wait(self.backoff.wait_s(attempt, retry_after)):
                raise Interrupted("stopped", where="regenerate", remedy="run the command again")
        if answer is not None:
            raise RowRefused(f"{trouble} ({self.backoff.attempts} times)")
        raise LaunchError(
            f"no answer, {self.backoff.attempts} times: {trouble}", where=self.url,
            remedy="start the server again, then run the same command: finished rows are kept",
        )  # fmt: skip


def _as_sent(message: Mapping[str, Any]) -> dict[str, Any]:
    """A turn as the API takes it: no keys of ours, a call's arguments as JSON text (rows hold them as objects)."""
    sent = {key: message[key] for key in SENT_KEYS if key in message}
    if calls := sent.get("tool_calls"):
        sent["tool_calls"] = [{**call, "function": _call_as_sent(call["function"])} for call in calls]
    return sent


def _call_as_sent(function: Mapping[str, Any]) -> dict[str, Any]:
    arguments = function.get("arguments", {})
    return {**function, "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments)}


def _said(answer: httpx.Response) -> str:
    return f"{answer.status_code} {' '.join(answer.text.split())[:300]}".strip()


def _read_reply(answer: httpx.Response) -> _Reply:
    """Raises RowRefused when there is no text in it."""
    try:
        body = answer.json()
        choice = body["choices"][0]
        message, tokens = choice["message"], (body.get("usage") or {}).get("completion_tokens", 0)
        text = message.get("content") or ""
        reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise RowRefused(f"no chat completion: {' '.join(answer.text.split())[:200]}") from error
    if not text and not reasoning:
        raise RowRefused("an empty answer")
    thought = {"reasoning_content": reasoning} if reasoning else {}
    cut = choice.get("finish_reason") == "length"
    return _Reply({"role": "assistant", **thought, "content": text}, int(tokens or 0), cut)
