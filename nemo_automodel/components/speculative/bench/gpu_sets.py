# SPDX-License-Identifier: Apache-2.0
"""GPUs for jobs that run side by side on one machine: each takes a set that no other job of the sweep has.

A launcher that runs jobs one after another, or Slurm, which hands out GPUs itself, needs none of this.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from pathlib import Path
from typing import Callable, Iterator, Sequence

from filelock import FileLock, Timeout

POLL_S = 0.2
VISIBLE = "CUDA_VISIBLE_DEVICES"


@contextmanager
def gpu_set(sets: Sequence[str], sweep_dir: Path | None, say: Callable[[str], None]) -> Iterator[str | None]:
    """One of `sets` ("0", or "0,1" for two GPUs) for the length of the block; waits for one. None: there are none.

    A job that is killed gives its set back: the kernel drops the lock with the process.
    """
    if not sets:
        yield None
        return
    if sweep_dir is None:
        yield sets[0]
        return
    folder = sweep_dir / "shared"
    folder.mkdir(parents=True, exist_ok=True)
    chosen, lock = _take(sets, folder, say)
    try:
        say(f"GPUs {chosen}")
        yield chosen
    finally:
        lock.release()


def _take(sets: Sequence[str], folder: Path, say: Callable[[str], None]) -> tuple[str, FileLock]:
    locks = [(name, FileLock(folder / f"gpus_{name.replace(',', '_')}.lock")) for name in sets]
    waiting = False
    while True:
        for name, lock in locks:
            try:
                lock.acquire(timeout=0)
                return name, lock
            except Timeout:
                continue
        if not waiting:
            say(f"all GPU sets ({'; '.join(sets)}) are taken: waiting")
            waiting = True
        time.sleep(POLL_S)
