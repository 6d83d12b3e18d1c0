# SPDX-License-Identifier: Apache-2.0
"""The error tree. A `UserError` is a user's mistake or a machine's limit: one line, no traceback.

Exit codes (design section 8): 0 done, 1 failed, 2 vLLM missing or too old, 3 acceptance gate, 130 interrupted.
"""

from __future__ import annotations


def printable_text(text: str) -> str:
    """A name in a file may hold what moves a terminal's cursor, or bytes that are no text: both as escapes."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


class UserError(Exception):
    """Something a user can mend. Three parts: what was found, where, what to type next."""

    exit_code = 1

    def __init__(self, found: str, *, where: str, remedy: str) -> None:
        self.found, self.where, self.remedy = found, where, remedy
        super().__init__(found, where, remedy)

    def __str__(self) -> str:
        return printable_text(" ".join(f"{self.found} [{self.where}] -> {self.remedy}".split("\n")))


class ConfigError(UserError):
    """A key or value of the configuration is not usable."""


class DataError(UserError):
    """A data set cannot be read, or nothing in it would be trained on."""


class ResolveError(UserError):
    """No usable draft checkpoint where one was named."""


class FixupError(UserError):
    """The draft cannot be made servable by the chosen vLLM; lists every problem at once."""


class ExportError(UserError):
    """The export could not be written."""


class PreflightError(UserError):
    """Something that serving needs is not there, found before the first training step."""


class LaunchError(UserError):
    """The server did not start, died, or answers without speculating."""


class TrainError(UserError):
    """Training could not start or go on."""


class VllmMissingError(UserError):
    """vLLM is not installed in the chosen interpreter, or is too old for this draft."""

    exit_code = 2


class GateError(UserError):
    """What was measured is below `serve.benchmark.min_acceptance_length` or `min_speedup`."""

    exit_code = 3


class Interrupted(UserError):
    """SIGINT or SIGTERM; what was done so far is saved, nothing is served."""

    exit_code = 130
