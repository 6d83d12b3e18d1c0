# SPDX-License-Identifier: Apache-2.0
"""Write the export, or find that the one there is still right. The only file of the serve stage that writes weights.

A sibling temp folder, fsync, one rename, under a lock. `manifest.json` decides freshness by equality with the plan and
with each source file's size, times and inode; content is hashed only when those differ. Bytes go from file to file in
the kernel (`copy_file_range`), so memory stays flat. The source is never written.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import hashlib
import json
import os
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Callable, Iterator

from filelock import FileLock, Timeout

from nemo_automodel.components.speculative.serve.export_plan import (
    CONFIG,
    MANIFEST,
    WEIGHTS,
    ExportPlan,
    Segment,
    changed,
    file_facts,
    foreign_files,
    plan_export,
)
from nemo_automodel.components.speculative.serve.types import Exported
from nemo_automodel.errors import ExportError
from nemo_automodel.files import fsync_dir, open_regular, plain_mode, read_json, sha256_file, write_json

__all__ = ["ExportPlan", "export", "plan_export", "refuse_replaced", "reusable_digest", "write_weights"]

LOCK_SECONDS = 1800  # another export of the same draft is a copy of gigabytes at most
WHERE = "serve.export_dir"
FICLONE = 0x40049409  # linux/fs.h
_FULL = (errno.ENOSPC, errno.EDQUOT)
_LOCKLESS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)  # NFS and the like, from flock
_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)
_NO_FOLDER = (errno.EEXIST, errno.ENOTDIR)  # a file where a folder is to be


def export(plan: ExportPlan, say: Callable[[str], None] = lambda line: None) -> Exported:
    """Make `plan.dest` a folder that vLLM loads, or reuse it when it is still what the plan says.

    `say` is told when another process is exporting there and is waited for.

    Raises:
        ExportError: no space, no permission, a foreign folder in the way, the source changed meanwhile, or another
            export holds the lock for half an hour.
    """
    parent = plan.dest.parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with _locked(plan.dest, say):
            _remove_leftovers(plan.dest)
            digest = reusable_digest(plan, refresh=True)
            if digest is not None:
                return Exported(plan.dest, True, digest)
            _refuse_foreign(plan.dest)
            return Exported(plan.dest, False, _build(plan))
    except Timeout as error:
        found = f"another process has been exporting to {plan.dest} for {LOCK_SECONDS} s"
        raise ExportError(found, where=WHERE, remedy="wait for it or end it, then run again") from error
    except OSError as error:
        if error.errno in (*_LOCKLESS, *_DENIED) and (digest := reusable_digest(plan)) is not None:
            return Exported(plan.dest, True, digest)  # made by somebody else, in a place where we cannot write
        raise _as_export_error(error, plan) from error


@contextlib.contextmanager
def _locked(dest: Path, say: Callable[[str], None]) -> Iterator[None]:
    lock = FileLock(dest.parent / f".{dest.name}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        say(f"another process is exporting to {dest}: waiting for it")
        lock.acquire(timeout=LOCK_SECONDS)
    try:
        yield
    finally:
        lock.release()


def _as_export_error(error: OSError, plan: ExportPlan) -> ExportError:
    if error.errno == errno.EFBIG:
        found = f"the export's weights take {plan.weight_bytes} bytes, and files may not be that large here"
        raise ExportError(found, where=WHERE, remedy="ulimit -f unlimited, or serve.export_dir=FOLDER on another disk")
    if error.errno in _FULL:
        place = next(p for p in plan.dest.parents if p.exists())
        free = shutil.disk_usage(place).free
        found = f"no space for the export: {plan.weight_bytes} bytes needed, {free} free at {place} ({error.strerror})"
        return ExportError(found, where=WHERE, remedy="make room, or serve.export_dir=FOLDER on another disk")
    remedies = dict.fromkeys((*_DENIED, *_NO_FOLDER), "serve.export_dir=FOLDER that can be written")
    remedies |= dict.fromkeys(_LOCKLESS, "its file system has no locks: serve.export_dir=FOLDER on a local disk")
    remedy = remedies.get(error.errno, "see the reason, then run again")
    return ExportError(f"cannot export to {plan.dest}: {error}", where=WHERE, remedy=remedy)


def reusable_digest(plan: ExportPlan, *, refresh: bool = False) -> str | None:
    """The digest of the export at `plan.dest` when it is what the plan would write, else None.

    `refresh` (hold the lock) notes new times of unchanged bytes, so that the next run need not hash them again.
    """
    try:
        manifest = read_json(plan.dest / MANIFEST)
        written = read_json(plan.dest / CONFIG)
        outputs = {WEIGHTS: _output_facts(plan.dest / WEIGHTS)}
    except (OSError, ValueError):
        return None  # not there or half-written: built anew
    if manifest.get("content") != plan.content or written != plan.config or manifest.get("outputs") != outputs:
        return None
    recorded = manifest.get("sources")
    if not isinstance(recorded, list) or not all(isinstance(entry, dict) for entry in recorded):
        return None
    if [entry.get("name") for entry in recorded] != list(plan.sources):
        return None
    touched = False
    for entry, path in zip(recorded, _paths(plan), strict=True):
        facts = file_facts(path)
        if facts == entry.get("facts"):
            continue
        if sha256_file(path) != entry.get("sha256"):
            return None
        entry["facts"], touched = facts, True
    if refresh and touched and os.access(plan.dest, os.W_OK):
        write_json(plan.dest / MANIFEST, manifest)
    return manifest.get("digest")


def refuse_replaced(plan: ExportPlan, exported: Exported | None) -> None:
    """Once a server has loaded it: the export is still the one that was made for it.

    Raises:
        ExportError: another job has put one with other options (another target, a longer context) in its place.
    """
    try:
        digest = exported and read_json(plan.dest / MANIFEST).get("digest")
    except (OSError, ValueError):
        return  # taken away meanwhile; the server has its copy
    if exported and digest != exported.digest:
        found = f"{plan.dest} was replaced while the server loaded it: another job exports this draft otherwise"
        raise ExportError(found, where=WHERE, remedy="serve.export_dir=FOLDER, another one for each of the two")


def _paths(plan: ExportPlan) -> list[Path]:
    return [plan.model_dir / name for name in plan.sources]


def _output_facts(path: Path) -> dict[str, int]:
    stat = path.stat()
    return {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns}


def _remove_leftovers(dest: Path) -> None:
    """Temp folders and files of runs that were killed; the lock is held, so none of them is in use."""
    name = glob.escape(dest.name)
    for leftover in dest.parent.glob(f".{name}.*.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)  # in the way of nothing; NFS keeps what a server still has open
    if not dest.is_symlink():
        for leftover in dest.glob(f".{MANIFEST}.*.tmp"):
            leftover.unlink()


def _refuse_foreign(dest: Path) -> None:
    """Only a folder that holds nothing but an export's files is replaced."""
    if not dest.exists() and not dest.is_symlink():
        return
    no_folder = dest.is_symlink() or not dest.is_dir()
    foreign = foreign_files(dest)
    if foreign or no_folder:
        what = "it is no folder" if no_folder else ", ".join(foreign[:3])
        found = f"{dest} is not an export of ours ({what}) and is left alone"
        raise ExportError(found, where=WHERE, remedy="move it away, or serve.export_dir=ANOTHER")


