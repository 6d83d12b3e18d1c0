# SPDX-License-Identifier: Apache-2.0
"""What the serve stage tells a person, on stderr: stdout is for the printed command alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from nemo_automodel.components.speculative.serve.types import Exported, Fixups, Resolved
from nemo_automodel.errors import printable_text

if TYPE_CHECKING:
    from nemo_automodel.components.speculative.bench.run import BenchmarkResult
    from nemo_automodel.components.speculative.serve.doctor import Diagnosis, Finding

_ABSENT = "(absent)"


class Report:
    """Human text of one job. `words` puts it into the terms of the command line that is in use."""

    def __init__(self, console: Console | None = None, words: Callable[[str], str] = str) -> None:
        self._console = console or Console(stderr=True, highlight=False)
        self._words = words

    def say(self, line: str) -> None:
        """One line; a warning is coloured."""
        style = "yellow" if line.startswith("warning:") else None
        self._console.print(_plain(self._words(line)), style=style, soft_wrap=True)

    def warn(self, line: str) -> None:
        self.say(f"warning: {line}")

    def plan(self, resolved: Resolved, fixups: Fixups) -> None:
        """The draft that was found, and each change with its reason."""
        kind = "P-EAGLE" if fixups.parallel_drafting else "EAGLE-3"
        self.say(f"draft: {resolved.model_dir} ({resolved.layout.value}, {kind}, K={fixups.num_speculative_tokens})")
        for change in fixups.changes:
            old, new = _short(change.old), _short(change.new)
            text = f"  [bold]{_plain(change.key)}[/]: {_plain(old)} -> {_plain(new)}  [dim]({_plain(change.why)})[/]"
            self._console.print(text, soft_wrap=True)
        renamed = sum(old != new for old, new in fixups.renames.items())
        self.say(f"  tensors: {renamed} renamed, {len(fixups.renames) - renamed} kept, {len(fixups.dropped)} left out")

    def findings(self, findings: Sequence[Finding]) -> None:
        """Every finding on a line of its own, worst first as they come."""
        styles = {"error": "bold red", "warning": "yellow", "note": "dim"}
        for finding in findings:
            name = finding.severity.value
            text = f"[{styles[name]}]{name:<8}[/] {_plain(self._words(finding.line()))}"
            self._console.print(text, soft_wrap=True)

    def diagnosis(self, diagnosis: Diagnosis) -> None:
        """What was examined, every finding, the verdict."""
        for name in ("draft", "target", "vllm"):
            self._console.print(_plain(f"{name + ':':<8} {getattr(diagnosis, name)}"), soft_wrap=True)
        self.findings(diagnosis.findings)
        style = "bold green" if diagnosis.exit_code == 0 else "bold red"
        self._console.print(escape(diagnosis.verdict()), style=style, soft_wrap=True)

    def exported(self, exported: Exported) -> None:
        self.say(f"export: {exported.dir} ({'reused, nothing changed' if exported.reused else 'written'})")

    def benchmark(self, result: BenchmarkResult, places: dict[str, Path]) -> None:
        """The final table, and where everything is."""
        self._console.print(_benchmark_table(result))
        for line in _notes(result):
            self.say(line)
        for name, path in places.items():
            self.say(f"{name + ':':<12}{path}")


def _plain(text: str) -> str:
    return escape(printable_text(text))


def _short(value: Any) -> str:
    text = _ABSENT if value is None else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _benchmark_table(result: BenchmarkResult) -> Table:
    table = Table(
        title=f"K={result.k}, {result.prompts} prompts, {result.output_tokens} tokens, greedy", title_justify="left"
    )
    table.add_column("")
    table.add_column("acceptance\nlength", justify="right")
    table.add_column("per position")
    table.add_column("tokens\nper step", justify="right")
    table.add_column("tokens/s", justify="right")
    table.add_column("speedup", justify="right")
    base, p = result.baseline_tokens_per_s, result.predicted
    length, shares = _number(result.acceptance_length), _shares(result.acceptance_per_position)
    rate = _rate(result.tokens_per_s, base)
    name = "with the draft" if result.k else "no speculation (K=0)"
    table.add_row(name, length, shares, _number(result.useful_tokens_per_step), *rate, style="bold")
    if p:
        length, shares = _number(p.acceptance_length), _shares(p.acceptance_per_position)
        table.add_row(f"predicted, {p.dtype}", length, shares, "", "", "")
    if result.ngram_tokens_per_s:
        steps, rate = _number(result.ngram_tokens_per_step), _rate(result.ngram_tokens_per_s, base)
        table.add_row("n-gram lookup", "", "", steps, *rate)
    if base and result.k:
        table.add_row("no speculation", "", "", _number(1.0), *_rate(base, base))
    return table


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _shares(per_position: tuple[float, ...]) -> str:
    return " ".join(f"{share:.3f}".removeprefix("0") for share in per_position)


def _rate(rate: float, base: float | None) -> tuple[str, str]:
    """tokens/s, and how many times the baseline's."""
    return f"{rate:.1f}", f"{rate / base:.2f}x" if base else ""


def _notes(result: BenchmarkResult) -> list[str]:
    notes = [
        "acceptance length = 1 + accepted / drafts, as vLLM counts it; tokens per step = those really returned "
        "(accepted tokens past an answer's end are not)"
    ]
    notes += result.notes()
    if result.predicted:
        p = result.predicted
        verdict = "agree" if p.agrees else "DISAGREE"
        notes.append(
            f"served and predicted acceptance {verdict}: largest difference per position {p.max_difference:.3f}"
        )
    if result.k and result.acceptance_length < 1.1:
        notes.append(
            "warning: almost nothing is accepted: is this the target that the draft was trained for? "
            "(`serve_vllm doctor` lists what else can be known)"
        )
    if result.k and result.speedup is not None and result.speedup < 1:
        notes.append("speculation does not pay here: without it the server is faster")
    return notes
