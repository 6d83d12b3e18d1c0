# SPDX-License-Identifier: Apache-2.0
"""Tokenised once: encoded rows on disk, found again by a digest of everything that they follow from.

One folder per digest under `data.cache_dir`: `ids.bin` (int32) and `masks.bin` (bool), which are mapped and not read
in, `index.npy` (lengths and numbers), and `facts.json`, written last. A folder appears by one rename, under a lock, so
that two runs tokenise once; what does not match its own digests is made anew. What no run has opened for KEEP_DAYS is
removed when something new is cached. Any of it can be deleted at any time: an open run keeps what it has mapped.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Callable

import filelock
import numpy as np

from nemo_automodel.components.datasets.encode import EncodedSet, RowEncoder, encode_rows
from nemo_automodel.components.datasets.encoded_rows import EncodedRows, RowWriter
from nemo_automodel.components.datasets.rows import rows_of
from nemo_automodel.components.datasets.sources import open_source
from nemo_automodel.errors import DataError
from nemo_automodel.files import fsync_dir, sha256_file, write_json

NO_CACHE = "none"
DIR_VARIABLE = "TRAIN_THEN_SERVE_TOKENS"  # else DEFAULT_DIR
DEFAULT_DIR = "~/.cache/train-then-serve/tokens"
KEEP_DAYS = 30  # without being opened
KEY_LENGTH = 32  # of a folder's name
REPORT_ROWS = 5000  # a line of progress per so many encoded rows
# The modules that decide what a row becomes.
CODE = ("sources", "normalise", "rows", "chat_template", "chat_spans", "reasoning", "encode", "encoded_rows")
LIBRARIES = ("transformers", "tokenizers", "jinja2")  # their versions may change what a row becomes

Say = Callable[[str], None]


@dataclass(frozen=True)
class RowsWanted:
    """Which rows of which source."""

    path: str
    where: str  # config key of the path
    split: str = "train"
    column: str | None = None
    max_rows: int | None = None
    max_bad_row_share: float = 0.01


def load_or_encode(
    wanted: RowsWanted, encoder: RowEncoder, *, cache_dir: str | None, workers: int, say: Say
) -> EncodedSet:
    """The encoded rows, from the cache where they are there. `cache_dir`: None is the default, "none" is no cache.

    Raises:
        DataError: see `encode_rows` and `open_source`; or the cache's disk is full.
    """
    source = open_source(wanted.path, wanted.split, wanted.where)

    def encode(writer: RowWriter | None = None) -> EncodedSet:
        return encode_rows(
            rows_of(source.records(), wanted.column, wanted.max_rows), encoder, where=wanted.where,
            max_bad_row_share=wanted.max_bad_row_share, workers=workers, writer=writer,
            on_row=lambda n: say(f"{wanted.where}: {n} rows read") if n % REPORT_ROWS == 0 else None,
        )  # fmt: skip

    if cache_dir == NO_CACHE or not source.files:  # a table in memory: nothing to tell by whether it has changed
        return encode()
    place = cache_dir or os.environ.get(DIR_VARIABLE) or DEFAULT_DIR
    try:
        root = Path(place).expanduser()
        root.mkdir(parents=True, exist_ok=True)
        digests = SourceDigests(root / "sources.json")
        key = key_of(wanted, encoder, [digests.of(path) for path in source.files])
        lock = filelock.FileLock(root / f"{key}.lock")
        if not _acquire_at_once(lock):
            say(f"{wanted.where}: waiting for another run that tokenises the same rows ({lock.lock_file})")
            lock.acquire()
    except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home, a file system without locks
        reason = getattr(error, "strerror", None) or error
        say(f"warning: no token cache in {place} ({reason}); data.cache_dir=PATH moves it")
        return encode()
    try:
        return _open_or_build(root / key, encode, wanted.where, say)
    finally:
        lock.release()


def _acquire_at_once(lock: filelock.BaseFileLock) -> bool:
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        return False
    return True


def key_of(wanted: RowsWanted, encoder: RowEncoder, files: list[str]) -> str:
    """Hex digest of all that the encoded rows follow from; `files`: content digests of the source, in order."""
    tokenizer = encoder.tokenizer
    facts = {
        "files": files,
        "rows": {key: value for key, value in asdict(wanted).items() if key not in ("path", "where")},
        "tokenizer": hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()
        if tokenizer.is_fast
        else None,
        "template": tokenizer.chat_template,
        "special_tokens": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        "seq_length": encoder.seq_length,
        "mask_reasoning_content": encoder.mask_reasoning_content,
        "chat_template_kwargs": dict(encoder.kwargs),
        "code": [sha256_file(Path(__file__).parent / f"{name}.py") for name in CODE],
        "libraries": {name: version(name) for name in LIBRARIES},
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:KEY_LENGTH]


class SourceDigests:
    """Content digests of source files; a file with unchanged size, times and inode is not read again."""

    def __init__(self, file: Path) -> None:
        self._file = file
        try:
            self._known: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):  # absent or damaged: it is only a short cut
            self._known = {}

    def of(self, path: Path) -> str:
        """Hex SHA-256 of the file's content."""
        found = path.stat()
        facts = [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev]
        name = str(path.resolve())
        known = self._known.get(name)
        if isinstance(known, dict) and known.get("facts") == facts:
            return known["sha256"]
        digest = sha256_file(path)
        self._known[name] = {"facts": facts, "sha256": digest}
        write_json(self._file, self._known)
        return digest


