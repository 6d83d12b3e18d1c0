# SPDX-License-Identifier: Apache-2.0
"""The end of a multirun: all its jobs in one table and one page, best first, the failed ones last with their reason."""

from __future__ import annotations

import csv
import io
import re
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from nemo_automodel.components.speculative.serve.record import RESULT, TRAIN
from nemo_automodel.files import read_json, write_atomic, write_json

NO_RESULT = "no result (killed?)"
WIDTH = 140  # of the table in a log file, which has no width of its own


@dataclass(frozen=True)
class Entry:
    """One job; rates in tokens/s, None when not measured."""

    job: str
    status: str  # "ok", "printed", "launched" or "failed"
    checkpoint: str
    k: int | None
    tokens_per_s: float | None
    acceptance_length: float | None
    speedup: float | None
    baseline_tokens_per_s: float | None
    vllm: str | None
    reason: str | None
    acceptance_per_position: tuple[float, ...] = ()
    baseline_digest: str = ""  # jobs that have it equal shared one measurement without speculation
    temperature: float | None = None
    name: str = ""  # what tables and pictures call it

    @property
    def failed(self) -> bool:
        return self.status == "failed"


def write_leaderboard(sweep_dir: Path) -> int:
    """Write leaderboard.{json,csv,md,png} and report.html into the sweep's folder, show the table and the verdict on
    stderr; number of failed jobs. With `serve.benchmark.update_best` BEST follows the verdict.

    A sweep whose jobs only trained has no leaderboard.
    """
    entries = collect(sweep_dir)
    if not entries:
        return 0
    write_json(sweep_dir / "leaderboard.json", [asdict(entry) for entry in entries])
    write_atomic(sweep_dir / "leaderboard.csv", render_csv(entries))
    write_atomic(sweep_dir / "leaderboard.md", render_markdown(entries))
    write_atomic(sweep_dir / "leaderboard.png", render_png(entries))
    _show(entries, sweep_dir)
    if any(entry.status != "printed" for entry in entries):
        _conclude(entries, sweep_dir)
    return sum(entry.failed for entry in entries)


def collect(sweep_dir: Path) -> list[Entry]:
    """The jobs of a sweep, best first: by tokens/s, then acceptance length; those without numbers, then the failed."""
    jobs = [path for path in sweep_dir.iterdir() if path.is_dir() and _is_job(path)]
    entries = _named([_entry(job) for job in sorted(jobs, key=_natural)])
    return sorted(_merge_bare(entries), key=_rank)


def _named(entries: list[Entry]) -> list[Entry]:
    """Each with a short name: the checkpoint's folder, with the run's where two runs are compared; the temperature
    where it is not 0."""
    parts = 1 if len({Path(short_name(entry.checkpoint)).parent for entry in entries if entry.checkpoint}) == 1 else 2
    named = []
    for entry in entries:
        short = "/".join(Path(short_name(entry.checkpoint)).parts[-parts:]) or f"job {entry.job}"
        warm = f", temperature {entry.temperature:g}" if entry.temperature else ""
        named.append(replace(entry, name=("no speculation" if entry.k == 0 else short) + warm))
    return named


def _merge_bare(entries: list[Entry]) -> list[Entry]:
    """Jobs with K = 0 that shared one measurement are one candidate: `job` names them all."""
    merged: dict[Any, Entry] = {}
    for entry in entries:
        same = entry.k == 0 and not entry.failed and entry.baseline_digest
        key = same or entry.job
        merged[key] = replace(merged[key], job=f"{merged[key].job},{entry.job}") if key in merged else entry
    return list(merged.values())


def _is_job(path: Path) -> bool:
    if (path / RESULT).is_file():
        return not _only_trained(path / RESULT)
    config = path / ".hydra" / "config.yaml"
    if config.is_file():
        return bool(OmegaConf.select(OmegaConf.load(config), "serve.enabled"))  # a job that only trained has no result
    return path.name.isdigit()


def _only_trained(result: Path) -> bool:
    """A job that ended well with its training; one whose training failed is shown, and counts."""
    try:
        value = read_json(result)
    except ValueError:
        return False  # half-written: shown as failed, with that reason
    return value.get("stage") == TRAIN and value.get("status") == "ok"


def _natural(path: Path) -> list[Any]:
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", path.name) if part]


def _rank(entry: Entry) -> tuple:
    return (entry.failed, -(entry.tokens_per_s or 0.0), -(entry.acceptance_length or 0.0))


def _entry(job: Path) -> Entry:
    try:
        result = read_json(job / RESULT)
    except FileNotFoundError:
        result = {"status": "failed", "reason": NO_RESULT}
    except ValueError as error:
        result = {"status": "failed", "reason": str(error)}
    bench = result.get("benchmark") or {}
    numbers = ("k", "tokens_per_s", "acceptance_length", "speedup", "baseline_tokens_per_s", "temperature")
    return Entry(
        job=job.name,
        status=result["status"],
        checkpoint=result.get("checkpoint") or _configured_checkpoint(job),
        vllm=(result.get("versions") or {}).get("vllm"),
        reason=result.get("reason"),
        acceptance_per_position=tuple(bench.get("acceptance_per_position") or ()),
        baseline_digest=bench.get("baseline_digest") or "",
        **{name: bench.get(name) for name in numbers},
    )


