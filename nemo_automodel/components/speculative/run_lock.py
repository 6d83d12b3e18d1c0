# SPDX-License-Identifier: Apache-2.0
"""One run in a folder at a time: two would mix their checkpoints and overwrite each other's result.json."""

from __future__ import annotations

import os
from pathlib import Path

from filelock import FileLock, Timeout

from nemo_automodel.errors import ConfigError

LOCK, PID = ".run.lock", ".run.pid"
WAIT_S = 3.0  # `... print_only=true | sh` starts the next while the first is ending

_held: list[FileLock] = []  # to the end of this process; the kernel frees them then, however it ends


def claim_folder(folder: Path, *, key: str = "hydra.run.dir") -> None:
    """Hold `folder` for the rest of this process; it is made when it is not there. `key` names it for people.

    Raises:
        ConfigError: another process runs in it (its pid is named), or it cannot be written.
    """
    lock = FileLock(folder / LOCK)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=WAIT_S)
        (folder / PID).write_text(f"{os.getpid()}\n")
    except Timeout as error:
        found = f"another run is writing there (pid {_pid(folder)})"
        remedy = f"wait for its end, or give another {key}=FOLDER"
        raise ConfigError(found, where=f"{key}={folder}", remedy=remedy) from error
    except OSError as error:
        raise ConfigError(
            f"cannot be written: {error.strerror}", where=f"{key}={folder}", remedy=f"another {key}=FOLDER"
        ) from error
    _held.append(lock)


def _pid(folder: Path) -> str:
    try:
        return (folder / PID).read_text().strip()
    except OSError:
        return "unknown"
