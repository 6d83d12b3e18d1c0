# SPDX-License-Identifier: Apache-2.0
"""The serve stage from outside: stdout, result.json, the disk. The server is a fake, the draft is a real one."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from launching import FAKE, HOST

from nemo_automodel.components.speculative.serve import command, pipeline
from nemo_automodel.components.speculative.serve import preflight as preflight_module
from nemo_automodel.components.speculative.serve.pipeline import record_failure, run_serve
from nemo_automodel.components.speculative.serve.port import find_port
from nemo_automodel.components.speculative.serve.preflight import preflight
from nemo_automodel.components.speculative.serve.types import BenchmarkSpec, ServeSpec
from nemo_automodel.components.speculative.serve.vllm_release import ResolvedRelease, release_for
from nemo_automodel.config.schema import DraftConfig
from nemo_automodel.errors import (
    GateError,
    Interrupted,
    LaunchError,
    PreflightError,
    ResolveError,
    UserError,
    VllmMissingError,
)

ROOT = Path(__file__).parents[2]
KEYS = {"status", "stage", "reason", "checkpoint", "export", "fixups", "command", "server", "benchmark", "versions"}
BENCHMARK_KEYS = {
    "acceptance_length", "acceptance_rate", "acceptance_per_position", "num_drafts", "tokens_per_s",
    "baseline_tokens_per_s", "speedup", "prompts", "k",
}  # fmt: skip


@pytest.fixture
def spec(peers: Path, tmp_path: Path) -> ServeSpec:
    return ServeSpec(
        checkpoint=str(peers / "nemo_peagle"),
        target=str(peers / "target"),
        port=0,
        export_dir=str(tmp_path / "export"),
        benchmark=BenchmarkSpec(prompts=str(peers / "heldout.jsonl"), num_prompts=3, max_new_tokens=8),
    )


@pytest.fixture
def installed(monkeypatch) -> None:
    """As if vLLM 0.32 for CPU were installed."""
    release = ResolvedRelease(release_for("0.32"), "0.32.0", True)
    monkeypatch.setattr(pipeline, "resolve_release", lambda spec: release)


@pytest.fixture
def missing(monkeypatch) -> None:
    """As if no vLLM were installed."""
    release = ResolvedRelease(release_for("0.32"), None, False)
    monkeypatch.setattr(pipeline, "resolve_release", lambda spec: release)
    monkeypatch.setattr(preflight_module, "resolve_release", lambda spec: release)


def _use_fake(monkeypatch, behaviour: str = "good") -> None:
    """The real command, except that the fake stands in for vLLM's module."""
    real = command._command

    def fake_command(spec, release, python, port, *rest):
        built = real(spec, release, python, port, *rest)
        return replace(built, argv=(sys.executable, str(FAKE), str(port), spec.target, behaviour, *built.argv))

    monkeypatch.setattr(command, "_command", fake_command)


def _result(out: Path) -> dict:
    return json.loads((out / "result.json").read_text())


def test_print_only_prints_one_pasteable_line_and_writes_only_its_result(spec, installed, tmp_path, capsys) -> None:
    out = tmp_path / "out"
    assert run_serve(replace(spec, print_only=True), base_dir=tmp_path, out_dir=out) == 0
    shown = capsys.readouterr()
    (line,) = shown.out.splitlines()
    words = shlex.split(line)
    speculative = json.loads(words[words.index("--speculative-config") + 1])
    assert speculative["num_speculative_tokens"] == 4 and speculative["parallel_drafting"] is True
    assert "pard_token" in shown.err and "not exported" in shown.err
    result = _result(out)
    export, launch = line.split(" && ")
    assert (result["status"], result["command"]["shell"]) == ("printed", launch)
    assert shlex.split(export)[-1] == "--export-only"
    assert KEYS <= set(result)
    assert not (tmp_path / "export").exists() and [path.name for path in out.iterdir()] == ["result.json"]


