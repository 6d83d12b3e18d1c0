# SPDX-License-Identifier: Apache-2.0
"""The serve stage, start to end: release -> resolve -> target -> plan -> export -> command -> launch or benchmark.

Imports of httpx and the benchmark wait until a server is to be started: printing answers in about a second.
"""

from __future__ import annotations

import os
import shlex
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from nemo_automodel.components.speculative.serve.command import build_baseline_command, build_command, command_warnings
from nemo_automodel.components.speculative.serve.doctor import Severity, findings_of
from nemo_automodel.components.speculative.serve.export import export, refuse_replaced, reusable_digest
from nemo_automodel.components.speculative.serve.export_line import export_line
from nemo_automodel.components.speculative.serve.export_plan import ExportPlan, plan_export
from nemo_automodel.components.speculative.serve.fixup import examine
from nemo_automodel.components.speculative.serve.options import refuse_unusable
from nemo_automodel.components.speculative.serve.port import check_host, find_port
from nemo_automodel.components.speculative.serve.record import RESULT, JobRecord, reason_of
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
from nemo_automodel.components.speculative.serve.shared import omit_shared
from nemo_automodel.components.speculative.serve.target_facts import absolute_target, read_target, read_target_or_none
from nemo_automodel.components.speculative.serve.text_paths import printable, refuse_no_text
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
from nemo_automodel.files import expand_user

__all__ = ["refuse_foreground_sweep", "run_export", "run_serve"]


@dataclass(frozen=True)
class Plan:
    """All that is known before anything is written. `spec` is the one given, its local paths made absolute."""

    spec: ServeSpec
    release: VllmRelease
    resolved: Resolved
    fixups: Fixups
    export: ExportPlan
    vllm: str | None  # installed version


def run_serve(
    spec: ServeSpec, *, base_dir: Path, out_dir: Path | None, multirun: bool = False, report: Report | None = None
) -> int:
    """Serve, benchmark or print one draft; the exit code. result.json lies in `out_dir` whatever happens.

    Relative paths of the checkpoint and the target count from `base_dir`. `report` tells a person (None: on stderr).

    Raises:
        UserError: any stage's own, after result.json has been written.
    """
    record, report = JobRecord(out_dir, printable(spec.checkpoint)), report or Report()
    try:
        refuse_foreground_sweep(spec, multirun)
        plan = _plan(spec, base_dir, record, report)
        if spec.print_only:
            return _print(plan, record, report)
        find_port(spec.host, spec.port)  # taken? better known before the export and the loading
        exported = _export(plan, record, report) if spec.speculates else None
        if spec.benchmark_mode:
            return _benchmark(plan, exported, out_dir, record, report, multirun)
        return _foreground(plan, exported, record, report)
    except BaseException as error:
        record.save_or_warn("failed", reason_of(error), report.warn)
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


def _plan(spec: ServeSpec, base_dir: Path, record: JobRecord, report: Report, *, exporting: bool = False) -> Plan:
    """Every pure stage in turn; the record knows at which one it ends. With `exporting` nothing is to be started."""
    record.stage = "release"
    refuse_unusable(spec)
    if not exporting:
        check_host(spec.host)
    starting, sglang = not (spec.print_only or exporting), spec.engine is Engine.sglang
    if sglang and not spec.speculates:
        raise ConfigError("K = 0", where="serve.num_speculative_tokens", remedy="serve/engine=vllm, or 1 and more")
    spec = settle_runtime(spec, report.say, start=starting)
    found = release_to_export_for(spec) if exporting else resolve_release(spec)
    record.vllm(found.installed, found.release.version)
    if starting and not sglang:
        require_vllm(found, spec)
    record.stage = "resolve"
    resolved = resolve(spec.checkpoint, base_dir)
    refuse_no_text(resolved.model_dir, spec)
    record.checkpoint(resolved.model_dir)
    record.stage = "target"
    spec = replace(
        spec,
        target=absolute_target(spec.target, base_dir),
        export_dir=None if spec.export_dir is None else str((base_dir / expand_user(spec.export_dir)).absolute()),
    )
    target, unread = _read_target(spec, base_dir)
    record.stage = "plan"
    planned = spec if spec.speculates else replace(spec, num_speculative_tokens=None)  # the draft is still looked at
    examination = examine(resolved, found.release, target, planned, exporting=exporting)
    if examination.problems:  # the error says why in one line; what else was found is said here
        report.findings([finding for finding in findings_of(examination) if finding.severity is not Severity.error])
    fixups = examination.require(str(resolved.model_dir))
    fixups = omit_shared(fixups, resolved, target, spec)
    fixups = plan_sglang(fixups) if sglang else fixups
    record.fixups(fixups)
    export_plan = plan_export(resolved, fixups, spec, base_dir)
    export_plan = sglang_dest(export_plan) if sglang else export_plan
    if spec.speculates:
        report.plan(resolved, fixups)
    served = () if exporting else sglang_warnings(spec) if sglang else command_warnings(spec, found.release, os.environ)
    of_draft = (*fixups.warnings, *export_plan.notes) if spec.speculates else ()  # K = 0: it is not served
    told = (*found.warnings, *unread, *of_draft, *served)
    record.warn(*told)
    for line in told:
        report.warn(line)
    return Plan(spec, found.release, resolved, fixups, export_plan, found.installed)


