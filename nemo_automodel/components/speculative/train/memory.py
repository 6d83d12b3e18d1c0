# SPDX-License-Identifier: Apache-2.0
"""What a step will take beside what this process may still take: of the GPU, or of the machine and its cgroups."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from nemo_automodel.components.speculative.train.data import TrainData
from nemo_automodel.components.speculative.train.estimate import GIB, estimate_memory
from nemo_automodel.components.speculative.train.job import TrainJob
from nemo_automodel.components.speculative.train.setup import Models

CGROUP_ROOT = Path("/sys/fs/cgroup")
UNLIMITED = 2**60  # version 1 writes a huge number for "no limit"


def free_bytes(device: torch.device) -> int | None:
    """None: nobody says."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    limits = [_machine_bytes(), *_cgroup_bytes(CGROUP_ROOT, Path("/proc/self/cgroup"))]
    return min((limit for limit in limits if limit is not None), default=None)


def _machine_bytes() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")), None)


def _cgroup_bytes(root: Path, membership: Path) -> list[int]:
    """What each cgroup from ours up to the root still allows; pages that the kernel can drop count as free."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return []
    free: list[int] = []
    for line in lines:
        _, controllers, inside = line.split(":", 2)
        if controllers == "":
            base, limit_file, used_file = root, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            base, limit_file, used_file = root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        group = base / inside.lstrip("/")
        for place in (group, *group.parents):
            free += _one_group(place, limit_file, used_file)
            if place == base:
                break
    return free


def _one_group(place: Path, limit_file: str, used_file: str) -> list[int]:
    try:
        limit, used = (place / limit_file).read_text().strip(), int((place / used_file).read_text())
        stat = dict(line.split() for line in (place / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return []
    if limit == "max" or int(limit) >= UNLIMITED:
        return []
    return [max(0, int(limit) - used + int(stat.get("inactive_file", 0)))]


def describe_memory(job: TrainJob, models: Models, data: TrainData) -> tuple[str, ...]:
    """What a step will take, and the knob to turn where that is more than there is; both models are loaded already."""
    longest = int(max(data.lines.lengths))
    parameters = list(models.target.model.parameters())
    estimate = estimate_memory(
        models.spec, target_parameters=sum(p.numel() for p in parameters), target_bytes=parameters[0].element_size(),
        seq_length=longest, micro_batch_size=job.train.micro_batch_size, partitions=models.partitions,
        supervised_share=data.train.supervised_tokens / max(1, data.train.tokens),
        compute_bytes=2 if models.bf16 else 4, freeze_embeddings=job.draft.freeze_embeddings,
        device=models.device.type,
    )  # fmt: skip
    free = free_bytes(models.device)
    if free is None:
        return (estimate.line(),)
    share = 1 if models.device.type == "cuda" else int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    room = free // share + estimate.target_weights + estimate.draft_weights  # these are loaded
    knob = estimate.knob(room, partitions=models.partitions, micro_batch_size=job.train.micro_batch_size)
    line = f"{estimate.line()}, {room / GIB:.1f} GiB can be had"
    return (line,) if knob is None else (line, f"warning: that is likely too little memory: set {knob}")
