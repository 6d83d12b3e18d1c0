# SPDX-License-Identifier: Apache-2.0
"""A run in this process: it learns, reports, and continues exactly where it stopped."""

from __future__ import annotations

import io
import json

import pytest
import torch
from rich.console import Console
from tiny_train import losses_of, make_job, metrics_of, write_rows, write_target

from nemo_automodel.components.speculative.draft.io import load_draft
from nemo_automodel.components.speculative.train.job import TrainJob, build_train_job
from nemo_automodel.components.speculative.train.loop import TrainLoop
from nemo_automodel.components.speculative.train.optim import lr_at
from nemo_automodel.components.speculative.train.progress import RunReport
from nemo_automodel.components.speculative.train.totals import simulated_acceptance_length
from nemo_automodel.components.speculative.train.run import build_run, train
from nemo_automodel.config.schema import AppConfig, Precision, TrainConfig
from nemo_automodel.errors import ConfigError, DataError, Interrupted, TrainError


class StopAfter:
    """A stop request that comes once `steps` optimiser steps are done."""

    def __init__(self, steps: int | None = None) -> None:
        self.steps, self.loop = steps, None

    def enter_loop(self) -> None:
        pass

    def __call__(self) -> bool:
        return self.steps is not None and self.loop.position.step >= self.steps


def train_here(job, *, resume=None, stop_after=None, console=None):
    """Run a job without a child process; returns how the loop ended."""
    stop = StopAfter(stop_after)
    with RunReport(job.run_dir, console or Console(file=io.StringIO())) as report:
        _, stop.loop = build_run(job, resume, report, stop)
        return stop.loop.run()


def test_the_loss_falls_and_the_figures_are_written(tmp_path):
    job = make_job(tmp_path, "run", num_epochs=6)
    end = train_here(job)
    lines = metrics_of(job)
    losses = losses_of(job)
    assert end.finished and end.position.step == len(losses) == 6 * 8
    assert sum(losses[-8:]) < 0.7 * sum(losses[:8])
    step = next(line for line in lines if "loss" in line)
    assert step["step"] == 1 and step["epoch"] == 1 and step["tokens_per_s"] > 0 and step["memory_gb"] > 0
    assert len(step["accuracy_per_depth"]) == 3
    held_out = [line["validation"] for line in lines if "validation" in line]
    assert len(held_out) == 6 and held_out[-1]["loss"] < held_out[0]["loss"]
    assert held_out[-1] == end.validation
    accuracy = end.validation["accuracy_per_depth"]
    assert end.validation["acceptance_length"] == pytest.approx(simulated_acceptance_length(accuracy), abs=2e-3)


def test_checkpoint_of_each_epoch_and_latest(tmp_path):
    job = make_job(tmp_path, "run", num_epochs=2, save_every_steps=3)
    end = train_here(job)
    root = job.run_dir / "checkpoints"
    names = sorted(p.name for p in root.iterdir())
    assert names == sorted(["BEST", "LATEST", "epoch_1_step_3", "epoch_1_step_6", "epoch_1_step_8", "epoch_2_step_9",
                            "epoch_2_step_12", "epoch_2_step_15", "epoch_2_step_16"])  # fmt: skip
    assert str((root / "LATEST").readlink()) == end.checkpoint.name == "epoch_2_step_16"
    model = end.checkpoint / "model"
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {p.name for p in model.iterdir()}
    config = json.loads((model / "config.json").read_text())
    assert config["num_depths"] == 3 and config["mask_token_id"] == 3 and config["dtype"] == "float32"
    load_draft(model)


@pytest.mark.parametrize("precision", [Precision.fp32, Precision.bf16])
def test_resume_continues_bit_for_bit(tmp_path, precision):
    settings = {"grad_accumulation_steps": 2, "max_steps": 6, "num_epochs": 2, "warmup_ratio": 0.3}
    settings["precision"] = precision
    straight = make_job(tmp_path, "straight", **settings)
    end = train_here(straight)
    first = make_job(tmp_path, "first", **settings)
    half = train_here(first, stop_after=3)
    assert not half.finished and half.checkpoint.name == "epoch_1_step_3"
    second = make_job(tmp_path, "second", **settings)
    torch.manual_seed(999)  # what the process did before must not matter
    resumed = train_here(second, resume=half.checkpoint)
    assert losses_of(first) + losses_of(second) == losses_of(straight)
    one, other = load_draft(end.checkpoint / "model")[0], load_draft(resumed.checkpoint / "model")[0]
    assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values()))


