# SPDX-License-Identifier: Apache-2.0
"""Decide where the export goes and which bytes it is made of. Reads headers only, writes nothing.

One `model.safetensors`, whatever the source's shards: there is no index to disagree with, and tensors can be left out.
When nothing is left out of a single shard, the file is the source's bytes with a header of equal length over it, so
that a filesystem with reflinks shares the data.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Mapping

from nemo_automodel.components.speculative.serve.shards import DTYPE_BYTES
from nemo_automodel.components.speculative.serve.types import Fixups, Resolved, ServeSpec, ShardTensor
from nemo_automodel.errors import ExportError
from nemo_automodel.files import TensorInfo, build_safetensors_header, expand_user, read_json, read_safetensors_header

LAYOUT_VERSION = 1
EXPORT_DIR = "vllm_export"
OWN_DIR = "vllm_export_own"  # beside a vllm_export/ of another tool; NeMo Automodel's launcher makes one, too
WEIGHTS, CONFIG, MANIFEST = "model.safetensors", "config.json", "manifest.json"


@dataclass(frozen=True)
class Segment:
    """`length` bytes of `source` from `begin`, placed at `dest` in the exported weights file."""

    source: Path
    begin: int
    dest: int
    length: int


@dataclass(frozen=True)
class ExportPlan:
    """All that an export is made of; `content` is what decides freshness besides the source's bytes."""

    dest: Path
    header: bytes  # written last, at offset 0
    segments: tuple[Segment, ...]
    weight_bytes: int  # size of the exported weights file
    model_dir: Path
    sources: tuple[str, ...]  # files below model_dir whose bytes the export depends on
    content: Mapping[str, Any]  # layout version, config, renames, dropped, copies, zeros, rows
    fixups: tuple[Mapping[str, Any], ...]  # for the manifest's reader; no part of freshness, wording may change
    notes: tuple[str, ...]
    facts: tuple[Mapping[str, int], ...]  # of each source when its header was read: it must not change after that

    @property
    def config(self) -> Mapping[str, Any]:
        return self.content["config"]


def plan_export(resolved: Resolved, fixups: Fixups, spec: ServeSpec, base_dir: Path | None = None) -> ExportPlan:
    """The folder, the header and the byte ranges of the export.

    Raises:
        ExportError: the destination is the source's own folder, or the checkpoint is being written.
    """
    sources = (CONFIG, *sorted(str(shard.relative_to(resolved.model_dir)) for shard in resolved.shards))
    facts = _unchanged_facts(resolved, sources)
    dest, notes = choose_dest(resolved, spec, base_dir or Path.cwd())
    header, segments = _layout(resolved, fixups)
    content = {
        "layout_version": LAYOUT_VERSION,
        "config": dict(fixups.config),
        "renames": dict(fixups.renames),
        "dropped": list(fixups.dropped),
        "copies": dict(fixups.copies),
    }
    for key, value in (("zeros", fixups.zeros), ("rows", fixups.rows)):
        if value:  # a key only where it is needed: exports made without it stay fresh
            content[key] = dict(value)
    changes = tuple(vars(change) for change in fixups.changes)
    end = max((segment.dest + segment.length for segment in segments), default=len(header))
    plain = json.loads(json.dumps(content))  # as it will be read back
    return ExportPlan(dest, header, segments, end, resolved.model_dir, sources, plain, changes, notes, facts)


def file_facts(path: Path) -> dict[str, int]:
    """What changes when a file's bytes do; equality of all of it stands for equality of content."""
    stat = path.stat()
    return {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "ctime_ns": stat.st_ctime_ns, "inode": stat.st_ino}


