# SPDX-License-Identifier: Apache-2.0
"""What need not be measured twice: a baseline that several jobs of a sweep share, and a job that is done already."""

from __future__ import annotations

import hashlib
import json
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Iterator, Mapping

from filelock import FileLock

from nemo_automodel.components.speculative.bench.gpu_sets import VISIBLE
from nemo_automodel.components.speculative.bench.plain import from_plain
from nemo_automodel.components.speculative.bench.result import BenchmarkResult, Measured
from nemo_automodel.components.speculative.serve.record import RESULT
from nemo_automodel.components.speculative.serve.types import BenchmarkSpec, LaunchCommand
from nemo_automodel.files import read_json, write_json

FORMAT = 1  # of the answer files
SHARED = "shared"  # folder in a sweep's


def digest(command: LaunchCommand, bench: BenchmarkSpec, prompts_digest: str, **more: Any) -> str:
    """Hex SHA-256 of everything that an outcome depends on: command and environment without the port and without which
    GPUs, what is asked and how, the vLLM version and whatever else is given. Gates change no measurement."""
    env = {name: value for name, value in command.env.items() if name != VISIBLE}
    argv = list(command.argv)
    argv[argv.index("--port") + 1] = ""
    asked = {
        key: getattr(bench, key)
        for key in ("max_new_tokens", "concurrency", "temperature", "stream", "chat_template_kwargs")
    }
    value = {"format": FORMAT, "argv": argv, "env": env, "prompts": prompts_digest, **asked, **more}
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=dict).encode()).hexdigest()


def write_answers(path: Path, kind: str, measured: Measured, digest: str, server: Mapping[str, Any]) -> None:
    """All answers with their times: the file from which every figure can be computed again."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"format": FORMAT, "kind": kind, "digest": digest, "server": dict(server), **asdict(measured)})


def read_answers(path: Path, digest: str) -> tuple[Measured, Mapping[str, Any]] | None:
    """Answers and server of a file with this digest; None when there is none, or it cannot be read."""
    try:
        value = read_json(path)
        if value["format"] == FORMAT and value["digest"] == digest:
            return from_plain(Measured, value), value["server"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return None


@contextmanager
def shared_place(sweep_dir: Path, kind: str, digest: str, say) -> Iterator[Path]:
    """Where the jobs of a sweep find one another's answers; only one of them is in the block at a time."""
    folder = sweep_dir / SHARED
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"answers_{kind}_{digest[:16]}.json"
    lock = FileLock(f"{path}.lock")
    if not _free(lock):
        say(f"{kind}: another job measures it; waiting")
    with lock:
        yield path


def _free(lock: FileLock) -> bool:
    try:
        with lock.acquire(timeout=0):
            return True
    except TimeoutError:
        return False


def finished_before(job_dir: Path, spec_digest: str) -> tuple[BenchmarkResult, Mapping[str, Any]] | None:
    """A job's earlier result and server, when the same was measured in this folder and completed (a gate may have
    failed it: gates are asked again)."""
    try:
        value = read_json(job_dir / RESULT)
        done = value["status"] == "ok" or (value["status"], value["stage"]) == ("failed", "gate")
        if done and value["benchmark"]["spec_digest"] == spec_digest:
            return BenchmarkResult.from_dict(value["benchmark"]), value["server"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return None
