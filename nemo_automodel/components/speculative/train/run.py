# SPDX-License-Identifier: Apache-2.0
"""One training run from job to result, inside the worker."""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers.utils import logging as transformers_logging

from nemo_automodel.components.datasets.packing import PackedRows
from nemo_automodel.components.speculative.train.checkpoint import CheckpointStore, load_state
from nemo_automodel.components.speculative.train.data import TrainData, read_data
from nemo_automodel.components.speculative.train.decode import plan_decode
from nemo_automodel.components.speculative.train.job import TrainJob, TrainResult
from nemo_automodel.components.speculative.train.loop import LoopEnd, TrainLoop
from nemo_automodel.components.speculative.train.memory import describe_memory
from nemo_automodel.components.speculative.train.packing_check import check_packing
from nemo_automodel.components.speculative.train.progress import RunReport, open_report
from nemo_automodel.components.speculative.train.resume import find_resume_checkpoint
from nemo_automodel.components.speculative.train.retention import best_of
from nemo_automodel.components.speculative.train.setup import build_models
from nemo_automodel.components.speculative.train.summary import describe_end
from nemo_automodel.components.speculative.train.world import World
from nemo_automodel.errors import Interrupted, TrainError


class Stop(Protocol):
    """True once the run shall end; `enter_loop` says that from now on there is something to save."""

    def __call__(self) -> bool: ...

    def enter_loop(self) -> None: ...


def train(job: TrainJob, stop: Stop, world: World = World()) -> TrainResult:
    """Set up, train, and say how it went. Every process of `world` calls it with the same job.

    Raises:
        Interrupted: a signal came; the state is saved and named.
        UserError: data, configuration or training cannot go on.
        PeerFailed, PeerLost: see `world`.
    """
    began = time.monotonic()
    transformers_logging.disable_progress_bar()  # one bar on the terminal is enough
    _set_threads(job, world)
    with open_report(job, world) as report:
        find = partial(find_resume_checkpoint, job.train.resume, job.run_dir)
        resume = world.share(world.together(find if job.train.resume and world.is_first else lambda: None))
        try:
            data, loop = build_run(job, resume, report, stop, world)
            if loop.is_finished and not loop.owes_validation():
                report.message(f"nothing to do: {resume} has all {loop.total_steps} steps")
                return TrainResult("nothing_to_do", resume, loop.position.step, 0.0, None, None, best_of(resume.parent))
            stop.enter_loop()
            end = loop.run()
        except torch.OutOfMemoryError as error:
            raise _out_of_memory(job, error) from error
        if world.any(stop()) or not end.finished:  # one that came during the last save or validation is a stop as well
            raise _interrupted(end, loop.total_steps)
        for line in _summary(job, data, loop, end):
            report.message(line)
        loss = report.last.get("loss")
    seconds, best = round(time.monotonic() - began, 2), best_of(end.checkpoint.parent)
    return TrainResult("done", end.checkpoint, end.position.step, seconds, loss, end.validation, best)


def _set_threads(job: TrainJob, world: World) -> None:
    """Processes on one machine share its cores, unless told how many threads to use."""
    if job.train.num_threads is not None:
        torch.set_num_threads(job.train.num_threads)
    elif world.size > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", world.size))))


def _summary(job: TrainJob, data: TrainData, loop: TrainLoop, end: LoopEnd) -> tuple[str, ...]:
    return describe_end(
        rows=len(data.train.rows), supervised_tokens=data.train.supervised_tokens, source=job.data.train,
        epochs=end.position.step / loop.steps_per_epoch, num_depths=loop.models.spec.num_depths,
        validation=end.validation, held_out=job.data.validation, decoded=end.decoded,
    )  # fmt: skip


def build_run(
    job: TrainJob, resume: Path | None, report: RunReport, stop: Stop, world: World = World()
) -> tuple[TrainData, TrainLoop]:
    """Read the data, load the models, restore the state of the checkpoint `resume`."""
    state = world.together(lambda: load_state(resume)) if resume else None
    data = world.first_then_others(lambda: read_data(job, report.message))
    order = _order(job, data, world)
    world.same(order["data"], "the data")
    models = world.together(lambda: build_models(job, data, resume, report.message))
    for line in describe_memory(job, models, data):
        report.message(line)
    if isinstance(data.lines, PackedRows):
        world.together(lambda: check_packing(models, data.lines))
    store = CheckpointStore(job.run_dir / "checkpoints", data.tokenizer)
    loop = TrainLoop(
        models, data.lines, data.validation.rows if data.validation else (), job.train, order=order,
        store=store, report=report, stop=stop, world=world,
        decoding=world.together(
            lambda: plan_decode(job, models, data.tokenizer, report.message) if world.is_first else None
        ),
    )  # fmt: skip
    loop.tidy()
    if state is not None:
        world.together(lambda: loop.resume(state, resume))
        report.resumed(state.position.step, again=loop.owes_validation() or loop.owes_decode())
        report.message(f"resumed {resume} after step {state.position.step}")
    else:
        report.resumed(0)
    return data, loop


def _order(job: TrainJob, data: TrainData, world: World) -> dict[str, Any]:
    """What the sequence of losses follows from, besides the draft's shape and dtype (in its config.json) and what may
    change on resume: lr, num_epochs, max_steps."""
    train, target = job.train, Path(job.target.path)
    same = ("seed", "micro_batch_size", "weight_decay", "warmup_ratio", "min_lr_ratio", "max_grad_norm")
    return {
        "target": str(target.resolve()) if target.exists() else job.target.path,
        "data": data.digest,
        **{key: getattr(train, key) for key in same},
        "grad_accumulation_steps x processes": train.grad_accumulation_steps * world.size,
        "betas": list(train.betas),
        "optimizer": train.optimizer.value,
        "freeze_embeddings": job.draft.freeze_embeddings,
    }


def _interrupted(end: LoopEnd, total_steps: int) -> Interrupted:
    serve = f"serve it with train.enabled=false serve.enabled=true serve.checkpoint={end.checkpoint}"
    return Interrupted(
        f"training was stopped after step {end.position.step} of {total_steps}; saved {end.checkpoint}",
        where="train",
        remedy=serve if end.finished else f"go on with train.resume={end.checkpoint}",
    )


def _out_of_memory(job: TrainJob, error: Exception) -> TrainError:
    rows, accumulate = job.train.micro_batch_size, job.train.grad_accumulation_steps
    smaller = f"train.micro_batch_size={rows // 2} train.grad_accumulation_steps={accumulate * 2}"
    shorter = f"train.seq_length={job.train.seq_length // 2}, or a smaller draft.draft_vocab_size"
    return TrainError(
        f"out of GPU memory: {str(error).splitlines()[0]}", where="train", remedy=smaller if rows > 1 else shorter
    )
