# SPDX-License-Identifier: Apache-2.0
"""Several processes do what one does; when one of them fails or dies, none hangs."""

from __future__ import annotations

import io
import json
import os
import signal

import pytest
import torch
from processes import in_processes
from rich.console import Console
from test_train_loop import StopAfter, train_here
from tiny_train import losses_of, make_job, metrics_of

import nemo_automodel.components.speculative.train.loop as loop_module
from nemo_automodel.components.speculative.draft.io import load_draft
from nemo_automodel.components.speculative.train.checkpoint import load_state
from nemo_automodel.components.speculative.train.outcome import last_checkpoint
from nemo_automodel.components.speculative.train.placement import PeerFailed, PeerLost
from nemo_automodel.components.speculative.train.progress import RunReport, SilentReport
from nemo_automodel.components.speculative.train.run import build_run
from nemo_automodel.errors import DataError


def train_in(world, job, *, resume=None, stop_after=None):
    """`train_here`, as one of several processes; returns the folder and the losses that this process saw."""
    stop = StopAfter(stop_after)
    console = Console(file=io.StringIO())
    with RunReport(job.run_dir, console) if world.is_first else SilentReport() as report:
        _, stop.loop = build_run(job, resume, report, stop, world)
        return stop.loop.run().checkpoint


def weights(checkpoint):
    return load_draft(checkpoint / "model")[0].state_dict()


# 9 micro batches of 2 rows: with 2 x 2 in a step the last step of an epoch has 1, so that a process has none.
SHARED = {"rows": 17, "num_epochs": 2, "lr": 1e-3, "decode_max_new_tokens": 16, "decode_every_steps": 2}


def test_two_processes_have_the_loss_curve_of_one_with_twice_the_accumulation(tmp_path):
    alone = make_job(tmp_path, "alone", grad_accumulation_steps=4, **SHARED)
    one = train_here(alone).checkpoint
    job = make_job(tmp_path, "two", grad_accumulation_steps=2, **SHARED)
    folders = in_processes(2, lambda world: train_in(world, job))
    assert folders == [job.run_dir / "checkpoints" / "epoch_2_step_6"] * 2
    assert losses_of(job) == pytest.approx(losses_of(alone), rel=1e-6) and len(losses_of(job)) == 6
    for mine, theirs in zip(metrics_of(job), metrics_of(alone), strict=True):
        assert ("decode" in mine, mine["step"]) == ("decode" in theirs, theirs["step"])  # by the first process alone
        assert mine.get("accuracy_per_depth") == theirs.get("accuracy_per_depth")
        if "validation" in mine:  # sharded
            assert mine["validation"]["loss"] == pytest.approx(theirs["validation"]["loss"], rel=1e-5)
    ours = weights(folders[0])
    for name, theirs in weights(one).items():
        assert torch.allclose(ours[name].float(), theirs.float(), atol=1e-4), name


def test_two_processes_resume_bit_for_bit(tmp_path):
    settings = {"grad_accumulation_steps": 2, **SHARED}
    straight = make_job(tmp_path, "straight", **settings)
    (end, _) = in_processes(2, lambda world: train_in(world, straight))
    first = make_job(tmp_path, "first", **settings)
    (half, _) = in_processes(2, lambda world: train_in(world, first, stop_after=2))
    second = make_job(tmp_path, "second", **settings)
    (resumed, _) = in_processes(2, lambda world: train_in(world, second, resume=half))
    assert losses_of(first) + losses_of(second) == losses_of(straight)
    assert all(torch.equal(a, b) for a, b in zip(weights(end).values(), weights(resumed).values()))
    alone = make_job(tmp_path, "alone", **{**settings, "grad_accumulation_steps": 4})
    train_here(alone, resume=half)  # on another machine
    assert losses_of(alone) == pytest.approx(losses_of(second), rel=1e-6)


def test_a_stop_in_one_process_stops_and_saves_all(tmp_path):
    job = make_job(tmp_path, "run", **SHARED)

    def work(world):
        return train_in(world, job, stop_after=3 if world.rank == 1 else None)

    folders = in_processes(2, work)
    assert folders == [job.run_dir / "checkpoints" / "epoch_1_step_3"] * 2
    assert load_state(folders[0]).position.step == 3


def test_a_process_that_dies_loses_no_whole_step(tmp_path, monkeypatch):
    job = make_job(tmp_path, "run", **SHARED)
    inner = loop_module.TrainLoop._gradients

    def dying(loop, indices, *, micro):
        if loop.world.rank == 1 and loop.position.step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return inner(loop, indices, micro=micro)

    monkeypatch.setattr(loop_module.TrainLoop, "_gradients", dying)
    said, code = in_processes(2, lambda world: train_in(world, job))
    assert code == -signal.SIGKILL and PeerLost.__name__ in said
    assert load_state(last_checkpoint(job.run_dir)).position.step == 2
    assert len(losses_of(job)) == 2


def test_an_error_of_any_process_ends_all_and_is_told_by_the_first():
    def work(world):
        try:
            world.agree(DataError("no rows", where="data.train", remedy="add some") if world.rank == 1 else None)
        except (DataError, PeerFailed) as error:
            return type(error).__name__, str(error)

    assert in_processes(3, work) == [
        ("DataError", "process 1: no rows [data.train] -> add some"), ("PeerFailed", ""), ("PeerFailed", ""),
    ]  # fmt: skip


def test_gradients_that_only_some_processes_have_are_summed(monkeypatch):
    import nemo_automodel.components.speculative.train.world as world_module
    from nemo_automodel.components.speculative.train.totals import Totals

    monkeypatch.setattr(world_module, "BUCKET_ENTRIES", 5)  # several buckets, one of them larger than the limit

    def work(world):
        parameters = [torch.nn.Parameter(torch.zeros(size)) for size in (3, 2, 7, 1, 4)]
        for i, parameter in enumerate(parameters):
            if i != 4 and (world.rank == 0 or i % 2):
                parameter.grad = torch.full_like(parameter, float(10 * i + world.rank))
        one = torch.tensor(1)
        totals = Totals(torch.tensor(0.5), one, one.repeat(2), one.repeat(2) * world.rank)
        total = world.sum_gradients(parameters, totals)
        return [None if p.grad is None else p.grad.unique().tolist() for p in parameters], total.flat().tolist()

    for gradients, totals in in_processes(2, work):
        assert gradients == [[0.0], [21.0], [20.0], [61.0], None]
        assert totals == [1.0, 2, 2, 2, 1, 1]


def test_the_first_process_shares_its_job_and_figures():
    shared = in_processes(2, lambda world: (world.share({"rank": world.rank}), world.any(world.rank == 1)))
    assert json.dumps(shared) == '[[{"rank": 0}, true], [{"rank": 0}, true]]'