def _unchanged_facts(resolved: Resolved, sources: tuple[str, ...]) -> tuple[dict[str, int], ...]:
    """The facts of files that are still those that `resolve` read; else offsets and checks would be another file's."""
    read = {(tensor.shard, tensor.info) for tensor in resolved.tensors}
    try:
        facts = tuple(file_facts(resolved.model_dir / name) for name in sources)
        there = {(shard, info) for shard in resolved.shards for info in read_safetensors_header(shard).tensors}
        config = read_json(resolved.model_dir / CONFIG)
    except (OSError, ValueError) as error:
        raise changed(resolved.model_dir) from error
    if not read <= there or config != resolved.config:
        raise changed(resolved.model_dir)
    return facts


def changed(model_dir: Path) -> ExportError:
    """A checkpoint that somebody writes while it is exported."""
    found = f"the checkpoint changed while it was exported ({model_dir})"
    return ExportError(found, where="serve.checkpoint", remedy="wait until it is written, then run again")


def choose_dest(resolved: Resolved, spec: ServeSpec, base_dir: Path) -> tuple[Path, tuple[str, ...]]:
    """`vllm_export/` beside the weights; its own folder under `serve.export_dir`; a cache for stores."""
    name = _label(resolved.model_dir)
    if spec.export_dir is not None:
        given = (base_dir / expand_user(spec.export_dir)).absolute()
        _refuse_place(given, resolved, base_dir / expand_user(spec.target))
        dest = given / name
    elif (why := _no_place(resolved)) is None:
        usual = resolved.model_dir / EXPORT_DIR
        if (usual / MANIFEST).is_file() or not foreign_files(usual):
            return usual, ()
        own = resolved.model_dir / OWN_DIR
        return own, (f"{usual} was made by another tool and is left alone: the export's place is {own}",)
    else:
        cache = expand_user(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
        dest = cache.absolute() / "speculative-exports" / name
        return dest, (f"{resolved.model_dir} {why}: the export's place is {dest}",)
    if dest.resolve() == resolved.model_dir:
        raise ExportError(f"{dest} is the draft itself", where="serve.export_dir", remedy="name another folder")
    return dest, ()


def _refuse_place(given: Path, resolved: Resolved, target: Path) -> None:
    """Raises ExportError: `serve.export_dir` is a folder that has another use; exports would be strewn into it."""
    uses = {Path("/"): "the root of the file system", target: "the target's own folder"}
    uses[resolved.model_dir] = "the folder of the draft's weights"
    for folder, use in uses.items():
        if given.resolve() == folder.resolve():
            found = f"{given} is {use}"
            raise ExportError(found, where="serve.export_dir", remedy="name another folder, or leave it at null")


def foreign_files(folder: Path) -> list[str]:
    """Names in an existing folder that no export of ours has; [] where there is no folder (a link counts as none)."""
    if folder.is_symlink() or not folder.is_dir():
        return []
    ours, rest = (WEIGHTS, CONFIG, MANIFEST), f".{MANIFEST}."  # `rest`: of a killed run, removed by the next export
    return sorted(file.name for file in folder.iterdir() if file.name not in ours and not file.name.startswith(rest))


def _no_place(resolved: Resolved) -> str | None:
    """Why nothing is written beside these weights; None: it may be."""
    if not _writable(resolved.model_dir):
        return "is read-only"
    if any(shard.is_symlink() for shard in resolved.shards):
        return "holds links into a store"
    return "is an export itself" if _is_export(resolved.model_dir) else None


def _is_export(folder: Path) -> bool:
    try:
        return "made_from" in read_json(folder / MANIFEST)
    except (OSError, ValueError):
        return False


def _writable(folder: Path) -> bool:
    # root passes access() everywhere; a folder without any write bit is still meant to be left alone
    return os.access(folder, os.W_OK) and bool(folder.stat().st_mode & 0o222)


def _label(model_dir: Path) -> str:
    """A readable name that no other checkpoint has: the last telling part of the path and a digest of all of it."""
    parts = [part for part in model_dir.parts[1:] if part not in ("model", "consolidated", EXPORT_DIR)]
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", parts[-1] if parts else "draft").strip("-.") or "draft"
    return f"{readable[:80]}-{hashlib.sha256(str(model_dir).encode(errors='surrogateescape')).hexdigest()[:12]}"


def _layout(resolved: Resolved, fixups: Fixups) -> tuple[bytes, tuple[Segment, ...]]:
    kept = [tensor for tensor in resolved.tensors if tensor.name in fixups.renames]
    starts = {shard: read_safetensors_header(shard).data_start for shard in resolved.shards}
    one_shard = len(resolved.shards) == 1 and not (fixups.copies or fixups.zeros or fixups.rows)
    if one_shard and len(kept) == len(read_safetensors_header(resolved.shards[0]).tensors):
        whole = _whole_file(resolved.shards[0], kept, fixups, starts[resolved.shards[0]])
        if whole is not None:
            return whole
    named = [(fixups.renames[tensor.name], tensor) for tensor in kept]
    named += [(name, tensor) for name, source in fixups.copies.items() for tensor in kept if tensor.name == source]
    placed = _place(named, fixups)
    header = build_safetensors_header(placed, {"format": "pt"})
    sources = dict(named)
    segments = [
        Segment(tensor.shard, starts[tensor.shard] + tensor.info.begin, len(header) + info.begin, info.end - info.begin)
        for info in placed
        if (tensor := sources.get(info.name)) is not None
    ]
    return header, tuple(_merge(segments))


def _place(named: list[tuple[str, ShardTensor]], fixups: Fixups) -> list[TensorInfo]:
    """Where each exported tensor lies. Widest dtype first keeps every tensor aligned to its element size, as
    safetensors' own writer does.

    Of a tensor in `fixups.rows` only the first rows are kept, which lie together at its beginning.
    Zeros are holes that no segment fills; they come before the tensors of their dtype, of which there is one at least,
    so that the file never ends in one.
    """
    order = [
        (
            (-DTYPE_BYTES[t.info.dtype], str(t.shard), t.info.begin),
            name,
            t.info.dtype,
            (fixups.rows.get(name, t.info.shape[0]), *t.info.shape[1:]) if t.info.shape else (),
        )
        for name, t in named
    ]
    order += [((-DTYPE_BYTES[dtype], "", 0), name, dtype, shape) for name, (dtype, shape) in fixups.zeros.items()]
    placed: list[TensorInfo] = []
    at = 0
    for _, name, dtype, shape in sorted(order, key=lambda entry: entry[0]):
        size = DTYPE_BYTES[dtype] * math.prod(shape)
        placed.append(TensorInfo(name, dtype, shape, at, at + size))
        at += size
    return placed


def _whole_file(
    shard: Path, kept: list[ShardTensor], fixups: Fixups, data_start: int
) -> tuple[bytes, tuple[Segment, ...]] | None:
    """The source file as it is, with a header of the same length; None when the new header is longer."""
    placed = [
        TensorInfo(fixups.renames[t.name], t.info.dtype, t.info.shape, t.info.begin, t.info.end)
        for t in sorted(kept, key=lambda t: t.info.begin)
    ]
    headers = (build_safetensors_header(placed, metadata) for metadata in ({"format": "pt"}, {}))
    header = next((header for header in headers if len(header) <= data_start), None)
    if header is None:
        return None
    text = header[8:].ljust(data_start - 8, b" ")
    return struct.pack("<Q", len(text)) + text, (Segment(shard, 0, 0, shard.stat().st_size),)


def _merge(segments: list[Segment]) -> list[Segment]:
    """Neighbours in the source that stay neighbours become one copy."""
    merged: list[Segment] = []
    for segment in segments:
        last = merged[-1] if merged else None
        if (
            last is not None
            and last.source == segment.source
            and last.begin + last.length == segment.begin
            and last.dest + last.length == segment.dest
        ):
            merged[-1] = Segment(last.source, last.begin, last.dest, last.length + segment.length)
        else:
            merged.append(segment)
    return merged
