# SPDX-License-Identifier: Apache-2.0
"""The processes that train together: one, or a process group. Every process enters every call here.

Small values go over a gloo group of their own, which notices a dead process at once; gradients go over NCCL on GPUs.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Callable, Iterator, Sequence, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

import nemo_automodel.errors as errors
from nemo_automodel.components.speculative.train.placement import PeerFailed, PeerLost
from nemo_automodel.components.speculative.train.totals import Totals
from nemo_automodel.errors import TrainError, UserError

T = TypeVar("T")
JOIN_SECONDS = 600.0  # for all processes to start
WAIT = timedelta(hours=24)  # for the first process to read the data or to write a checkpoint
REDUCE_WAIT = timedelta(minutes=30)  # NCCL: a process that hangs ends the run
BUCKET_ENTRIES = 2**24  # gradients summed in one call: 64 MiB in fp32


@dataclass(frozen=True)
class World:
    """`rank` of `size`; groups are None when it is alone."""

    rank: int = 0
    size: int = 1
    control: Any = None  # gloo, CPU tensors
    data: Any = None  # the device's

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def share(self, value: T) -> T:
        """The first process's value."""
        if self.size == 1:
            return value
        box = [value]
        with _peers():
            dist.broadcast_object_list(box, src=0, group=self.control)
        return box[0]

    def any(self, flag: bool) -> bool:
        """Whether it holds in any process."""
        if self.size == 1:
            return flag
        votes = torch.tensor([int(flag)])
        with _peers():
            dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=self.control)
        return bool(votes)

    def agree(self, error: UserError | None) -> None:
        """Go on together, or fail together: the first process raises the first error, the others PeerFailed.

        Raises:
            UserError: of the kind that some process met; its rank is named unless it was the first.
        """
        if self.size == 1:
            if error is not None:
                raise error
            return
        met: list[tuple[str, str, str, str] | None] = [None] * self.size
        with _peers():
            dist.all_gather_object(met, _parts(error), group=self.control)
        for rank, parts in enumerate(met):
            if parts is None:
                continue
            if not self.is_first:
                raise PeerFailed
            kind, found, where, remedy = parts
            raise getattr(errors, kind)(f"process {rank}: {found}" if rank else found, where=where, remedy=remedy)

    def together(self, work: Callable[[], T]) -> T:
        """Each process's own result of `work`; see `agree` for its errors."""
        try:
            result, error = work(), None
        except UserError as met:
            result, error = None, met
        self.agree(error)
        return result

    def first_then_others(self, work: Callable[[], T]) -> T:
        """`together`, but the first process before all others: they find what it left on disk."""
        if self.size == 1:
            return work()
        mine = self.together(work if self.is_first else lambda: None)
        others = self.together((lambda: None) if self.is_first else work)
        return mine if self.is_first else others

    def same(self, value: T, what: str) -> None:
        """Raises TrainError when the processes do not hold equal values."""
        first = self.share(value)
        differs = TrainError(
            f"{what} differ from those of process 0", where=f"process {self.rank}",
            remedy="let all nodes read the same files",
        )  # fmt: skip
        self.agree(differs if value != first else None)

    def sum_totals(self, totals: Totals) -> Totals:
        """Added up over all processes."""
        if self.size == 1:
            return totals
        return totals.from_flat(self._summed(totals.flat()))

    def sum_gradients(self, parameters: Sequence[Tensor], totals: Totals) -> Totals:
        """Add up gradients in place, and totals, over all processes.

        A parameter without a gradient in this process counts as zeros; without one in any, it stays without.
        """
        if self.size == 1:
            return totals
        has = torch.tensor([p.grad is not None for p in parameters], dtype=torch.float64)
        figures = totals.flat()
        summed = self._summed(torch.cat((figures, has)))
        used = [p for p, count in zip(parameters, summed[len(figures) :].tolist()) if count]
        for parameter in used:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        for bucket in _buckets([p.grad for p in used]):
            self._sum_bucket(bucket)
        return totals.from_flat(summed[: len(figures)])

    def _summed(self, values: Tensor) -> Tensor:
        with _peers():
            dist.all_reduce(values, group=self.control)
        return values

    def _sum_bucket(self, gradients: list[Tensor]) -> None:
        alone = len(gradients) == 1 and gradients[0].is_contiguous()
        flat = gradients[0] if alone else torch.cat([g.flatten() for g in gradients])
        with _peers():
            dist.all_reduce(flat, group=self.data)
        if alone:
            return
        for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients])):
            gradient.copy_(part.view_as(gradient))

    def leave(self) -> None:
        """End the process group; not after an error, when others may hang in it."""
        if self.size > 1:
            dist.destroy_process_group()


def join() -> World:
    """Meet the processes that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT speak of; alone without these.

    Raises:
        TrainError: not all of them came within JOIN_SECONDS.
    """
    size = int(os.environ.get("WORLD_SIZE", 1))
    if size == 1:
        return World()
    rank = int(os.environ["RANK"])
    try:
        store = _meet(rank, size)
        with _peers():
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=WAIT)
    except (dist.DistError, PeerLost, OSError) as error:
        raise TrainError(
            f"process {rank} of {size} did not meet the others in {JOIN_SECONDS:.0f} s ({_first_line(error)})",
            where=f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}",
            remedy="start all of them (torchrun, srun), or one alone: unset RANK WORLD_SIZE SLURM_PROCID",
        ) from error
    control = dist.group.WORLD
    if not torch.cuda.is_available():
        return World(rank, size, control, control)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    return World(rank, size, control, dist.new_group(backend="nccl", timeout=REDUCE_WAIT))


def _meet(rank: int, size: int) -> Any:
    store, _, _ = next(dist.rendezvous("env://", rank, size, timeout=timedelta(seconds=JOIN_SECONDS)))
    store = dist.PrefixStore("train_then_serve", store)
    store.set(f"here/{rank}", b"")
    store.wait([f"here/{other}" for other in range(size)], timedelta(seconds=JOIN_SECONDS))
    return store


@contextmanager
def _peers() -> Iterator[None]:
    """A broken connection is a RuntimeError of many wordings."""
    try:
        yield
    except RuntimeError as error:
        raise PeerLost(_first_line(error)) from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _parts(error: UserError | None) -> tuple[str, str, str, str] | None:
    return None if error is None else (type(error).__name__, error.found, error.where, error.remedy)


def _buckets(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Neighbours of about BUCKET_ENTRIES together."""
    bucket: list[Tensor] = []
    entries = 0
    for gradient in gradients:
        if bucket and entries + gradient.numel() > BUCKET_ENTRIES:
            yield bucket
            bucket, entries = [], 0
        bucket.append(gradient)
        entries += gradient.numel()
    if bucket:
        yield bucket
