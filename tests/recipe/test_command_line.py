# SPDX-License-Identifier: Apache-2.0
"""The real command line: exit codes, what lies on disk afterwards, and that a user's mistake is one line."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECIPE = [sys.executable, str(ROOT / "recipes" / "train_then_serve.py")]
ENV = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
PRINT = ["train.enabled=false", "serve.enabled=true", "serve.print_only=true"]
# A few steps on the shipped target: seconds, not minutes.
SHORT = ["data.max_rows=64", "data.max_validation_rows=4", "train.max_steps=3", "train.log_every_steps=1"]


def run(folder: Path, *words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([*RECIPE, *words], cwd=folder, env=ENV, capture_output=True, text=True, timeout=300)
    assert done.returncode == code, done.stderr[-3000:]
    return done


def only(folder: Path, pattern: str) -> Path:
    (found,) = folder.glob(pattern)
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the quickstart recipe has trained for three steps."""
    folder = tmp_path_factory.mktemp("trained")
    run(folder, *SHORT)
    return folder


def test_training_leaves_what_the_contract_names(trained: Path) -> None:
    run_dir = only(trained, "outputs/quickstart/*/checkpoints").parent
    assert {".hydra", "checkpoints", "metrics.jsonl", "train.log"} <= {p.name for p in run_dir.iterdir()}
    assert not any(c in str(run_dir.relative_to(trained)) for c in "=, ")
    latest = run_dir / "checkpoints" / "LATEST"
    assert latest.is_symlink() and not os.readlink(latest).startswith("/")
    config = json.loads((latest / "model" / "config.json").read_text())
    assert config["architectures"] == ["LlamaEagle3DraftModel"]
    assert (config["num_hidden_layers"], config["num_depths"], config["mask_token_id"]) == (2, 4, 3)
    assert (latest / "model" / "model.safetensors").is_file() and (latest / "trainer").is_dir()
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    result = json.loads((run_dir / "result.json").read_text())
    assert (result["status"], result["stage"], result["reason"]) == ("ok", "train", None)
    assert Path(result["checkpoint"]).resolve() == latest.resolve()
    assert all(isinstance(line, dict) for line in steps) and len(steps) >= 3


def test_print_only_finds_the_newest_run_and_prints_one_line_that_a_shell_reads(trained: Path) -> None:
    before = {p for p in trained.rglob("*") if "checkpoints" in p.parts}
    done = run(trained, *PRINT, "serve.port=0")
    (line,) = done.stdout.splitlines()
    words = shlex.split(line.split(" && ")[-1])
    speculative = json.loads(words[words.index("--speculative-config") + 1])
    assert (speculative["method"], speculative["num_speculative_tokens"]) == ("eagle3", 4)
    assert speculative["parallel_drafting"] is True
    assert words[words.index("--model") + 1] == str(ROOT / "recipes" / "quickstart" / "target")
    assert {p for p in trained.rglob("*") if "checkpoints" in p.parts} == before


