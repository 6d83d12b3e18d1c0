# SPDX-License-Identifier: Apache-2.0
"""What the benchmark asks: chat rows without their last answer, sent to /v1/chat/completions, greedy."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Mapping

import httpx

from nemo_automodel.components.datasets.rows import ChatRow, load_rows
from nemo_automodel.components.speculative.serve.client import ServerClient
from nemo_automodel.errors import DataError, LaunchError

WHERE = "serve.benchmark.prompts"


@dataclass(frozen=True)
class Answer:
    """The server's answer to one prompt."""

    text: str
    completion_tokens: int  # end-of-turn token included, as the server counts
    seconds: float


@dataclass(frozen=True)
class WorkloadResult:
    """All answers, in the order of the prompts; `seconds` is wall time of the whole."""

    answers: tuple[Answer, ...]
    seconds: float

    @property
    def output_tokens(self) -> int:
        return sum(answer.completion_tokens for answer in self.answers)

    @property
    def tokens_per_s(self) -> float:
        """Output tokens of all prompts / wall time."""
        return self.output_tokens / self.seconds


def load_prompts(
    path: str, num_prompts: int, *, split: str = "train", column: str | None = None
) -> tuple[ChatRow, ...]:
    """The first conversations of a chat data set (any form that training reads), each up to its last answer.

    `split` and `column` as in `load_rows`; a row's tools stay with it.

    Raises:
        DataError: nothing readable there, a row is no conversation, or no row has anything to ask.
    """
    prompts: list[ChatRow] = []
    for row in load_rows(path, where=WHERE, split=split, column=column):
        if messages := _cut_answer(row.messages):
            prompts.append(replace(row, messages=messages))
        if len(prompts) == num_prompts:
            break
    if not prompts:
        raise DataError(f"{path} holds nothing to ask", where=WHERE, remedy="name chat rows that have a user turn")
    return tuple(prompts)


def _cut_answer(messages: tuple[Mapping[str, Any], ...]) -> tuple[Mapping[str, Any], ...]:
    while messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    return messages


def run_workload(
    client: ServerClient,
    prompts: tuple[ChatRow, ...],
    *,
    max_new_tokens: int,
    concurrency: int,
    template_kwargs: Mapping[str, Any] | None = None,
) -> WorkloadResult:
    """Ask every prompt, `concurrency` at a time; all answers in order.

    Raises:
        LaunchError: the server refuses a prompt or stops answering.
    """
    start = time.perf_counter()
    with ThreadPoolExecutor(max_workers=concurrency) as pool:
        pending = [pool.submit(ask, client, row, max_new_tokens, template_kwargs) for row in prompts]
        try:
            answers = tuple(future.result() for future in pending)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            client.close()  # ends the requests that are still under way
            raise
    return WorkloadResult(answers, time.perf_counter() - start)


def ask(
    client: ServerClient, row: ChatRow, max_new_tokens: int, template_kwargs: Mapping[str, Any] | None = None
) -> Answer:
    """Ask one prompt.

    Raises:
        LaunchError: the server refuses it or stops answering.
    """
    start = time.perf_counter()
    try:
        reply = client.chat(row.messages, max_new_tokens, tools=row.tools, template_kwargs=template_kwargs)
    except httpx.HTTPError as error:
        raise LaunchError(
            f"the server failed on a prompt: {error or type(error).__name__}",
            where="serve.benchmark",
            remedy="see the server's log; prompt and answer must fit serve.max_model_len",
        ) from error
    text = reply["choices"][0]["message"]["content"] or ""
    return Answer(text, reply["usage"]["completion_tokens"], time.perf_counter() - start)
