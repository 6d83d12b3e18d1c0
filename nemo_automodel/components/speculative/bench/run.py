# SPDX-License-Identifier: Apache-2.0
"""The benchmark: the same prompts with the draft, without it, with n-gram lookup, and as the reference predicts."""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Callable

from nemo_automodel.components.datasets.rows import ChatRow
from nemo_automodel.components.speculative.bench.metrics import (
    acceptance_length,
    acceptance_rate,
    per_position,
    tokens_per_step_overall,
    useful_tokens_per_step,
)
from nemo_automodel.components.speculative.bench.parity import (
    WHERE_TO_LOOK,
    ParityJob,
    Prediction,
    compare,
    predict,
    reference_dtype,
    unpredictable,
)
from nemo_automodel.components.speculative.bench.workload import (
    WHERE,
    WorkloadResult,
    ask,
    load_prompts,
    run_workload,
)
from nemo_automodel.components.speculative.serve.client import ServerClient
from nemo_automodel.components.speculative.serve.command import build_baseline_command, build_command
from nemo_automodel.components.speculative.serve.counters import SpecDecodeCounters
from nemo_automodel.components.speculative.serve.launch import running_server, stopping_servers
from nemo_automodel.components.speculative.serve.port import find_port
from nemo_automodel.components.speculative.serve.types import Exported, Fixups, LaunchCommand, ServerInfo, ServeSpec
from nemo_automodel.components.speculative.serve.vllm_release import VllmRelease
from nemo_automodel.errors import ConfigError, GateError

SETTLE_S = 5.0  # the server writes its counters after the last answer has been sent
Say = Callable[[str], None]


@dataclass(frozen=True)
class BenchmarkJob:
    """Everything the benchmark needs; logs and parity files go into `job_dir`. A local `spec.target` is absolute."""

    spec: ServeSpec
    fixups: Fixups
    exported: Exported
    release: VllmRelease
    job_dir: Path


