# SPDX-License-Identifier: Apache-2.0
"""Chat rows from disk or the Hub, brought into one form: role/content messages. Reads lazily, row by row."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import Any, Iterable, Iterator, Mapping

from nemo_automodel.components.datasets.bad_rows import BadRows
from nemo_automodel.components.datasets.normalise import COLUMNS as COLUMNS, normalise
from nemo_automodel.components.datasets.sources import Record, Unreadable, open_source


@dataclass(frozen=True)
class ChatRow:
    """One conversation; `number` counts from 1 in the source."""

    number: int
    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    place: str = ""  # file:line, where the source has lines


@dataclass(frozen=True)
class BadRow:
    """A record that is no conversation, and why."""

    number: int
    reason: str
    remedy: str = "mend or delete these rows, or name the field of the turns with data.column=NAME"
    place: str = ""


def load_rows(
    path: str, *, where: str, split: str = "train", column: str | None = None, max_rows: int | None = None
) -> Iterator[ChatRow]:
    """Like `read_rows`, but every bad row is an error; no row after the first bad one is yielded.

    Raises:
        DataError: nothing readable at `path`, or rows that are no conversation (up to five are named by number).
    """
    bad, read = BadRows(None, where), 0
    for row in read_rows(path, where=where, split=split, column=column, max_rows=max_rows):
        read += 1
        if isinstance(row, BadRow):
            bad.add(row.number, row.reason, row.remedy, row.place)
            bad.refuse_early(read)
        elif not bad.count:
            yield row
    bad.refuse_too_many(read)


def read_rows(
    path: str, *, where: str, split: str = "train", column: str | None = None, max_rows: int | None = None
) -> Iterator[ChatRow | BadRow]:
    """Yield the rows of a file, a folder of files, a `datasets` folder on disk, or a Hub data set.

    `column` names the field that holds the turns; None takes `messages`, then `conversations`, then pairs such as
    `prompt` and `completion`. `where` is the config key named in errors. `max_rows` counts bad rows too.

    Raises:
        DataError: nothing readable at `path`.
    """
    yield from rows_of(open_source(path, split, where).records(), column, max_rows)


def read_records(path: str, *, where: str, split: str = "train") -> Iterator[Any]:
    """The raw records at `path`, for callers with forms of their own; `normalise_row` understands the usual ones.

    Raises:
        DataError: nothing readable at `path`.
    """
    return (record.value for record in open_source(path, split, where).records())


def normalise_row(raw: Any, number: int, column: str | None, place: str = "") -> ChatRow:
    """One raw record -> `ChatRow`.

    Raises:
        ValueError: what is wrong with the record, in one clause.
    """
    if isinstance(raw, Unreadable):
        raise ValueError(raw.reason)
    return ChatRow(number, *normalise(raw, column), place)


def rows_of(records: Iterable[Record], column: str | None, max_rows: int | None) -> Iterator[ChatRow | BadRow]:
    """The first `max_rows` records (None: all), each as a row, good or bad."""
    for number, record in enumerate(islice(records, max_rows), start=1):
        try:
            row: ChatRow | BadRow = normalise_row(record.value, number, column, record.place)
        except (ValueError, RecursionError) as error:
            row = BadRow(number, str(error), place=record.place)
        yield row
