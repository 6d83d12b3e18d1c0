# SPDX-License-Identifier: Apache-2.0
"""`benchmark` in result.json: the headline figures, and everything behind them. Keys: docs/measuring.md."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Mapping

from nemo_automodel.components.speculative.bench.asking import LevelRun
from nemo_automodel.components.speculative.bench.confidence import Interval
from nemo_automodel.components.speculative.bench.figures import (
    Figures,
    Latency,
    TextDifference,
    first_difference,
    level_figures,
    subset_figures,
)
from nemo_automodel.components.speculative.bench.metrics import acceptance_length, tokens_per_step_overall
from nemo_automodel.components.speculative.bench.parity import Prediction
from nemo_automodel.components.speculative.bench.plain import from_plain
from nemo_automodel.components.speculative.serve.types import BenchmarkSpec
from nemo_automodel.errors import GateError


@dataclass(frozen=True)
class BenchmarkResult:
    """What was measured. Lengths in tokens per verification step, rates in tokens/s; None: not asked for.

    The headline figures are those of the first level of concurrency; intervals are 95 %, by bootstrap over prompts.
    """

    acceptance_length: float  # 1 + accepted / drafts, vLLM's counters
    acceptance_rate: float  # accepted / drafted tokens
    acceptance_per_position: tuple[float, ...]  # [K], accepted at position / drafts
    num_drafts: int
    useful_tokens_per_step: float  # returned tokens only; below acceptance_length on short answers
    tokens_per_s: float
    baseline_tokens_per_s: float | None
    speedup: float | None
    prompts: int
    output_tokens: int
    k: int
    text_equal: int | None  # prompts whose text equals the baseline's
    ngram_acceptance_length: float | None  # over the steps in which it proposed anything, as vLLM counts
    ngram_tokens_per_step: float | None  # over all steps: compare this with useful_tokens_per_step
    ngram_tokens_per_s: float | None
    predicted: Prediction | None
    requests: int = 0  # a prompt of two turns makes two
    concurrency: int = 1  # of the headline figures
    temperature: float = 0.0
    acceptance_length_interval: Interval | None = None
    acceptance_per_position_intervals: tuple[Interval, ...] = ()
    useful_tokens_per_step_interval: Interval | None = None
    tokens_per_s_interval: Interval | None = None
    speedup_interval: Interval | None = None
    acceptance_source: str | None = None  # where per-prompt steps come from: see `Acceptance.source`
    latency: Latency | None = None
    baseline_latency: Latency | None = None
    text_difference: TextDifference | None = None  # the first one
    levels: tuple[Figures, ...] = ()
    subsets: tuple[Figures, ...] = ()  # of the first level
    spec_digest: str = ""  # what was measured and how; a later run with the same one need not measure again
    baseline_digest: str = ""  # the same of the baseline; jobs of a sweep that have it equal share one measurement

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)

    def notes(self) -> list[str]:
        """What the table does not hold, a line each: intervals, latency, text, levels, subsets."""
        told = [
            ("acceptance length", self.acceptance_length_interval, ".3f"),
            ("speedup", self.speedup_interval, ".2f"),
        ]
        sure = [f"{name} {low:{form}} to {high:{form}}" for name, (low, high), form in _there(told) if self.k]
        lines = [f"95 % intervals over {self.prompts} prompts: {', '.join(sure)}"] if sure else []
        lines += _latency_line(self.latency, self.baseline_latency if self.k else None)
        if self.text_equal is not None and self.k:
            lines.append(f"text equal with and without speculation: {self.text_equal} of {self.prompts} prompts")
        if (d := self.text_difference) is not None:
            lines.append(
                f"warning: first difference: prompt {d.prompt + 1}, turn {d.turn + 1}, character {d.position}: "
                f"{d.served!r}, without speculation {d.baseline!r} (docs/measuring.md says when that is rounding)"
            )
        for figures in (*self.levels[1:], *self.subsets):
            lines.append(_figures_line(figures))
        return lines

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> BenchmarkResult:
        """Read back what `to_dict` gave.

        Raises:
            TypeError: a key is missing.
        """
        return from_plain(cls, value)


def _there(told: list[tuple[str, Interval | None, str]]) -> list[tuple[str, Interval, str]]:
    return [(name, interval, form) for name, interval, form in told if interval is not None]


def _latency_line(ours: Latency | None, base: Latency | None) -> list[str]:
    if ours is None or ours.ttft_ms is None:
        return []
    parts = []
    for name, key in (("time to first token", "ttft_ms"), ("between tokens", "itl_ms")):
        if (p := getattr(ours, key)) is not None:
            other = getattr(base, key) if base else None
            beside = f" (without speculation {other.p50:.1f})" if other else ""
            parts.append(f"{name} p50 {p.p50:.1f}{beside}, p90 {p.p90:.1f}, p99 {p.p99:.1f} ms")
    return ["; ".join(parts)]


def _figures_line(figures: Figures) -> str:
    name = f"subset {figures.name}" if figures.name else f"{figures.concurrency} at once"
    parts = [f"{figures.tokens_per_s:.1f} tokens/s"]
    if figures.speedup is not None:
        parts.append(f"{figures.speedup:.2f}x")
    if figures.acceptance.acceptance_length is not None:
        parts.append(f"acceptance length {figures.acceptance.acceptance_length:.3f}")
    return f"{name}, {figures.prompts} prompts: {', '.join(parts)}"


@dataclass(frozen=True)
class Measured:
    """One server's answers at every level of concurrency, first level first."""

    levels: tuple[LevelRun, ...]

    @property
    def first(self) -> LevelRun:
        return self.levels[0]