def test_another_target_than_the_one_trained_for_is_refused_unless_insisted_on(trained: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for file in (ROOT / "recipes" / "quickstart" / "target").iterdir():
        (other / file.name).symlink_to(file)
    done = run(trained, *PRINT, f"target.path={other}", code=1)
    assert "was trained for" in done.stderr and "recipes/quickstart/target" in done.stderr
    assert str(other) in run(trained, *PRINT, f"serve.target={other}", "serve.port=0").stdout


def test_print_only_before_training_shows_the_whole_road_and_trains_nothing(tmp_path: Path) -> None:
    done = run(tmp_path, "serve.enabled=true", "serve.print_only=true", "train.num_epochs=2")
    there, train, export, serve = done.stdout.strip().split(" && ")
    assert shlex.split(there) == ["cd", str(tmp_path)]
    assert {"train.num_epochs=2", "serve.enabled=false"} <= set(shlex.split(train))
    assert shlex.split(export)[-1] == "--export-only" and "--speculative-config" in shlex.split(serve)
    assert not list(tmp_path.rglob("checkpoints"))


def test_the_qwen_recipe_prints_its_command_for_a_stand_in(tmp_path: Path) -> None:
    draft = write_qwen_stand_in(tmp_path / "stand in, K=8")
    done = run(tmp_path, "-cn", "qwen_peagle_perfectblend", *PRINT, f"serve.checkpoint='{draft}'", "serve/vllm=v0_32")
    words = shlex.split(done.stdout.split(" && ")[-1])
    speculative = json.loads(words[words.index("--speculative-config") + 1])
    assert words[words.index("--model") + 1] == "Qwen/Qwen3-8B"
    assert speculative == {
        "method": "eagle3",
        "model": str(draft / "vllm_export"),
        "num_speculative_tokens": 8,
        "parallel_drafting": True,
    }
    result = json.loads(only(tmp_path, "outputs/*/*/result.json").read_text())
    assert result["status"] == "printed" and result["export"] is None
    # a full draft vocabulary: vLLM >= 0.30 refuses the map
    assert any(fixup["key"] == "tensor d2t" and fixup["new"] is None for fixup in result["fixups"])


def write_qwen_stand_in(folder: Path) -> Path:
    """A draft of Qwen3-8B's size as NeMo Automodel writes it; the weights are a hole in the file, no bytes on disk."""
    sys.path.insert(0, str(ROOT))
    from nemo_automodel.files import TensorInfo, build_safetensors_header

    h, v, wide = 4096, 151936, 12288
    shapes = {"model.embed_tokens.weight": (v, h), "model.fc.weight": (h, 3 * h), "model.norm.weight": (h,)}
    for i in range(4):
        layer = {
            "input_layernorm": (h,), "post_attention_layernorm": (h,), "hidden_norm": (h,),
            "self_attn.q_proj": (4096, 2 * h if i == 0 else h), "self_attn.k_proj": (1024, 2 * h if i == 0 else h),
            "self_attn.v_proj": (1024, 2 * h if i == 0 else h), "self_attn.o_proj": (h, 4096),
            "mlp.gate_proj": (wide, h), "mlp.up_proj": (wide, h), "mlp.down_proj": (h, wide),
        }  # fmt: skip
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    shapes |= {"lm_head.weight": (v, h), "mask_hidden": (1, 1, 3 * h)}
    entries, at = [], 0
    sized = [(n, "BF16", 2, s) for n, s in shapes.items()] + [("d2t", "I64", 8, (v,)), ("t2d", "BOOL", 1, (v,))]
    for name, dtype, width, shape in sized:
        length = width
        for side in shape:
            length *= side
        entries.append(TensorInfo(name, dtype, shape, at, at + length))
        at += length
    folder.mkdir()
    header = build_safetensors_header(entries, {})
    with (folder / "model.safetensors").open("wb") as file:
        file.write(header)
        file.truncate(len(header) + at)
    config = {
        "architectures": ["LlamaEagle3DraftModel"], "model_type": "qwen3", "parallel_drafting": True, "num_depths": 8,
        "mask_token_id": 151669, "draft_vocab_size": v, "vocab_size": v, "hidden_size": h, "target_hidden_size": h,
        "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "intermediate_size": wide, "rms_norm_eps": 1e-6, "max_position_embeddings": 40960, "rope_theta": 1000000.0,
        "hidden_act": "silu", "tie_word_embeddings": False, "attention_bias": False,
        "eagle_aux_hidden_state_layer_ids": [2, 18, 33],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_without_vllm_the_exit_code_is_2_before_the_first_step(tmp_path: Path) -> None:
    venv.create(tmp_path / "empty", with_pip=False, symlinks=True)
    python = tmp_path / "empty" / "bin" / "python"
    done = run(tmp_path, *SHORT, "serve.enabled=true", f"serve.python={python}", "serve.port=0", code=2)
    assert "pip install" in done.stderr and "Traceback" not in done.stderr
    assert not list(tmp_path.glob("outputs/*/*/checkpoints"))
    assert json.loads(only(tmp_path, "outputs/*/*/result.json").read_text())["status"] == "failed"


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["serve.prot=1"], "prot"),
        (["+serve.zzz=1"], "serve.zzz"),
        (["train.enabled=false"], "nothing to do"),
        (["train.lr=-1"], "train.lr"),
        ([*PRINT, "serve.checkpoint=./nowhere"], "nowhere"),
        ([*PRINT, "serve.checkpoint=LATEST"], "no finished run"),
        (["data.train=./no.jsonl"], "no.jsonl"),
        (["-m", "train.enabled=false", "serve.enabled=true", "serve.checkpoint=a,b"], "serve.mode"),
        (["-m", "train.seed=1,2", "serve.enabled=true", "serve/port=auto"], "serve.mode"),
        (["serve.print_only=true", "serve.checkpoint=x"], "serve.enabled=true"),
        (["-m", *PRINT, "serve.checkpoint=glob(nothing/*)"], "nothing"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else value,
)
def test_a_mistake_is_named_without_a_traceback(tmp_path: Path, words: list[str], part: str) -> None:
    done = run(tmp_path, *words, code=1)
    assert part in done.stderr and "Traceback" not in done.stderr
    assert not list(tmp_path.rglob("checkpoints"))


def test_a_secret_on_the_command_line_is_refused_and_written_nowhere(tmp_path: Path) -> None:
    done = run(tmp_path, *PRINT, "serve.checkpoint=x", "+serve.env.VLLM_API_KEY=hunter2", code=1)
    assert "VLLM_API_KEY" in done.stderr and "hunter2" not in done.stderr
    assert not any("hunter2" in p.read_text() for p in tmp_path.rglob("*") if p.is_file())


def test_a_sweep_over_a_broken_checkpoint_goes_on_and_says_so(trained: Path, tmp_path: Path) -> None:
    good = only(trained, "outputs/quickstart/*/checkpoints/LATEST").resolve()
    broken = tmp_path / "runs" / "broken, half=written"
    (broken / "model").mkdir(parents=True)
    (broken / "model" / "config.json").write_text((good / "model" / "config.json").read_text())
    (broken / "model" / "model.safetensors").write_bytes((good / "model" / "model.safetensors").read_bytes()[:5000])
    for name in ("a", "z"):
        (tmp_path / "runs" / name).symlink_to(good)
    done = run(tmp_path, "-m", *PRINT, "serve.port=0", "serve.checkpoint=glob(runs/*)", code=1)
    assert done.stdout.count("--speculative-config") == 2
    sweep = only(tmp_path, "outputs/quickstart/multirun_*")
    statuses = [json.loads((sweep / str(i) / "result.json").read_text())["status"] for i in range(3)]
    assert statuses == ["printed", "failed", "printed"]
    assert {p.name for p in sweep.glob("leaderboard.*")} == {f"leaderboard.{e}" for e in ("json", "csv", "md", "png")}
    assert "half" in (sweep / "leaderboard.md").read_text()


def test_ctrl_c_while_training_saves_and_never_serves(tmp_path: Path) -> None:
    words = ["data.max_rows=64", "train.log_every_steps=1", "train.num_epochs=1000", "train.max_steps=100000"]
    serve = ["serve.enabled=true", "serve.mode=benchmark", "serve.port=0", f"serve.python={sys.executable}"]
    if subprocess.run([sys.executable, "-c", "import vllm"], capture_output=True).returncode:
        serve = []  # then preflight would end the run before it begins
    process = subprocess.Popen([*RECIPE, *words, *serve], cwd=tmp_path, env=ENV, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 200
    while not any(p.read_text() for p in tmp_path.glob("outputs/*/*/metrics.jsonl")) and time.monotonic() < deadline:
        assert process.poll() is None, process.stderr.read()[-2000:]
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130 and "Traceback" not in errors, errors[-2000:]
    assert (only(tmp_path, "outputs/*/*/checkpoints") / "LATEST" / "model" / "model.safetensors").is_file()
    assert not list(tmp_path.rglob("vllm_export"))
    result = json.loads(only(tmp_path, "outputs/*/*/result.json").read_text())
    assert result["status"] == "failed" and "stopped" in result["reason"]
    assert (Path(result["checkpoint"]) / "model" / "model.safetensors").is_file()
