# SPDX-License-Identifier: Apache-2.0
"""What a run shows: a bar on a terminal, plain lines elsewhere, `metrics.jsonl` for machines, `train.log` for later."""

from __future__ import annotations

import json
import logging
import resource
import sys
from pathlib import Path
from typing import Any, Mapping

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

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

    def __init__(self, run_dir: Path, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self._metrics = (run_dir / METRICS_FILE).open("a", encoding="utf-8")
        self._bar: Progress | None = None
        self._task = None
        self.last: dict[str, Any] = {}  # the metrics last logged

    def __enter__(self) -> RunReport:
        return self

    def __exit__(self, *_exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        self._metrics.close()

    def message(self, text: str) -> None:
        """One line for people, kept in train.log."""
        logger.info(text)
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def begin(self, *, total: int, done: int) -> None:
        """Start the bar, on a terminal."""
        self.total = total
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
        text = f"step {metrics['step']}/{self.total}  epoch {metrics['epoch']}  {describe(metrics)}  {speed}"
        logger.info(text)
        if self._bar is not None:
            self._bar.update(self._task, shown=f"{describe_short(metrics)} {speed}")
        else:
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def validation(self, metrics: Mapping[str, Any]) -> None:
        """Log the figures of the held-out rows."""
        self._write(metrics)
        self.message(f"epoch {metrics['epoch']} validation  {describe(metrics['validation'])}")

    def _write(self, metrics: Mapping[str, Any]) -> None:
        self._metrics.write(json.dumps(metrics, allow_nan=False) + "\n")
        self._metrics.flush()


def describe_short(metrics: Mapping[str, Any]) -> str:
    """The same within the 80 columns of a terminal."""
    accuracy = " ".join(f"{value:.2f}".lstrip("0") for value in metrics["accuracy_per_depth"])
    return f"loss {metrics['loss']:.2f} acc {accuracy} len {metrics['acceptance_length']:.2f}"


def describe(metrics: Mapping[str, Any]) -> str:
    """The learning figures in one phrase."""
    accuracy = " ".join(f"{value:.3f}".lstrip("0") for value in metrics["accuracy_per_depth"])
    return f"loss {metrics['loss']:.4f}  accuracy {accuracy}  accepted length {metrics['acceptance_length']:.2f}"
