# SPDX-License-Identifier: Apache-2.0
"""The benchmark: the same prompts with the draft, without it, with n-gram lookup, and as the reference predicts."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Callable, Mapping

from nemo_automodel.components.datasets.rows import ChatRow
from nemo_automodel.components.speculative.bench.asking import LevelRun, run_level, warm_up
from nemo_automodel.components.speculative.bench.gpu_sets import VISIBLE, gpu_set
from nemo_automodel.components.speculative.bench.parity import (
    ParityJob,
    Prediction,
    examine_served,
    reference_dtype,
    unpredictable,
)
from nemo_automodel.components.speculative.bench.result import BenchmarkResult, Measured, build_result, check_gate
from nemo_automodel.components.speculative.bench.sharing import (
    digest,
    finished_before,
    read_answers,
    shared_place,
    write_answers,
)
from nemo_automodel.components.speculative.bench.streaming import Asking
from nemo_automodel.components.speculative.bench.workload import WHERE, Prompt, digest_prompts, load_prompts
from nemo_automodel.components.speculative.serve.client import ServerClient
from nemo_automodel.components.speculative.serve.command import build_baseline_command, build_command
from nemo_automodel.components.speculative.serve.export_plan import ExportPlan
from nemo_automodel.components.speculative.serve.launch import running_server, stopping_servers
from nemo_automodel.components.speculative.serve.port import find_port
from nemo_automodel.components.speculative.serve.types import Exported, Fixups, LaunchCommand, ServerInfo, ServeSpec
from nemo_automodel.components.speculative.serve.vllm_release import VllmRelease
from nemo_automodel.errors import ConfigError

__all__ = ["BenchmarkJob", "BenchmarkResult", "check_gate", "run_benchmark"]

Say = Callable[[str], None]
OnServer = Callable[[LaunchCommand, ServerInfo], None]


@dataclass(frozen=True)
class BenchmarkJob:
    """Everything the benchmark needs; logs and parity files go into `job_dir`. A local `spec.target` is absolute."""

    spec: ServeSpec
    fixups: Fixups
    exported: Exported | None  # None: no speculation (K = 0)
    release: VllmRelease
    job_dir: Path
    vllm: str | None = None  # installed version
    export_plan: ExportPlan | None = None  # how the export is made: parity makes it anew
    sweep_dir: Path | None = None  # where the jobs of a sweep share a baseline


@dataclass(frozen=True)
class _Run:
    """A job with what it asks."""

    job: BenchmarkJob
    prompts: tuple[Prompt, ...]
    prompts_digest: str
    say: Say

    @property
    def asking(self) -> Asking:
        bench = self.job.spec.benchmark
        return Asking(bench.max_new_tokens, bench.temperature, bench.stream, bench.stall_s, bench.chat_template_kwargs)

    def digest(self, kind: str, **more: Any) -> str:
        job = self.job
        return digest(_command(job, kind, 0), job.spec.benchmark, self.prompts_digest, kind=kind, vllm=job.vllm, **more)


def run_benchmark(
    job: BenchmarkJob,
    *,
    say: Say,
    on_server: OnServer,
    on_result: Callable[[BenchmarkResult], None],
) -> BenchmarkResult:
    """Measure. One server at a time; each is gone before the next starts.

    `on_server` is told of the server that is judged (the baseline's, with K = 0); `on_result` of what was measured,
    before the reference decoder runs. What `job_dir` holds already is not measured again (`serve.benchmark.rerun`).

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
    run = _Run(job, prompts, digest_prompts(prompts), say)
    kind = "baseline" if job.exported is None else "speculative"
    wanted = {"baseline": bench.baseline, "ngram": bench.ngram, "parity": bench.parity}
    spec_digest = run.digest(kind, export=job.exported and job.exported.digest, **wanted)
    if not bench.rerun and (done := finished_before(job.job_dir, spec_digest)):
        say("measured before, nothing has changed: the result is kept (serve.benchmark.rerun=true measures again)")
        result, server = done
        on_server(_command(job, kind, int(server["url"].rpartition(":")[2])), ServerInfo(**server))
        return result
    with stopping_servers(), gpu_set(bench.gpu_sets, job.sweep_dir, say) as gpus:
        if gpus is not None:
            run = replace(run, job=replace(job, spec=replace(job.spec, env={**job.spec.env, VISIBLE: gpus})))
        return _measure_all(run, kind, spec_digest, on_server, on_result)


def _measure_all(
    run: _Run, kind: str, spec_digest: str, on_server: OnServer, on_result: Callable[[BenchmarkResult], None]
) -> BenchmarkResult:
    job, bench, k = run.job, run.job.spec.benchmark, run.job.fixups.num_speculative_tokens
    if kind == "baseline":
        served, k = _shared(run, kind, on_server), 0
        baseline = served
    else:
        served = _measure(run, kind, run.digest(kind), job.job_dir, on_server)
        baseline = _shared(run, "baseline") if bench.baseline else None
    ngram = _shared(run, "ngram") if bench.ngram and k else None
    result = build_result(
        served,
        baseline,
        ngram,
        k=k,
        temperature=bench.temperature,
        spec_digest=spec_digest,
        baseline_digest=run.digest("baseline") if baseline else "",
    )
    on_result(result)
    return replace(result, predicted=_predict(run, served.first)) if bench.parity and k else result


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


def _shared(run: _Run, kind: str, on_server: OnServer | None = None) -> Measured:
    """A server that does not depend on the draft: in a sweep, the first job measures it for all that can share it."""
    job, same = run.job, run.digest(kind)
    if job.sweep_dir is None:
        return _measure(run, kind, same, job.job_dir, on_server)
    with shared_place(job.sweep_dir, kind, same, run.say) as path:
        if not (found := read_answers(path, same)):
            return _measure(run, kind, same, job.job_dir, on_server, path)
    measured, server = found
    run.say(f"{kind}: {measured.first.tokens_per_s:.1f} tokens/s, measured by another job of this sweep ({path})")
    if on_server:
        info = ServerInfo(**server)
        on_server(_command(job, kind, int(info.url.rpartition(":")[2])), info)
    return measured


def _measure(
    run: _Run, kind: str, same: str, folder: Path, on_server: OnServer | None = None, answers: Path | None = None
) -> Measured:
    job, say = run.job, run.say
    spec, bench = job.spec, job.spec.benchmark
    port = find_port(spec.host, spec.port)
    command = _command(job, kind, port)
    log = folder / f"server_{kind}.log"
    levels = ", ".join(map(str, bench.concurrency))
    say(f"{kind}: {len(run.prompts)} prompts, at most {bench.max_new_tokens} tokens each, {levels} at once")
    with running_server(command, host=spec.host, port=port, log=log, speculative=kind == "speculative", say=say) as (
        client,
        info,
    ):
        if on_server:
            on_server(command, info)
        measured = Measured(tuple(_level(run, kind, client, level) for level in bench.concurrency))
    write_answers(answers or folder / f"answers_{kind}.json", kind, measured, same, asdict(info))
    return measured


def _level(run: _Run, kind: str, client: ServerClient, concurrency: int) -> LevelRun:
    warm_up(client, run.prompts, run.asking, concurrency)
    done = run_level(
        client,
        run.prompts,
        run.asking,
        concurrency=concurrency,
        counting=kind != "baseline",
        drafts_every_step=kind == "speculative",
    )
    run.say(
        f"{kind}: {done.tokens} tokens in {done.seconds:.1f} s, {done.tokens_per_s:.1f} tokens/s, {concurrency} at once"
    )
    return done


def asked_rows(prompts: tuple[Prompt, ...], served: LevelRun) -> tuple[ChatRow, ...]:
    """Every request as it was made: later turns follow the answers that the server gave."""
    rows = []
    for prompt, conversation in zip(prompts, served.conversations, strict=True):
        messages: tuple[Mapping[str, Any], ...] = prompt.row.messages
        rows.append(prompt.row)
        for turn, answer in zip(prompt.followups, conversation.answers):
            said = {"role": "assistant", "content": answer.text}
            messages = (*messages, said, {"role": "user", "content": turn})
            rows.append(replace(prompt.row, messages=messages))
    return tuple(rows)


def _predict(run: _Run, served: LevelRun) -> Prediction | None:
    job, bench = run.job, run.job.spec.benchmark
    why = "text is drawn at random" if bench.temperature > 0 else None
    if form := unpredictable(job.fixups):
        why = f"the reference decoder does not know {form}"
    if why:
        run.say(f"warning: nothing is predicted: {why}")
        return None
    dtype = reference_dtype(job.spec.dtype)
    run.say(f"reference decoder: the same prompts in {dtype}")
    parity = ParityJob(
        job_dir=job.job_dir,
        target=job.spec.target,
        draft=job.exported.dir,
        prompts=asked_rows(run.prompts, served),
        max_new_tokens=bench.max_new_tokens,
        num_speculative_tokens=job.fixups.num_speculative_tokens,
        dtype=dtype,
        trust_remote_code=job.spec.trust_remote_code,
        template_kwargs=bench.chat_template_kwargs,
    )
    return examine_served(parity, job.export_plan, job.exported.dir, served.counters, run.say)
