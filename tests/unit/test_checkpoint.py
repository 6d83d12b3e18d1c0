# SPDX-License-Identifier: Apache-2.0
"""A checkpoint is whole or it is not there, and what train.resume names is found."""

from __future__ import annotations

import io
import os
import resource
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from test_train_loop import train_here
from tiny_train import make_job

import nemo_automodel.components.speculative.train.checkpoint as checkpoint_module
import nemo_automodel.components.speculative.train.loop as loop_module
from nemo_automodel.components.speculative.draft.io import load_draft
from nemo_automodel.components.speculative.train.checkpoint import CheckpointStore, load_state
from nemo_automodel.components.speculative.train.resume import find_resume_checkpoint, latest_of
from nemo_automodel.components.speculative.train.retention import best_of, record_validation
from nemo_automodel.errors import TrainError


class NoTokenizer:
    def save_pretrained(self, folder):
        (folder / "tokenizer.json").write_text("{}")


@pytest.fixture
def trained(tmp_path):
    """A run of one step, its end and what is needed to save again."""
    end = train_here(make_job(tmp_path, "run", max_steps=1))
    draft, spec = load_draft(end.checkpoint / "model")
    store = CheckpointStore(end.checkpoint.parent, NoTokenizer())
    return end, draft, spec, store


def later(state, step):
    return replace(state, position=replace(state.position, step=step))


