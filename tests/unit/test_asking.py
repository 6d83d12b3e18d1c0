# SPDX-License-Identifier: Apache-2.0
"""Requests against a server of our own: times and tokens of each, several turns, order, and a server that fails."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from launching import launch

from nemo_automodel.components.datasets.rows import ChatRow
from nemo_automodel.components.speculative.bench.asking import SETTLE_S, run_level, warm_up
from nemo_automodel.components.speculative.bench.streaming import Answer, Asking, ask
from nemo_automodel.components.speculative.bench.workload import Prompt
from nemo_automodel.errors import LaunchError

ASKING = Asking(max_new_tokens=8)


def _prompt(text: str, *followups: str, **row) -> Prompt:
    return Prompt(ChatRow(1, ({"role": "user", "content": text},), **row), followups)


def _asked(log: Path) -> list[dict]:
    return [body for line in log.read_text().splitlines() if "messages" in (body := json.loads(line))]


@pytest.mark.parametrize("concurrency", [1, 4])
@pytest.mark.parametrize("stream", [True, False])
def test_answers_keep_the_order_of_the_prompts(tmp_path: Path, concurrency: int, stream: bool) -> None:
    prompts = tuple(_prompt(str(i)) for i in range(9))
    with launch(tmp_path, "good") as (client, _):
        warm_up(client, prompts, ASKING, concurrency)
        run = run_level(client, prompts, Asking(8, stream=stream), concurrency=concurrency, counting=True)
    assert [c.answers[0].text for c in run.conversations] == [f"echo {i}" for i in range(9)]
    assert run.tokens == 72 and run.tokens_per_s == pytest.approx(72 / run.seconds)
    assert run.counters.num_drafts == 9 * 4  # the warm-up is not in it
    alone = [c.counters.num_drafts if c.counters else None for c in run.conversations]
    assert alone == [4 if concurrency == 1 else None] * 9
    assert [c.steps for c in run.conversations] == [4 if stream else None] * 9


def test_a_lookup_that_seldom_finds_anything_is_not_waited_for(tmp_path: Path) -> None:
    """It counts no draft for most steps; waiting for those cost five seconds a prompt."""
    with launch(tmp_path, "never_drafts", speculative=False) as (client, _):
        start = time.monotonic()
        run = run_level(client, (_prompt("a"),) * 3, ASKING, concurrency=1, counting=True, drafts_every_step=False)
        assert time.monotonic() - start < SETTLE_S
    assert run.counters.num_drafts == 0 and [c.counters for c in run.conversations] == [None] * 3


def test_every_chunk_is_timed_and_says_its_tokens(tmp_path: Path) -> None:
    with launch(tmp_path, "good") as (client, _):
        answer = ask(client, [{"role": "user", "content": "a\u2028b"}], ASKING)
    assert answer.text == "echo a\u2028b"  # a line separator in a text ends no line of the stream
    assert answer.chunk_tokens == (1, 2, 2, 2, 1) and answer.completion_tokens == 8 and answer.prompt_tokens == 3
    assert list(answer.chunk_s) == sorted(answer.chunk_s) and answer.chunk_s[-1] <= answer.seconds
    assert answer.ttft_s == answer.chunk_s[0]
    assert answer.itl_s == pytest.approx((answer.chunk_s[-1] - answer.chunk_s[0]) / 7)


def test_one_token_has_no_latency_between_tokens() -> None:
    assert Answer("x", 1, 0.5, chunk_s=(0.4,), chunk_tokens=(1,)).itl_s is None
    assert Answer("x", 3, 0.5, chunk_s=(0.4,), chunk_tokens=(3,)).itl_s is None


def test_later_turns_follow_the_servers_own_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_SERVER_LOG", str(tmp_path / "asked.jsonl"))
    with launch(tmp_path, "good") as (client, _):
        run = run_level(client, (_prompt("a", "b"),), ASKING, concurrency=1, counting=True)
    second = _asked(tmp_path / "asked.jsonl")[1]["messages"]
    assert [(m["role"], m["content"]) for m in second] == [("user", "a"), ("assistant", "echo a"), ("user", "b")]
    assert (run.requests, run.tokens, run.conversations[0].counters.num_drafts) == (2, 16, 8)


def test_tools_template_and_temperature_reach_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft was trained on prompts that had them: without them another prompt is measured."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    monkeypatch.setenv("FAKE_SERVER_LOG", str(tmp_path / "asked.jsonl"))
    prompts = (_prompt("a", tools=(tool,)), _prompt("b"))
    with launch(tmp_path, "good") as (client, _):
        asking = Asking(5, template_kwargs={"enable_thinking": False})
        run_level(client, prompts, asking, concurrency=1, counting=False)
        run_level(client, prompts, Asking(5, temperature=0.7), concurrency=1, counting=False)
    first, second, _, drawn = _asked(tmp_path / "asked.jsonl")
    assert (first["tools"], first["tool_choice"]) == ([tool], "none")  # in the prompt, never answered with a call
    assert "tools" not in second and "tool_choice" not in second
    assert first["chat_template_kwargs"] == second["chat_template_kwargs"] == {"enable_thinking": False}
    assert (first["temperature"], "seed" in first, drawn["temperature"], drawn["seed"]) == (0.0, False, 0.7, 1)


@pytest.mark.parametrize(
    ("behaviour", "told"),
    [
        ("fails_on_chat", "400 .*maximum context length"),
        ("falls_silent", "no sign of life for 0.3 s .*stall_s"),
        ("breaks_off", "broke off|peer closed"),
        ("dies_in_an_answer", "the server failed"),
    ],
)
@pytest.mark.parametrize("concurrency", [1, 3])
def test_a_server_that_fails_is_an_error_not_a_number(
    tmp_path: Path, behaviour: str, told: str, concurrency: int
) -> None:
    start = time.monotonic()
    with launch(tmp_path, behaviour) as (client, _):
        with pytest.raises(LaunchError, match=told):
            run_level(client, (_prompt("a"),) * 4, Asking(5, stall_s=0.3), concurrency=concurrency, counting=False)
    assert time.monotonic() - start < 60  # it never waits for ever