@dataclass(frozen=True)
class BenchmarkResult:
    """What was measured. Lengths in tokens per verification step, rates in tokens/s; None: not asked for."""

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

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, keys as in design section 3."""
        return asdict(self)


@dataclass(frozen=True)
class _Measured:
    work: WorkloadResult
    counters: SpecDecodeCounters | None


def run_benchmark(
    job: BenchmarkJob,
    *,
    say: Say,
    on_server: Callable[[LaunchCommand, ServerInfo], None],
    on_result: Callable[[BenchmarkResult], None],
) -> BenchmarkResult:
    """Measure. One server at a time; each is gone before the next starts.

    `on_server` is told of the speculative server; `on_result` of what was measured, before the reference decoder runs.

    Raises:
        ConfigError: no prompts are named.
        DataError: the prompts cannot be read.
        LaunchError: a server does not start, work or stop, or the reference decoder fails.
        Interrupted: SIGINT or SIGTERM.
    """
    bench = job.spec.benchmark
    if bench.prompts is None:
        raise ConfigError(
            "no prompts to ask", where=WHERE, remedy=f"add {WHERE}=rows.jsonl, or data.validation=rows.jsonl"
        )
    prompts = load_prompts(bench.prompts, bench.num_prompts, split=bench.split, column=bench.column)
    with stopping_servers():
        served = _measure(job, "speculative", prompts, say, on_server)
        baseline = _measure(job, "baseline", prompts, say) if bench.baseline else None
        ngram = _measure(job, "ngram", prompts, say) if bench.ngram else None
        result = _result(job, served, baseline, ngram)
        on_result(result)
        return replace(result, predicted=_predict(job, prompts, served.counters, say)) if bench.parity else result


def check_gate(result: BenchmarkResult, minimum: float | None) -> None:
    """Hold the measured acceptance length against the gate.

    Raises:
        GateError: it is below (exit code 3).
    """
    if minimum is not None and result.acceptance_length < minimum:
        raise GateError(
            f"acceptance length {result.acceptance_length:.3f} is below {minimum}",
            where="serve.benchmark.min_acceptance_length",
            remedy="train longer or on more data, or lower the gate",
        )


def _command(job: BenchmarkJob, kind: str, port: int) -> LaunchCommand:
    if kind == "speculative":
        return build_command(job.exported.dir, job.fixups, job.spec, job.release, job.spec.python, port, os.environ)
    return build_baseline_command(
        job.spec,
        job.release,
        job.spec.python,
        port,
        ngram=kind == "ngram",
        num_speculative_tokens=job.fixups.num_speculative_tokens,
        environ=os.environ,
    )


def _measure(
    job: BenchmarkJob,
    kind: str,
    prompts: tuple[ChatRow, ...],
    say: Say,
    on_server: Callable[[LaunchCommand, ServerInfo], None] | None = None,
) -> _Measured:
    spec, bench = job.spec, job.spec.benchmark
    port = find_port(spec.host, spec.port)
    command = _command(job, kind, port)
    log = job.job_dir / f"server_{kind}.log"
    speculative = kind == "speculative"
    say(f"{kind}: {len(prompts)} prompts, at most {bench.max_new_tokens} tokens each, {bench.concurrency} at once")
    with running_server(command, host=spec.host, port=port, log=log, speculative=speculative, say=say) as (
        client,
        info,
    ):
        if on_server:
            on_server(command, info)
        ask(client, prompts[0], bench.max_new_tokens, bench.chat_template_kwargs)  # warm-up, not counted
        before = _settled_counters(client)
        work = run_workload(
            client,
            prompts,
            max_new_tokens=bench.max_new_tokens,
            concurrency=bench.concurrency,
            template_kwargs=bench.chat_template_kwargs,
        )
        after = _settled_counters(client)
    say(f"{kind}: {work.output_tokens} tokens in {work.seconds:.1f} s, {work.tokens_per_s:.1f} tokens/s")
    return _Measured(work, after - before if before and after else after)


def _settled_counters(client: ServerClient) -> SpecDecodeCounters | None:
    """The counters once two readings in a row agree."""
    deadline = time.monotonic() + SETTLE_S
    last = client.counters()
    while time.monotonic() < deadline:
        time.sleep(0.1)
        now = client.counters()
        if now == last:
            break
        last = now
    return last


def _predict(
    job: BenchmarkJob, prompts: tuple[ChatRow, ...], served: SpecDecodeCounters, say: Say
) -> Prediction | None:
    if form := unpredictable(job.fixups):
        say(f"warning: nothing is predicted: the reference decoder does not know {form}")
        return None
    dtype = reference_dtype(job.spec.dtype)
    say(f"reference decoder: the same prompts in {dtype}")
    parity = ParityJob(
        job_dir=job.job_dir,
        target=job.spec.target,
        draft=job.exported.dir,
        prompts=prompts,
        max_new_tokens=job.spec.benchmark.max_new_tokens,
        num_speculative_tokens=job.fixups.num_speculative_tokens,
        dtype=dtype,
        trust_remote_code=job.spec.trust_remote_code,
        template_kwargs=job.spec.benchmark.chat_template_kwargs,
    )
    prediction = compare(predict(parity), served, dtype)
    if not prediction.agrees:
        say(f"warning: served and predicted acceptance differ by {prediction.max_difference:.3f}: {WHERE_TO_LOOK}")
    return prediction


def _result(
    job: BenchmarkJob, served: _Measured, baseline: _Measured | None, ngram: _Measured | None
) -> BenchmarkResult:
    counters, work = served.counters, served.work
    same = baseline and sum(a.text == b.text for a, b in zip(work.answers, baseline.work.answers, strict=True))
    return BenchmarkResult(
        acceptance_length=acceptance_length(counters),
        acceptance_rate=acceptance_rate(counters),
        acceptance_per_position=per_position(counters),
        num_drafts=counters.num_drafts,
        useful_tokens_per_step=useful_tokens_per_step(counters, work.output_tokens, len(work.answers)),
        tokens_per_s=work.tokens_per_s,
        baseline_tokens_per_s=baseline.work.tokens_per_s if baseline else None,
        speedup=work.tokens_per_s / baseline.work.tokens_per_s if baseline else None,
        prompts=len(work.answers),
        output_tokens=work.output_tokens,
        k=job.fixups.num_speculative_tokens,
        text_equal=same,
        ngram_acceptance_length=acceptance_length(ngram.counters) if ngram and ngram.counters else None,
        ngram_tokens_per_step=_ngram_tokens_per_step(ngram),
        ngram_tokens_per_s=ngram.work.tokens_per_s if ngram else None,
        predicted=None,
    )


def _ngram_tokens_per_step(ngram: _Measured | None) -> float | None:
    if ngram is None or ngram.counters is None:
        return None
    return tokens_per_step_overall(ngram.counters, ngram.work.output_tokens, len(ngram.work.answers))
