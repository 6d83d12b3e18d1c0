# SPDX-License-Identifier: Apache-2.0
"""`diagnose` from the command line, on folders: the search by counts is tested in test_sabotage.py."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from drafts import write_draft, write_target
from safetensors.numpy import load_file, save_file

from nemo_automodel.components.speculative.bench import parity
from nemo_automodel.components.speculative.serve_vllm import main


@pytest.fixture
def words(tmp_path: Path, capsys) -> list[str]:
    """An export that was served, and the checkpoint that it was made from."""
    common = ["--draft", str(write_draft(tmp_path / "draft")), "--target", str(write_target(tmp_path / "target"))]
    main([*common, "--vllm-version", "0.32", "--export-only"])
    served = capsys.readouterr().out.strip()
    return ["diagnose", *common, "--served", served]


def test_what_was_exported_is_what_was_trained(words, capsys) -> None:
    assert main(words) == 0
    assert "no difference" in capsys.readouterr().out


def test_a_damaged_export_is_named_key_by_key_and_tensor_by_tensor(words, capsys) -> None:
    served = Path(words[-1])
    config = json.loads((served / "config.json").read_text())
    (served / "config.json").write_text(json.dumps(config | {"pard_token": 9, "rope_theta": 5e5}))
    tensors = load_file(served / "model.safetensors")
    tensors["fc.weight"] = np.concatenate(np.split(tensors["fc.weight"], 3, axis=1)[1:] + np.split(
        tensors["fc.weight"], 3, axis=1)[:1], axis=1)  # fmt: skip
    save_file({name: np.ascontiguousarray(t) for name, t in tensors.items()}, served / "model.safetensors")
    assert main(words) == 1
    shown = capsys.readouterr().out
    assert [line.split(":")[0].strip() for line in shown.splitlines()[1:]] == ["rope", "mask token", "fc"]
    assert "pard_token is 9, not 3" in shown and "blocks rotated by 1" in shown


def test_a_run_is_searched_with_the_checkpoints_own_weights(words, tmp_path, monkeypatch, capsys) -> None:
    run = tmp_path / "job"
    run.mkdir()
    bench = {"num_drafts": 100, "acceptance_per_position": [0.5, 0.25]}
    (run / "result.json").write_text(json.dumps({"benchmark": bench}))
    (run / "parity_job.json").write_text(json.dumps({"dtype": "float32", "draft": "what was served"}))

    def search(module: str, folder: Path, name: str) -> dict:
        job = json.loads((folder / "parity_job.json").read_text())
        assert job["draft"] != "what was served" and (Path(job["draft"]) / "model.safetensors").is_file()
        tried = [("", "as it is", 80, 60), ("rope", "rope theta 10000", 50, 25)]
        return {"tried": [{"area": a, "name": n, "num_drafts": 100, "accepted_per_position": c} for a, n, *c in tried]}

    monkeypatch.setattr(parity, "_run", search)
    assert main([*words[:-2], "--run", str(run)]) == 1
    assert "rope: rope theta 10000 (gives the served counts)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "told"),
    [([], "--served DIR, --run"), (["--served", "nowhere"], "--served"), (["--run", "nowhere"], "parity=true")],
)
def test_what_is_missing_is_named(words, more: list[str], told: str, capsys) -> None:
    assert main([*words[:-2], *more]) == 1
    assert told in capsys.readouterr().err
