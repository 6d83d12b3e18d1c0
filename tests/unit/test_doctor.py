# SPDX-License-Identifier: Apache-2.0
"""The doctor's verdict and reason for every case that vLLM was tried or read with, and its command."""

from __future__ import annotations

import json
import os
import pickle
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from doctor_cases import CASES, GONE, SEQUENTIAL, eagle3
from drafts import draft_config, write_draft, write_target

from nemo_automodel.components.speculative.serve.convert import convert_bin
from nemo_automodel.components.speculative.serve.doctor import Diagnosis, Severity, diagnose
from nemo_automodel.components.speculative.serve.types import ServeSpec
from nemo_automodel.errors import ResolveError

REPO = Path(__file__).parents[2]
MODULE = "nemo_automodel.components.speculative.serve_vllm"


def examine(
    folder: Path, config: Any, tensors: Any, *, vllm: str = "0.32", target: Any = None, **options: Any
) -> Diagnosis:
    kept = {name: value for name, value in tensors.items() if value is not None}
    draft = write_draft(folder / "draft", config, kept)
    facts = write_target(folder / "target", **({"num_hidden_layers": 6} | (target or {})))
    if (ids := options.pop("tokenizer", None)) is not None:
        vocab = {"model": {"vocab": {str(i): i for i in range(ids - 1)}}, "added_tokens": [{"id": ids - 1}]}
        (facts / "tokenizer.json").write_text(json.dumps(vocab))
    spec = ServeSpec(
        str(draft),
        str(facts),
        vllm_version=vllm,
        print_only=True,
        tensor_parallel_size=options.pop("tp", 1),
        draft_tensor_parallel_size=options.pop("draft_tp", None),
        extra_args=options.pop("extra", {}),
        **options,
    )
    return diagnose(spec, folder)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"extra": {"no-such-flag": 3}}, "no --no-such-flag"),
        ({"extra": {"port": 1}}, "--port is managed"),
        ({"extra": {"max-num-seqs": True}}, "--max-num-seqs has no value"),
        ({"extra": {"max_num_seqs": 0}}, "--max-num-seqs is 0"),
        ({"extra": {"max_num_b": -5}}, "--max-num-batched-tokens is -5"),
        ({"max_model_len": 0}, "max_model_len is 0"),
        ({"max_model_len": -4}, "max_model_len is -4"),
    ],
)
def test_options_that_vllm_refuses_are_errors(tmp_path: Path, options: dict[str, Any], text: str) -> None:
    found = examine(tmp_path, eagle3(), SEQUENTIAL, **options)
    assert found.exit_code == 1 and any(text in finding.what for finding in found.of(Severity.error))


def test_a_path_that_a_launch_would_refuse_is_an_error(tmp_path: Path) -> None:
    draft = write_draft(tmp_path / os.fsdecode(b"d\xff"))
    found = diagnose(ServeSpec(str(draft), "", vllm_version="0.32", print_only=True), tmp_path)
    assert found.exit_code == 1 and "is not UTF-8" in found.findings[0].what and "\\xff" in found.draft


@pytest.mark.parametrize(
    ("config", "tensors", "options", "code", "severity", "text"),
    [case[1:] for case in CASES],
    ids=[case[0] for case in CASES],
)
def test_verdict_and_reason(
    tmp_path: Path, config: Any, tensors: Any, options: dict[str, Any], code: int, severity: str, text: str
) -> None:
    found = examine(tmp_path, config, tensors, **options)
    lines = [finding.line() for finding in found.of(Severity(severity))] if severity else []
    assert found.exit_code == code, [finding.line() for finding in found.findings]
    assert any(text in line for line in lines) or not severity, (text, lines)
    assert bool(found.of(Severity.error)) == (code != 0)
    if code == 0 and not severity:
        assert not found.of(Severity.warning), found.findings


@pytest.mark.parametrize("name", ["DeepSeek", "MLA tensors", "DFlash", "EAGLE-1"])
def test_another_family_has_one_reason(tmp_path: Path, name: str) -> None:
    """What its tensors lack in our layout is no finding of its own."""
    config, tensors = next(case[1:3] for case in CASES if case[0] == name)
    assert len(examine(tmp_path, config, tensors).of(Severity.error)) == 1


def doctor(folder: Path, *words: str, code: str | None = None) -> subprocess.CompletedProcess[str]:
    start = ["-c", code] if code else ["-m", MODULE]
    environ = {**os.environ, "PYTHONPATH": str(REPO), "HF_HUB_OFFLINE": "1"}
    argv = [sys.executable, *start, "doctor", *words]
    return subprocess.run(argv, cwd=folder, env=environ, capture_output=True, text=True, timeout=120)


def test_the_command_lists_findings_and_ends_with_the_verdict(tmp_path: Path) -> None:
    write_draft(tmp_path / "run" / "checkpoints" / "epoch_0_step_5" / "model")
    write_target(tmp_path / "t")
    before = sorted(tmp_path.rglob("*"))
    done = doctor(tmp_path, "--draft", "run", "--target", "t", "--vllm", "0.32")
    assert done.returncode == 0 and done.stdout.splitlines()[-1].startswith("would serve after the export: 0 errors")
    assert "note" in done.stdout and "mended by the export" in done.stdout
    assert sorted(tmp_path.rglob("*")) == before
    old = doctor(tmp_path, "--draft", "run", "--vllm", "0.15")
    assert old.returncode == 2 and "needs a newer vLLM" in old.stdout and "no target is named" in old.stdout


