# SPDX-License-Identifier: Apache-2.0
"""Atomic writes, digests and safetensors headers, without torch or numpy."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import stat
import struct
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format's own reader


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a safetensors file; offsets count from the end of the header, in bytes."""

    name: str
    dtype: str  # safetensors spelling: "F32", "BF16", "I64", "BOOL", ...
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def numel(self) -> int:
        count = 1
        for side in self.shape:
            count *= side
        return count


@dataclass(frozen=True)
class SafetensorsHeader:
    """The parsed header; `data_start` is the file offset of the first tensor byte."""

    tensors: tuple[TensorInfo, ...]  # ascending by `begin`
    metadata: dict[str, str]
    data_start: int


def open_regular(path: Path) -> BinaryIO:
    """Open an ordinary file for reading. A pipe would block for ever, a device never end.

    Raises:
        OSError: not there, not readable.
        ValueError: it is something else than a file.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise ValueError(f"{path}: is no ordinary file")
    return os.fdopen(handle, "rb")


def read_safetensors_header(path: Path) -> SafetensorsHeader:
    """Read names, dtypes, shapes and offsets of one safetensors file; no tensor data.

    Raises:
        ValueError: the file is truncated, its header is no JSON, or offsets leave the file.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        prefix = file.read(8)
        if len(prefix) < 8:
            raise ValueError(f"{path}: {size} bytes, too short for a safetensors file")
        (length,) = struct.unpack("<Q", prefix)
        if length > min(MAX_HEADER_BYTES, size - 8):
            raise ValueError(f"{path}: header of {length} bytes does not fit a file of {size} bytes (half-written?)")
        try:
            raw = json.loads(file.read(length))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}: its header is not JSON ({error})") from error
    return _parse_header(raw, path, data_start=8 + length, file_size=size)


def _parse_header(raw: object, path: Path, *, data_start: int, file_size: int) -> SafetensorsHeader:
    if not isinstance(raw, dict):
        raise ValueError(f"{path}: its header is not a JSON object")
    metadata = raw.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError(f"{path}: __metadata__ in its header is not a map of texts, which safetensors refuses")
    try:
        tensors = [
            TensorInfo(name, entry["dtype"], tuple(entry["shape"]), *entry["data_offsets"])
            for name, entry in raw.items()
        ]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path}: malformed tensor entry in the header ({error!r})") from error
    if odd := [t.name for t in tensors if not _is_sound(t)]:
        raise ValueError(f"{path}: malformed tensor entry in the header ({odd[0]!r})")
    tensors.sort(key=lambda t: (t.begin, t.end))
    end = max((t.end for t in tensors), default=0)
    if data_start + end != file_size:
        raise ValueError(f"{path}: {file_size} bytes, but its header promises {data_start + end} (half-written?)")
    return SafetensorsHeader(tuple(tensors), metadata, data_start)


def _is_sound(tensor: TensorInfo) -> bool:
    """A text for a dtype, whole numbers for sides and offsets (JSON may hold anything there)."""
    numbers = (*tensor.shape, tensor.begin, tensor.end)
    return isinstance(tensor.dtype, str) and all(type(n) is int and n >= 0 for n in numbers)


def build_safetensors_header(tensors: list[TensorInfo], metadata: dict[str, str]) -> bytes:
    """The length prefix and header bytes for these tensors, padded with spaces so that data starts 8-aligned."""
    body: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    for t in tensors:
        body[t.name] = {"dtype": t.dtype, "shape": list(t.shape), "data_offsets": [t.begin, t.end]}
    text = json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def write_atomic(path: Path, data: bytes | str) -> None:
    """Write a whole file or nothing: sibling temp file, fsync, one rename, fsync of the folder."""
    payload = data.encode() if isinstance(data, str) else data
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(payload)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, plain_mode())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    fsync_dir(path.parent)


def write_json(path: Path, value: object) -> None:
    """`write_atomic` of plain JSON: indented, non-ASCII kept, NaN refused."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    if not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text):  # JSON spells it, UTF-8 cannot
        text = json.dumps(value, indent=2, allow_nan=False)
    write_atomic(path, text + "\n")


def read_json(path: Path) -> dict:
    """Read one JSON object.

    Raises:
        ValueError: no JSON, or JSON that is no object; the path is in the message.
    """
    with open_regular(path) as file:
        text = file.read()
    try:
        value = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: a JSON object is wanted, found {type(value).__name__}")
    return value


def is_path_like(value: str, base_dir: Path | None = None) -> bool:
    """True when `value` can only be meant as a path, so that a mistyped path is never looked up on the Hub.

    A Hub id is `owner/name`. Where the first part is there under `base_dir` (None: the working directory), it is a
    folder of the user and not an organisation.
    """
    if _HUB_ID.fullmatch(value) is None or "--" in value or ".." in value:
        return True
    return ((base_dir or Path()) / value.split("/")[0]).exists()


def expand_user(path: str | Path) -> Path:
    """`~` and `~name` as the user's home. Where there is none the path stays as it is (pathlib's own raises)."""
    return Path(os.path.expanduser(path))


def fsync_dir(path: Path) -> None:
    """Make a rename in this folder survive a power cut."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # what file systems answer that cannot do it for folders
            raise
    finally:
        os.close(handle)


def point(root: Path, name: str, folder: str) -> None:
    """Make `root/name` a relative link to `folder` beside it, in one rename."""
    link = root / f".{name}.{os.getpid()}.part"
    link.unlink(missing_ok=True)
    link.symlink_to(folder)
    os.replace(link, root / name)
    fsync_dir(root)


def sha256_file(path: Path) -> str:
    """Hex SHA-256 of a file's content, read in 1 MiB pieces."""
    digest = hashlib.sha256()
    with open_regular(path) as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def plain_mode() -> int:
    """The permissions of an ordinary new file, which temp files do not have."""
    current = os.umask(0)
    os.umask(current)
    return 0o666 & ~current
