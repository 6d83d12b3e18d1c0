# SPDX-License-Identifier: Apache-2.0
"""The README's promise, by its own command line: train the quickstart draft, serve it with a real vLLM, measure."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

pytestmark = pytest.mark.vllm
ROOT = Path(__file__).parents[2]
RECIPE = [sys.executable, str(ROOT / "recipes" / "train_then_serve.py")]
CLI = "nemo_automodel.components.speculative.serve_vllm"
ENV = {**os.environ, "PYTHONPATH": str(ROOT)}
SERVE = ["train.enabled=false", "serve.enabled=true", "+serve.env.VLLM_CPU_OMP_THREADS_BIND=nobind"]
BENCHMARK = [*SERVE, "serve.mode=benchmark", "serve/port=auto"]
FEW = ["serve.benchmark.num_prompts=6", "serve.benchmark.max_new_tokens=32"]
BARE = ["serve.benchmark.baseline=false", "serve.benchmark.ngram=false", "serve.benchmark.parity=false"]


def run(folder: Path, *words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([*RECIPE, *words], cwd=folder, env=ENV, capture_output=True, text=True, timeout=900)
    assert done.returncode == code, done.stderr[-4000:]
    return done


def newest_result(folder: Path) -> dict:
    return json.loads(max(folder.glob("outputs/quickstart/*/result.json")).read_text())


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the quickstart draft has been trained, for two thirds of the steps of `make quickstart`."""
    folder = tmp_path_factory.mktemp("quickstart")
    run(folder, "train.max_steps=900")
    return folder


def test_in_float32_vllm_and_the_reference_decoder_count_the_same(trained: Path) -> None:
    run(trained, *BENCHMARK, "serve.dtype=float32", "serve.benchmark.ngram=false", "serve.benchmark.num_prompts=30")
    bench = newest_result(trained)["benchmark"]
    predicted = bench["predicted"]
    assert predicted["dtype"] == "float32" and predicted["agrees"] is True
    assert predicted["num_drafts"] == bench["num_drafts"]
    assert predicted["acceptance_per_position"] == bench["acceptance_per_position"]
    assert bench["text_equal"] == bench["prompts"] == 30, "speculation changed the text"
    assert bench["acceptance_length"] >= 2.5


def test_an_eagle3_draft_with_all_its_options_counts_the_same_in_float32(tmp_path: Path) -> None:
    """Trained for some seconds only: what is accepted matters less than that both count it alike."""
    shape = ["draft=eagle3", "draft.num_layers=2", "draft.fc_norm=true", "draft.norm_output=true"]
    short = ["draft.draft_vocab_size=256", "train.max_steps=120", "train.warmup_ratio=0.1"]
    serve = [word for word in BENCHMARK if word != "train.enabled=false"]
    asked = ["serve.dtype=float32", "serve.benchmark.num_prompts=12", *(w for w in BARE if "parity" not in w)]
    run(tmp_path, *shape, *short, *serve, *asked)
    bench = newest_result(tmp_path)["benchmark"]
    assert bench["predicted"]["dtype"] == "float32" and bench["predicted"]["agrees"] is True
    assert bench["predicted"]["num_drafts"] == bench["num_drafts"]
    accepted = bench["acceptance_per_position"]
    assert bench["predicted"]["acceptance_per_position"] == accepted and len(accepted) == 4
    assert accepted[0] > 0.2 and accepted[3] > 0.0, "chains are fed back and verified"


def test_the_served_draft_beats_the_ngram_lookup_and_bf16_agrees_with_the_prediction(trained: Path) -> None:
    checkpoint = next(trained.glob("outputs/quickstart/*/checkpoints")).parent
    words = ["--target", str(ROOT / "recipes/quickstart/target"), "--draft", str(checkpoint), "--max-model-len", "512"]
    subprocess.run([sys.executable, "-m", CLI, *words, "--export-only"], env=ENV, check=True, timeout=120)
    run(trained, *BENCHMARK, "serve.benchmark.baseline=false", "serve.benchmark.num_prompts=30")
    result = newest_result(trained)
    bench = result["benchmark"]
    assert result["export"]["reused"] is True, "nothing changed since the export"
    assert bench["acceptance_length"] >= 2.5
    assert bench["ngram_tokens_per_step"] < bench["useful_tokens_per_step"] - 1
    assert bench["predicted"]["max_difference"] <= 0.02


def test_a_sweep_with_a_broken_checkpoint_measures_the_others(trained: Path, tmp_path: Path) -> None:
    (run_dir,) = (p.parent for p in trained.glob("outputs/quickstart/*/checkpoints"))
    broken = tmp_path / "broken"
    (broken / "model").mkdir(parents=True)
    (broken / "model" / "config.json").write_text("{")
    checkpoints = f"serve.checkpoint={broken},{run_dir}"
    run(tmp_path, "-m", *BENCHMARK, *FEW, *BARE, checkpoints, code=1)
    (sweep,) = tmp_path.glob("outputs/quickstart/multirun_*")
    board = json.loads((sweep / "leaderboard.json").read_text())
    assert [entry["status"] for entry in board] == ["ok", "failed"]
    assert board[-1]["reason"] and "config.json" in board[-1]["reason"]


def test_what_print_only_prints_can_be_piped_into_a_shell(trained: Path, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    printed = run(trained, *SERVE, "serve.print_only=true", f"serve.port={port}").stdout
    with (tmp_path / "log").open("wb") as log:
        shell = subprocess.Popen(
            ["sh"], stdin=subprocess.PIPE, stdout=log, stderr=log, cwd=tmp_path, env=ENV, start_new_session=True
        )
        shell.stdin.write(printed.encode())
        shell.stdin.close()
    try:
        _wait_for(f"http://127.0.0.1:{port}/v1/models", shell, tmp_path / "log")
    finally:
        os.killpg(shell.pid, signal.SIGTERM)
        shell.wait(60)


def _wait_for(url: str, process: subprocess.Popen, log: Path, seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text(errors="replace")[-3000:]
        try:
            if httpx.get(url, timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            time.sleep(0.5)
    raise AssertionError(f"{url} never answered")


def test_ctrl_c_in_the_foreground_stops_the_server_and_ends_with_130(trained: Path, tmp_path: Path) -> None:
    checkpoint = next(trained.glob("outputs/quickstart/*/checkpoints")).parent
    words = [*SERVE, "serve/port=auto", f"serve.checkpoint={checkpoint}"]
    with (tmp_path / "log").open("wb") as log:
        parent = subprocess.Popen([*RECIPE, *words], cwd=tmp_path, env=ENV, stdout=log, stderr=log)
    deadline = time.monotonic() + 240
    while not (server := _server(tmp_path)):
        assert parent.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()[-3000:]
        time.sleep(0.3)
    parent.send_signal(signal.SIGINT)
    assert parent.wait(90) == 130
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"{server['url']}/health", timeout=5)
    assert not Path(f"/proc/{server['pid']}").exists()


def _server(folder: Path) -> dict | None:
    results = list(folder.glob("outputs/quickstart/*/result.json"))
    return json.loads(results[0].read_text())["server"] if results else None
