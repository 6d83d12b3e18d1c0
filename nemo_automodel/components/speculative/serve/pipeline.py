# SPDX-License-Identifier: Apache-2.0
"""The serve stage, start to end: release -> resolve -> target -> plan -> export -> command -> launch or benchmark.

Imports of httpx and the benchmark wait until a server is to be started: printing answers in about a second.
"""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from nemo_automodel.components.speculative.serve.command import build_command, command_warnings
from nemo_automodel.components.speculative.serve.doctor import Severity, findings_of
from nemo_automodel.components.speculative.serve.export import export, reusable_digest
from nemo_automodel.components.speculative.serve.export_plan import ExportPlan, plan_export
from nemo_automodel.components.speculative.serve.fixup import examine
from nemo_automodel.components.speculative.serve.port import find_port
from nemo_automodel.components.speculative.serve.record import (
    RESULT,
    JobRecord,
    reason_of,
)
from nemo_automodel.components.speculative.serve.report import Report
from nemo_automodel.components.speculative.serve.resolve import resolve
from nemo_automodel.components.speculative.serve.runtime import (
    make_line,
    release_to_export_for,
    resolve_release,
    settle_runtime,
)
from nemo_automodel.components.speculative.serve.sglang import (
    build_sglang_command,
    plan_sglang,
    sglang_dest,
    sglang_warnings,
)
from nemo_automodel.components.speculative.serve.target_facts import (
    absolute_target,
    read_target,
    read_target_or_none,
)
from nemo_automodel.components.speculative.serve.types import (
    Engine,
    Exported,
    Fixups,
    LaunchCommand,
    Resolved,
    ServerInfo,
    ServeSpec,
    TargetFacts,
)
from nemo_automodel.components.speculative.serve.vllm_release import VllmRelease, require_vllm
from nemo_automodel.errors import ConfigError, Interrupted, LaunchError

COMMAND_LINE = "nemo_automodel.components.speculative.serve_vllm"
__all__ = ["export_line", "refuse_foreground_sweep", "run_export", "run_serve"]


@dataclass(frozen=True)
class _Plan:
    """All that is known before anything is written. `spec` is the one given, its local paths made absolute."""

    spec: ServeSpec
    release: VllmRelease
    resolved: Resolved
    fixups: Fixups
    export: ExportPlan


def run_serve(spec: ServeSpec, *, base_dir: Path, out_dir: Path | None, multirun: bool = False) -> int:
    """Serve, benchmark or print one draft; the exit code. result.json lies in `out_dir` whatever happens.

    Relative paths of the checkpoint and the target count from `base_dir`.

    Raises:
        UserError: any stage's own, after result.json has been written.
    """
    record, report = JobRecord(out_dir, spec.checkpoint), Report()
    try:
        refuse_foreground_sweep(spec, multirun)
        plan = _plan(spec, base_dir, record, report)
        if spec.print_only:
            return _print(plan, record, report)
        find_port(spec.host, spec.port)  # taken? better known before the export and the loading
        exported = _export(plan, record, report)
        if spec.benchmark_mode:
            return _benchmark(plan, exported, out_dir, record, report)
        return _foreground(plan, record, report)
    except BaseException as error:
        record.save("failed", reason_of(error))
        raise


def refuse_foreground_sweep(spec: ServeSpec, multirun: bool) -> None:
    """A foreground server never ends, so it has no place in a multirun; ask before training, too.

    Raises:
        ConfigError: `multirun` would start one.
    """
    if multirun and not (spec.benchmark_mode or spec.print_only):
        raise ConfigError(
            "a server in the foreground would hold the sweep at its first job",
            where="serve.mode",
            remedy="serve.mode=benchmark, or serve.print_only=true",
        )


def _plan(spec: ServeSpec, base_dir: Path, record: JobRecord, report: Report, *, exporting: bool = False) -> _Plan:
    """Every pure stage in turn; the record knows at which one it ends. With `exporting` nothing is to be started."""
    record.stage = "release"
    starting, sglang = not (spec.print_only or exporting), spec.engine is Engine.sglang
    spec = settle_runtime(spec, report.say, start=starting)
    found = release_to_export_for(spec) if exporting else resolve_release(spec)
    record.vllm(found.installed, found.release.version)
    if starting and not sglang:
        require_vllm(found, spec)
    record.stage = "resolve"
    resolved = resolve(spec.checkpoint, base_dir)
    record.checkpoint(resolved.model_dir)
    record.stage = "target"
    spec = replace(
        spec,
        target=absolute_target(spec.target, base_dir),
        export_dir=None if spec.export_dir is None else str((base_dir / Path(spec.export_dir).expanduser()).absolute()),
    )
    target, unread = _read_target(spec, base_dir)
    record.stage = "plan"
    examination = examine(resolved, found.release, target, spec, exporting=exporting)
    if examination.problems:  # the error says why in one line; what else was found is said here
        report.findings([finding for finding in findings_of(examination) if finding.severity is not Severity.error])
    fixups = examination.require(str(resolved.model_dir))
    fixups = plan_sglang(fixups) if sglang else fixups
    record.fixups(fixups)
    export_plan = plan_export(resolved, fixups, spec, base_dir)
    export_plan = sglang_dest(export_plan) if sglang else export_plan
    report.plan(resolved, fixups)
    served = () if exporting else sglang_warnings(spec) if sglang else command_warnings(spec, os.environ)
    told = (*found.warnings, *unread, *fixups.warnings, *export_plan.notes, *served)
    record.warn(*told)
    for line in told:
        report.warn(line)
    return _Plan(spec, found.release, resolved, fixups, export_plan)