def test_accumulation_equals_one_large_batch(tmp_path):
    # One depth: no element draw, so that both runs supervise the same elements; sums are divided by one count.
    shared = {"rows": 8, "draft": {"num_depths": 1}, "max_steps": 1}
    small = make_job(tmp_path, "small", micro_batch_size=2, grad_accumulation_steps=4, **shared)
    large = make_job(tmp_path, "large", micro_batch_size=8, **shared)
    one, other = (load_draft(train_here(job).checkpoint / "model")[0].state_dict() for job in (small, large))
    assert losses_of(small) == pytest.approx(losses_of(large), rel=1e-5)
    for name in one:
        # Adam's first step is lr * sign(gradient): entries with a gradient near zero may differ in sign, few do.
        differing = (one[name] - other[name]).abs() > 1e-5
        assert differing.float().mean() < 0.01, name


def test_a_reduced_vocabulary_is_in_the_checkpoint(tmp_path):
    job = make_job(tmp_path, "run", max_steps=1, draft={"draft_vocab_size": 20})
    draft, spec = load_draft(train_here(job).checkpoint / "model")
    assert spec.draft_vocab_size == 20
    letters = draft.vocab_ids().tolist()
    assert 2 in letters and letters == sorted(set(letters))  # the end-of-turn token is among the most frequent


def test_plain_lines_when_not_on_a_terminal_and_a_bar_on_one(tmp_path):
    plain, terminal = io.StringIO(), io.StringIO()
    train_here(make_job(tmp_path, "a", max_steps=2), console=Console(file=plain))
    train_here(make_job(tmp_path, "b", max_steps=2), console=Console(file=terminal, force_terminal=True, width=140))
    assert "step 2/2  epoch 1  loss" in plain.getvalue() and "\x1b" not in plain.getvalue()
    assert "accepted length" in plain.getvalue() and "validation" in plain.getvalue()
    assert "2/2" in terminal.getvalue() and "tok/s" in terminal.getvalue()


def test_a_finished_run_has_nothing_left_to_do(tmp_path):
    end = train_here(make_job(tmp_path, "first", max_steps=2))
    again = make_job(tmp_path, "again", max_steps=2, resume="LATEST")
    result = train(again, StopAfter())
    assert (result.status, result.checkpoint, result.step) == ("nothing_to_do", end.checkpoint, 2)
    assert not (again.run_dir / "checkpoints").exists()


def test_other_data_or_another_draft_is_not_resumed(tmp_path):
    end = train_here(make_job(tmp_path, "first", max_steps=1))
    with pytest.raises(TrainError, match="other data.*data "):
        train_here(make_job(tmp_path, "rows", max_steps=2, rows=12), resume=end.checkpoint)
    with pytest.raises(TrainError, match="other data.*micro_batch_size 2 -> 4"):
        train_here(make_job(tmp_path, "batch", max_steps=2, micro_batch_size=4), resume=end.checkpoint)
    with pytest.raises(TrainError, match="another draft.*num_depths 3 -> 2"):
        train_here(make_job(tmp_path, "depths", max_steps=2, draft={"num_depths": 2}), resume=end.checkpoint)


def test_a_learning_rate_that_diverges_is_named(tmp_path):
    job = make_job(tmp_path, "run", num_epochs=20, lr=1e30)
    with pytest.raises(TrainError, match="not finite") as caught:
        train_here(job)
    assert caught.value.where == "train.lr"


def refused(job, kind, where):
    with pytest.raises(kind) as caught:
        train_here(job)
    assert caught.value.where == where
    return str(caught.value)


def test_mistakes_are_named_before_the_first_step(tmp_path):
    assert "128 positions" in refused(make_job(tmp_path, "a", seq_length=129), ConfigError, "train.seq_length")
    assert "no file" in refused(make_job(tmp_path, "b", data={"train": "/no/rows.jsonl"}), DataError, "data.train")
    used = make_job(tmp_path, "c", draft={"mask_token_id": 8})  # the letter "a"
    assert "occurs in the data (data.train, row 1)" in refused(used, ConfigError, "draft.mask_token_id")
    outside = make_job(tmp_path, "d", draft={"mask_token_id": 64})
    refused(outside, ConfigError, "draft.mask_token_id")
    only_questions = tmp_path / "questions.jsonl"
    only_questions.write_text(json.dumps({"messages": [{"role": "user", "content": "alpha"}]}) + "\n")
    shown = refused(make_job(tmp_path, "e", data={"train": str(only_questions)}), DataError, "data.train")
    assert "alpha<|im_end|>" in shown
    nowhere = make_job(tmp_path, "f")
    nowhere.target.path = str(tmp_path / "no_target")
    refused(nowhere, ConfigError, "target.path")
    for run in "abcdef":
        assert not (tmp_path / run / "checkpoints").exists()