def test_a_full_disk_leaves_the_checkpoint_before(trained):
    end, draft, spec, store = trained
    state = load_state(end.checkpoint)
    before = sorted(p.name for p in store.root.iterdir())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))  # writes beyond 4 KiB fail, as on a full disk
    try:
        with pytest.raises(TrainError) as caught:
            store.save(draft, spec, later(state, 2), epoch=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert str(end.checkpoint) in caught.value.remedy
    assert sorted(p.name for p in store.root.iterdir()) == before
    assert latest_of(store.root) == end.checkpoint
    load_draft(end.checkpoint / "model"), load_state(end.checkpoint)
    assert store.save(draft, spec, later(state, 2), epoch=1).name == "epoch_1_step_2"


def test_saving_again_under_the_same_name_replaces(trained):
    end, draft, spec, store = trained
    state = load_state(end.checkpoint)
    with torch.no_grad():
        draft.mask_hidden.fill_(7.0)
    assert store.save(draft, spec, state, epoch=1) == end.checkpoint
    assert load_draft(end.checkpoint / "model")[0].mask_hidden.eq(7.0).all()
    assert sorted(p.name for p in store.root.iterdir()) == ["BEST", "LATEST", end.checkpoint.name]


def test_latest_is_relative_and_a_text_file_is_understood(trained):
    end, *_, store = trained
    assert os.readlink(store.root / "LATEST") == end.checkpoint.name
    (store.root / "LATEST").unlink()
    (store.root / "LATEST").write_text(end.checkpoint.name + "\n")
    assert find_resume_checkpoint(str(store.root.parent), store.root.parent) == end.checkpoint


def test_every_spelling_of_resume_finds_the_checkpoint(trained, tmp_path):
    end, *_ = trained
    run = tmp_path / "run"
    for value in (run, run / "checkpoints", end.checkpoint, end.checkpoint / "model", run / "checkpoints" / "LATEST"):
        assert find_resume_checkpoint(str(value), tmp_path / "new") == end.checkpoint, value
    assert find_resume_checkpoint("LATEST", run) == end.checkpoint
    assert find_resume_checkpoint("LATEST", tmp_path / "new") == end.checkpoint  # the newest run beside it


def test_nothing_to_resume_lists_where_it_looked(tmp_path):
    with pytest.raises(TrainError, match="no resumable checkpoint") as caught:
        find_resume_checkpoint(str(tmp_path / "nowhere"), tmp_path / "run")
    assert str(tmp_path / "nowhere") in str(caught.value)
    with pytest.raises(TrainError, match="no resumable checkpoint"):
        find_resume_checkpoint("LATEST", tmp_path / "run")


def states_of(root):
    return sorted(path.parents[1].name for path in root.glob("epoch_*/trainer/state.pt"))


def test_only_the_newest_checkpoints_keep_their_trainer_state(tmp_path):
    end = train_here(make_job(tmp_path, "run", num_epochs=1, save_every_steps=2))
    root = end.checkpoint.parent
    assert states_of(root) == ["epoch_1_step_6", "epoch_1_step_8"]
    old = root / "epoch_1_step_2"
    assert load_draft(old / "model") and not (old / "trainer").exists()
    with pytest.raises(TrainError, match="keeps its weights only.*keep_trainer_states") as caught:
        find_resume_checkpoint(str(old), tmp_path / "new")
    assert str(end.checkpoint) in caught.value.remedy and "\n" not in str(caught.value)


def test_the_states_of_another_run_are_not_touched(tmp_path):
    first = train_here(make_job(tmp_path, "first", num_epochs=2, max_steps=2, save_every_steps=1))
    job = make_job(tmp_path, "second", num_epochs=2, max_steps=6, save_every_steps=1, keep_trainer_states=1)
    second = train_here(job, resume=first.checkpoint)
    assert states_of(first.checkpoint.parent) == ["epoch_1_step_1", "epoch_1_step_2"]
    assert states_of(second.checkpoint.parent) == ["epoch_1_step_6"]


def test_newest_means_written_last_not_the_highest_step(tmp_path):
    first = train_here(make_job(tmp_path, "run", num_epochs=1, save_every_steps=2))
    older = first.checkpoint.with_name("epoch_1_step_6")
    train_here(make_job(tmp_path, "run", num_epochs=1, save_every_steps=1, max_steps=7), resume=older)
    assert states_of(older.parent) == ["epoch_1_step_7", "epoch_1_step_8"]


def test_no_state_is_removed_before_the_new_checkpoint_stands(trained, monkeypatch):
    end, draft, spec, store = trained
    state = load_state(end.checkpoint)
    store.save(draft, spec, later(state, 2), epoch=1)

    def full_disk(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint_module, "point", full_disk)
    with pytest.raises(TrainError):
        store.save(draft, spec, later(state, 3), epoch=1)
    assert {"epoch_1_step_1", "epoch_1_step_2"} <= set(states_of(store.root))


def names(root):
    return sorted(p.name for p in root.iterdir())


def test_keep_last_removes_whole_checkpoints_but_never_best(tmp_path, monkeypatch):
    lengths = iter([3.0, 2.0, 1.0, 1.0])
    monkeypatch.setattr(
        loop_module, "validate", lambda *_, **__: {"acceptance_length": next(lengths), "loss": 1.0,
                                                   "accuracy_per_depth": [0.5]},
    )  # fmt: skip
    job = make_job(tmp_path, "run", rows=8, num_epochs=4, keep_last_checkpoints=1)
    end = train_here(job)
    root = end.checkpoint.parent
    assert names(root) == ["BEST", "LATEST", "epoch_1_step_4", "epoch_4_step_16"]
    assert os.readlink(root / "BEST") == "epoch_1_step_4" and os.readlink(root / "LATEST") == "epoch_4_step_16"
    load_draft(root / "BEST" / "model")
    assert best_of(root) == root / "epoch_1_step_4"


def test_best_follows_the_figures_on_disk_after_a_resumption(tmp_path):
    job = make_job(tmp_path, "run", rows=8, num_epochs=3)
    first = train_here(job, stop_after=8)
    root = first.checkpoint.parent
    record_validation(root / "epoch_1_step_4", {"acceptance_length": 9.0, "loss": 1.0})
    train_here(job, resume=first.checkpoint)
    assert os.readlink(root / "BEST") == "epoch_1_step_4"
    record_validation(root / "epoch_2_step_8", {"acceptance_length": 9.0, "loss": 0.5})
    assert os.readlink(root / "BEST") == "epoch_2_step_8"


def test_a_disk_that_fills_up_while_best_moves_costs_a_warning(tmp_path, monkeypatch):
    def full_disk(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(loop_module, "record_validation", full_disk)
    said = io.StringIO()
    end = train_here(make_job(tmp_path, "run", max_steps=1), console=Console(file=said))
    assert end.finished and "warning: BEST cannot be moved" in said.getvalue()


def test_a_replaced_checkpoint_is_never_missing(trained, monkeypatch):
    end, draft, spec, store = trained
    seen = []
    inner = checkpoint_module._exchange

    def watched(one, other):
        done = inner(one, other)
        seen.append((done, (end.checkpoint / "model" / "config.json").is_file()))
        return done

    monkeypatch.setattr(checkpoint_module, "_exchange", watched)
    store.save(draft, spec, load_state(end.checkpoint), epoch=1)
    assert seen == [(True, True)]
    monkeypatch.setattr(checkpoint_module, "_exchange", lambda *_: False)  # a file system that cannot
    store.save(draft, spec, load_state(end.checkpoint), epoch=1)
    load_draft(end.checkpoint / "model"), load_state(end.checkpoint)
    assert names(store.root) == ["BEST", "LATEST", "epoch_1_step_1"]


def test_what_a_killed_run_was_writing_is_removed(trained):
    end, *_, store = trained
    for name in (".epoch_1_step_2.99.part", ".epoch_1_step_1.99.old"):
        (store.root / name / "model").mkdir(parents=True)
    store.remove_leftovers()
    assert names(store.root) == ["BEST", "LATEST", "epoch_1_step_1"]


def test_a_damaged_state_is_named(trained):
    end, *_ = trained
    path = end.checkpoint / "trainer" / "state.pt"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(TrainError, match="cannot read .*state.pt"):
        load_state(end.checkpoint)
