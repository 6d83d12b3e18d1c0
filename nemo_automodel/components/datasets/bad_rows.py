# SPDX-License-Identifier: Apache-2.0
"""How many unusable rows a data set may have, and what is said about them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from nemo_automodel.errors import DataError

MAX_NAMED = 5  # bad rows named in one message
HOPELESS_AFTER = 1000  # bad rows without one good row before them: the rest is not worth the time


@dataclass
class BadRows:
    """Bad rows of one source as they are met; `max_share` 0 allows none, None none whatever is configured."""

    max_share: float | None
    where: str  # config key of the source
    count: int = 0
    named: list[str] = field(default_factory=list)
    remedy: str = ""  # of the first bad row

    def add(self, number: int, reason: str, remedy: str, place: str = "") -> None:
        """Take note of row `number` (from 1); `place`: its file and line, where it has one."""
        self.count += 1
        self.remedy = self.remedy or remedy
        if len(self.named) < MAX_NAMED:
            line = " ".join(reason.split("\n"))
            line = line.encode(errors="backslashreplace").decode()  # half a surrogate pair cannot be printed
            self.named.append(f"row {number}{f' ({place})' if place else ''}: {line}")

    def refuse_early(self, read: int) -> None:
        """Call after each bad row, `read` rows into the source.

        Raises:
            DataError: nothing that follows can make the source usable, or enough is known to mend it.
        """
        if (not self.max_share and self.count == MAX_NAMED) or (self.count == read == HOPELESS_AFTER):
            raise self._error(f"{self.count} of the first {read} rows")

    def refuse_too_many(self, read: int) -> None:
        """Call at the end, after `read` rows.

        Raises:
            DataError: more of them are bad than `max_share` allows, or all are.
        """
        if self.count and (self.count == read or self.count / read > (self.max_share or 0)):
            raise self._error(f"{self.count} of {read} rows", allow=math.ceil(1000 * self.count / read) / 1000)

    def _error(self, how_many: str, allow: float = 1.0) -> DataError:
        skip = allow < 1 and self.max_share is not None
        allowed = "" if self.max_share is None else f" (allowed share {self.max_share:g})"
        return DataError(
            f"{how_many} cannot be used{allowed}: {'; '.join(self.named)}",
            where=self.where,
            remedy=self.remedy + (f", or leave such rows out with data.max_bad_row_share={allow:g}" if skip else ""),
        )
