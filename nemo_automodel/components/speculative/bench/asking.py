# SPDX-License-Identifier: Apache-2.0
"""Ask a whole workload at one level of concurrency, with vLLM's counters around it.

At concurrency 1 the counters are also read after each conversation, outside the measured time: then drafts and
accepted tokens are known per prompt, exactly. vLLM has no other per-request figure.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Mapping

import httpx

from nemo_automodel.components.speculative.bench.streaming import Answer, Asking, ask
from nemo_automodel.components.speculative.bench.workload import Prompt
from nemo_automodel.components.speculative.serve.client import ServerClient
from nemo_automodel.components.speculative.serve.counters import SpecDecodeCounters
from nemo_automodel.errors import LaunchError

SETTLE_S = 5.0  # the server writes its counters after the last answer has been sent
AGREE_S = 0.02  # two readings this far apart that are equal: nothing more comes after one conversation


@dataclass(frozen=True)
class Conversation:
    """One prompt's answers, one per turn; `counters` are its own drafts where they are known."""

    subset: str
    answers: tuple[Answer, ...]
    counters: SpecDecodeCounters | None = None

    @property
    def tokens(self) -> int:
        return sum(answer.completion_tokens for answer in self.answers)

    @property
    def seconds(self) -> float:
        return sum(answer.seconds for answer in self.answers)

    @property
    def steps(self) -> int | None:
        """Chunks after the first of each answer; None when the server does not say."""
        steps = [answer.steps for answer in self.answers]
        return None if None in steps else sum(steps)


@dataclass(frozen=True)
class LevelRun:
    """All conversations at one concurrency, in the order of the prompts."""

    concurrency: int
    conversations: tuple[Conversation, ...]
    seconds: float  # wall time; at concurrency 1 without the pauses in which counters are read
    counters: SpecDecodeCounters | None = None  # of the whole level

    @property
    def tokens(self) -> int:
        return sum(conversation.tokens for conversation in self.conversations)

    @property
    def requests(self) -> int:
        return sum(len(conversation.answers) for conversation in self.conversations)

    @property
    def tokens_per_s(self) -> float:
        """Output tokens of all prompts / wall time."""
        return self.tokens / self.seconds


def run_level(
    client: ServerClient,
    prompts: tuple[Prompt, ...],
    asking: Asking,
    *,
    concurrency: int,
    counting: bool,
    drafts_every_step: bool = True,
) -> LevelRun:
    """Ask every prompt, `concurrency` conversations at a time. `counting`: the server has spec-decode counters.

    `drafts_every_step` is false for a lookup that proposes only where it finds something: how many drafts one
    conversation counts is then not known beforehand, so only the whole level is counted.

    Raises:
        LaunchError: the server refuses a prompt or stops answering.
    """
    before = settled_counters(client) if counting else None
    if concurrency == 1:
        conversations, seconds = _one_by_one(client, prompts, asking, before if drafts_every_step else None)
    else:
        start = time.perf_counter()
        conversations = _together(client, prompts, asking, concurrency)
        seconds = time.perf_counter() - start
    after = settled_counters(client) if counting else None
    return LevelRun(concurrency, conversations, seconds, after - before if before and after else after)


def warm_up(client: ServerClient, prompts: tuple[Prompt, ...], asking: Asking, concurrency: int) -> None:
    """The first prompts once, as many at a time as will be measured; nothing of it is counted.

    Raises:
        LaunchError: the server refuses a prompt or stops answering.
    """
    first = tuple(Prompt(prompt.row) for prompt in prompts[:concurrency])
    _together(client, first, asking, concurrency)


def converse(client: ServerClient, prompt: Prompt, asking: Asking, seed: int) -> Conversation:
    """Ask turn by turn; each later turn follows the server's own answers.

    Raises:
        LaunchError: the server refuses a turn or stops answering.
    """
    messages: list[Mapping[str, Any]] = list(prompt.row.messages)
    answers = [ask(client, messages, asking, tools=prompt.row.tools, seed=seed)]
    for turn in prompt.followups:
        messages += [{"role": "assistant", "content": answers[-1].text}, {"role": "user", "content": turn}]
        answers.append(ask(client, messages, asking, tools=prompt.row.tools, seed=seed))
    return Conversation(prompt.subset, tuple(answers))


def _one_by_one(
    client: ServerClient, prompts: tuple[Prompt, ...], asking: Asking, before: SpecDecodeCounters | None
) -> tuple[tuple[Conversation, ...], float]:
    conversations, busy = [], 0.0
    for seed, prompt in enumerate(prompts):
        start = time.perf_counter()
        conversation = converse(client, prompt, asking, seed)
        busy += time.perf_counter() - start
        if before is not None:
            after = _counters_after(client, before, conversation.steps or 0)
            conversation = Conversation(conversation.subset, conversation.answers, after - before)
            before = after
        conversations.append(conversation)
    return tuple(conversations), busy


def _together(
    client: ServerClient, prompts: tuple[Prompt, ...], asking: Asking, concurrency: int
) -> tuple[Conversation, ...]:
    with ThreadPoolExecutor(max_workers=concurrency) as pool:
        pending = [pool.submit(converse, client, prompt, asking, seed) for seed, prompt in enumerate(prompts)]
        try:
            return tuple(future.result() for future in pending)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            client.close()  # ends the requests that are still under way
            raise


def _counters_after(client: ServerClient, before: SpecDecodeCounters, steps: int) -> SpecDecodeCounters:
    """The counters once they hold at least `steps` more drafts and two readings agree."""
    deadline = time.monotonic() + SETTLE_S
    last = _counters(client) or before
    while time.monotonic() < deadline:
        time.sleep(AGREE_S)
        now = _counters(client) or before
        if now == last and now.num_drafts - before.num_drafts >= steps:
            break
        last = now
    return last


def settled_counters(client: ServerClient) -> SpecDecodeCounters | None:
    """The counters once two readings in a row agree."""
    deadline = time.monotonic() + SETTLE_S
    last = _counters(client)
    while time.monotonic() < deadline:
        time.sleep(0.1)
        now = _counters(client)
        if now == last:
            break
        last = now
    return last


def _counters(client: ServerClient) -> SpecDecodeCounters | None:
    try:
        return client.counters()
    except httpx.HTTPError as error:
        what = f"the server's counters cannot be read: {str(error) or type(error).__name__}"
        raise LaunchError(what, where="serve.benchmark", remedy="see the server's log") from error
