# SPDX-License-Identifier: Apache-2.0
"""The pictures of a sweep, as SVG text for a page that stands alone. Matplotlib is imported when one is drawn."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any, Mapping, Sequence

from nemo_automodel.components.speculative.bench.leaderboard import Entry
from nemo_automodel.files import read_json

MOST = 8  # lines in one picture
WIDTH_IN = 4.5  # inches: hardly shrunk on a phone of 390 px, so that its words stay legible there
_STEP = re.compile(r"epoch_\d+_step_(\d+)$")
Results = Mapping[str, Mapping[str, Any]]


def draw_all(entries: Sequence[Entry], results: Results) -> list[tuple[str, str]]:
    """(title, SVG) of each picture that there are figures for."""
    shown = [entry for entry in entries if entry.tokens_per_s is not None]
    drafts = [entry for entry in shown if entry.k]
    pictures = [("Output tokens/s", _rates(shown, results))] if shown else []
    if drafts:
        pictures.append(("Acceptance per position", _positions(drafts[:MOST], results)))
    if len({step_of(entry.checkpoint) for entry in drafts} - {None}) > 1:
        pictures.append(("Acceptance length by training step", _steps(drafts)))
    if any(len(results[entry.job]["benchmark"].get("levels") or ()) > 1 for entry in drafts):
        pictures.append(("Speedup by requests at once", _concurrency(drafts[:MOST], results)))
    return pictures


def label(entry: Entry) -> str:
    """Which candidate this is, in a few words."""
    return f"{entry.name} K={entry.k} [{entry.job}]" if entry.k else entry.name


def step_of(checkpoint: str) -> int | None:
    """The training step in an `epoch_*_step_*` folder's name."""
    found = [match for part in Path(checkpoint).parts if (match := _STEP.match(part))]
    return int(found[-1].group(1)) if found else None


def validation_of(checkpoint: str) -> Mapping[str, Any] | None:
    """Held-out figures of this checkpoint: its own validation.json, else the run's metrics.jsonl at its step."""
    path = Path(checkpoint)
    folder = next((place for place in (path, *path.parents) if _STEP.match(place.name)), None)
    if folder is None:
        return None
    try:
        return read_json(folder / "validation.json")
    except (OSError, ValueError):
        return _logged(folder.parent.parent / "metrics.jsonl", step_of(checkpoint))


def _logged(path: Path, step: int | None) -> Mapping[str, Any] | None:
    found = None
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if row.get("step") == step and "validation" in row:
                found = row["validation"]
    except (OSError, ValueError):
        return found
    return found


def _figure(height: float) -> Any:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text: small, and searchable
    matplotlib.rcParams["svg.hashsalt"] = "report"  # the same sweep gives the same bytes
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_IN, height), layout="constrained")
    return figure, figure.subplots()


def _legend(figure: Any) -> None:
    """Below the picture, where it hides no line; of both axes where there are two."""
    figure.legend(loc="outside lower left", fontsize="small", frameon=False)


def _svg(figure: Any) -> str:
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    return re.sub(r' xmlns(:\w+)?="[^"]*"', "", text).replace("xlink:href", "href")  # inline: HTML knows both


def _rates(shown: Sequence[Entry], results: Results) -> str:
    figure, axes = _figure(0.8 + 0.55 * len(shown))
    rates = [entry.tokens_per_s for entry in shown]
    intervals = [results[entry.job]["benchmark"].get("tokens_per_s_interval") or (rate, rate)
                 for entry, rate in zip(shown, rates, strict=True)]  # fmt: skip
    reach = [[max(0.0, r - low) for r, (low, _) in zip(rates, intervals, strict=True)],
             [max(0.0, high - r) for r, (_, high) in zip(rates, intervals, strict=True)]]  # fmt: skip
    colours = ["#999999" if entry.k == 0 else "#2b6cb0" for entry in shown]
    axes.barh(range(len(shown)), rates, xerr=reach, color=colours, height=0.4, capsize=3)
    for place, entry in enumerate(shown):  # names above the bars: beside them they take half of a phone's width
        axes.text(0, place - 0.26, f" {label(entry)}", va="bottom", fontsize="small")
    axes.set_yticks([])
    axes.set_ylim(len(shown) - 0.5, -0.75)
    axes.set_xlabel("output tokens/s (bars: 95 % interval)")
    return _svg(figure)


def _positions(drafts: Sequence[Entry], results: Results) -> str:
    figure, axes = _figure(3 + 0.2 * len(drafts))
    for entry in drafts:
        shares = entry.acceptance_per_position
        places = range(1, len(shares) + 1)
        axes.plot(places, shares, marker="o", label=label(entry))
        if between := results[entry.job]["benchmark"].get("acceptance_per_position_intervals"):
            axes.fill_between(places, *zip(*between, strict=True), alpha=0.12)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set(xlabel="position in the draft", ylabel="accepted / drafts", ylim=(0, 1))
    _legend(figure)
    return _svg(figure)


def _steps(drafts: Sequence[Entry]) -> str:
    figure, axes = _figure(4)
    for k in sorted({entry.k for entry in drafts}):
        points = sorted(
            (step_of(e.checkpoint), e.acceptance_length) for e in drafts if e.k == k and step_of(e.checkpoint)
        )
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", label=f"served, K={k}")
    held = {step_of(e.checkpoint): validation_of(e.checkpoint) for e in drafts if step_of(e.checkpoint)}
    told = sorted((step, figures) for step, figures in held.items() if figures)
    lengths = [(step, f["acceptance_length"]) for step, f in told if "acceptance_length" in f]
    losses = [(step, f["loss"]) for step, f in told if "loss" in f]
    if lengths:
        axes.plot(*zip(*lengths, strict=True), marker="x", linestyle=":", color="black", label="in validation")
    if losses:
        other = axes.twinx()
        other.plot(*zip(*losses, strict=True), marker="s", linestyle="--", color="#c05621", label="validation loss")
        other.set_ylabel("validation loss")
    axes.set(xlabel="training step", ylabel="acceptance length")
    _legend(figure)
    return _svg(figure)


def _concurrency(drafts: Sequence[Entry], results: Results) -> str:
    figure, axes = _figure(3 + 0.2 * len(drafts))
    for entry in drafts:
        levels = sorted(results[entry.job]["benchmark"].get("levels") or (), key=lambda level: level["concurrency"])
        points = [(level["concurrency"], level["speedup"]) for level in levels if level["speedup"] is not None]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", label=label(entry))
    axes.axhline(1.0, color="black", linestyle="--", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set(xlabel="requests at once", ylabel="speedup")
    _legend(figure)
    return _svg(figure)
