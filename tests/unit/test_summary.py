# SPDX-License-Identifier: Apache-2.0
"""What a run says besides its losses: the summary, free memory, trackers, the lines of metrics.jsonl."""

from __future__ import annotations

import io
import json
import sys
from types import ModuleType

import torch
from rich.console import Console
from test_train_loop import train_here
from tiny_train import make_job

from nemo_automodel.components.speculative.train import memory, trackers
from nemo_automodel.components.speculative.train.progress import RunReport
from nemo_automodel.components.speculative.train.summary import describe_end
from nemo_automodel.components.speculative.train.trackers import open_trackers, scalars

STEP = {
    "step": 5, "epoch": 1, "loss": 1.5, "accuracy_per_depth": [0.5, 0.25], "acceptance_length": 1.6, "lr": 1e-3,
    "tokens_per_s": 100.0, "memory_gb": 0.5,
}  # fmt: skip
HELD_OUT = {"step": 5, "epoch": 1, "validation": {"loss": 2.0, "accuracy_per_depth": [0.4], "acceptance_length": 1.4}}


def end(length, tokens, **changed):
    values = dict(rows=5000, supervised_tokens=tokens, source="chats.jsonl", epochs=2.5, num_depths=4,
                  validation={"acceptance_length": length}, held_out="held.jsonl")  # fmt: skip
    return describe_end(**{**values, **changed})


def test_a_small_set_is_told_what_it_can_give():
    learnt, expected, advice = end(1.52, 1_200_000)
    assert learnt == "trained on 3M supervised tokens (1.2M in 5,000 rows of chats.jsonl, 2.5 times)"
    assert "near 1.52 (K=4, at most 5)" in expected and "held.jsonl" in expected
    assert "4 to 6 is not to be expected of a few thousand rows" in advice


def test_advice_fits_the_figures():
    assert len(end(3.4, 1_200_000)) == 2
    assert "answered by the target itself" in end(1.5, 300_000_000)[2]
    assert "few thousand" not in end(1.5, 300_000_000)[2]
    assert "data.validation=PATH" in end(1.5, 1000, validation=None, held_out=None)[1]


def test_the_lowest_limit_of_the_cgroups_counts(tmp_path):
    def group(place, limit, used, inactive):
        place.mkdir(parents=True, exist_ok=True)
        (place / "memory.max").write_text(f"{limit}\n")
        (place / "memory.current").write_text(f"{used}\n")
        (place / "memory.stat").write_text(f"anon 1\ninactive_file {inactive}\n")

    group(tmp_path / "pod", 1000, 700, 100)
    group(tmp_path / "pod" / "job", "max", 600, 0)
    (tmp_path / "me").write_text("0::/pod/job\n")
    assert memory._cgroup_bytes(tmp_path, tmp_path / "me") == [400]
    assert memory._cgroup_bytes(tmp_path, tmp_path / "absent") == []
    assert 0 < memory.free_bytes(torch.device("cpu")) < 2**50


def test_too_little_memory_is_said_with_the_knob_before_the_first_step(tmp_path, monkeypatch):
    said = io.StringIO()
    train_here(make_job(tmp_path, "fits", max_steps=1), console=Console(file=said))
    before = said.getvalue().partition("step 1/1")[0]
    assert "memory of a step: about" in before and "can be had" in before and "too little" not in before
    monkeypatch.setattr(memory, "free_bytes", lambda device: 1000)
    said = io.StringIO()
    train_here(make_job(tmp_path, "tight", max_steps=1), console=Console(file=said))
    assert "warning: that is likely too little memory: set " in said.getvalue().partition("step 1/1")[0]


def test_every_figure_has_a_name_for_the_trackers():
    assert dict(scalars(STEP)) == {
        "train/epoch": 1, "train/loss": 1.5, "train/accuracy/depth_0": 0.5, "train/accuracy/depth_1": 0.25,
        "train/acceptance_length": 1.6, "train/lr": 1e-3, "train/tokens_per_s": 100.0, "train/memory_gb": 0.5,
    }  # fmt: skip
    assert dict(scalars(HELD_OUT)) == {
        "validation/loss": 2.0, "validation/accuracy/depth_0": 0.4, "validation/acceptance_length": 1.4,
    }  # fmt: skip


def test_trackers_get_what_the_file_gets(tmp_path, monkeypatch):
    logged, settings = [], {}

    class Run:
        def log(self, values, step):
            logged.append((step, values))

        def finish(self, quiet):
            logged.append("finished")

    stand_in = ModuleType("wandb")
    stand_in.init = lambda **kwargs: settings.update(kwargs) or Run()
    stand_in.__spec__ = sys.__spec__
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    job = make_job(tmp_path, "run", wandb_project="drafts", tensorboard=False)
    with RunReport(job.run_dir, Console(file=io.StringIO()), open_trackers(job)) as report:
        report.begin(total=10, done=4)
        report.step(STEP)
        report.validation(HELD_OUT)
    assert settings["project"] == "drafts" and settings["name"] == "run"
    assert settings["config"]["train"]["lr"] == job.train.lr
    assert logged == [(5, dict(scalars(STEP))), (5, dict(scalars(HELD_OUT))), "finished"]


def test_tensorboard_is_used_when_it_is_there(tmp_path, monkeypatch):
    monkeypatch.setattr(trackers, "_is_installed", lambda tracker: False)
    assert open_trackers(make_job(tmp_path, "run")) == ()
    monkeypatch.setattr(trackers, "_is_installed", lambda tracker: True)
    monkeypatch.setattr(trackers, "TensorBoard", lambda job: "writer")
    assert open_trackers(make_job(tmp_path, "run")) == ("writer",)
    assert open_trackers(make_job(tmp_path, "run", tensorboard=False)) == ()


def test_a_run_resumed_in_its_folder_forgets_the_steps_it_lost(tmp_path):
    said = io.StringIO()
    with RunReport(tmp_path, Console(file=said)) as report:
        report.begin(total=9, done=0)
        for step in (1, 2, 3):
            report.step({**STEP, "step": step})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')  # killed while it wrote
    with RunReport(tmp_path, Console(file=said)) as report:
        report.resumed(2)
        report.begin(total=9, done=2)
        report.step({**STEP, "step": 3})
    steps = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3]
    assert "left" in said.getvalue().splitlines()[0]


def test_the_last_line_has_no_time_left(tmp_path):
    said = io.StringIO()
    with RunReport(tmp_path, Console(file=said)) as report:
        report.begin(total=9, done=0)
        report.step({**STEP, "step": 9})
    assert "step 9/9" in said.getvalue() and "left" not in said.getvalue()
