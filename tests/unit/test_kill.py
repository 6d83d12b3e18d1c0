# SPDX-License-Identifier: Apache-2.0
"""SIGKILL at any moment: what is on disk is whole, and a resumed run has the losses of one that was never killed."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal

import torch
from test_train_loop import train_here
from tiny_train import make_job, metrics_of

import nemo_automodel.components.speculative.train.loop as loop_module
from nemo_automodel.components.speculative.draft.io import load_draft
from nemo_automodel.components.speculative.train.checkpoint import load_state
from nemo_automodel.components.speculative.train.outcome import last_checkpoint

SETTINGS = {
    "rows": 16, "num_epochs": 2, "grad_accumulation_steps": 2, "save_every_steps": 1, "keep_trainer_states": 1,
    "keep_last_checkpoints": 2, "log_every_steps": 3, "decode_prompts": 0,
}  # fmt: skip
# Moments of one step with its checkpoint: each call of these is one.
MOMENTS = ((os, "fsync"), (os, "rename"), (os, "replace"), (os, "rmdir"), (torch, "save"))
MEASURED = ("tokens_per_s", "memory_gb", "seconds")


def logged(job) -> list[dict]:
    """The lines of metrics.jsonl without what the machine's load decides."""
    return [{key: value for key, value in line.items() if key not in MEASURED} for line in metrics_of(job)]


def train_until(job, moments: int) -> None:
    """In this process: train, from LATEST where there is one, and die by SIGKILL at the so-and-so-many-th moment."""
    left = moments

    def dying(inner):
        def call(*args, **kwargs):
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return inner(*args, **kwargs)

        return call

    for module, name in MOMENTS:
        setattr(module, name, dying(getattr(module, name)))
    loop_module.TrainLoop._gradients = dying(loop_module.TrainLoop._gradients)
    train_here(job, resume=last_checkpoint(job.run_dir))


def killed(job, moments: int) -> bool:
    child = multiprocessing.get_context("fork").Process(target=train_until, args=(job, moments))
    child.start()
    child.join(60)
    assert child.exitcode in (0, -signal.SIGKILL)
    return child.exitcode != 0


def test_killed_at_random_moments_it_ends_as_if_never_killed(tmp_path):
    straight = make_job(tmp_path, "straight", **SETTINGS)
    end = train_here(straight)
    job = make_job(tmp_path, "killed", **SETTINGS)
    draw = random.Random(7)
    kills = 0
    while killed(job, draw.randint(15, 45)):
        kills += 1
        latest = last_checkpoint(job.run_dir)
        if latest is not None:  # whole
            load_draft(latest / "model")
            load_state(latest)
    assert kills >= 5
    assert logged(job) == logged(straight)
    root = job.run_dir / "checkpoints"
    assert sorted(p.name for p in root.iterdir()) == sorted(p.name for p in end.checkpoint.parent.iterdir())
    one, other = load_draft(end.checkpoint / "model")[0], load_draft(root / "LATEST" / "model")[0]
    assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values()))