def _build(plan: ExportPlan) -> str:
    temp = Path(tempfile.mkdtemp(prefix=f".{plan.dest.name}.", suffix=".tmp", dir=plan.dest.parent))
    try:
        with ThreadPoolExecutor(1) as pool:  # hashing reads what the copy has just read
            hashes = pool.submit(lambda: [sha256_file(path) for path in _paths(plan)])
            write_weights(plan, temp / WEIGHTS)
            digests = hashes.result()
        if [file_facts(path) for path in _paths(plan)] != list(plan.facts):
            raise changed(plan.model_dir)
        manifest = _manifest(plan, digests, temp / WEIGHTS)
        write_json(temp / CONFIG, plan.config)
        write_json(temp / MANIFEST, manifest)
        os.chmod(temp, plain_mode() | 0o111)
        fsync_dir(temp)
        _swap(temp, plan.dest)
    except BaseException:
        shutil.rmtree(temp, ignore_errors=True)
        raise
    return manifest["digest"]


def _manifest(plan: ExportPlan, digests: list[str], weights: Path) -> dict[str, Any]:
    key = json.dumps([plan.content, digests], sort_keys=True, ensure_ascii=False).encode(errors="surrogatepass")
    sources = [
        {"name": name, "facts": fact, "sha256": digest}
        for name, fact, digest in zip(plan.sources, plan.facts, digests, strict=True)
    ]
    outputs = {WEIGHTS: _output_facts(weights)}
    digest = hashlib.sha256(key).hexdigest()
    manifest = {
        "digest": digest,
        "made_from": str(plan.model_dir),
        "content": plan.content,
        "fixups": list(plan.fixups),
    }
    return manifest | {"sources": sources, "outputs": outputs}


