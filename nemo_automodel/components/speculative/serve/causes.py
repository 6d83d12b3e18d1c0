# SPDX-License-Identifier: Apache-2.0
"""Why a server died, read from the end of its output, and what to type next where the message is known.

The known messages are data (`causes.json`).
"""

from __future__ import annotations

import json
import re
import signal
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources

_PREFIX = re.compile(r"^(\([^)]*pid=\d+\)\s*)?((DEBUG|INFO|WARNING|ERROR|CRITICAL)\s+[\d-]+ [\d:]+\s+\[[^\]]*\]\s*)?")
_CAUSE = re.compile(
    r"^(?:[\w.]+\.)?\w*(?:Error|Exception|Interrupt|Exit)\b.*|.*: error: .*|.*\bOut of memory\b.*", re.I
)
_ECHO = re.compile(
    r"root cause|stack trace|EngineDeadError|EngineCore encountered|CancelledError|SystemExit|stream generator"
)
_FRAME = re.compile(r'^\s*(File "|\^+|raise )')
_QUIET = re.compile(r"^\s*(DEBUG|INFO|WARNING)\b")  # vLLM's own lines below an error
_SHOWN = 400

# Signals that end a server from outside, or below Python.
SIGNALS = {
    128 + signal.SIGKILL: "it was killed: out of memory? See dmesg, and give it less (a smaller serve.max_model_len)",
    128 + signal.SIGILL: "this CPU lacks instructions that the build uses: another build or release of vLLM",
    128 + signal.SIGBUS: "shared memory ran out: a larger /dev/shm, in a container --ipc=host",
}


@dataclass(frozen=True)
class Cause:
    """The telling line of the output; `remedy` is empty where the message is not known."""

    line: str
    remedy: str = ""


@dataclass(frozen=True)
class _Known:
    pattern: re.Pattern[str]
    remedy: str


@lru_cache(maxsize=1)
def _known() -> tuple[_Known, ...]:
    text = resources.files(__package__).joinpath("causes.json").read_text(encoding="utf-8")
    return tuple(_Known(re.compile(entry["pattern"]), entry["remedy"]) for entry in json.loads(text)["causes"])


def read_cause(text: str, exit_code: int | None = None) -> Cause:
    """What a server's output and exit code (128 + N for signal N; None: it lives) say of its death."""
    lines = _telling_lines(text)
    told = find_cause(text)
    for line in (told, *reversed(lines)):  # what is said last, else anything known that was said before it
        for known in _known():
            if match := known.pattern.search(line):
                remedy = known.remedy.format(match.group(), *(group or "" for group in match.groups()))
                return Cause(line.strip()[:_SHOWN], remedy)
    if _CAUSE.match(told) and _ECHO.search(told):
        return Cause("its engine process ended and left no reason", SIGNALS[128 + signal.SIGKILL])
    by_signal = (exit_code or 0) > 128 and not any(_CAUSE.match(line) for line in lines)
    return Cause(_signal_name(exit_code) if by_signal else told, SIGNALS.get(exit_code or 0, ""))


def _signal_name(exit_code: int) -> str:
    """For a server that had nothing to say of its death; its last lines would only lead astray."""
    try:
        return f"ended by {signal.Signals(exit_code - 128).name}"
    except ValueError:
        return f"ended by signal {exit_code - 128}"


def _telling_lines(text: str) -> list[str]:
    """Lines that can name a cause: errors, without their prefix, and what no logger wrote."""
    shown = [line for line in text.splitlines() if not _QUIET.match(re.sub(r"^\([^)]*pid=\d+\)\s*", "", line))]
    lines = [_PREFIX.sub("", line).rstrip() for line in shown]
    return [line for line in lines if line.strip() and not _FRAME.match(line)]


def find_cause(text: str) -> str:
    """The line of an output that says why it ended: the last error that is not merely the echo of another.

    vLLM 0.32 ends with "Engine core initialization failed. See root cause above", which is no cause; argparse's
    `error:` and pydantic's `ValidationError` (whose text is on the lines after it) count too.
    """
    lines = [_PREFIX.sub("", line).rstrip() for line in text.splitlines()]
    lines = [line for line in lines if line.strip() and not _FRAME.match(line)]
    causes = [i for i, line in enumerate(lines) if _CAUSE.match(line)]
    telling = [i for i in causes if not _ECHO.search(lines[i])] or causes
    if not telling:
        return " | ".join(line.strip() for line in lines[-3:]) or "it printed nothing"
    last = telling[-1]
    span = 3 if "validation error" in lines[last] else 1
    return " ".join(line.strip() for line in lines[last : last + span])[:_SHOWN]


def last_line(text: str) -> str:
    """The last line that says anything, without vLLM's prefix, for a progress line."""
    lines = [line for line in (_PREFIX.sub("", line).strip() for line in text.splitlines()) if line]
    return lines[-1][:100] if lines else "(no output yet)"
