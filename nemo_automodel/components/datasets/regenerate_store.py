# SPDX-License-Identifier: Apache-2.0
"""Where answers are kept, so that a run killed at any moment goes on.

OUT         finished rows in the order of the data; written whole or not at all
OUT.part    finished rows as they came in; a half-written last line is cut off
OUT.json    the settings, and how the last run ended
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Mapping

from filelock import FileLock, Timeout

from nemo_automodel.components.datasets.regenerate_ask import Answered
from nemo_automodel.components.datasets.rows import ChatRow
from nemo_automodel.errors import ConfigError, DataError
from nemo_automodel.files import fsync_dir, plain_mode, read_json, write_json

SYNC_S = 1.0  # rows of at most so many seconds are lost in a power cut; none when only the process is killed


def digest_of(row: ChatRow) -> str:
    """Names a row's content, so that answers never land beside other prompts."""
    text = json.dumps([row.messages, row.tools], sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class _Place:
    file: Path
    begin: int
    size: int


@dataclass
class Tally:
    """What became of the rows."""

    answered: int = 0
    dropped: int = 0  # an answer was cut by max_tokens
    failed: dict[int, str] = field(default_factory=dict)  # row number -> why
    cut: int = 0  # answers that max_tokens ended, among those kept
    ended: int = 0  # conversations whose last turns are missing


class Store:
    """The answers of one output file, held by one process at a time. Use as a context manager."""

    def __init__(self, out: Path, settings: Mapping[str, Any]) -> None:
        """Raises ConfigError: answers made with other settings are there."""
        self.out, self.part, self.summary = out, out.with_name(out.name + ".part"), out.with_name(out.name + ".json")
        self._settings = dict(settings)
        self._lock = FileLock(out.with_name(f".{out.name}.lock"))
        self._places: dict[int, _Place] = {}
        self._digests: dict[int, str] = {}
        self._dropped: dict[int, str] = {}
        self._file: Any = None
        self._synced = 0.0

    def __enter__(self) -> Store:
        self.out.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.acquire(timeout=0)
        except Timeout as error:
            raise ConfigError(
                "another run writes this file", where=f"--out {self.out}", remedy="wait for it, or give another --out"
            ) from error
        try:
            self._open()
        except BaseException:
            self._lock.release()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._file is not None:
            self._file.close()
        self._lock.release()

    def _open(self) -> None:
        if self.summary.exists():
            self._check_settings(read_json(self.summary).get("settings", {}))
        elif self.out.exists():
            raise ConfigError(
                "it is there and not ours (no .json beside it)", where=f"--out {self.out}", remedy="give another --out"
            )
        self._read(self.out)
        self._cut_torn_line()
        self._read(self.part)
        self._save_summary("running", {})
        self._file = self.part.open("ab")

    def _check_settings(self, was: Mapping[str, Any]) -> None:
        changed = [f"{k} {was.get(k)!r} -> {v!r}" for k, v in self._settings.items() if was.get(k) != v]
        if changed:
            raise ConfigError(
                f"the answers there were made otherwise: {', '.join(changed)}", where=f"--out {self.out}",
                remedy=f"give another --out, or remove {self.out}*",
            )  # fmt: skip

    def _cut_torn_line(self) -> None:
        if not self.part.exists():
            return
        data = self.part.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            os.truncate(self.part, whole)

    def _read(self, path: Path) -> None:
        if not path.exists():
            return
        with path.open("rb") as file:
            begin = 0
            for line in file:
                self._note(json.loads(line), _Place(path, begin, len(line)))
                begin += len(line)

    def _note(self, record: Mapping[str, Any], place: _Place) -> None:
        number = record["row"]
        self._digests[number] = record["source"]
        if record.get("dropped"):
            self._dropped[number] = record["dropped"]
        else:
            self._places[number] = place

    def has(self, row: ChatRow) -> bool:
        """True when this row is finished.

        Raises:
            DataError: another row had its number when it was answered.
        """
        known = self._digests.get(row.number)
        if known is not None and known != digest_of(row):
            raise DataError(
                f"row {row.number} is not the one that was answered: the data has changed", where="--data",
                remedy=f"give another --out, or remove {self.out}*",
            )  # fmt: skip
        return known is not None

    def add(self, answered: Answered, *, drop: str | None = None) -> None:
        """Keep one answered row; with `drop` (the reason) only that it is finished."""
        row = answered.row
        record: dict[str, Any] = {"row": row.number, "source": digest_of(row)}
        if drop:
            record["dropped"] = drop
        else:
            record["messages"] = list(answered.messages)
            record |= {"tools": list(row.tools)} if row.tools else {}
            record |= {"tokens": answered.tokens}
            record |= {"cut": list(answered.cut)} if answered.cut else {}
            record |= {"ended": answered.ended} if answered.ended else {}
        line = (json.dumps(record, ensure_ascii=False) + "\n").encode()
        self._note(record, _Place(self.part, self._file.tell(), len(line)))
        self._file.write(line)
        self._file.flush()  # to the kernel: nothing is lost when this process is killed
        if time.monotonic() - self._synced > SYNC_S:
            os.fsync(self._file.fileno())
            self._synced = time.monotonic()

    def finish(self, tally: Tally) -> int:
        """Write OUT in the order of the data and remove OUT.part; the number of rows in OUT."""
        self._file.close()
        part = self.out.with_name(f".{self.out.name}.tmp")
        sources = {path: path.open("rb") for path in (self.out, self.part) if path.exists()}
        try:
            with part.open("wb") as file:
                for _, place in sorted(self._places.items()):
                    sources[place.file].seek(place.begin)
                    file.write(sources[place.file].read(place.size))
                file.flush()
                os.fsync(file.fileno())
        finally:
            for source in sources.values():
                source.close()
        part.chmod(plain_mode())
        # the dropped rows are noted before their lines go; killed in between, both files hold the same rows
        self._save_summary("done" if not tally.failed else "some rows failed", tally.failed)
        os.replace(part, self.out)
        fsync_dir(self.out.parent)
        self.part.unlink(missing_ok=True)
        return len(self._places)

    def _save_summary(self, status: str, failed: Mapping[int, str]) -> None:
        old = read_json(self.summary) if self.summary.exists() else {}
        for entry in old.get("dropped", []):
            self._dropped.setdefault(entry["row"], entry["why"])
            self._digests.setdefault(entry["row"], entry["source"])
        dropped = [{"row": n, "source": self._digests[n], "why": why} for n, why in sorted(self._dropped.items())]
        write_json(
            self.summary,
            {
                "status": status, "settings": self._settings, "rows": len(self._places), "dropped": dropped,
                "failed": [{"row": number, "why": why} for number, why in sorted(failed.items())],
            },
        )  # fmt: skip
