# SPDX-License-Identifier: Apache-2.0
"""One line that says how far it is: rewritten on a terminal, a new one every ten seconds elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TextIO

LINE_S = {True: 1.0, False: 10.0}  # seconds between two, on a terminal or not


class Progress:
    """Counts rows and tokens; rates are those of this run, rows that were finished before it left out."""

    def __init__(self, total: int, stream: TextIO | None = None) -> None:
        self.stream = stream or sys.stderr
        self.total, self.finished, self.skipped, self.failed, self.tokens = total, 0, 0, 0, 0
        self._began = self._shown = time.monotonic()

    def skip(self) -> None:
        """A row that an earlier run finished."""
        self.skipped += 1

    def add(self, tokens: int) -> None:
        self.finished += 1
        self.tokens += tokens

    def fail(self, number: int, reason: str) -> None:
        self.failed += 1
        self._clear()
        print(f"warning: row {number} failed: {reason}", file=self.stream, flush=True)

    def show(self) -> None:
        """Print the line when it is time for it, and always for the last row."""
        now = time.monotonic()
        over = self.skipped + self.finished + self.failed == self.total
        if now - self._shown < LINE_S[self.stream.isatty()] and not over:
            return
        self._shown = now
        self._clear()
        end = "\n" if over or not self.stream.isatty() else ""
        print(self.line(now - self._began), end=end, file=self.stream, flush=True)

    def line(self, seconds: float) -> str:
        """`seconds` since the start."""
        rate = (self.finished + self.failed) / max(seconds, 1e-9)
        left = self.total - self.skipped - self.finished - self.failed
        parts = [
            f"{self.total - left}/{self.total} rows", f"{rate:.2f} rows/s",
            f"{self.tokens / max(seconds, 1e-9):.0f} tokens/s",
            f"{clock(left / rate)} left" if rate else "time left unknown",
        ]  # fmt: skip
        parts += [f"{self.skipped} from before"] if self.skipped else []
        parts += [f"{self.failed} failed"] if self.failed else []
        return ", ".join(parts)

    def _clear(self) -> None:
        if self.stream.isatty():
            print("\r\x1b[K", end="", file=self.stream)


def clock(seconds: float) -> str:
    """1:02:03 or 2:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
