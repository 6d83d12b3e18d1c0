# SPDX-License-Identifier: Apache-2.0
"""Where raw records come from: files, a folder of files, a saved `datasets` folder, a Hub data set. Read lazily."""

from __future__ import annotations

import gzip
import json
import os
import re
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterator

from nemo_automodel.errors import DataError
from nemo_automodel.files import is_path_like

FILE_SUFFIXES = (".jsonl", ".json", ".parquet", ".jsonl.gz", ".json.gz", ".ndjson", ".ndjson.gz")
PARQUET_ROWS = 256  # read at once
# A folder whose files are named after splits is read by split, as `datasets` does: test rows must not be trained on.
SPLIT_WORDS = {
    "train": {"train", "training"},
    "validation": {"validation", "valid", "val", "dev"},
    "test": {"test", "testing", "eval", "evaluation"},
}


@dataclass(frozen=True)
class Unreadable:
    """A line that is no record at all: a bad row like any other."""

    reason: str


@dataclass(frozen=True)
class Record:
    """One raw record and where it stands: `chats.jsonl:95` (a line), `part-1.parquet:95` (a row of the file)."""

    value: Any
    place: str = ""  # empty in a `datasets` table: the row's number says it


@dataclass(frozen=True)
class FileSource:
    """Files, one after the other."""

    files: tuple[Path, ...]
    where: str  # config key

    def records(self) -> Iterator[Record]:
        """Raises DataError when a file cannot be read (further)."""
        for path in self.files:
            try:
                for number, value in _read_file(path):
                    yield Record(value, f"{path.name}:{number}")
            except (OSError, EOFError, ValueError, RecursionError, zlib.error) as error:  # ArrowInvalid is a ValueError
                raise DataError(
                    f"cannot read {path}: {error}", where=self.where,
                    remedy=f"check the file, or set {self.where}=PATH to another one",
                ) from error  # fmt: skip


@dataclass(frozen=True)
class TableSource:
    """A split that the `datasets` library has loaded: memory-mapped Arrow files."""

    table: Any  # datasets.Dataset

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(sorted({Path(file["filename"]) for file in self.table.cache_files}))

    def records(self) -> Iterator[Record]:
        return (Record(value) for value in self.table)


def open_source(path: str, split: str, where: str) -> FileSource | TableSource:
    """Find out what `path` is; no row is read yet.

    Raises:
        DataError: nothing readable at `path`.
    """
    local = Path(os.path.expanduser(path))  # a user that is not there is left as it is
    if os.path.isfile(local):  # pathlib's raises for a name that is too long
        if not local.name.lower().endswith(FILE_SUFFIXES):
            raise DataError(
                f"cannot read {local}: the name ends in none of {', '.join(FILE_SUFFIXES)}", where=where,
                remedy=f"set {where}=PATH to a file of such a name",
            )  # fmt: skip
        return FileSource((local,), where)
    if path and os.path.isdir(local):
        if (local / "state.json").exists() or (local / "dataset_dict.json").exists():  # `save_to_disk`
            return TableSource(_from_disk(local, split, where))
        return FileSource(_shards(local, split, where), where)
    if path.lower().endswith(FILE_SUFFIXES) or is_path_like(path):
        raise DataError(
            f"no file or folder at {path}", where=where,
            remedy=f"set {where}=PATH to a {', '.join(FILE_SUFFIXES)} file, a folder of such files or a saved "
            "`datasets` folder, or give a Hub id",
        )  # fmt: skip
    return TableSource(_from_hub(path, split, where))