def test_the_command_imports_nothing_heavy(tmp_path: Path) -> None:
    write_draft(tmp_path / "d")
    write_target(tmp_path / "t")
    code = (
        f"import sys\nfrom {MODULE} import main\nprint(main(sys.argv[1:]))\n"
        "print(sorted({'torch', 'transformers', 'vllm', 'numpy', 'httpx', 'huggingface_hub'} & set(sys.modules)))\n"
    )
    done = doctor(tmp_path, "--draft", "d", "--target", "t", "--vllm", "0.32", code=code)
    assert done.stdout.splitlines()[-2:] == ["0", "[]"], done.stderr


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--draft", "nowhere/x/y"), "no such path"),
        (("--draft", "pickled"), "convert"),
        (("--draft", "d", "--target", "./nowhere"), "no folder"),
        (
            ("--draft", "d", "--vllm", "0.27", "--num-speculative-tokens", "9", "--", "--max-num-seqs", "1024"),
            "max_num_seqs",
        ),
    ],
)
def test_the_command_fails_with_a_reason(tmp_path: Path, words: tuple[str, ...], text: str) -> None:
    write_draft(tmp_path / "d")
    (tmp_path / "pickled").mkdir()
    (tmp_path / "pickled" / "config.json").write_text("{}")
    (tmp_path / "pickled" / "pytorch_model.bin").write_bytes(b"x")
    done = doctor(tmp_path, *words)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert text in done.stdout and done.stdout.splitlines()[-1].startswith("would not serve: ")


def test_print_only_tells_what_else_was_found_when_it_fails(tmp_path: Path) -> None:
    write_draft(tmp_path / "d", draft_config(mask_token_id=GONE, eagle_aux_hidden_state_layer_ids=GONE))
    write_target(tmp_path / "t")
    environ = {**os.environ, "PYTHONPATH": str(REPO), "COLUMNS": "300"}
    argv = [sys.executable, "-m", MODULE, "--draft", "d", "--target", "t", "--print-only"]
    done = subprocess.run(argv, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and done.stdout == ""
    assert "error: " in done.stderr and "without mask_token_id" in done.stderr
    assert "names no aux layers" in done.stderr and "architectures: " in done.stderr


def test_bin_weights_are_converted_by_the_command_that_the_refusal_names(tmp_path: Path) -> None:
    draft = tmp_path / "a draft"
    draft.mkdir()
    tensors = {name.replace("layers.0.", "midlayer."): torch.from_numpy(value) for name, value in SEQUENTIAL.items()}
    torch.save(tensors, draft / "pytorch_model.bin")
    torch.save({"lr": 1.0}, draft / "training_args.bin")  # the trainer's own, which is no part of the model
    (draft / "config.json").write_text(json.dumps(eagle3()))
    before = {file.name: file.read_bytes() for file in draft.iterdir()}
    (line,) = [line for line in doctor(tmp_path, "--draft", "a draft").stdout.splitlines() if "convert once: " in line]
    words = shlex.split(line.split("convert once: ")[1])
    environ = {**os.environ, "PYTHONPATH": str(REPO)}
    done = subprocess.run([sys.executable, *words[1:]], env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert {file.name: file.read_bytes() for file in draft.iterdir()} == before
    assert doctor(tmp_path, "--draft", done.stdout.strip(), "--vllm", "0.32").returncode == 0
    again = subprocess.run([sys.executable, *words[1:]], env=environ, capture_output=True, text=True, timeout=120)
    assert again.returncode == 1 and "is there already" in again.stderr


def test_a_missing_bin_of_an_index_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    torch.save({"fc.weight": torch.zeros(2)}, tmp_path / "pytorch_model-00001-of-00002.bin")
    names = {"fc.weight": "pytorch_model-00001-of-00002.bin", "norm.weight": "pytorch_model-00002-of-00002.bin"}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": names}))
    with pytest.raises(ResolveError, match="not there: pytorch_model-00002-of-00002.bin"):
        convert_bin(tmp_path)


def test_a_snapshot_of_the_hub_s_cache_is_converted_outside_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "models--me--draft" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    torch.save({"fc.weight": torch.zeros(4, 2).t()}, snapshot / "pytorch_model.bin")  # a view: not contiguous
    monkeypatch.chdir(tmp_path)
    assert convert_bin(snapshot) == tmp_path / "draft-safetensors"
    assert sorted(file.name for file in snapshot.parent.iterdir()) == ["abc"]


def test_a_bin_that_runs_code_is_not_opened(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    draft = tmp_path / "d"
    draft.mkdir()
    (draft / "config.json").write_text("{}")
    (draft / "pytorch_model.bin").write_bytes(pickle.dumps({"a": Evil()}))
    environ = {**os.environ, "PYTHONPATH": str(REPO)}
    argv = [sys.executable, "-m", MODULE, "convert", "--draft", str(draft)]
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "cannot be loaded safely" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "ran").exists() and not (tmp_path / "d-safetensors").exists()