def test_the_printed_line_exports_what_it_then_serves(spec, installed, tmp_path, capsys) -> None:
    spec = replace(spec, print_only=True, port=find_port(HOST, 0))
    run_serve(spec, base_dir=tmp_path, out_dir=None)
    export, launch = capsys.readouterr().out.strip().split(" && ")
    subprocess.run(export, shell=True, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    words = shlex.split(launch)
    folder = Path(json.loads(words[words.index("--speculative-config") + 1])["model"])
    assert (folder / "model.safetensors").is_file()
    run_serve(spec, base_dir=tmp_path, out_dir=None)
    assert capsys.readouterr().out.strip() == launch  # exported already: nothing else is to be done


def test_print_only_without_a_folder_writes_nothing(spec, installed, tmp_path) -> None:
    before = set(tmp_path.rglob("*"))
    run_serve(replace(spec, print_only=True), base_dir=tmp_path, out_dir=None)
    assert set(tmp_path.rglob("*")) == before


def test_print_only_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from nemo_automodel.components.speculative.serve import pipeline, preflight\n"
        "heavy = ('torch', 'transformers', 'vllm', 'httpx', 'numpy', 'matplotlib', 'datasets')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_print_only_names_the_port_that_is_taken_but_prints(spec, installed, tmp_path, capsys) -> None:
    import socket

    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        assert run_serve(replace(spec, print_only=True, port=port), base_dir=tmp_path, out_dir=None) == 0
    shown = capsys.readouterr()
    assert "cannot be bound" in shown.err and f"--port {port}" in shown.out


def test_a_failure_is_written_with_its_stage_and_raised(spec, installed, tmp_path) -> None:
    out = tmp_path / "out"
    with pytest.raises(ResolveError):
        run_serve(replace(spec, checkpoint="./nothing/here"), base_dir=tmp_path, out_dir=out)
    result = _result(out)
    assert (result["status"], result["stage"], result["checkpoint"]) == ("failed", "resolve", "./nothing/here")
    assert "nothing/here" in result["reason"] and "Traceback" not in result["reason"]


def test_missing_vllm_is_exit_code_2_before_anything_is_read_or_written(spec, missing, tmp_path) -> None:
    out = tmp_path / "out"
    with pytest.raises(VllmMissingError, match="pip install") as caught:
        run_serve(replace(spec, checkpoint="./nothing"), base_dir=tmp_path, out_dir=out)
    assert caught.value.exit_code == 2
    assert _result(out)["stage"] == "release" and not (tmp_path / "export").exists()


def test_a_foreground_server_in_a_sweep_is_refused(spec, installed, tmp_path) -> None:
    with pytest.raises(UserError, match="serve.mode=benchmark"):
        run_serve(spec, base_dir=tmp_path, out_dir=tmp_path / "out", multirun=True)


def test_a_benchmark_fills_the_result(spec, installed, monkeypatch, tmp_path, capsys) -> None:
    _use_fake(monkeypatch)
    out = tmp_path / "out"
    assert run_serve(replace(spec, benchmark_mode=True), base_dir=tmp_path, out_dir=out, multirun=True) == 0
    result = _result(out)
    assert result["status"] == "ok" and result["export"]["reused"] is False
    bench = result["benchmark"]
    assert BENCHMARK_KEYS <= set(bench)
    # the fake counts a draft for every second of the 8 tokens and accepts half of those
    assert (bench["num_drafts"], bench["acceptance_length"], bench["prompts"], bench["k"]) == (12, 1.5, 3, 4)
    assert (bench["text_equal"], bench["useful_tokens_per_step"]) == (3, (24 - 3) / 12)
    assert bench["baseline_tokens_per_s"] > 0 and result["server"]["url"].startswith("http://127.0.0.1:")
    assert "acceptance" in capsys.readouterr().err
    run_serve(replace(spec, benchmark_mode=True), base_dir=tmp_path, out_dir=out)
    assert _result(out)["export"]["reused"] is True


def test_the_gate_fails_the_job_and_keeps_the_numbers(spec, installed, monkeypatch, tmp_path) -> None:
    _use_fake(monkeypatch)
    bench = replace(spec.benchmark, baseline=False, min_acceptance_length=2.0)
    with pytest.raises(GateError) as caught:
        run_serve(replace(spec, benchmark_mode=True, benchmark=bench), base_dir=tmp_path, out_dir=tmp_path / "out")
    assert caught.value.exit_code == 3
    result = _result(tmp_path / "out")
    assert (result["status"], result["stage"], result["benchmark"]["acceptance_length"]) == ("failed", "gate", 1.5)


def test_a_server_that_dies_fails_the_job_with_its_cause(spec, installed, monkeypatch, tmp_path) -> None:
    _use_fake(monkeypatch, "dies_at_start")
    with pytest.raises(LaunchError, match="mask_hidden not found"):
        run_serve(replace(spec, benchmark_mode=True), base_dir=tmp_path, out_dir=tmp_path / "out")
    result = _result(tmp_path / "out")
    assert (result["status"], result["stage"]) == ("failed", "benchmark") and result["benchmark"] is None


def test_a_secret_never_reaches_the_result(spec, installed, monkeypatch, tmp_path, capfd) -> None:
    _use_fake(monkeypatch)
    monkeypatch.setenv("VLLM_API_KEY", "very-secret-value")
    run_serve(replace(spec, benchmark_mode=True), base_dir=tmp_path, out_dir=tmp_path / "out")
    shown = capfd.readouterr()
    written = "".join(p.read_text() for p in (tmp_path / "out").iterdir())
    assert "very-secret-value" not in written + shown.out + shown.err


def test_a_foreground_launch_is_recorded_while_it_runs_and_after_ctrl_c(spec, installed, monkeypatch, tmp_path) -> None:
    import os
    import signal

    _use_fake(monkeypatch)
    out, seen = tmp_path / "out", []
    real = pipeline.Report.say

    def say(self, line: str) -> None:
        real(self, line)
        if "ready after" in line:
            seen.append(_result(out))
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(pipeline.Report, "say", say)
    assert run_serve(spec, base_dir=tmp_path, out_dir=out) == Interrupted.exit_code
    assert seen[0]["status"] == "launched" and seen[0]["server"]["pid"] > 0
    assert (_result(out)["status"], _result(out)["reason"]) == ("ok", "SIGINT received")


def test_a_failure_outside_the_serve_stage_is_recorded_once(tmp_path: Path) -> None:
    record_failure(tmp_path, PreflightError("no GPU", where="serve", remedy="add one"))
    record_failure(tmp_path, ValueError("later"))
    result = _result(tmp_path)
    assert (result["status"], result["stage"]) == ("failed", "preflight") and "no GPU" in result["reason"]


def test_preflight_passes_what_can_be_served(spec, tmp_path, monkeypatch) -> None:
    release = ResolvedRelease(release_for("0.32"), "0.32.0", True)
    monkeypatch.setattr(preflight_module, "resolve_release", lambda spec: release)
    preflight(replace(spec, benchmark_mode=True, checkpoint=str(tmp_path)), DraftConfig(), base_dir=tmp_path)


def test_preflight_names_everything_at_once(spec, missing, tmp_path) -> None:
    bench = replace(spec.benchmark, prompts=str(tmp_path / "absent.jsonl"))
    bad = replace(
        spec,
        benchmark_mode=True,
        benchmark=bench,
        port=70000,
        tensor_parallel_size=3,
        extra_args={"port": 1},
        method="medusa",
    )
    with pytest.raises(VllmMissingError) as caught:
        preflight(bad, DraftConfig(), base_dir=tmp_path)
    for part in (
        "absent.jsonl",
        "serve.port",
        "vLLM is not installed",
        "3 does not divide",
        "extra_args.port",
        "medusa",
    ):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("version", "found"), [("0.15", "cannot serve P-EAGLE"), ("0.20", "sets \\(K-1\\) x max_num_seqs")]
)
def test_preflight_knows_what_an_old_vllm_cannot(spec, tmp_path, monkeypatch, version: str, found: str) -> None:
    release = ResolvedRelease(release_for(version), f"{version}.0", False)
    monkeypatch.setattr(preflight_module, "resolve_release", lambda spec: release)
    with pytest.raises(UserError, match=found):
        preflight(spec, DraftConfig(num_depths=16), base_dir=tmp_path)


def test_preflight_finds_a_taken_port(spec, tmp_path, monkeypatch) -> None:
    import socket

    release = ResolvedRelease(release_for("0.32"), "0.32.0", True)
    monkeypatch.setattr(preflight_module, "resolve_release", lambda spec: release)
    with socket.create_server((HOST, 0)) as taken:
        with pytest.raises(LaunchError, match="serve.port"):
            preflight(replace(spec, port=taken.getsockname()[1]), DraftConfig(), base_dir=tmp_path)
    assert find_port(HOST, 0) > 0