def _open_or_build(folder: Path, encode: Callable[..., EncodedSet], where: str, say: Say) -> EncodedSet:
    if folder.exists():
        try:
            found = _read(folder)
            os.utime(folder)  # for `remove_unused`
            say(f"{where}: tokens from the cache {folder}")
            return found
        except (OSError, ValueError, KeyError, TypeError) as error:
            say(f"warning: {where}: the token cache {folder} is damaged ({error}); it is made anew")
            shutil.rmtree(folder, ignore_errors=True)
    for leftover in folder.parent.glob(f".{folder.name}.*"):  # of a run that was killed: we hold the lock
        shutil.rmtree(leftover, ignore_errors=True)
    half = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        _write(half, encode)
        os.rename(half, folder)
        fsync_dir(folder.parent)
    except OSError as error:
        raise DataError(
            f"cannot write the token cache {folder} ({error.strerror or error})", where="data.cache_dir",
            remedy="free some space, set data.cache_dir=PATH on another disk, or data.cache_dir=none",
        ) from error  # fmt: skip
    finally:
        shutil.rmtree(half, ignore_errors=True)
    found = _read(folder)
    size = sum(file.stat().st_size for file in folder.iterdir())
    say(f"{where}: tokens cached in {folder} ({size / 1e6:.1f} MB)")
    for gone in remove_unused(folder.parent):
        say(f"{where}: removed {gone} from the cache: not opened for {KEEP_DAYS} days")
    return found


def remove_unused(root: Path) -> list[Path]:
    """Remove the folders of the cache that no run has opened for KEEP_DAYS, but for those being opened just now."""
    removed = []
    for folder in [facts.parent for facts in root.glob("[0-9a-f]" * KEY_LENGTH + "/facts.json")]:
        lock = filelock.FileLock(root / f"{folder.name}.lock")
        if _is_unused(folder) and _acquire_at_once(lock):
            if _is_unused(folder):  # still: nobody opened it meanwhile
                shutil.rmtree(folder, ignore_errors=True)
                removed.append(folder)
            lock.release()
    return removed


def _is_unused(folder: Path) -> bool:
    try:
        return time.time() - folder.stat().st_mtime > KEEP_DAYS * 24 * 3600
    except OSError:  # another run has just removed it
        return False


def _write(folder: Path, encode: Callable[..., EncodedSet]) -> None:
    with (folder / "ids.bin").open("wb") as ids, (folder / "masks.bin").open("wb") as masks:
        writer = RowWriter((ids, masks))
        made = encode(writer)
        for file in (ids, masks):
            file.flush()
            os.fsync(file.fileno())
    np.save(folder / "index.npy", np.stack(writer.index()))
    facts = asdict(replace(made, rows=None))
    write_json(folder / "facts.json", {"digest": _digest(_map(folder), facts), **facts})


def _digest(rows: EncodedRows, facts: dict[str, Any]) -> str:
    return hashlib.sha256((rows.digest + json.dumps(facts, sort_keys=True)).encode()).hexdigest()


def _map(folder: Path) -> EncodedRows:
    lengths, numbers = np.load(folder / "index.npy")
    ids = np.memmap(folder / "ids.bin", np.int32, mode="r")
    return EncodedRows(ids, np.memmap(folder / "masks.bin", bool, mode="r"), lengths, numbers)


def _read(folder: Path) -> EncodedSet:
    """Raises OSError, ValueError, KeyError or TypeError when a file is missing or not as it was written."""
    facts = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
    rows = _map(folder)
    if facts.pop("digest") != _digest(rows, facts):
        raise ValueError("its content does not match its digest")
    return EncodedSet(**{**facts, "rows": rows, "bad_rows": tuple(facts["bad_rows"])})