def test_learning_rate_warms_up_and_decays():
    train = TrainConfig(lr=1.0, warmup_ratio=0.1, min_lr_ratio=0.2)
    rates = [lr_at(step, 100, train) for step in range(100)]
    assert rates[0] == pytest.approx(0.1) and max(rates) == rates[9] == 1.0
    assert all(a >= b for a, b in zip(rates[9:], rates[10:]))
    assert rates[-1] == pytest.approx(0.2, abs=1e-3) and rates[55] == pytest.approx(0.6)


def test_simulated_acceptance_length():
    assert simulated_acceptance_length([0.5, 0.5, 1.0]) == 1 + 0.5 + 0.25 + 0.25
    assert simulated_acceptance_length([]) == 1.0


def test_what_changes_the_losses_may_not_change_on_resume(tmp_path):
    end = train_here(make_job(tmp_path, "first", max_steps=1))
    changes = {"grad_accumulation_steps": 2, "seed": 7, "weight_decay": 0.1, "warmup_ratio": 0.5, "min_lr_ratio": 0.5,
               "max_grad_norm": 0.1, "betas": [0.8, 0.9]}  # fmt: skip
    for key, value in changes.items():
        with pytest.raises(TrainError, match=f"other data or settings.*{key} .* -> ") as caught:
            train_here(make_job(tmp_path, key, max_steps=2, **{key: value}), resume=end.checkpoint)
        assert caught.value.where == "train.resume"
    with pytest.raises(TrainError, match="freeze_embeddings False -> True"):
        train_here(make_job(tmp_path, "frozen", draft={"freeze_embeddings": True}), resume=end.checkpoint)
    moved = make_job(tmp_path, "target", max_steps=2)
    moved.target.path = str(write_target(tmp_path / "other_target"))
    with pytest.raises(TrainError, match="target .*/target -> .*/other_target"):
        train_here(moved, resume=end.checkpoint)
    assert train_here(make_job(tmp_path, "more", max_steps=3, num_epochs=2, lr=1e-3), resume=end.checkpoint).finished


class StopNow(StopAfter):
    """A stop request that comes when told."""

    received = False

    def __call__(self) -> bool:
        return self.received


@pytest.mark.parametrize("moment", ["_save", "_validate"])
def test_a_stop_during_the_last_save_or_validation_is_an_interruption(tmp_path, monkeypatch, moment):
    job, stop = make_job(tmp_path, "run", max_steps=2), StopNow()
    inner = getattr(TrainLoop, moment)

    def stopped_in(loop):
        stop.received = True
        inner(loop)

    monkeypatch.setattr(TrainLoop, moment, stopped_in)
    with pytest.raises(Interrupted, match="after step 2 of 2; saved .*epoch_1_step_2") as caught:
        train(job, stop)
    assert "serve.checkpoint=" in caught.value.remedy


def test_a_few_bad_rows_do_not_stop_the_run_and_are_said(tmp_path):
    bad = write_rows(tmp_path / "bad.jsonl", 16)
    bad.write_text(bad.read_text() + '{"messages": []}\n')
    said = io.StringIO()
    job = make_job(tmp_path, "run", max_steps=1, data={"train": str(bad), "max_bad_row_share": 0.1})
    train_here(job, console=Console(file=said))
    assert "warning: data.train: row 17 (bad.jsonl:17): 'messages' must be a list" in said.getvalue()
    assert "16 rows" in said.getvalue() and "1 bad of 17" in said.getvalue()
    job = make_job(tmp_path, "strict", max_steps=1, data={"train": str(bad)})
    assert "row 17" in refused(job, DataError, "data.train")


def test_validation_rows_may_come_from_another_split(tmp_path):
    import datasets

    rows = [json.loads(line) for line in write_rows(tmp_path / "a.jsonl", 20).read_text().splitlines()]
    train_rows, held_out = datasets.Dataset.from_list(rows[:16]), datasets.Dataset.from_list(rows[16:])
    datasets.DatasetDict({"train": train_rows, "test": held_out}).save_to_disk(str(tmp_path / "both"))
    said = io.StringIO()
    both = {"train": str(tmp_path / "both"), "validation": str(tmp_path / "both")}
    job = make_job(tmp_path, "run", max_steps=1, data={**both, "validation_split": "test"})
    train_here(job, console=Console(file=said))
    assert "data.train: 16 rows" in said.getvalue() and "data.validation: 4 rows" in said.getvalue()
    job = make_job(tmp_path, "same", max_steps=1, data=both)
    said = io.StringIO()
    train_here(job, console=Console(file=said))
    assert "data.validation: 16 rows" in said.getvalue()


def test_a_job_survives_its_file(tmp_path):
    app = AppConfig()
    app.target.path, app.data.train, app.train.max_steps = "t", "d.jsonl", 7
    app.data.chat_template_kwargs = {"enable_thinking": False}
    job = build_train_job(app, tmp_path / "run")
    job.save(tmp_path / "job.json")
    assert TrainJob.load(tmp_path / "job.json") == job
