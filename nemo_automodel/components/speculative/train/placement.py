# SPDX-License-Identifier: Apache-2.0
"""Which of how many processes this one is, as an outer launcher (torchrun, Slurm's srun) says. No torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Mapping

from nemo_automodel.errors import ConfigError

# What a process of torch.distributed reads, and what a child that is none must not inherit.
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LAUNCHER_PREFIX = "TORCHELASTIC_"
FIRST_PORT, PORTS = 20_000, 20_000  # of a Slurm job: from its number, so that two jobs on one node differ


class PeerLost(Exception):
    """The connection to another training process broke: it died."""


class PeerFailed(Exception):
    """Another training process has failed and the first one reports it: this one ends without a word."""


@dataclass(frozen=True)
class Placement:
    """One process among `world_size`; the first of all listens at `master_addr:master_port`."""

    rank: int
    world_size: int
    local_rank: int
    master_addr: str
    master_port: int
    launcher: str  # "torchrun" or "Slurm"

    def environment(self) -> dict[str, str]:
        """The variables that torch.distributed reads."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }


def outer_placement(env: Mapping[str, str]) -> Placement | None:
    """The place that torchrun or Slurm gave this process; None: it runs alone.

    Raises:
        ConfigError: variables that are no numbers, or a rank that is not below the number of processes.
    """
    try:
        found = _torchrun(env) or _slurm(env)
    except ValueError as error:
        raise ConfigError(
            f"a launcher's variable is no number ({error})", where="environment", remedy="unset RANK WORLD_SIZE"
        ) from error
    if found is not None and not 0 <= found.rank < found.world_size:
        raise ConfigError(
            f"rank {found.rank} of {found.world_size} processes", where=f"environment of {found.launcher}",
            remedy="start all processes with one launcher, or unset RANK WORLD_SIZE SLURM_PROCID",
        )  # fmt: skip
    return found if found is not None and found.world_size > 1 else None


def _torchrun(env: Mapping[str, str]) -> Placement | None:
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= env.keys():
        return None
    local = int(env.get("LOCAL_RANK", 0))
    address, port = env["MASTER_ADDR"], int(env["MASTER_PORT"])
    return Placement(int(env["RANK"]), int(env["WORLD_SIZE"]), local, address, port, "torchrun")


def _slurm(env: Mapping[str, str]) -> Placement | None:
    """A task of `srun`. SLURM_NTASKS speaks of the whole job, the step's own number goes before it."""
    tasks = env.get("SLURM_STEP_NUM_TASKS") or env.get("SLURM_NTASKS")
    if not tasks or "SLURM_PROCID" not in env:
        return None
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or ""
    several = int(env.get("SLURM_STEP_NUM_NODES") or env.get("SLURM_NNODES") or 1) > 1
    address = env.get("MASTER_ADDR") or (first_host(nodes) if several else "127.0.0.1")
    port = int(env.get("MASTER_PORT") or FIRST_PORT + int(env.get("SLURM_JOB_ID", 0)) % PORTS)
    return Placement(int(env["SLURM_PROCID"]), int(tasks), int(env.get("SLURM_LOCALID", 0)), address, port, "Slurm")


def first_host(nodes: str) -> str:
    """The first name of a Slurm node list: `gpu[003-006,9],x1` -> `gpu003`."""
    match = re.match(r"([^\[,]+)(?:\[([^\],\-]+)[^\]]*\]([^,]*))?", nodes)
    return "127.0.0.1" if match is None else "".join(part or "" for part in match.groups())


def without_placement(env: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process that stands alone."""
    return {k: v for k, v in env.items() if k not in VARIABLES and not k.startswith(LAUNCHER_PREFIX)}
