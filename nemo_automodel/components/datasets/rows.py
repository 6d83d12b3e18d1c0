# SPDX-License-Identifier: Apache-2.0
"""Chat rows from disk or the Hub, brought into one form: role/content messages. Reads lazily, row by row."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Iterable, Iterator, Mapping

from nemo_automodel.components.datasets.bad_rows import BadRows
from nemo_automodel.errors import DataError
from nemo_automodel.files import is_path_like

COLUMNS = ("messages", "conversations")
FILE_SUFFIXES = (".jsonl", ".json", ".parquet")
# `from` of the ShareGPT world -> `role`. Role/content rows keep their roles: the template knows them.
SHAREGPT_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant",
    "model": "assistant", "system": "system", "tool": "tool", "observation": "tool", "function_response": "tool",
}  # fmt: skip


@dataclass(frozen=True)
class ChatRow:
    """One conversation; `number` counts from 1 in the source."""

    number: int
    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class BadRow:
    """A record that is no conversation, and why."""

    number: int
    reason: str
    remedy: str = "mend or delete these rows, or name the field of the turns with data.column=NAME"


@dataclass(frozen=True)
class Unreadable:
    """A line that is no record at all: a bad row like any other."""

    reason: str


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
            bad.add(row.number, row.reason, row.remedy)
            bad.refuse_early(read)
        elif not bad.count:
            yield row
    bad.refuse_too_many(read)


def read_rows(
    path: str, *, where: str, split: str = "train", column: str | None = None, max_rows: int | None = None
) -> Iterator[ChatRow | BadRow]:
    """Yield the rows of a .jsonl/.json/.parquet file, a `datasets` folder on disk, or a Hub data set.

    `column` names the field that holds the turns; None takes `messages`, then `conversations`. `where` is the config
    key named in errors. `max_rows` counts bad rows too.

    Raises:
        DataError: nothing readable at `path`.
    """
    for number, raw in enumerate(islice(_read_raw(path, split, where), max_rows), start=1):
        try:
            row: ChatRow | BadRow = normalise_row(raw, number, column)
        except ValueError as error:
            row = BadRow(number, str(error))
        yield row


def normalise_row(raw: Any, number: int, column: str | None) -> ChatRow:
    """One raw record -> `ChatRow`; understands role/content and from/value turns.

    Raises:
        ValueError: what is wrong with the record, in one clause.
    """
    if isinstance(raw, Unreadable):
        raise ValueError(raw.reason)
    if not isinstance(raw, Mapping):
        raise ValueError(f"an object is wanted, found {type(raw).__name__}")
    name = column or next((c for c in COLUMNS if raw.get(c) is not None), None)
    if name is None or raw.get(name) is None:
        wanted = f"field {column!r}" if column else "field 'messages' or 'conversations'"
        raise ValueError(f"no {wanted} (it has: {', '.join(map(str, raw)) or 'nothing'})")
    turns = raw[name]
    if not isinstance(turns, (list, tuple)) or not turns:
        raise ValueError(f"{name!r} must be a list of at least one turn")
    messages = tuple(_normalise_turn(turn, index) for index, turn in enumerate(turns))
    return ChatRow(number, messages, _normalise_tools(raw.get("tools")))


def _normalise_turn(turn: Any, index: int) -> dict[str, Any]:
    if not isinstance(turn, Mapping):
        raise ValueError(f"turn {index} is no object")
    turn = _without_nulls(turn)
    if "role" in turn:
        return {**turn, "content": _text_of(turn.get("content", ""), index)}
    if "from" not in turn or "value" not in turn:
        raise ValueError(f"turn {index} has neither role/content nor from/value")
    role = SHAREGPT_ROLES.get(turn["from"])
    if role is None:
        raise ValueError(f"turn {index} is from {turn['from']!r}, known are {', '.join(SHAREGPT_ROLES)}")
    rest = {key: value for key, value in turn.items() if key not in ("from", "value")}
    return {**rest, "role": role, "content": _text_of(turn["value"], index)}


def _without_nulls(value: Any) -> Any:
    """Drop null keys at every depth: Parquet and Arrow give each object every key of its column, and a template would
    render those as arguments. Nulls in lists stay: nothing pads lists."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def _text_of(content: Any, index: int) -> str:
    """Text as it is; a list of text parts joined; anything else (images, audio) refused."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, (list, tuple)) else [None]
    if all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in parts):
        return "".join(part["text"] for part in parts)
    raise ValueError(f"the content of turn {index} is not text")


def _normalise_tools(tools: Any) -> tuple[Mapping[str, Any], ...]:
    if not isinstance(tools, str):
        tools = _without_nulls(tools)
    else:  # JSON text: its nulls are the author's
        try:
            tools = json.loads(tools) if tools.strip() else None
        except json.JSONDecodeError as error:
            raise ValueError(f"'tools' is a string but not JSON ({error})") from error
    if tools is None:
        return ()
    if not isinstance(tools, (list, tuple)) or not all(isinstance(tool, Mapping) for tool in tools):
        raise ValueError("'tools' must be a list of objects")
    return tuple(tools)


def _read_raw(path: str, split: str, where: str) -> Iterable[Any]:
    local = Path(path).expanduser()
    if local.is_file():
        return _read_file(local, where)
    if local.is_dir():
        return _read_with_datasets(str(local), split, where, on_disk=(local / "state.json").exists() or _is_dict(local))
    if path.endswith(FILE_SUFFIXES) or is_path_like(path):
        raise DataError(
            f"no file or folder at {path}",
            where=where,
            remedy=f"set {where}=PATH to a {', '.join(FILE_SUFFIXES)} file or a `datasets` folder, or give a Hub id",
        )
    return _read_with_datasets(path, split, where, on_disk=False)


def _is_dict(folder: Path) -> bool:
    return (folder / "dataset_dict.json").exists()  # `DatasetDict.save_to_disk`


def _read_file(path: Path, where: str) -> Iterator[Any]:
    try:
        if path.suffix == ".parquet":
            yield from _read_parquet(path)
        elif path.suffix == ".json":
            yield from _read_json(path)
        elif path.suffix == ".jsonl":
            yield from _read_jsonl(path)
        else:
            raise ValueError(f"the name ends in none of {', '.join(FILE_SUFFIXES)}")
    except (OSError, ValueError) as error:  # pyarrow's ArrowInvalid and UnicodeDecodeError are ValueErrors
        raise DataError(
            f"cannot read {path}: {error}", where=where, remedy=f"check the file, or set {where}=PATH to another one"
        ) from error


def _read_jsonl(path: Path) -> Iterator[Any]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                yield Unreadable(f"line {number} is not JSON ({error.msg} at column {error.colno})")


def _read_json(path: Path) -> Iterator[Any]:
    rows = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(rows, list):
        raise ValueError("a JSON list of rows is wanted (one row per line belongs in a .jsonl file)")
    yield from rows


def _read_parquet(path: Path) -> Iterator[Any]:
    import pyarrow.parquet as parquet

    with parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=256):
            yield from batch.to_pylist()


def _read_with_datasets(path: str, split: str, where: str, *, on_disk: bool) -> Iterable[Any]:
    import datasets

    try:
        if not on_disk:
            return datasets.load_dataset(path, split=split)
        found = datasets.load_from_disk(path)
        return found[split] if isinstance(found, datasets.DatasetDict) else found
    except Exception as error:  # the library raises over a dozen unrelated types, network ones among them
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise DataError(
            f"cannot load the data set {path}, split {split!r}: {reason}",
            where=where,
            remedy=f"check data.split and the name, or set {where}=PATH to a local file",
        ) from error
