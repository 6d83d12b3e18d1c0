# SPDX-License-Identifier: Apache-2.0
"""`report.html` of a sweep: one file that needs nothing else, readable on a phone and without a network."""

from __future__ import annotations

from html import escape
from typing import Any, Mapping, Sequence

from nemo_automodel.components.speculative.bench.leaderboard import Entry
from nemo_automodel.components.speculative.bench.plots import draw_all, label, validation_of
from nemo_automodel.components.speculative.bench.verdict import Verdict

STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; padding: 1rem; max-width: 84rem; color: #1a202c;
  background: #fff; overflow-wrap: anywhere; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
.verdict { border-left: .4rem solid #2f855a; background: #f0fff4; padding: .8rem 1rem; }
.verdict.no { border-color: #c05621; background: #fffaf0; }
.verdict strong { font-size: 1.2rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; }
th, td { padding: .35rem .6rem; text-align: right; white-space: nowrap; border-bottom: 1px solid #e2e8f0; }
th:nth-child(2), td:nth-child(2) { text-align: left; white-space: normal; min-width: 7.5rem; }
tr.failed td { color: #9b2c2c; }
small { color: #4a5568; display: block; }
pre { white-space: pre-wrap; background: #f7fafc; border: 1px solid #e2e8f0; padding: .6rem; font-size: .8rem; }
figure { margin: 1rem 0; } figure svg { width: 100%; max-width: 40rem; height: auto; display: block; }
dt { font-weight: 600; } dd { margin: 0 0 .5rem 0; }
"""
COLUMNS = ("", "candidate", "K", "tokens/s", "speedup", "acceptance length", "per position", "first token",
           "between tokens", "text equal", "predicted", "validation", "vLLM")  # fmt: skip


def render_report(
    name: str, entries: Sequence[Entry], results: Mapping[str, Mapping[str, Any]], verdict: Verdict
) -> str:
    """The whole page. `results` holds each job's result.json by job name."""
    pictures = "".join(f"<figure><h2>{escape(title)}</h2>{svg}</figure>" for title, svg in draw_all(entries, results))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(name)}</title><style>{STYLE}</style></head><body>"
        f"<h1>{escape(name)}</h1>{_verdict(verdict)}"
        f"<h2>All candidates, best first</h2>{_table(entries, results)}{_failures(entries)}"
        f"{_subsets(entries, results)}{pictures}{_conditions(entries, results)}</body></html>\n"
    )


def _verdict(verdict: Verdict) -> str:
    reasons = "".join(f"<p>{escape(reason)}</p>" for reason in verdict.reasons)
    command = f"<pre>{escape(verdict.command)}</pre>" if verdict.command else ""
    kind = "verdict" if verdict.ship else "verdict no"
    return f'<div class="{kind}"><strong>{escape(verdict.headline)}</strong>{reasons}{command}</div>'


def _table(entries: Sequence[Entry], results: Mapping[str, Mapping[str, Any]]) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in COLUMNS)
    rows = []
    for rank, entry in enumerate(entries, 1):
        cells = "".join(f"<td>{cell}</td>" for cell in _cells(rank, entry, results.get(entry.job) or {}))
        rows.append(f'<tr class="{escape(entry.status)}">{cells}</tr>')
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _cells(rank: int, entry: Entry, result: Mapping[str, Any]) -> list[str]:
    bench = result.get("benchmark") or {}
    if entry.tokens_per_s is None:
        return [
            str(rank),
            escape(f"{entry.name} [{entry.job}]") + ("<small>failed</small>" if entry.failed else ""),
            *[""] * (len(COLUMNS) - 3),
            entry.vllm or "",
        ]
    latency, predicted = bench.get("latency") or {}, bench.get("predicted")
    held = validation_of(entry.checkpoint) if entry.k else None
    return [
        str(rank),
        escape(label(entry)) + ("<small>failed</small>" if entry.failed else ""),
        f"{entry.k}",
        _number(entry.tokens_per_s, ".1f", bench.get("tokens_per_s_interval")),
        _number(entry.speedup, ".2f", bench.get("speedup_interval"), "x"),
        _number(entry.acceptance_length, ".3f", bench.get("acceptance_length_interval")),
        " ".join(f"{share:.2f}".removeprefix("0") for share in entry.acceptance_per_position),
        _median(latency.get("ttft_ms")),
        _median(latency.get("itl_ms")),
        "" if bench.get("text_equal") is None else f"{bench['text_equal']} of {bench['prompts']}",
        _parity(predicted),
        _number(held.get("acceptance_length"), ".3f") if held else "",
        escape(entry.vllm or ""),
    ]


def _name(entry: Entry) -> str:
    return entry.checkpoint or f"job {entry.job}"


def _number(value: float | None, form: str, interval: Sequence[float] | None = None, unit: str = "") -> str:
    if value is None:
        return ""
    between = f"<small>{interval[0]:{form}} to {interval[1]:{form}}</small>" if interval else ""
    return f"{value:{form}}{unit}{between}"


def _median(percentiles: Mapping[str, float] | None) -> str:
    return "" if percentiles is None else f"{percentiles['p50']:.1f} ms<small>p99 {percentiles['p99']:.1f}</small>"


def _parity(predicted: Mapping[str, Any] | None) -> str:
    if predicted is None:
        return ""
    verdict = "agrees" if predicted["agrees"] else "DISAGREES"
    return f"{predicted['acceptance_length']:.3f}<small>{verdict}, {predicted['dtype']}</small>"


def _failures(entries: Sequence[Entry]) -> str:
    failed = [entry for entry in entries if entry.failed]
    if not failed:
        return ""
    lines = "".join(
        f"<dt>job {escape(e.job)}: {escape(_name(e))}</dt><dd>{escape(e.reason or '')}</dd>" for e in failed
    )
    return f"<h2>What failed</h2><dl>{lines}</dl>"


def _subsets(entries: Sequence[Entry], results: Mapping[str, Mapping[str, Any]]) -> str:
    """Acceptance length and speedup of every subset, a row each candidate; nothing when there are none."""
    drafts = [e for e in entries if e.k and (results[e.job]["benchmark"].get("subsets") if e.job in results else None)]
    if not drafts:
        return ""
    names = [subset["name"] for subset in results[drafts[0].job]["benchmark"]["subsets"]]
    head = "".join(f"<th>{escape(name)}</th>" for name in ("", "candidate", *names))
    rows = []
    for entry in drafts:
        found = {subset["name"]: subset for subset in results[entry.job]["benchmark"]["subsets"]}
        cells = "".join(f"<td>{_subset(found.get(name))}</td>" for name in names)
        rows.append(f"<tr><td></td><td>{escape(label(entry))}</td>{cells}</tr>")
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    return f'<h2>Speedup and acceptance length by subset</h2><div class="scroll">{table}</div>'


def _subset(figures: Mapping[str, Any] | None) -> str:
    if figures is None:
        return ""
    length = figures["acceptance"]["acceptance_length"]
    return f"{_number(figures['speedup'], '.2f', figures['speedup_interval'], 'x')}" + (
        f"<small>{length:.2f} tokens</small>" if length is not None else ""
    )


def _conditions(entries: Sequence[Entry], results: Mapping[str, Mapping[str, Any]]) -> str:
    """Under what all this was measured; the definitions are in docs/measuring.md."""
    bench = next((r["benchmark"] for r in results.values() if r.get("benchmark")), None)
    if bench is None:
        return ""
    facts = {
        "workload": f"{bench.get('prompts')} prompts, {bench.get('requests')} requests",
        "decoding": f"temperature {bench['temperature']}" if bench.get("temperature") else "greedy",
        "requests at once": ", ".join(str(level["concurrency"]) for level in bench.get("levels") or ()),
        "acceptance length": "1 + accepted / drafts, vLLM's own counters, tokens past an answer's end included",
        "speedup": "output tokens/s over those of the same server without speculation, same prompts",
        "intervals": "95 %, bootstrap over prompts; they hold the spread of prompts, not that of the machine",
    }
    lines = "".join(f"<dt>{escape(key)}</dt><dd>{escape(value)}</dd>" for key, value in facts.items())
    return f"<h2>Conditions</h2><dl>{lines}</dl>"
