# SPDX-License-Identifier: Apache-2.0
"""Answers made by hand -> figures that can be computed by hand."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest

from nemo_automodel.components.speculative.bench.asking import Conversation, LevelRun
from nemo_automodel.components.speculative.bench.confidence import paired_interval, ratio_interval
from nemo_automodel.components.speculative.bench.figures import first_difference, level_figures, subset_figures
from nemo_automodel.components.speculative.bench.plain import from_plain
from nemo_automodel.components.speculative.bench.result import BenchmarkResult, Measured, build_result
from nemo_automodel.components.speculative.bench.streaming import Answer
from nemo_automodel.components.speculative.serve.counters import SpecDecodeCounters


def answer(seconds: float, *chunks: int, text: str = "same", first: float = 0.1, gap: float = 0.05) -> Answer:
    times = tuple(first + gap * i for i in range(len(chunks)))
    return Answer(text, sum(chunks), seconds, chunk_s=times, chunk_tokens=chunks)


def talk(*answers: Answer, subset: str = "", accepted: tuple[int, ...] | None = None, drafts: int = 0) -> Conversation:
    own = None if accepted is None else SpecDecodeCounters(drafts, drafts * len(accepted), sum(accepted), accepted)
    return Conversation(subset, answers, own)


def level(*talks: Conversation, seconds: float | None = None, counters=None, concurrency: int = 1) -> LevelRun:
    return LevelRun(concurrency, talks, seconds or sum(t.seconds for t in talks), counters)


ALONE = level(
    talk(answer(1.0, 1, 3, 2), accepted=(2, 1), drafts=2, subset="a"),
    talk(answer(2.0, 1, 1), answer(1.0, 1, 2, 2), accepted=(1, 2), drafts=3, subset="b"),
)


def test_at_concurrency_1_everything_is_counted_per_prompt() -> None:
    got = level_figures(ALONE, None)
    assert (got.prompts, got.requests, got.output_tokens) == (2, 3, 13)
    assert got.tokens_per_s == pytest.approx(13 / 4.0)
    a = got.acceptance
    assert (a.num_drafts, a.acceptance_length, a.source) == (5, 1 + 6 / 5, "counters")
    assert a.acceptance_per_position == (3 / 5, 3 / 5) and len(a.acceptance_per_position_intervals) == 2
    assert a.useful_tokens_per_step == pytest.approx((13 - 3) / 5)  # one token of each request is the prefill's
    assert a.acceptance_length_interval == pytest.approx((2.0, 2.5))  # prompt b alone, prompt a alone
    one, two = subset_figures(ALONE, None)
    assert (one.name, one.acceptance.acceptance_length, two.acceptance.num_drafts) == ("a", 2.5, 3)
    assert (one.tokens_per_s, two.tokens_per_s) == (6.0, pytest.approx(7 / 3))


def test_together_drafts_are_the_levels_and_steps_are_the_chunks() -> None:
    talks = [talk(answer(2.0, 1, 3, 2), subset="a"), talk(answer(2.0, 1, 1, 1), subset="b")]
    counted = SpecDecodeCounters(4, 8, 5, (3, 2))
    got = level_figures(level(*talks, seconds=2.5, counters=counted, concurrency=2), None)
    assert got.tokens_per_s == pytest.approx(9 / 2.5)
    assert (got.acceptance.acceptance_length, got.acceptance.acceptance_length_interval) == (2.25, None)
    assert got.acceptance.source == "chunks" and got.acceptance.useful_tokens_per_step_interval == (1.0, 2.5)
    merged = level(*talks, seconds=2.5, counters=replace(counted, num_drafts=5), concurrency=2)
    got = level_figures(merged, None).acceptance  # one chunk held two steps: chunks are no steps
    assert (got.source, got.useful_tokens_per_step) == ("counters of the level", 7 / 5)
    assert [one.acceptance.useful_tokens_per_step for one in subset_figures(merged, None)] == [None, None]
    one, two = subset_figures(level(*talks, seconds=2.5, counters=counted, concurrency=2), None)
    assert (one.acceptance.useful_tokens_per_step, two.acceptance.source) == (2.5, "chunks")
    assert one.acceptance.acceptance_length is None  # a level's counters do not say whose drafts they are
    assert one.tokens_per_s == pytest.approx(6 / 2.0 * 4.0 / 2.5)


def test_speedup_is_paired_by_prompt() -> None:
    """A long easy prompt and a short hard one, each twice as fast: no draw says anything else."""
    base = level(talk(answer(2.0, *[1] * 6)), talk(answer(6.0, *[1] * 7)))
    ours = level(talk(answer(1.0, 1, 5)), talk(answer(3.0, 1, 6)))
    got = level_figures(ours, base)
    assert got.speedup == pytest.approx(2.0) and got.speedup_interval == pytest.approx((2.0, 2.0))
    low, high = got.tokens_per_s_interval
    assert low < got.tokens_per_s < high


def test_latency_is_what_a_reader_sees() -> None:
    got = level_figures(level(talk(answer(1.0, 1, 3, 2))), None).latency
    assert got.ttft_ms.p50 == pytest.approx(100) and got.chunk_gap_ms.p99 == pytest.approx(50)
    assert got.itl_ms.p50 == pytest.approx(100 / 5)  # two gaps of 50 ms brought five tokens
    assert (got.tokens_per_chunk, got.request_tokens_per_s.p90) == (2.5, 6.0)
    silent = level_figures(level(talk(Answer("x", 6, 1.0))), None).latency
    assert (silent.ttft_ms, silent.itl_ms, silent.chunk_gap_ms, silent.tokens_per_chunk) == (None,) * 4


def test_the_first_difference_of_texts_is_shown() -> None:
    base = level(talk(answer(1, 1)), talk(answer(1, 1), answer(1, 1, text="the quick brown fox jumps")))
    ours = level(talk(answer(1, 1)), talk(answer(1, 1), answer(1, 1, text="the quick brown fix jumps")))
    got = first_difference(ours, base)
    assert (got.prompt, got.turn, got.position) == (1, 1, 17)
    assert (got.served, got.baseline) == ("the quick brown fix jumps", "the quick brown fox jumps")
    assert first_difference(base, base) is None
    assert level_figures(ours, base).text_equal == 1 and level_figures(ours, base, comparing=False).text_equal is None
    longer = level(talk(answer(1, 1, text="same and more")), base.conversations[1])
    assert first_difference(longer, base).position == 4


def test_intervals_repeat_and_narrow_with_more_prompts() -> None:
    few, many = [3.0, 5.0, 4.0, 8.0], [3.0, 5.0, 4.0, 8.0] * 25
    assert ratio_interval(few, [2] * 4) == ratio_interval(few, [2] * 4)
    width = [high - low for low, high in (ratio_interval(v, [2] * len(v)) for v in (few, many))]
    assert width[1] < width[0] / 3
    assert ratio_interval([3.0], [2]) is None and ratio_interval([1, 1], [0, 0]) is None
    assert paired_interval([1, 2], [1, 1], [1, 2], [1, 1]) == (1.0, 1.0)


def test_an_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    import random

    draw = random.Random(1)
    hits = 0
    for _ in range(100):
        drafts = [draw.randint(5, 40) for _ in range(40)]
        low, high = ratio_interval([sum(draw.random() < 0.7 for _ in range(n)) for n in drafts], drafts)
        hits += low <= 0.7 <= high
    assert 86 <= hits <= 100


def test_a_result_comes_back_from_its_json() -> None:
    base = replace(ALONE, counters=None)
    result = build_result(Measured((ALONE,)), Measured((base,)), None, k=2, spec_digest="d")
    again = BenchmarkResult.from_dict(json.loads(json.dumps(result.to_dict())))
    assert again == result and again.subsets[1].acceptance.acceptance_length == 2.0
    assert from_plain(Measured, json.loads(json.dumps(asdict(Measured((ALONE,)))))) == Measured((ALONE,))
    assert any("subset b" in line for line in result.notes())


def test_without_speculation_nothing_is_accepted_and_nothing_gained() -> None:
    base = level(talk(answer(1, 1, 1, 1)), talk(answer(1, 1, 2)))  # a slow reader finds two steps in one chunk
    result = build_result(Measured((base,)), Measured((base,)), None, k=0)
    assert (result.k, result.acceptance_length, result.acceptance_per_position, result.num_drafts) == (0, 1.0, (), 0)
    assert (result.speedup, result.speedup_interval, result.useful_tokens_per_step) == (1.0, (1.0, 1.0), 1.0)
