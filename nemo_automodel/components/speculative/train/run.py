# SPDX-License-Identifier: Apache-2.0
"""One training run from job to result, inside the worker."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers.utils import logging as transformers_logging

from nemo_automodel.components.speculative.train.checkpoint import CheckpointStore, load_state
from nemo_automodel.components.speculative.train.job import TrainJob, TrainResult
from nemo_automodel.components.speculative.train.loop import LoopEnd, TrainLoop
from nemo_automodel.components.speculative.train.progress import RunReport
from nemo_automodel.components.speculative.train.resume import find_resume_checkpoint
from nemo_automodel.components.speculative.train.setup import TrainData, build_models, read_data
from nemo_automodel.errors import Interrupted, TrainError


class Stop(Protocol):
    """True once the run shall end; `enter_loop` says that from now on there is something to save."""

    def __call__(self) -> bool: ...

    def enter_loop(self) -> None: ...


def train(job: TrainJob, stop: Stop) -> TrainResult:
    """Set up, train, and say how it went.

    Raises:
        Interrupted: a signal came; the state is saved and named.
        UserError: data, configuration or training cannot go on.
    """
    began = time.monotonic()
    transformers_logging.disable_progress_bar()  # one bar on the terminal is enough
    if job.train.num_threads is not None:
        torch.set_num_threads(job.train.num_threads)
    with RunReport(job.run_dir) as report:
        resume = find_resume_checkpoint(job.train.resume, job.run_dir) if job.train.resume else None
        try:
            loop = build_loop(job, resume, report, stop)
            if loop.is_finished:
                report.message(f"nothing to do: {resume} has all {loop.total_steps} steps")
                return TrainResult("nothing_to_do", resume, loop.position.step, 0.0, None, None)
            stop.enter_loop()
            end = loop.run()
        except torch.OutOfMemoryError as error:
            raise _out_of_memory(job, error) from error
    if stop() or not end.finished:  # a stop that came during the last save or validation is one as well
        raise _interrupted(end, loop.total_steps)
    loss = report.last.get("loss")
    return TrainResult(
        "done", end.checkpoint, end.position.step, round(time.monotonic() - began, 2), loss, end.validation
    )


def build_loop(job: TrainJob, resume: Path | None, report: RunReport, stop: Stop) -> TrainLoop:
    """Read the data, load the models, restore the state of the checkpoint `resume`."""
    state = load_state(resume) if resume else None
    data = read_data(job, report.message)
    models = build_models(job, data, resume, report.message)
    loop = TrainLoop(
        models, data.train.rows, data.validation.rows if data.validation else (), job.train, order=_order(job, data),
        store=CheckpointStore(job.run_dir / "checkpoints", data.tokenizer), report=report, stop=stop,
    )  # fmt: skip
    if state is not None:
        loop.resume(state, resume)
        report.message(f"resumed {resume} after step {state.position.step}")
    return loop


def _order(job: TrainJob, data: TrainData) -> dict[str, Any]:
    """What the sequence of losses follows from, besides the draft's shape and dtype (in its config.json) and what may
    change on resume: lr, num_epochs, max_steps."""
    train, target = job.train, Path(job.target.path)
    same = ("seed", "micro_batch_size", "grad_accumulation_steps", "weight_decay", "warmup_ratio", "min_lr_ratio",
            "max_grad_norm")  # fmt: skip
    return {
        "target": str(target.resolve()) if target.exists() else job.target.path,
        "data": data.digest(),
        **{key: getattr(train, key) for key in same},
        "betas": list(train.betas),
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
