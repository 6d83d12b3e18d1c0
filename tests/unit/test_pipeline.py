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
from drafts import draft_config, write_draft, write_target
from launching import FAKE, HOST

from nemo_automodel.components.datasets.rows import ChatRow
from nemo_automodel.components.speculative.bench import parity
from nemo_automodel.components.speculative.bench.parity import ParityJob
from nemo_automodel.components.speculative.serve import command, disk, pipeline
from nemo_automodel.components.speculative.serve import preflight as preflight_module
from nemo_automodel.components.speculative.serve.disk import SPARE_BYTES, check_disk, disk_need
from nemo_automodel.components.speculative.serve.pipeline import (
    refuse_foreground_sweep,
    run_export,
    run_serve,
)
from nemo_automodel.components.speculative.serve.port import find_port
from nemo_automodel.components.speculative.serve.preflight import preflight
from nemo_automodel.components.speculative.serve.record import record_failure, record_training
from nemo_automodel.components.speculative.serve.target_facts import read_target
from nemo_automodel.components.speculative.serve.types import BenchmarkSpec, ServeSpec
from nemo_automodel.components.speculative.serve.vllm_release import ResolvedRelease, release_for
from nemo_automodel.config.schema import DraftConfig, Precision, TrainConfig
from nemo_automodel.errors import (
    ExportError,
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
def spec(tmp_path: Path) -> ServeSpec:
    turns = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": "an answer"}]
    (tmp_path / "heldout.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 4)
    return ServeSpec(
        checkpoint=str(write_draft(tmp_path / "draft")),
        target=str(write_target(tmp_path / "target")),
        port=0,
        export_dir=str(tmp_path / "export"),
        benchmark=BenchmarkSpec(prompts=str(tmp_path / "heldout.jsonl"), num_prompts=3, max_new_tokens=8),
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


# One option each that the export step once lost, refused, or took otherwise than the launch.
EXPORT_OPTIONS = {
    "longer": {"max_model_len": 1024, "env": {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}},
    "old, with room made": {"vllm_version": "0.27", "extra_args": {"max_num_seqs": 8}, "num_speculative_tokens": 9},
    "deeper": {"num_speculative_tokens": 2},
    "parallel": {"tensor_parallel_size": 2, "draft_tensor_parallel_size": 1},
    "method": {"method": "peagle"},
    "trust": {"trust_remote_code": True, "dtype": "float32", "served_model_name": "m"},
    "beside the weights": {"export_dir": None},
    "relative": {"export_dir": "some where"},
}


@pytest.mark.parametrize("options", EXPORT_OPTIONS.values(), ids=EXPORT_OPTIONS)
def test_the_export_step_makes_the_export_that_the_launch_reuses(spec, options, monkeypatch, tmp_path, capsys) -> None:
    write_draft(tmp_path / "draft", draft_config(num_depths=9))
    options = {"python": _other_python(tmp_path, options.get("vllm_version", "0.32") + ".0")} | options
    _reuses(replace(spec, print_only=True, **options), tmp_path, monkeypatch, capsys)


@pytest.mark.parametrize("version", ["0.20.2", "0.40.0"])
def test_the_export_step_plans_for_the_vllm_of_serve_python(spec, version, monkeypatch, tmp_path, capsys) -> None:
    """A draft that the release of serve.python takes and this interpreter's may not, and one that nobody has read."""
    spec = replace(spec, python=_other_python(tmp_path, version), print_only=True)
    said = _reuses(spec, tmp_path, monkeypatch, capsys)
    assert "is installed" not in said and "cannot speculate" not in said  # what is here does not matter to an export


def _other_python(folder: Path, version: str) -> str:
    python = folder / "python"
    python.write_text(f"#!/bin/sh\necho vllm {version}\n")
    python.chmod(0o755)
    return str(python)


def _reuses(spec: ServeSpec, base_dir: Path, monkeypatch, capsys) -> str:
    """Print, run the printed export step, and hold its export against the launch's own; the step's stderr."""
    monkeypatch.chdir(base_dir)
    spec = replace(spec, port=find_port(HOST, 0))
    run_serve(spec, base_dir=base_dir, out_dir=None)
    step, launch = capsys.readouterr().out.strip().split(" && ")
    (base_dir / "elsewhere").mkdir()
    done = subprocess.run(
        step, shell=True, text=True, capture_output=True, cwd=base_dir / "elsewhere",
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    words = shlex.split(launch)
    assert done.stdout.strip() == json.loads(words[words.index("--speculative-config") + 1])["model"]
    run_serve(spec, base_dir=base_dir, out_dir=None)
    assert capsys.readouterr().out.strip() == launch  # exported already: nothing else is to be done
    return done.stderr


def test_an_export_that_cannot_see_its_target_is_refused(spec, tmp_path) -> None:
    """Printing forgives that; an export without the target's facts is not the one that a launch would make."""
    with pytest.raises(ResolveError, match="cannot be had from the Hub"):
        run_export(replace(spec, target="some-org/some-model"), base_dir=tmp_path)
    assert not (tmp_path / "export").exists()


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
        refuse_foreground_sweep(spec, True)  # the recipe asks before it trains
    for fine in (replace(spec, benchmark_mode=True), replace(spec, print_only=True)):
        refuse_foreground_sweep(fine, True)
    refuse_foreground_sweep(spec, False)
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


def test_a_key_of_the_environment_is_used_and_is_in_no_command_line(spec, installed, monkeypatch, tmp_path) -> None:
    """What `ps` shows to everybody on the machine."""
    _use_fake(monkeypatch)
    monkeypatch.setenv("VLLM_API_KEY", "very-secret-value")
    seen = []
    real = pipeline.Report.say

    def say(self, line: str) -> None:
        real(self, line)
        if line.startswith("ready after"):
            seen.extend(f.read_bytes() for f in Path("/proc").glob("[0-9]*/cmdline") if f.exists())

    monkeypatch.setattr(pipeline.Report, "say", say)
    bench = replace(spec.benchmark, baseline=False)
    run_serve(replace(spec, benchmark_mode=True, benchmark=bench), base_dir=tmp_path, out_dir=tmp_path / "out")
    assert any(b"fake_server.py" in words for words in seen)
    assert not any(b"very-secret-value" in words for words in seen)


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


@pytest.mark.parametrize("benchmark", [True, False])
def test_a_server_that_loaded_another_jobs_export_is_refused(spec, installed, monkeypatch, tmp_path, benchmark) -> None:
    """Two jobs, one draft, other options: the second one's export takes the first one's place while vLLM loads."""
    _use_fake(monkeypatch)
    real = pipeline.export

    def export_then_the_other_job(plan, say):
        done = real(plan, say)
        manifest = json.loads((done.dir / "manifest.json").read_text())
        (done.dir / "manifest.json").write_text(json.dumps(manifest | {"digest": "of other options"}))
        return done

    monkeypatch.setattr(pipeline, "export", export_then_the_other_job)
    out = tmp_path / "out"
    with pytest.raises(ExportError, match="was replaced while the server loaded it"):
        run_serve(replace(spec, benchmark_mode=benchmark), base_dir=tmp_path, out_dir=out)
    assert _result(out)["status"] == "failed" and "serve.export_dir" in _result(out)["reason"]


def test_a_failure_outside_the_serve_stage_is_recorded_once(tmp_path: Path) -> None:
    error = PreflightError("no GPU", where="serve", remedy="add one")
    record_failure(tmp_path, error)
    record_failure(tmp_path, error, stage="later")
    result = _result(tmp_path)
    assert (result["status"], result["stage"]) == ("failed", "preflight") and "no GPU" in result["reason"]
    assert {"python", "vllm", "vllm_facts"} <= set(result["versions"])


def test_a_training_leaves_a_result_of_its_own(tmp_path: Path) -> None:
    done, stopped = tmp_path / "done", tmp_path / "stopped"
    record_training(done, done / "checkpoints" / "epoch_1_step_9", status="ok", reason=None)
    result = _result(done)
    assert KEYS <= set(result) and (result["status"], result["stage"], result["reason"]) == ("ok", "train", None)
    assert result["checkpoint"] == str(done / "checkpoints" / "epoch_1_step_9")
    error = Interrupted("stopped after step 4", where="train", remedy="train.resume=LATEST")
    record_training(stopped, stopped / "checkpoints" / "LATEST", status="failed", reason=str(error))
    record_failure(stopped, error)  # what every job that ends badly goes through
    result = _result(stopped)
    assert (result["status"], result["stage"]) == ("failed", "train") and "step 4" in result["reason"]
    assert result["checkpoint"].endswith("LATEST")
    record_training(tmp_path / "early", None, status="failed", reason="no data")
    assert _result(tmp_path / "early")["checkpoint"] == ""


def test_preflight_passes_what_can_be_served(spec, tmp_path, monkeypatch) -> None:
    release = ResolvedRelease(release_for("0.32"), "0.32.0", True)
    monkeypatch.setattr(preflight_module, "resolve_release", lambda spec: release)
    spec = replace(spec, benchmark_mode=True, checkpoint=str(tmp_path))
    preflight(spec, DraftConfig(), TrainConfig(), base_dir=tmp_path)


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
        preflight(bad, DraftConfig(), TrainConfig(), base_dir=tmp_path)
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
        preflight(spec, DraftConfig(num_depths=16), TrainConfig(), base_dir=tmp_path)


def test_preflight_finds_a_mistyped_flag(spec, tmp_path, monkeypatch) -> None:
    """vLLM's own argparse would, hours later."""
    release = ResolvedRelease(release_for("0.32"), "0.32.0", True)
    monkeypatch.setattr(preflight_module, "resolve_release", lambda spec: release)
    mistyped = replace(spec, extra_args={"max_num_sqes": 8})
    with pytest.raises(UserError, match=r"no --max-num-sqes .*did you mean serve.extra_args.max_num_seqs\?"):
        preflight(mistyped, DraftConfig(), TrainConfig(), base_dir=tmp_path)


def test_preflight_finds_a_taken_port(spec, tmp_path, monkeypatch) -> None:
    import socket

    release = ResolvedRelease(release_for("0.32"), "0.32.0", True)
    monkeypatch.setattr(preflight_module, "resolve_release", lambda spec: release)
    with socket.create_server((HOST, 0)) as taken:
        with pytest.raises(LaunchError, match="serve.port"):
            preflight(replace(spec, port=taken.getsockname()[1]), DraftConfig(), TrainConfig(), base_dir=tmp_path)
    assert find_port(HOST, 0) > 0


def test_preflight_refuses_what_a_benchmark_cannot_count(spec, tmp_path, monkeypatch) -> None:
    release = ResolvedRelease(release_for("0.32"), "0.32.0", True)
    monkeypatch.setattr(preflight_module, "resolve_release", lambda spec: release)
    with pytest.raises(UserError, match="disable-log-stats"):
        preflight(
            replace(spec, extra_args={"disable_log_stats": True}), DraftConfig(), TrainConfig(), base_dir=tmp_path
        )


# Qwen3-8B: 2 x 622,329,856 in embeddings and lm_head, fc 3 x 4096^2, layers (2 x 4096 in, 32 and 8 heads of 128, 12288)
QWEN3_8B = {
    "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 151936, "intermediate_size": 12288, "max_position_embeddings": 40960,
}  # fmt: skip
ATTENTION = {first: (32 + 8 + 8) * 128 * (8192 if first else 4096) + 32 * 128 * 4096 for first in (True, False)}
VECTORS = 3 * 4096 + (3 + 3) * 4096 + 4096  # mask_hidden, three norms a layer, the last norm
PARAMETERS = 2 * 151936 * 4096 + 3 * 4096**2 + ATTENTION[True] + ATTENTION[False] + 2 * 3 * 4096 * 12288 + VECTORS


@pytest.mark.parametrize(
    ("train", "saves", "states"),
    [
        ({"num_epochs": 1}, 1, 1),
        ({"num_epochs": 2}, 2, 2),
        ({"num_epochs": 10}, 10, 3),  # two are kept, the third is being written
        ({"num_epochs": 10, "keep_trainer_states": 1}, 10, 2),
        ({"num_epochs": 9, "max_steps": 1000, "save_every_steps": 300}, 4, 3),
        ({"max_steps": 1000}, 1, 1),
    ],
)
def test_the_disk_that_a_training_takes(tmp_path, train: dict, saves: int, states: int) -> None:
    target = read_target(str(write_target(tmp_path / "t", **QWEN3_8B)))
    for precision, weights, trainer in ((Precision.fp32, 4, 8), (Precision.bf16, 2, 12)):
        need = disk_need(DraftConfig(num_layers=2), TrainConfig(precision=precision, **train), target)
        assert need.export == weights * PARAMETERS
        assert need.checkpoints == (saves * weights + states * trainer) * PARAMETERS


def test_frozen_embeddings_and_a_small_vocabulary_take_less(tmp_path) -> None:
    target = read_target(str(write_target(tmp_path / "t", **QWEN3_8B)))
    train, rows = TrainConfig(precision=Precision.fp32), 151936 * 4096
    whole = disk_need(DraftConfig(), train, target)
    frozen = disk_need(DraftConfig(freeze_embeddings=True), train, target)
    small = disk_need(DraftConfig(draft_vocab_size=32000), train, target)
    assert (whole.export - frozen.export, whole.checkpoints - frozen.checkpoints) == (0, 8 * rows)
    assert whole.export - small.export == 4 * (151936 - 32000) * 4096


def test_preflight_looks_where_checkpoints_and_export_go(spec, tmp_path, monkeypatch) -> None:
    run_dir, export_dir = tmp_path / "runs" / "now", tmp_path / "big" / "export"
    target = read_target(str(write_target(tmp_path / "t", **QWEN3_8B)))
    need = disk_need(DraftConfig(), TrainConfig(precision=Precision.fp32), target)
    spec = replace(spec, checkpoint=str(run_dir), export_dir="big/export")
    free = {"runs": need.checkpoints + SPARE_BYTES, "big": need.export + SPARE_BYTES}
    monkeypatch.setattr(disk, "_free_bytes", lambda folder: free[folder.relative_to(tmp_path).parts[0]])
    monkeypatch.setattr(disk, "_same_disk", lambda a, b: False)
    check_disk(spec, DraftConfig(), TrainConfig(precision=Precision.fp32), target, tmp_path)
    for place, folder in (("runs", run_dir), ("big", export_dir)):
        free[place] -= 1
        with pytest.raises(PreflightError) as caught:
            check_disk(spec, DraftConfig(), TrainConfig(precision=Precision.fp32), target, tmp_path)
        assert str(folder) in str(caught.value)
        free[place] += 1
    monkeypatch.setattr(disk, "_same_disk", lambda a, b: True)  # one disk holds both
    with pytest.raises(PreflightError, match="checkpoints and export"):
        check_disk(spec, DraftConfig(), TrainConfig(precision=Precision.fp32), target, tmp_path)


def test_the_reference_gets_the_benchmarks_own_prompts(tmp_path, monkeypatch) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    chats = (ChatRow(1, ({"role": "user", "content": "a"},), (tool,)), ChatRow(2, ({"role": "user", "content": "b"},)))
    job = ParityJob(tmp_path, "t", tmp_path, chats, 8, 2, "float32", template_kwargs={"enable_thinking": False})

    def reference(argv: list[str], **_: object) -> subprocess.CompletedProcess:
        Path(argv[-1]).write_text(json.dumps({"num_drafts": 4, "accepted_per_position": [3, 1]}))
        return subprocess.CompletedProcess(argv, 0)

    monkeypatch.setattr(parity.subprocess, "run", reference)
    assert parity.predict(job).num_accepted_tokens == 4
    written = json.loads((tmp_path / "parity_job.json").read_text())
    assert written["chat_template_kwargs"] == {"enable_thinking": False} and written["num_prompts"] == 2
    rows = [json.loads(line) for line in (tmp_path / "parity_prompts.jsonl").read_text().splitlines()]
    assert [row.get("tools") for row in rows] == [[tool], None]


def test_a_benchmark_reads_the_column_and_sends_the_template_arguments(spec, installed, monkeypatch, tmp_path) -> None:
    _use_fake(monkeypatch)
    log = tmp_path / "asked.jsonl"
    monkeypatch.setenv("FAKE_SERVER_LOG", str(log))
    rows = tmp_path / "rows.jsonl"
    other = [{"role": "user", "content": "no"}]
    rows.write_text(json.dumps({"messages": other, "talk": [{"from": "human", "value": "yes"}]}))
    bench = BenchmarkSpec(str(rows), baseline=False, column="talk", chat_template_kwargs={"enable_thinking": False})
    run_serve(replace(spec, benchmark_mode=True, benchmark=bench), base_dir=tmp_path, out_dir=tmp_path / "out")
    asked = [body for line in log.read_text().splitlines() if "messages" in (body := json.loads(line))]
    assert len(asked) == 2  # the warm-up and the prompt
    for body in asked:
        assert body["messages"][0]["content"] == "yes" and body["chat_template_kwargs"] == {"enable_thinking": False}
