# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of checkpoints while training goes on: which, in what order, and that none outlives its run."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from test_pipeline import _use_fake, installed, spec  # noqa: F401

from nemo_automodel.components.speculative.bench import beside_training
from nemo_automodel.components.speculative.bench.beside_training import BesideTraining, check_gpus_apart
from nemo_automodel.components.speculative.bench.checkpoint_job import CheckpointJob, main
from nemo_automodel.components.speculative.bench.plain import from_plain
from nemo_automodel.components.speculative.serve.types import BenchmarkSpec, LaunchCommand, ServeSpec
from nemo_automodel.errors import ConfigError
from nemo_automodel.files import read_json

STAND_IN = """
import json, os, sys, time
from pathlib import Path
job = Path(sys.argv[1]); spec = json.loads(job.read_text())["spec"]
with (job.parents[1] / "order").open("a") as file: file.write(f"{job.parent.name} {os.getpid()}\\n")
while not (job.parents[1] / "go").exists(): time.sleep(0.02)
if "step_20" in job.parent.name: sys.exit("dead")
value = {"status": "ok", "benchmark": {"acceptance_length": 2.5, "tokens_per_s": 100.0, "speedup": 1.5}}
(job.parent / "result.json").write_text(json.dumps(value))
"""


class Watched(BesideTraining):
    """Runs a stand-in for the benchmark, which waits for the file `go`."""

    def __init__(self, tmp_path: Path, spec: ServeSpec) -> None:  # noqa: F811
        self.said: list[str] = []
        super().__init__(spec, run_dir=tmp_path / "run", base_dir=tmp_path, say=self.said.append)

    def _command(self, checkpoint: Path, folder: Path) -> LaunchCommand:
        made = super()._command(checkpoint, folder)
        return replace(made, argv=(sys.executable, "-c", STAND_IN, made.argv[-1]))

    def started(self, count: int) -> list[str]:
        order = self._root / "order"
        deadline = time.monotonic() + 60
        while not order.exists() or len(order.read_text().splitlines()) < count:
            assert time.monotonic() < deadline, self.said
            time.sleep(0.02)
        return [line.split()[0] for line in order.read_text().splitlines()]


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside_training, "POLL_S", 0.02)


def save_checkpoint(tmp_path: Path, step: int) -> None:
    """As training does: whole, by a rename."""
    part = tmp_path / "run" / "checkpoints" / ".part"
    (part / "model").mkdir(parents=True)
    (part / "model" / "config.json").write_text("{}")
    part.rename(part.with_name(f"epoch_1_step_{step}"))


def test_one_at_a_time_the_newest_first_and_failures_are_said(tmp_path, spec) -> None:  # noqa: F811
    save_checkpoint(tmp_path, 5)  # of an earlier run
    spec = replace(spec, benchmark=replace(spec.benchmark, min_acceptance_length=9.0, gpu_sets=("3", "4")))
    with Watched(tmp_path, spec) as watched:
        save_checkpoint(tmp_path, 10)
        watched.started(1)
        for step in (20, 100, 30):
            save_checkpoint(tmp_path, step)
        root = tmp_path / "run" / "checkpoints_bench"
        (root / "go").touch()
        assert watched.started(4) == [f"epoch_1_step_{step}" for step in (10, 100, 30, 20)]
        watched.finish(measure_last=False)
    assert "epoch_1_step_100 as served: acceptance length 2.500, 100.0 tokens/s, 1.50x" in watched.said
    dead = "warning: epoch_1_step_20 is not measured: its benchmark died, see "
    assert [line for line in watched.said if line.startswith("warning")] == [
        line for line in watched.said if dead in line
    ]
    job = from_plain(CheckpointJob, read_json(root / "epoch_1_step_30" / "job.json"))
    asked = job.spec
    assert asked.checkpoint.endswith("checkpoints/epoch_1_step_30") and asked.benchmark_mode and asked.port == 0
    assert (asked.benchmark.min_acceptance_length, asked.benchmark.gpu_sets) == (None, ("3",))
    assert asked == replace(spec, checkpoint=asked.checkpoint, benchmark_mode=True, export_dir=None,
                            benchmark=replace(spec.benchmark, min_acceptance_length=None, gpu_sets=("3",)))  # fmt: skip


@pytest.mark.parametrize(("measure_last", "wanted"), [(True, [10, 30]), (False, [10])])
def test_at_the_end_only_the_newest_is_still_measured(tmp_path, spec, measure_last, wanted) -> None:  # noqa: F811
    with Watched(tmp_path, spec) as watched:
        save_checkpoint(tmp_path, 10)
        watched.started(1)
        for step in (20, 30):
            save_checkpoint(tmp_path, step)
        watched._closing.set()
        (watched._root / "go").touch()
        watched.finish(measure_last=measure_last)
    assert watched.started(1) == [f"epoch_1_step_{step}" for step in wanted]


def test_nothing_is_left_when_training_fails(tmp_path, spec) -> None:  # noqa: F811
    with pytest.raises(ValueError), Watched(tmp_path, spec) as watched:
        save_checkpoint(tmp_path, 10)
        watched.started(1)
        pid = int((watched._root / "order").read_text().split()[1])
        raise ValueError
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert watched.said == []


def test_the_process_measures_and_writes_the_leaderboard(tmp_path, spec, installed, monkeypatch) -> None:  # noqa: F811
    _use_fake(monkeypatch)
    out = tmp_path / "checkpoints_bench" / "epoch_1_step_10"
    bench = replace(spec.benchmark, baseline=False)
    CheckpointJob(replace(spec, benchmark_mode=True, benchmark=bench), str(tmp_path), str(out)).save(
        tmp_path / "j.json"
    )
    assert main([str(tmp_path / "j.json")]) == 0
    assert json.loads((out / "result.json").read_text())["benchmark"]["acceptance_length"] == 1.5
    board = json.loads((out.parent / "leaderboard.json").read_text())
    assert [(entry["job"], entry["status"]) for entry in board] == [("epoch_1_step_10", "ok")]
    assert (out.parent / "report.html").is_file()


@pytest.mark.parametrize(("sets", "count", "environ", "refused"), [
    ((), None, {}, None), ((), 0, {}, None), (("1",), 2, {}, None),
    ((), 2, {}, """add 'serve.benchmark.gpu_sets=["1"]'"""), (("0",), 2, {}, "would take GPU 0; training takes 0"),
    (("0",), 2, {"CUDA_VISIBLE_DEVICES": "5,0"}, None), ((), 1, {}, "fewer train.nproc_per_node, or false"),
])  # fmt: skip
def test_a_gpu_that_trains_is_not_taken(monkeypatch, sets, count, environ, refused) -> None:
    monkeypatch.setattr(beside_training, "visible_gpus", lambda: count)
    asked = ServeSpec("c", "t", benchmark=BenchmarkSpec(gpu_sets=sets))
    if refused is None:
        return check_gpus_apart(asked, 1, environ)
    with pytest.raises(ConfigError) as caught:
        check_gpus_apart(asked, 1, environ)
    assert refused in str(caught.value)