def build_result(
    served: Measured,
    baseline: Measured | None,
    ngram: Measured | None,
    *,
    k: int,
    temperature: float = 0.0,
    spec_digest: str = "",
    baseline_digest: str = "",
) -> BenchmarkResult:
    """All figures; pure. With `k` 0 `served` is the baseline itself."""
    comparing = temperature == 0
    bases = baseline.levels if baseline else (None,) * len(served.levels)
    levels = tuple(
        level_figures(run, base, comparing=comparing) for run, base in zip(served.levels, bases, strict=True)
    )
    first, lookup = levels[0], ngram.first if ngram else None
    counted = first.acceptance
    return BenchmarkResult(
        acceptance_length=counted.acceptance_length or 1.0,
        acceptance_rate=counted.acceptance_rate or 0.0,
        acceptance_per_position=counted.acceptance_per_position,
        num_drafts=counted.num_drafts or 0,
        useful_tokens_per_step=counted.useful_tokens_per_step or 1.0,
        tokens_per_s=first.tokens_per_s,
        baseline_tokens_per_s=first.baseline_tokens_per_s,
        speedup=first.speedup,
        prompts=first.prompts,
        output_tokens=first.output_tokens,
        k=k,
        text_equal=first.text_equal,
        ngram_acceptance_length=acceptance_length(lookup.counters) if lookup and lookup.counters else None,
        ngram_tokens_per_step=_ngram_tokens_per_step(lookup),
        ngram_tokens_per_s=lookup.tokens_per_s if lookup else None,
        predicted=None,
        requests=first.requests,
        concurrency=first.concurrency,
        temperature=temperature,
        acceptance_length_interval=counted.acceptance_length_interval,
        acceptance_per_position_intervals=counted.acceptance_per_position_intervals,
        useful_tokens_per_step_interval=counted.useful_tokens_per_step_interval,
        tokens_per_s_interval=first.tokens_per_s_interval,
        speedup_interval=first.speedup_interval,
        acceptance_source=counted.source,
        latency=first.latency,
        baseline_latency=first.baseline_latency,
        text_difference=first_difference(served.first, baseline.first) if baseline and comparing else None,
        levels=levels,
        subsets=subset_figures(served.first, bases[0], comparing=comparing),
        spec_digest=spec_digest,
        baseline_digest=baseline_digest,
    )


def _ngram_tokens_per_step(run: LevelRun | None) -> float | None:
    if run is None or run.counters is None:
        return None
    return tokens_per_step_overall(run.counters, run.tokens, run.requests)


def check_gate(result: BenchmarkResult, bench: BenchmarkSpec) -> None:
    """Hold what was measured against the gates; a server without speculation has nothing to be held against.

    Raises:
        GateError: acceptance length or speedup is below its gate (exit code 3).
    """
    if result.k == 0:
        return
    length, speedup = bench.min_acceptance_length, bench.min_speedup
    if length is not None and result.acceptance_length < length:
        raise GateError(
            f"acceptance length {result.acceptance_length:.3f} is below {length}",
            where="serve.benchmark.min_acceptance_length",
            remedy="train longer or on more data, or lower the gate",
        )
    if speedup is not None and result.speedup is not None and result.speedup < speedup:
        raise GateError(
            f"{result.speedup:.3f} times the tokens/s of no speculation is below {speedup}",
            where="serve.benchmark.min_speedup",
            remedy="try another serve.num_speculative_tokens or concurrency, train longer, or lower the gate",
        )