def _configured_checkpoint(job: Path) -> str:
    config = job / ".hydra" / "config.yaml"
    return str(OmegaConf.select(OmegaConf.load(config), "serve.checkpoint") or "") if config.is_file() else ""


def render_csv(entries: list[Entry]) -> str:
    """One line a job, all columns; per-position shares joined by spaces."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    names = [f.name for f in fields(Entry)]
    writer.writerow(["rank", *names])
    for rank, entry in enumerate(entries, 1):
        row = asdict(entry) | {"acceptance_per_position": " ".join(f"{p:.4f}" for p in entry.acceptance_per_position)}
        writer.writerow([rank, *("" if row[name] is None else row[name] for name in names)])
    return out.getvalue()


_COLUMNS = ("rank", "checkpoint", "vLLM", "K", "tokens/s", "speedup", "acceptance length", "per position", "status")


def _cells(rank: int, entry: Entry) -> tuple[str, ...]:
    return (
        str(rank),
        entry.name,
        entry.vllm or "-",
        _number(entry.k, "d"),
        _number(entry.tokens_per_s, ".1f"),
        _number(entry.speedup, ".2f", "x"),
        _number(entry.acceptance_length, ".3f"),
        " ".join(f"{p:.3f}" for p in entry.acceptance_per_position) or "-",
        entry.status + (f": {entry.reason}" if entry.reason else ""),
    )


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"


def short_name(checkpoint: str) -> str:
    """The last parts of the path that say which checkpoint it is: `epoch_1_step_500`, not `model/consolidated`."""
    parts = [part for part in Path(checkpoint).parts if part not in ("model", "consolidated", "/", "checkpoints")]
    return "/".join(parts[-2:])


def render_markdown(entries: list[Entry]) -> str:
    """The table for an issue or a README."""
    lines = ["| " + " | ".join(_COLUMNS) + " |", "|" + "---|" * len(_COLUMNS)]
    for rank, entry in enumerate(entries, 1):
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in _cells(rank, entry)) + " |")
    return "\n".join(lines) + "\n"


def render_png(entries: list[Entry]) -> bytes:
    """Bars of tokens/s, best on top, acceptance length beside each; the baseline as a line."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    shown = [entry for entry in entries if entry.tokens_per_s is not None]
    figure = Figure(figsize=(9, 1.2 + 0.5 * max(1, len(shown))), layout="constrained")
    axes = figure.subplots()
    names = [_bar_name(entry) for entry in shown]
    bars = axes.barh(names, [e.tokens_per_s for e in shown], height=0.6)
    axes.bar_label(bars, [_number(e.acceptance_length, ".2f") for e in shown], padding=3)
    baselines = [e.baseline_tokens_per_s for e in shown if e.baseline_tokens_per_s]
    if baselines:
        axes.axvline(
            sum(baselines) / len(baselines), color="black", linestyle="--", linewidth=1, label="no speculation"
        )
        axes.legend(loc="lower right")
    axes.margins(x=0.12)  # room for the longest bar's label
    axes.invert_yaxis()
    axes.set_xlabel("output tokens/s (label: acceptance length)")
    axes.set_title(f"{len(shown)} of {len(entries)} candidates measured")
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=120)
    return out.getvalue()


def _bar_name(entry: Entry) -> str:
    """One name a job: bars of one name would be drawn over each other."""
    return f"{entry.name}{f' K={entry.k}' if entry.k else ''}, vLLM {entry.vllm or '-'} [{entry.job}]"


def _conclude(entries: list[Entry], sweep_dir: Path) -> None:
    """The page, the verdict in words, and BEST where it was asked for."""
    from nemo_automodel.components.speculative.bench.report_html import render_report
    from nemo_automodel.components.speculative.bench.verdict import judge, update_best

    results = {entry.job: found for entry in entries if (found := _result_of(sweep_dir / entry.job.split(",")[0]))}
    verdict = judge(entries, results)
    write_atomic(sweep_dir / "report.html", render_report(sweep_dir.name, entries, results, verdict))
    console = Console(stderr=True, highlight=False)
    told = [verdict.headline, *verdict.reasons, *([verdict.command] if verdict.command else [])]
    if any(_asks_for_best(sweep_dir / entry.job.split(",")[0]) for entry in entries):
        told.append(update_best(verdict))
    for line in (*told, f"written: {sweep_dir}/report.html"):
        console.print(escape(line), soft_wrap=True)


def _result_of(job: Path) -> dict[str, Any] | None:
    try:
        return read_json(job / RESULT)
    except (OSError, ValueError):
        return None


def _asks_for_best(job: Path) -> bool:
    config = job / ".hydra" / "config.yaml"
    return config.is_file() and bool(OmegaConf.select(OmegaConf.load(config), "serve.benchmark.update_best"))


def _show(entries: list[Entry], sweep_dir: Path) -> None:
    table = Table(title="leaderboard", title_justify="left")
    for name in _COLUMNS:
        table.add_column(name, overflow="fold")
    for rank, entry in enumerate(entries, 1):
        table.add_row(*map(escape, _cells(rank, entry)), style="red" if entry.failed else None)
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, WIDTH)
    console.print(table)
    console.print(f"written: {sweep_dir}/leaderboard.{{json,csv,md,png}}", soft_wrap=True)