def _read_target(spec: ServeSpec, base_dir: Path) -> tuple[TargetFacts | None, tuple[str, ...]]:
    """The target's facts; printing forgives a Hub id that cannot be read, and says so."""
    if not spec.print_only:
        return read_target(spec.target, base_dir), ()
    target, warning = read_target_or_none(spec.target, base_dir)
    return target, (warning,) if warning else ()


def _command(plan: Plan, port: int) -> LaunchCommand:
    """The planned command, on the port that was found."""
    if plan.spec.engine is Engine.sglang:
        place = plan.resolved.model_dir
        return build_sglang_command(plan.export.dest, plan.fixups, plan.spec, plan.release, port, model_dir=place)
    if not plan.spec.speculates:
        return build_baseline_command(plan.spec, plan.release, plan.spec.python, port, environ=os.environ)
    return build_command(plan.export.dest, plan.fixups, plan.spec, plan.release, plan.spec.python, port, os.environ)


def _print(plan: Plan, record: JobRecord, report: Report) -> int:
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
    if plan.spec.speculates and reusable_digest(plan.export) is None:
        report.say(f"the draft is not exported yet: the line does that first, to {plan.export.dest}")
        steps.insert(0, export_line(plan.spec, str(plan.resolved.model_dir), plan.release))
    if line := make_line(plan.spec):
        steps.insert(0, shlex.join(line))
    print(" && ".join(steps), flush=True)
    return 0


def run_export(spec: ServeSpec, *, base_dir: Path, report: Report | None = None) -> int:
    """Resolve, plan and export; nothing is started, so vLLM need not be here. The folder is printed on stdout.

    Raises:
        UserError: any stage's own.
    """
    record, report = JobRecord(None, printable(spec.checkpoint)), report or Report()
    plan = plan_only(spec, base_dir=base_dir, record=record, report=report)
    print(_export(plan, record, report).dir, flush=True)
    return 0


def plan_only(
    spec: ServeSpec, *, base_dir: Path, record: JobRecord | None = None, report: Report | None = None
) -> Plan:
    """All that an export of this draft is made of; nothing is written or started, vLLM need not be here.

    Raises:
        UserError: any stage's own.
    """
    record = record or JobRecord(None, printable(spec.checkpoint))
    return _plan(replace(spec, print_only=False), base_dir, record, report or Report(), exporting=True)


def _export(plan: Plan, record: JobRecord, report: Report) -> Exported:
    record.stage = "export"
    exported = export(plan.export, report.say)
    record.exported(exported)
    report.exported(exported)
    return exported


def _foreground(plan: Plan, exported: Exported | None, record: JobRecord, report: Report) -> int:
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
        refuse_replaced(plan.export, exported)
        ready.append(server)
        record.server(server)
        record.save_or_warn("launched", None, report.warn)

    try:
        counted = plan.spec.engine is Engine.vllm and plan.spec.speculates
        code = serve_foreground(command, host=host, port=port, say=report.say, on_ready=on_ready, speculative=counted)
    except Interrupted as error:
        if ready:  # how a foreground server is meant to end
            record.save_or_warn("ok", error.found, report.warn)
            return error.exit_code
        raise
    status, reason = ("ok", None) if code == 0 else ("failed", f"vLLM ended with exit code {code}")
    record.save_or_warn(status, reason, report.warn)
    return code


def _benchmark(
    plan: Plan, exported: Exported | None, out_dir: Path | None, record: JobRecord, report: Report, multirun: bool
) -> int:
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
        vllm=plan.vllm,
        export_plan=plan.export,
        sweep_dir=job_dir.parent if multirun else None,
    )

    def on_server(command: LaunchCommand, server: ServerInfo) -> None:
        refuse_replaced(plan.export, exported)
        record.command(command)
        record.server(server)

    result = run_benchmark(
        job, say=report.say, on_server=on_server, on_result=lambda measured: record.benchmark(measured.to_dict())
    )
    record.benchmark(result.to_dict())
    places = {"checkpoint": plan.resolved.model_dir} | ({"export": exported.dir} if exported else {})
    report.benchmark(result, places | {"logs": job_dir} | ({"result": out_dir / RESULT} if out_dir else {}))
    record.stage = "gate"
    check_gate(result, plan.spec.benchmark)
    record.stage = "done"
    record.save("ok")
    return 0
