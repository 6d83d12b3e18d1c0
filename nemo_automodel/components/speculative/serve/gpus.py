# SPDX-License-Identifier: Apache-2.0
"""How many GPUs a server would see. Asked of nvidia-smi: this process never touches CUDA."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import Iterator


def visible_gpus() -> int | None:
    """GPUs that a server would see; None when that cannot be told."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    try:
        done = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=60, check=False)
    except subprocess.TimeoutExpired:
        return None
    if done.returncode != 0:
        return None
    count = sum(line.startswith("GPU ") for line in done.stdout.splitlines())
    masked = os.environ.get("CUDA_VISIBLE_DEVICES")
    return count if masked is None else min(count, len(list(_devices(masked))))


def _devices(masked: str) -> Iterator[str]:
    """CUDA's rule: the list ends at the first -1."""
    for name in filter(None, (part.strip() for part in masked.split(","))):
        if name == "-1":
            return
        yield name
