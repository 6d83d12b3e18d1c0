# SPDX-License-Identifier: Apache-2.0
"""Sweeps through Hydra's joblib and submitit launchers: they compose, and jobs run in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from drafts import write_draft, write_target  # noqa: E402

ROOT = Path(__file__).parents[2]
PLUGINS = {"parallel": "hydra_plugins.hydra_joblib_launcher", "slurm": "hydra_plugins.hydra_submitit_launcher"}
PLUGINS["parallel_submitit"] = PLUGINS["slurm"]


def recipe(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, str(ROOT / "recipes" / "train_then_serve.py"), *words]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    return subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, timeout=300)


def need(launcher: str) -> None:
    try:
        there = find_spec(PLUGINS[launcher]) is not None
    except ModuleNotFoundError:
        there = False
    if not there:
        pytest.skip(f"{PLUGINS[launcher]} is not installed: pip install -e '.[parallel]'")


def test_the_slurm_example_composes(tmp_path: Path) -> None:
    need("slurm")
    done = recipe(tmp_path, "hydra/launcher=slurm", "hydra.launcher.partition=gpu", "--cfg", "hydra")
    assert done.returncode == 0, done.stderr
    for told in ("partition: gpu", "gpus_per_node: 1", "SlurmLauncher"):
        assert told in done.stdout


@pytest.mark.parametrize("launcher", ["parallel", "parallel_submitit"])
def test_jobs_of_their_own_processes_end_in_one_leaderboard(launcher: str, tmp_path: Path) -> None:
    need(launcher)
    target = write_target(tmp_path / "target")
    drafts = [write_draft(tmp_path / name) for name in ("a", "b")]
    done = recipe(
        tmp_path, "-cn", "serve_only", "-m", f"hydra/launcher={launcher}", "serve/port=auto",
        "serve.print_only=true", "serve.vllm.version=0.32", f"target.path={target}",
        f"serve.checkpoint={drafts[0]},{drafts[1]},{tmp_path / 'none'}", f"hydra.sweep.dir={tmp_path / 'sweep'}",
    )  # fmt: skip
    assert done.returncode == 1, done.stderr[-3000:]  # the third has no draft
    board = json.loads((tmp_path / "sweep" / "leaderboard.json").read_text())
    assert [entry["status"] for entry in board] == ["printed", "printed", "failed"]
