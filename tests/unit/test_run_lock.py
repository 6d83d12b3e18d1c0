# SPDX-License-Identifier: Apache-2.0
"""Two runs in one folder: the second ends at once, in one line, before Hydra has written anything."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from drafts import write_draft, write_target

from nemo_automodel.components.speculative import run_lock
from nemo_automodel.components.speculative.run_lock import claim_folder
from nemo_automodel.errors import ConfigError

ROOT = Path(__file__).parents[2]
HOLD = (
    "import sys; from pathlib import Path; from nemo_automodel.components.speculative.run_lock import claim_folder\n"
    "claim_folder(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
)


@pytest.fixture
def holder(tmp_path: Path):
    """A process that runs in `tmp_path/run`."""
    argv = [sys.executable, "-c", HOLD, str(tmp_path / "run")]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def recipe(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, str(ROOT / "recipes" / "train_then_serve.py"), "-cn", "serve_only", *words]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, timeout=120)


def words(tmp_path: Path) -> list[str]:
    draft, target = write_draft(tmp_path / "draft"), write_target(tmp_path / "target")
    return [f"serve.checkpoint={draft}", f"target.path={target}", "serve.print_only=true", "serve.port=0"]


def test_a_second_run_in_the_folder_is_one_line_and_writes_nothing(holder, tmp_path: Path) -> None:
    before = {file.name for file in (tmp_path / "run").iterdir()}
    done = recipe(tmp_path, *words(tmp_path), f"hydra.run.dir={tmp_path / 'run'}")
    assert done.returncode == 1 and done.stdout == "" and "Traceback" not in done.stderr
    (line,) = done.stderr.strip().splitlines()
    assert f"pid {holder.pid}" in line and "another hydra.run.dir" in line
    assert {file.name for file in (tmp_path / "run").iterdir()} == before


def test_a_killed_run_leaves_the_folder_free(holder, tmp_path: Path) -> None:
    holder.kill()
    holder.wait()
    claim_folder(tmp_path / "run")
    assert (tmp_path / "run" / ".run.pid").read_text() == f"{os.getpid()}\n"


def test_a_run_that_is_ending_is_waited_for(holder, tmp_path: Path) -> None:
    """`... serve.print_only=true | sh` starts the printed line while the one that printed it is still there."""
    subprocess.Popen(["sh", "-c", f"sleep 0.3; kill {holder.pid}"])
    claim_folder(tmp_path / "run")


def test_the_message_names_the_key_of_a_sweep(holder, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(run_lock, "WAIT_S", 0.1)
    with pytest.raises(ConfigError, match=rf"pid {holder.pid}.*another hydra.sweep.dir=FOLDER"):
        claim_folder(tmp_path / "run", key="hydra.sweep.dir")


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written.*hydra.run.dir"):
        claim_folder(tmp_path / "file" / "run")


def test_a_secret_in_a_configuration_file_never_reaches_hydras_own_files(tmp_path: Path) -> None:
    conf = tmp_path / "conf"
    conf.mkdir()
    (conf / "mine.yaml").write_text(
        "defaults: [serve_only, _self_]\nserve:\n  env: {VLLM_API_KEY: sk-very-secret}\n  print_only: true\n"
    )
    started = time.time()
    done = recipe(tmp_path, "--config-dir", str(conf), "-cn", "mine", *words(tmp_path))
    assert done.returncode == 1 and "serve.env.VLLM_API_KEY" in done.stderr and "export VLLM_API_KEY" in done.stderr
    assert "sk-very-secret" not in done.stderr + done.stdout and "Traceback" not in done.stderr
    written = [file for file in tmp_path.rglob("*") if file.is_file() and file.stat().st_mtime >= started]
    assert not any("sk-very-secret" in file.read_text(errors="replace") for file in written)
