# SPDX-License-Identifier: Apache-2.0
"""What a run shows: a bar on a terminal, plain lines elsewhere, `metrics.jsonl` for machines, `train.log` for later."""

from __future__ import annotations

import json
import logging
import resource
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, Mapping, Sequence

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from nemo_automodel.components.speculative.train.job import TrainJob
from nemo_automodel.components.speculative.train.trackers import Tracker, open_trackers
from nemo_automodel.components.speculative.train.world import World
from nemo_automodel.files import write_atomic

logger = logging.getLogger("nemo_automodel.train")
METRICS_FILE = "metrics.jsonl"


def memory_gb() -> float:
    """Peak memory of this process: the GPU's when there is one, else resident, in GB (10^9 bytes)."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024) / 1e9


class RunReport:
    """Collects one run's output. Use as a context manager; `begin` before the first `step`."""

    def __init__(self, run_dir: Path, console: Console | None = None, trackers: Sequence[Tracker] = ()) -> None:
        self.console = console or Console(stderr=True)
        self._path = run_dir / METRICS_FILE
        self._metrics = self._path.open("a", encoding="utf-8")
        self._trackers = trackers
        self._bar: Progress | None = None
        self._task = None
        self._pace: tuple[float, int] | None = None  # when the first step began, and which it was
        self.last: dict[str, Any] = {}  # the metrics last logged

    def __enter__(self) -> RunReport:
        return self

    def __exit__(self, *_exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        self._metrics.close()
        for tracker in self._trackers:
            tracker.close()

    def resumed(self, step: int, *, again: bool = False) -> None:
        """What a run into the same folder logged after this step was lost with it and will be logged again; `again`:
        so will be the validation after this step. Step 0: that run had come to no checkpoint, or is not gone on with.
        """
        kept = "".join(
            line for line in self._path.read_text().splitlines(keepends=True)
            if _step_of(line) < step or (_step_of(line) == step and not (again and "loss" not in json.loads(line)))
        )  # fmt: skip
        self._metrics.close()
        write_atomic(self._path, kept)
        self._metrics = self._path.open("a", encoding="utf-8")

    def message(self, text: str) -> None:
        """One line for people, kept in train.log."""
        logger.info(text)
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def begin(self, *, total: int, done: int) -> None:
        """Start the bar, on a terminal."""
        self.total = total
        self._pace = (time.monotonic(), done)
        if self.console.is_terminal:
            columns = (
                BarColumn(bar_width=8),
                MofNCompleteColumn(table_column=Column(no_wrap=True, min_width=len(f"{total}/{total}"))),
                TimeRemainingColumn(compact=True, table_column=Column(no_wrap=True, min_width=5)),
                TextColumn("{task.fields[shown]}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)),
            )
            self._bar = Progress(*columns, console=self.console, expand=True)
            self._task = self._bar.add_task("training", total=total, completed=done, shown="")
            self._bar.start()

    def tick(self, step: int) -> None:
        """One optimiser step is done."""
        if self._bar is not None:
            self._bar.update(self._task, completed=step)

    def step(self, metrics: Mapping[str, Any]) -> None:
        """Log the averages since the last call: one JSON line, one line or the bar's text."""
        self.last = dict(metrics)
        self._write(metrics)
        speed = f"{metrics['tokens_per_s']:,.0f} tok/s  {metrics['memory_gb']:.2f} GB"
        left = f"  {self._time_left(metrics['step'])} left" if metrics["step"] < self.total else ""
        text = f"step {metrics['step']}/{self.total}  epoch {metrics['epoch']}  {describe(metrics)}  {speed}{left}"
        logger.info(text)
        if self._bar is not None:
            self._bar.update(self._task, shown=f"{describe_short(metrics)} {speed}")
        else:
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def validation(self, metrics: Mapping[str, Any]) -> None:
        """Log the figures of the held-out rows."""
        self._write(metrics)
        self.message(f"epoch {metrics['epoch']} validation  {describe(metrics['validation'])}")

    def decode(self, metrics: Mapping[str, Any]) -> None:
        """Log what was decoded with the target."""
        self._write(metrics)
        self.message(f"step {metrics['step']} decoded  {describe_decoded(metrics['decode'])}")

    def _time_left(self, step: int) -> str:
        began, first = self._pace
        seconds = (time.monotonic() - began) / max(1, step - first) * (self.total - step)
        return str(timedelta(seconds=round(seconds)))

    def _write(self, metrics: Mapping[str, Any]) -> None:
        self._metrics.write(json.dumps(metrics, allow_nan=False) + "\n")
        self._metrics.flush()
        for tracker in self._trackers:
            tracker.log(metrics)


class SilentReport(RunReport):
    """For all processes but the first: keeps the last metrics and says nothing."""

    def __init__(self) -> None:
        self.last: dict[str, Any] = {}

    def __exit__(self, *_exc: object) -> None:
        pass

    def resumed(self, step: int, *, again: bool = False) -> None:
        pass

    def message(self, text: str) -> None:
        pass

    def begin(self, *, total: int, done: int) -> None:
        pass

    def tick(self, step: int) -> None:
        pass

    def step(self, metrics: Mapping[str, Any]) -> None:
        self.last = dict(metrics)

    def validation(self, metrics: Mapping[str, Any]) -> None:
        pass

    def decode(self, metrics: Mapping[str, Any]) -> None:
        pass


def open_report(job: TrainJob, world: World) -> RunReport:
    """The first process reports."""
    if not world.is_first:
        return SilentReport()
    return RunReport(job.run_dir, trackers=open_trackers(job))


def _step_of(line: str) -> int:
    """Of one line of metrics.jsonl; a line that was cut short counts as the last of all."""
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return sys.maxsize


def describe_short(metrics: Mapping[str, Any]) -> str:
    """The same within the 80 columns of a terminal."""
    accuracy = " ".join(f"{value:.2f}".lstrip("0") for value in metrics["accuracy_per_depth"])
    return f"loss {metrics['loss']:.2f} acc {accuracy} len {metrics['acceptance_length']:.2f}"


def describe_decoded(figures: Mapping[str, Any]) -> str:
    """The true acceptance, as vLLM would count it, in one phrase."""
    shares = " ".join(f"{share:.3f}".lstrip("0") for share in figures["acceptance_per_position"])
    return (
        f"acceptance length {figures['acceptance_length']:.3f}  per position {shares}  "
        f"({figures['num_drafts']} drafts, {figures['prompts']} prompts, {figures['seconds']:.1f} s)"
    )


def describe(metrics: Mapping[str, Any]) -> str:
    """The learning figures in one phrase."""
    accuracy = " ".join(f"{value:.3f}".lstrip("0") for value in metrics["accuracy_per_depth"])
    return f"loss {metrics['loss']:.4f}  accuracy {accuracy}  accepted length {metrics['acceptance_length']:.2f}"