def _swap(temp: Path, dest: Path) -> None:
    """Put the finished folder in place. Killed between the two renames, the next run builds it again."""
    if dest.exists():
        old = Path(tempfile.mkdtemp(prefix=f".{dest.name}.old.", suffix=".tmp", dir=dest.parent))
        os.rename(dest, old)  # an empty folder may be renamed over
        os.rename(temp, dest)
        fsync_dir(dest.parent)
        shutil.rmtree(old, ignore_errors=True)
    else:
        os.rename(temp, dest)
        fsync_dir(dest.parent)


def write_weights(plan: ExportPlan, path: Path) -> None:
    """Share or copy the segments, then write the header over the start, then fsync."""
    with path.open("wb") as out:
        if not _share(plan, out.fileno()):
            usage = shutil.disk_usage(path.parent)  # some file systems (FUSE) tell no sizes: all zeros
            if usage.total and usage.free < plan.weight_bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            for segment in plan.segments:
                _copy(segment, out.fileno())
        os.pwrite(out.fileno(), plan.header, 0)
        os.fsync(out.fileno())
    if path.stat().st_size != plan.weight_bytes:
        found = f"{path.stat().st_size} bytes were written, {plan.weight_bytes} planned"
        raise ExportError(found, where="serve.checkpoint", remedy="the checkpoint changed meanwhile: run again")


def _share(plan: ExportPlan, out: int) -> bool:
    """Make `out` a reflink of the source, which takes neither time nor room; whether that was possible."""
    if len(plan.segments) != 1 or plan.segments[0].begin or plan.segments[0].dest:
        return False
    with open_regular(plan.segments[0].source) as file:
        try:
            fcntl.ioctl(out, FICLONE, file.fileno())
        except OSError:
            return False
    return True


def _copy(segment: Segment, out: int) -> None:
    """In the kernel where the two filesystems allow it, else through a 1 MiB buffer."""
    with open_regular(segment.source) as file:
        done, in_kernel = 0, True
        while done < segment.length:
            left = segment.length - done
            if in_kernel:
                try:
                    copied = os.copy_file_range(file.fileno(), out, left, segment.begin + done, segment.dest + done)
                except OSError as error:
                    if error.errno not in (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM):
                        raise
                    in_kernel = False
                    continue
            else:
                block = os.pread(file.fileno(), min(left, 1 << 20), segment.begin + done)
                copied = os.pwrite(out, block, segment.dest + done) if block else 0
            if copied == 0 and in_kernel:
                in_kernel = False  # some filesystems answer 0 instead of an error
            elif copied == 0:
                raise ExportError(
                    f"{segment.source} ended early", where="serve.checkpoint", remedy="it changed meanwhile: run again"
                )
            done += copied