def _shards(folder: Path, split: str, where: str) -> tuple[Path, ...]:
    """The files below the folder in the order of their names; those of the split, where names tell splits apart."""
    files = sorted(p for p in folder.rglob("*") if p.name.lower().endswith(FILE_SUFFIXES) and p.is_file())
    files = [p for p in files if not any(part.startswith(".") for part in p.relative_to(folder).parts)]
    if not files:
        raise DataError(
            f"{folder} holds no {', '.join(FILE_SUFFIXES)} file and is no saved `datasets` folder", where=where,
            remedy=f"set {where}=PATH to a file or another folder",
        )  # fmt: skip
    splits = {path: _split_of(str(path.relative_to(folder))) for path in files}
    if not any(splits.values()):
        return tuple(files)
    chosen = tuple(path for path in files if splits[path] == split)
    if not chosen and split == "train":  # `part-1.jsonl` and `dev.jsonl`: what is not held out is for training
        chosen = tuple(path for path in files if splits[path] is None)
    if not chosen:
        found = ", ".join(sorted({s for s in splits.values() if s}))
        key = "data.validation_split" if where == "data.validation" else "data.split"
        raise DataError(
            f"no file in {folder} is named after the split {split!r} (found: {found})", where=where,
            remedy=f"set {key}={found.split(', ')[0]}, or name one file",
        )  # fmt: skip
    return chosen


def _split_of(name: str) -> str | None:
    words = set(re.split(r"[^a-z]+", name.lower()))
    return next((split for split, known in SPLIT_WORDS.items() if words & known), None)


def _read_file(path: Path) -> Iterator[tuple[int, Any]]:
    """(line or row number from 1, record)."""
    name = path.name.lower()
    if name.endswith(".parquet"):
        return _read_parquet(path)
    return _read_json(path) if name.endswith((".json", ".json.gz")) else _read_jsonl(path)


def _open(path: Path) -> Any:
    return gzip.open(path, "rb") if path.suffix.lower() == ".gz" else path.open("rb")


def _read_jsonl(path: Path) -> Iterator[tuple[int, Any]]:
    with _open(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                yield number, json.loads(line)
            except json.JSONDecodeError as error:
                yield number, Unreadable(f"line {number} is not JSON ({error.msg} at column {error.colno})")
            except UnicodeDecodeError:
                yield number, Unreadable(f"line {number} is not UTF-8 text")
            except (ValueError, RecursionError) as error:  # a number of thousands of digits; thousands of brackets
                yield number, Unreadable(f"line {number} cannot be read ({error})")


def _read_json(path: Path) -> Iterator[tuple[int, Any]]:
    """A list of rows; or, under that name too, one row per line."""
    with _open(path) as file:
        start = file.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n")
        if not start.startswith(b"["):
            yield from _read_jsonl(path)
            return
        file.seek(0)
        rows = json.loads(file.read())
    yield from enumerate(rows, start=1)


def _read_parquet(path: Path) -> Iterator[tuple[int, Any]]:
    import pyarrow.parquet as parquet

    number = 0
    with parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=PARQUET_ROWS):
            for row in batch.to_pylist():
                number += 1
                yield number, row


def _from_disk(folder: Path, split: str, where: str) -> Any:
    import datasets

    try:
        found = datasets.load_from_disk(str(folder))
        if isinstance(found, datasets.DatasetDict) and split not in found:
            raise ValueError(f"it has {', '.join(found)}")
        return found[split] if isinstance(found, datasets.DatasetDict) else found
    except Exception as error:  # the library raises over a dozen unrelated types
        raise _not_loaded(f"the data set folder {folder}", split, where, error) from error


def _from_hub(name: str, split: str, where: str) -> Any:
    import datasets

    try:
        return datasets.load_dataset(name, split=split)
    except Exception as error:  # network errors of several libraries among them
        from huggingface_hub import constants

        if constants.is_offline_mode():
            raise DataError(
                f"the data set {name!r} is not in the local cache, and the Hub is not asked (HF_HUB_OFFLINE is set)",
                where=where,
                remedy=f"unset HF_HUB_OFFLINE to download it, or set {where}=PATH to a local file or folder",
            ) from error
        raise _not_loaded(f"the data set {name!r}", split, where, error) from error


def _not_loaded(what: str, split: str, where: str, error: Exception) -> DataError:
    reason = str(error).strip().split("\n")[0] or type(error).__name__
    return DataError(
        f"cannot load {what}, split {split!r}: {reason}", where=where,
        remedy=f"check data.split and the name, or set {where}=PATH to a local file",
    )  # fmt: skip
