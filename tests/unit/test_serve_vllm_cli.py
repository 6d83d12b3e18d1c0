# SPDX-License-Identifier: Apache-2.0
"""The command line without Hydra, run as users run it."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from drafts import write_draft, write_target

from nemo_automodel.components.speculative.serve_vllm import build_parser, parse_extra, spec_from_args
from nemo_automodel.errors import ConfigError

REPO = Path(__file__).parents[2]
MODULE = "nemo_automodel.components.speculative.serve_vllm"


def run(cwd: Path, *words: str, code: str | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    start = ["-c", code] if code else ["-m", MODULE]
    environ = {**os.environ, "PYTHONPATH": str(REPO), **env}
    return subprocess.run(
        [sys.executable, *start, *words], cwd=cwd, env=environ, capture_output=True, text=True, timeout=120
    )


@pytest.fixture
def here(tmp_path: Path) -> Path:
    write_draft(tmp_path / "run" / "checkpoints" / "epoch_0_step_5" / "model")
    write_target(tmp_path / "target")
    return tmp_path


def files(folder: Path) -> set[str]:
    return {str(f) for f in folder.rglob("*")}


def test_print_only_prints_one_line_and_writes_nothing(here: Path) -> None:
    before = files(here)
    done = run(
        here, "--target", "target", "--draft", "run", "--port", "9001", "--print-only", "--", "--max-num-seqs", "8"
    )
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    words = shlex.split(line)
    assert words[words.index("--model") + 1] == str(here / "target")
    assert words[words.index("--port") + 1] == "9001" and line.endswith("--max-num-seqs 8")
    assert "architectures" in done.stderr
    assert files(here) == before


def test_printing_loads_no_heavy_package(here: Path) -> None:
    code = (
        "import sys\n"
        f"from {MODULE} import main\n"
        "code = main(sys.argv[1:])\n"
        "heavy = {'torch', 'transformers', 'vllm', 'datasets', 'numpy', 'omegaconf', 'httpx', 'huggingface_hub'}\n"
        "print(code, sorted(heavy & set(sys.modules)))\n"
    )
    done = run(here, "--target", "target", "--draft", "run", "--print-only", code=code)
    assert done.stdout.splitlines()[-1] == "0 []", done.stderr


@pytest.mark.parametrize("env", [{"HF_HUB_OFFLINE": "1"}, {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9"}])
def test_a_hub_target_that_cannot_be_read_is_still_printed(here: Path, env: dict[str, str]) -> None:
    words = ("--target", "some-org/some-model", "--draft", "run", "--print-only")
    done = run(here, *words, HF_HOME=str(here / "hf"), **env)
    assert "Retrying" not in done.stderr
    assert done.returncode == 0 and "--model some-org/some-model" in done.stdout
    assert "skipped" in done.stderr


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--target", "target", "--draft", "nowhere"), "serve.checkpoint"),
        (("--target", "./nowhere", "--draft", "run"), "serve.target"),
        (("--target", "target", "--draft", "run", "--num-speculative-tokens", "0"), "serve.num_speculative_tokens"),
        (("--target", "target", "--draft", "run", "--", "--port", "1"), "set serve.port instead"),
        (("--target", "target", "--draft", "run", "--", "8"), "belongs to no flag"),
        (("--target", "target", "--draft", "run", "--port", "99999999"), "serve.port"),
    ],
)
def test_mistakes_fail_in_one_line_also_when_printing(here: Path, words: tuple[str, ...], text: str) -> None:
    cut = words.index("--") if "--" in words else len(words)
    done = run(here, *words[:cut], "--print-only", *words[cut:])
    assert done.returncode == 1 and done.stdout == ""
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert text in line and "Traceback" not in done.stderr


def test_serving_without_vllm_has_exit_code_2(here: Path) -> None:
    code = (
        "import sys, importlib.metadata as metadata\n"
        "def missing(name):\n"
        "    raise metadata.PackageNotFoundError(name)\n"
        "metadata.version = missing\n"
        f"from {MODULE} import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    done = run(here, "--target", "target", "--draft", "run", "--port", "0", code=code)
    assert done.returncode == 2 and "pip install vllm" in done.stderr and "Traceback" not in done.stderr
    printed = run(here, "--target", "target", "--draft", "run", "--print-only", code=code)
    assert printed.returncode == 0 and "no vLLM in" in printed.stderr


def test_flags_become_the_spec() -> None:
    words = ["--target", "t", "--draft", "d", "--tp-size", "2", "--draft-tp-size", "1", "--dtype", "float32"]
    words += [
        "--max-model-len",
        "64",
        "--gpu-memory-utilization",
        "0.5",
        "--trust-remote-code",
        "--host",
        "h",
        "--method",
        "eagle3",
    ]
    spec = spec_from_args(
        build_parser().parse_args(words), ["--enforce-eager", "--seed=-3", "--hf-overrides", '{"a": 1}']
    )
    assert (spec.tensor_parallel_size, spec.draft_tensor_parallel_size, spec.dtype, spec.max_model_len) == (
        2,
        1,
        "float32",
        64,
    )
    assert (spec.gpu_memory_utilization, spec.trust_remote_code, spec.host, spec.method) == (0.5, True, "h", "eagle3")
    assert spec.extra_args == {"enforce-eager": True, "seed": "-3", "hf-overrides": '{"a": 1}'}


def test_a_flag_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="twice"):
        parse_extra(["--max-num-seqs", "1", "--max-num-seqs=2"])