def _read_target(spec: ServeSpec, base_dir: Path) -> tuple[TargetFacts | None, tuple[str, ...]]:
    """The target's facts; printing forgives a Hub id that cannot be read, and says so."""
    if not spec.print_only:
        return read_target(spec.target, base_dir), ()
    target, warning = read_target_or_none(spec.target, base_dir)
    return target, (warning,) if warning else ()


def _command(plan: _Plan, port: int) -> LaunchCommand:
    """The planned command, on the port that was found."""
    if plan.spec.engine is Engine.sglang:
        place = plan.resolved.model_dir
        return build_sglang_command(plan.export.dest, plan.fixups, plan.spec, plan.release, port, model_dir=place)
    return build_command(plan.export.dest, plan.fixups, plan.spec, plan.release, plan.spec.python, port, os.environ)


def _print(plan: _Plan, record: JobRecord, report: Report) -> int:
    """One line for a shell on stdout, so that `... | sh` works; everything else went to stderr."""
    record.stage = "command"
    try:
        port = find_port(plan.spec.host, plan.spec.port)
    except LaunchError as error:  # it may be free when the command is used
        report.warn(str(error))
        record.warn(str(error))
        port = plan.spec.port
    command = _command(plan, port)
    record.command(command)
    record.save("printed")
    steps = [command.shell()]
    if reusable_digest(plan.export) is None:
        report.say(f"the draft is not exported yet: the line does that first, to {plan.export.dest}")
        steps.insert(0, export_line(plan.spec, str(plan.resolved.model_dir), plan.release))
    if line := make_line(plan.spec):
        steps.insert(0, shlex.join(line))
    print(" && ".join(steps), flush=True)
    return 0


def export_line(spec: ServeSpec, draft: str, release: VllmRelease) -> str:
    """A shell command that makes the export which a launch of `spec` with `release` reuses, from any folder.

    `spec`'s paths are absolute. Options that only a server has stay out: an export neither needs nor checks them.
    """
    options = {
        "--vllm-version": release.version,
        "--max-model-len": spec.max_model_len,
        "--export-dir": spec.export_dir,
        "--engine": None if spec.engine is Engine.vllm else spec.engine.value,
    }
    flags = [word for name, value in options.items() if value is not None for word in (name, str(value))]
    argv = [sys.executable, "-m", COMMAND_LINE, "--target", spec.target, "--draft", draft, *flags, "--export-only"]
    return shlex.join(argv)


def run_export(spec: ServeSpec, *, base_dir: Path) -> int:
    """Resolve, plan and export; nothing is started, so vLLM need not be here. The folder is printed on stdout.

    Raises:
        UserError: any stage's own.
    """
    record, report = JobRecord(None, spec.checkpoint), Report()
    plan = _plan(replace(spec, print_only=False), base_dir, record, report, exporting=True)
    print(_export(plan, record, report).dir, flush=True)
    return 0


def _export(plan: _Plan, record: JobRecord, report: Report) -> Exported:
    record.stage = "export"
    exported = export(plan.export)
    record.exported(exported)
    report.exported(exported)
    return exported


def _foreground(plan: _Plan, record: JobRecord, report: Report) -> int:
    from nemo_automodel.components.speculative.serve.launch import serve_foreground

    record.stage = "launch"
    host = plan.spec.host
    port = find_port(host, plan.spec.port)
    command = _command(plan, port)
    record.command(command)
    record.save("launched")
    report.say(command.shell())
    ready: list[ServerInfo] = []

    def on_ready(server: ServerInfo) -> None:
        ready.append(server)
        record.server(server)
        record.save("launched")

    try:
        counted = plan.spec.engine is Engine.vllm
        code = serve_foreground(command, host=host, port=port, say=report.say, on_ready=on_ready, speculative=counted)
    except Interrupted as error:
        if ready:  # how a foreground server is meant to end
            record.save("ok", error.found)
            return error.exit_code
        raise
    record.save("ok" if code == 0 else "failed", None if code == 0 else f"vLLM ended with exit code {code}")
    return code


def _benchmark(plan: _Plan, exported: Exported, out_dir: Path | None, record: JobRecord, report: Report) -> int:
    from nemo_automodel.components.speculative.bench.run import BenchmarkJob, check_gate, run_benchmark

    record.stage = "benchmark"
    job_dir = out_dir or Path(tempfile.mkdtemp(prefix="serve_"))
    job_dir.mkdir(parents=True, exist_ok=True)
    job = BenchmarkJob(
        spec=plan.spec,
        fixups=plan.fixups,
        exported=exported,
        release=plan.release,
        job_dir=job_dir,
    )

    def on_server(command: LaunchCommand, server: ServerInfo) -> None:
        record.command(command)
        record.server(server)

    result = run_benchmark(
        job, say=report.say, on_server=on_server, on_result=lambda measured: record.benchmark(measured.to_dict())
    )
    record.benchmark(result.to_dict())
    places = {"checkpoint": plan.resolved.model_dir, "export": exported.dir, "logs": job_dir}
    report.benchmark(result, places | ({"result": out_dir / RESULT} if out_dir else {}))
    record.stage = "gate"
    check_gate(result, plan.spec.benchmark.min_acceptance_length)
    record.stage = "done"
    record.save("ok")
    return 0
