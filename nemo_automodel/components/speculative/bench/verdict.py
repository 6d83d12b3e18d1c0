# SPDX-License-Identifier: Apache-2.0
"""What to ship after a sweep: the best draft with the command that serves it, or no speculation at all."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Mapping, Sequence

from nemo_automodel.components.speculative.bench.leaderboard import Entry
from nemo_automodel.files import point

PORT = "8000"  # of the command that is shown; the measured server had a free one


@dataclass(frozen=True)
class Verdict:
    """`ship` is the job to take, None when nothing should be shipped; `command` serves it (or the bare target)."""

    ship: Entry | None
    headline: str
    reasons: tuple[str, ...]
    command: str | None


def judge(entries: Sequence[Entry], results: Mapping[str, Mapping[str, Any]]) -> Verdict:
    """The verdict over the jobs of a sweep, best first; `results` holds their result.json by job name."""
    measured = [entry for entry in entries if not entry.failed and entry.tokens_per_s is not None]
    drafts = [entry for entry in measured if entry.k]
    bare = next((entry for entry in measured if entry.k == 0), None)
    if not drafts:
        told = "nothing to ship: no draft was measured to the end"
        return Verdict(None, told, (), _command(bare, results))
    best, lost = drafts[0], _lost(entries)
    name = f"{best.name} with K={best.k}"
    bench = results[best.job]["benchmark"]
    gain, interval = best.speedup, bench.get("speedup_interval")
    if gain is None:
        reasons = ("no job ran without speculation, so nobody knows whether it pays: add K=0, or baseline=true",)
        return Verdict(best, f"best of the drafts: {name}", reasons, _command(best, results))
    sure = f"{gain:.2f}x the tokens/s of no speculation" + _between(interval)
    if gain > 1 and (interval is None or interval[0] > 1):
        reasons = (sure, *_levels(bench), *_doubts(bench), *lost)
        return Verdict(best, f"ship this: {name}", reasons, _command(best, results))
    why = f"the best draft, {name}, gives {sure}"
    more = ("its interval holds 1: more prompts (serve.benchmark.num_prompts) would tell",) if gain > 1 else ()
    return Verdict(None, "do not speculate", (why, *more, *_levels(bench), *lost), _command(bare, results))


def _between(interval: Sequence[float] | None) -> str:
    return f" (95 % interval {interval[0]:.2f} to {interval[1]:.2f})" if interval else ""


def _levels(bench: Mapping[str, Any]) -> tuple[str, ...]:
    """Where more requests at once change the answer."""
    levels = [level for level in bench.get("levels") or () if level["speedup"] is not None]
    if len(levels) < 2:
        return ()
    told = ", ".join(f"{level['speedup']:.2f}x at {level['concurrency']}" for level in levels)
    return (f"by requests at once: {told}",)


def _lost(entries: Sequence[Entry]) -> tuple[str, ...]:
    """A sweep that was interrupted, or in which jobs broke, has compared fewer than were asked for."""
    lost = sum(entry.failed and entry.tokens_per_s is None for entry in entries)
    return (f"not compared: {lost} of {len(entries)} jobs failed before they were measured",) if lost else ()


def _doubts(bench: Mapping[str, Any]) -> tuple[str, ...]:
    """A fast draft that is not the trained one is worth a look first: the trained one may be faster."""
    predicted = bench.get("predicted")
    if not predicted or predicted["agrees"]:
        return ()
    causes = [cause["what"] for cause in predicted.get("export_differences") or ()]
    causes += [cause["what"] for cause in (predicted.get("diagnosis") or {}).get("causes") or ()]
    told = f": {causes[0]}" if causes else ""
    return (
        f"but it is not served as it was trained: acceptance length {bench['acceptance_length']:.3f}, predicted "
        f"{predicted['acceptance_length']:.3f}{told}",
    )


def _command(entry: Entry | None, results: Mapping[str, Mapping[str, Any]]) -> str | None:
    command = results[entry.job].get("command") if entry else None
    if not command:
        return None
    words = shlex.split(command["shell"])
    words[words.index("--port") + 1] = PORT
    return shlex.join(words)


def update_best(verdict: Verdict) -> str:
    """Point BEST, beside LATEST, at the shipped checkpoint; one sentence about what was done."""
    if verdict.ship is None:
        return "BEST stays as it is: no draft is to be shipped"
    path = Path(verdict.ship.checkpoint)
    checkpoint = next((place for place in (path, *path.parents) if _in_run(place)), None)
    if checkpoint is None:
        return f"BEST stays as it is: {verdict.ship.checkpoint} lies in no checkpoints/ folder of a run"
    point(checkpoint.parent, "BEST", checkpoint.name)
    return f"BEST -> {checkpoint}"


def _in_run(path: Path) -> bool:
    return path.parent.name == "checkpoints" and path.name.startswith("epoch_") and path.is_dir()
