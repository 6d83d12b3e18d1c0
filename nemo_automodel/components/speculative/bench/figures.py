# SPDX-License-Identifier: Apache-2.0
"""Answers -> figures: of a level of concurrency, and of each subset in it. Definitions: docs/measuring.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Sequence

import numpy as np

from nemo_automodel.components.speculative.bench.asking import Conversation, LevelRun
from nemo_automodel.components.speculative.bench.confidence import Interval, paired_interval, ratio_interval
from nemo_automodel.components.speculative.bench.metrics import (
    acceptance_length,
    acceptance_rate,
    per_position,
    useful_tokens_per_step,
)
from nemo_automodel.components.speculative.serve.counters import SpecDecodeCounters

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Percentiles:
    """Of one quantity; its unit is in the name of the field that holds it."""

    p50: float
    p90: float
    p99: float


@dataclass(frozen=True)
class Latency:
    """What one user sees. Over requests; chunk gaps over all chunks after each request's first."""

    ttft_ms: Percentiles | None  # request sent -> first chunk with a token
    itl_ms: Percentiles | None  # (last chunk - first chunk) / tokens after the first chunk's
    chunk_gap_ms: Percentiles | None  # between neighbouring chunks: how long the text stands still
    request_tokens_per_s: Percentiles  # tokens / seconds of the request; p90 is the rate that 90 % fall below
    tokens_per_chunk: float | None  # after the first chunk of each answer


@dataclass(frozen=True)
class Acceptance:
    """Shares of drafts; None where nothing was counted. Intervals: 95 %, over prompts; None where not known."""

    acceptance_length: float | None = None  # 1 + accepted / drafts
    acceptance_length_interval: Interval | None = None
    acceptance_rate: float | None = None  # accepted / drafted
    acceptance_per_position: tuple[float, ...] = ()  # [K]
    acceptance_per_position_intervals: tuple[Interval, ...] = ()  # [K], or empty
    num_drafts: int | None = None
    useful_tokens_per_step: float | None = None  # returned tokens after the prefill's / steps
    useful_tokens_per_step_interval: Interval | None = None
    source: str | None = None  # of the steps: "counters" per prompt, "counters of the level", "chunks", or None


@dataclass(frozen=True)
class Figures:
    """One level of concurrency, or one subset of it."""

    name: str  # the subset; "" is all of the level
    concurrency: int
    prompts: int
    requests: int  # a prompt of two turns makes two
    output_tokens: int
    tokens_per_s: float
    tokens_per_s_interval: Interval | None
    baseline_tokens_per_s: float | None
    speedup: float | None
    speedup_interval: Interval | None
    text_equal: int | None  # prompts whose every answer equals the baseline's
    acceptance: Acceptance
    latency: Latency
    baseline_latency: Latency | None


def level_figures(run: LevelRun, baseline: LevelRun | None, *, comparing: bool = True) -> Figures:
    """Figures of everything asked at one concurrency. `comparing`: texts should be equal (temperature 0)."""
    return _figures("", run, run.conversations, baseline, comparing)


def subset_figures(run: LevelRun, baseline: LevelRun | None, *, comparing: bool = True) -> tuple[Figures, ...]:
    """The same for each subset, in the order of the workload; empty when there are fewer than two.

    At concurrency above 1 a subset has no wall time of its own: its rate is tokens / summed request seconds, times the
    number of requests that were under way on average.
    """
    names = list(dict.fromkeys(conversation.subset for conversation in run.conversations))
    if len(names) < 2:
        return ()
    wanted = {name: [c.subset == name for c in run.conversations] for name in names}
    return tuple(_figures(name, run, _pick(run, wanted[name]), baseline, comparing, wanted[name]) for name in names)


def _pick(run: LevelRun, wanted: Sequence[bool]) -> tuple[Conversation, ...]:
    return tuple(c for c, want in zip(run.conversations, wanted, strict=True) if want)


def _figures(
    name: str,
    run: LevelRun,
    asked: tuple[Conversation, ...],
    baseline: LevelRun | None,
    comparing: bool,
    wanted: Sequence[bool] | None = None,
) -> Figures:
    tokens, seconds = [c.tokens for c in asked], [c.seconds for c in asked]
    busy = _overlap(run)
    base = None if baseline is None else baseline.conversations if wanted is None else _pick(baseline, wanted)
    base_rate = speedup = speedup_interval = text_equal = None
    if base is not None:
        base_tokens, base_seconds = [c.tokens for c in base], [c.seconds for c in base]
        base_rate = sum(base_tokens) / sum(base_seconds) * _overlap(baseline)
        speedup = sum(tokens) / sum(seconds) * busy / base_rate
        speedup_interval = paired_interval(tokens, seconds, base_tokens, base_seconds, times=busy / _overlap(baseline))
        text_equal = sum(_texts(a) == _texts(b) for a, b in zip(asked, base, strict=True)) if comparing else None
    return Figures(
        name=name,
        concurrency=run.concurrency,
        prompts=len(asked),
        requests=sum(len(c.answers) for c in asked),
        output_tokens=sum(tokens),
        tokens_per_s=sum(tokens) / sum(seconds) * busy,
        tokens_per_s_interval=ratio_interval(tokens, seconds, times=busy),
        baseline_tokens_per_s=base_rate,
        speedup=speedup,
        speedup_interval=speedup_interval,
        text_equal=text_equal,
        acceptance=_acceptance(asked, run),
        latency=latency(asked),
        baseline_latency=None if base is None else latency(base),
    )


