# SPDX-License-Identifier: Apache-2.0
"""The table at the end of a sweep: order, failures with reasons, and the four files."""

from __future__ import annotations

import csv
import json
from pathlib import Path

from nemo_automodel.components.speculative.bench.leaderboard import NO_RESULT, collect, write_leaderboard
from nemo_automodel.components.speculative.serve.record import record_training


def _job(sweep: Path, name: str, *, status: str = "ok", reason: str | None = None, **bench) -> None:
    job = sweep / name
    job.mkdir(parents=True)
    result = {"status": status, "stage": "done", "reason": reason, "checkpoint": f"/runs/r1/checkpoints/{name}/model"}
    result |= {"benchmark": bench or None, "versions": {"vllm": "0.32.0"}}
    (job / "result.json").write_text(json.dumps(result))


def _sweep(tmp_path: Path) -> Path:
    _job(tmp_path, "0", tokens_per_s=50.0, acceptance_length=3.9, acceptance_per_position=[0.9, 0.5], k=2)
    _job(tmp_path, "1", status="failed", reason="the second shard | is missing")
    _job(tmp_path, "2", tokens_per_s=80.0, acceptance_length=2.0, speedup=1.6, baseline_tokens_per_s=50.0, k=4)
    _job(tmp_path, "3", status="printed")
    _job(tmp_path, "10", tokens_per_s=80.0, acceptance_length=3.0, k=8)
    (tmp_path / "11").mkdir()
    (tmp_path / ".submitit").mkdir()
    return tmp_path


def test_best_first_and_failed_ones_last_with_their_reason(tmp_path: Path) -> None:
    entries = collect(_sweep(tmp_path))
    assert [entry.job for entry in entries] == ["10", "2", "0", "3", "1", "11"]
    assert [entry.reason for entry in entries[-2:]] == ["the second shard | is missing", NO_RESULT]


def test_four_files_are_written_and_failures_counted(tmp_path: Path, capsys) -> None:
    assert write_leaderboard(_sweep(tmp_path)) == 2
    rows = json.loads((tmp_path / "leaderboard.json").read_text())
    assert (rows[0]["job"], rows[0]["tokens_per_s"], rows[0]["acceptance_length"]) == ("10", 80.0, 3.0)
    table = list(csv.DictReader((tmp_path / "leaderboard.csv").open()))
    assert [row["rank"] for row in table] == list("123456") and table[2]["acceptance_per_position"] == "0.9000 0.5000"
    lines = (tmp_path / "leaderboard.md").read_text().splitlines()
    assert lines[0].startswith("| rank | checkpoint | vLLM | K |") and "| 0.32.0 | 8 |" in lines[2]
    assert len(lines) == 8 and "1.60x" in lines[3] and "second shard \\| is missing" in lines[6]
    assert (tmp_path / "leaderboard.png").read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr()
    assert shown.out == "" and "leaderboard" in shown.err
    assert len(max(shown.err.splitlines(), key=len)) > 100, "a log file has room for a name in one piece"


def test_a_half_written_result_is_a_failure_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "result.json").write_text('{"status": "o')
    (entry,) = collect(tmp_path)
    assert entry.failed and "not JSON" in entry.reason


def test_jobs_that_only_trained_make_no_leaderboard(tmp_path: Path) -> None:
    config = tmp_path / "0" / ".hydra" / "config.yaml"
    config.parent.mkdir(parents=True)
    config.write_text("serve: {enabled: false}\n")
    assert write_leaderboard(tmp_path) == 0
    assert not list(tmp_path.glob("leaderboard.*"))


def test_a_killed_job_keeps_the_checkpoint_it_was_given(tmp_path: Path) -> None:
    config = tmp_path / "0" / ".hydra" / "config.yaml"
    config.parent.mkdir(parents=True)
    config.write_text("serve: {enabled: true, checkpoint: runs/epoch_3}\n")
    (entry,) = collect(tmp_path)
    assert (entry.checkpoint, entry.reason) == ("runs/epoch_3", NO_RESULT)


def test_a_sweep_that_only_printed_has_its_files_too(tmp_path: Path) -> None:
    _job(tmp_path, "0", status="printed")
    assert write_leaderboard(tmp_path) == 0
    assert (tmp_path / "leaderboard.png").is_file()


def test_a_job_that_trained_well_is_none_of_the_table_and_a_failed_one_is(tmp_path: Path) -> None:
    record_training(tmp_path / "0", tmp_path / "0" / "checkpoints" / "epoch_1_step_5", status="ok", reason=None)
    assert write_leaderboard(tmp_path) == 0 and not list(tmp_path.glob("leaderboard.*"))
    record_training(tmp_path / "1", None, status="failed", reason="no space")
    assert [(entry.job, entry.reason) for entry in collect(tmp_path)] == [("1", "no space")]


def test_names_say_what_differs(tmp_path: Path) -> None:
    """The run where there are two, the temperature where it is not 0."""
    _job(tmp_path, "0", tokens_per_s=50.0, k=2, temperature=0.7)
    _job(tmp_path, "1", tokens_per_s=40.0, k=0, temperature=0.7)
    assert [e.name for e in collect(tmp_path)] == ["0, temperature 0.7", "no speculation, temperature 0.7"]
    _job(tmp_path, "2", tokens_per_s=30.0, k=2, temperature=0.0)
    value = json.loads((tmp_path / "2" / "result.json").read_text()) | {"checkpoint": "/runs/r2/checkpoints/0/model"}
    (tmp_path / "2" / "result.json").write_text(json.dumps(value))
    assert [e.name for e in collect(tmp_path)][::2] == ["r1/0, temperature 0.7", "r2/0"]