def _overlap(run: LevelRun) -> float:
    """Requests under way at a time, on average."""
    return sum(c.seconds for c in run.conversations) / run.seconds


def _texts(conversation: Conversation) -> tuple[str, ...]:
    return tuple(answer.text for answer in conversation.answers)


def _acceptance(asked: tuple[Conversation, ...], run: LevelRun) -> Acceptance:
    """Per prompt from its own counters where all have them, else the level's; steps from chunks where no chunk of the
    level holds two steps."""
    own = [c.counters for c in asked]
    if own and None not in own:
        return _counted(asked, own)
    level, all_steps = run.counters, [c.steps for c in run.conversations]
    if level is None or not level.num_drafts:  # without speculation
        return Acceptance()
    exact = None not in all_steps and sum(all_steps) == level.num_drafts
    later, steps = [c.tokens - len(c.answers) for c in asked], [c.steps for c in asked]
    interval = ratio_interval(later, steps) if exact else None
    if len(asked) < len(run.conversations):  # a subset: what it had of the level's drafts is known by chunks only
        useful = sum(later) / sum(steps) if exact and sum(steps) else None
        return Acceptance(
            useful_tokens_per_step=useful, useful_tokens_per_step_interval=interval, source="chunks" if useful else None
        )
    return Acceptance(
        acceptance_length=acceptance_length(level),
        acceptance_rate=acceptance_rate(level),
        acceptance_per_position=per_position(level),
        num_drafts=level.num_drafts,
        useful_tokens_per_step=useful_tokens_per_step(level, run.tokens, run.requests),
        useful_tokens_per_step_interval=interval,
        source="chunks" if exact else "counters of the level",
    )


def _counted(asked: tuple[Conversation, ...], own: list[SpecDecodeCounters]) -> Acceptance:
    drafts, accepted = [c.num_drafts for c in own], [c.num_accepted_tokens for c in own]
    depth = max((len(c.accepted_per_position) for c in own), default=0)
    places = [[(c.accepted_per_position + (0,) * depth)[i] for c in own] for i in range(depth)]
    total = SpecDecodeCounters(
        sum(drafts), sum(c.num_draft_tokens for c in own), sum(accepted), tuple(sum(place) for place in places)
    )
    if not total.num_drafts:
        return Acceptance()
    requests = sum(len(c.answers) for c in asked)
    later = [c.tokens - len(c.answers) for c in asked]
    intervals = [ratio_interval(place, drafts) for place in places]
    return Acceptance(
        acceptance_length=acceptance_length(total),
        acceptance_length_interval=ratio_interval(accepted, drafts, plus=1.0),
        acceptance_rate=acceptance_rate(total),
        acceptance_per_position=per_position(total),
        acceptance_per_position_intervals=() if None in intervals else tuple(intervals),
        num_drafts=total.num_drafts,
        useful_tokens_per_step=useful_tokens_per_step(total, sum(c.tokens for c in asked), requests),
        useful_tokens_per_step_interval=ratio_interval(later, drafts),
        source="counters",
    )


def latency(asked: Sequence[Conversation]) -> Latency:
    """Percentiles over the requests of these conversations; streamed quantities are None when nothing was streamed."""
    answers = [answer for conversation in asked for answer in conversation.answers]
    gaps = [1e3 * (b - a) for answer in answers for a, b in zip(answer.chunk_s, answer.chunk_s[1:])]
    later = [count for answer in answers for count in answer.chunk_tokens[1:]]
    return Latency(
        ttft_ms=_percentiles([1e3 * a.ttft_s for a in answers if a.ttft_s is not None]),
        itl_ms=_percentiles([1e3 * a.itl_s for a in answers if a.itl_s is not None]),
        chunk_gap_ms=_percentiles(gaps),
        request_tokens_per_s=_percentiles([a.completion_tokens / a.seconds for a in answers]),
        tokens_per_chunk=sum(later) / len(later) if later else None,
    )


def _percentiles(values: Sequence[float]) -> Percentiles | None:
    return Percentiles(*map(float, np.percentile(values, PERCENTILES))) if len(values) else None


@dataclass(frozen=True)
class TextDifference:
    """The first place where speculation changed the text; `position` counts characters from the answer's start."""

    prompt: int  # from 0, in the order asked
    turn: int
    position: int
    served: str  # from a little before the difference
    baseline: str


def first_difference(run: LevelRun, baseline: LevelRun, *, context: int = 20, shown: int = 80) -> TextDifference | None:
    """None when every answer is equal; a conversation differs from its first unequal turn on."""
    for number, (ours, theirs) in enumerate(zip(run.conversations, baseline.conversations, strict=True)):
        for turn, (a, b) in enumerate(zip(_texts(ours), _texts(theirs), strict=True)):
            if a != b:
                place = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
                begin = max(0, place - context)
                return TextDifference(number, turn, place, a[begin : begin + shown], b[begin : begin + shown])
    return None
