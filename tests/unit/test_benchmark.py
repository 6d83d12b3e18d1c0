# SPDX-License-Identifier: Apache-2.0
"""Whole benchmark jobs against the fake server: K = 0, shared baselines, resuming, gates, a server that dies."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from drafts import write_draft, write_target
from launching import FAKE

from nemo_automodel.components.speculative.bench.diagnose import compare_folders
from nemo_automodel.components.speculative.bench.gpu_sets import gpu_set
from nemo_automodel.components.speculative.bench.parity import anew
from nemo_automodel.components.speculative.bench.plain import from_plain
from nemo_automodel.components.speculative.bench.result import Measured, build_result
from nemo_automodel.components.speculative.serve import command, pipeline
from nemo_automodel.components.speculative.serve.export import export
from nemo_automodel.components.speculative.serve.pipeline import run_serve
from nemo_automodel.components.speculative.serve.types import BenchmarkSpec, ServeSpec
from nemo_automodel.components.speculative.serve.vllm_release import ResolvedRelease, release_for
from nemo_automodel.errors import GateError, LaunchError


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ServeSpec:
    rows = [{"category": "xy"[i % 2], "turns": [f"q{i}", "and then?"][: 1 + i % 2]} for i in range(4)]
    (tmp_path / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    release = ResolvedRelease(release_for("0.32"), "0.32.0", True)
    monkeypatch.setattr(pipeline, "resolve_release", lambda spec: release)
    bench = BenchmarkSpec(prompts=str(tmp_path / "asked.jsonl"), num_prompts=4, max_new_tokens=8)
    return ServeSpec(
        checkpoint=str(write_draft(tmp_path / "draft")),
        target=str(write_target(tmp_path / "target")),
        port=0,
        benchmark_mode=True,
        benchmark=bench,
    )


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    use_fake(monkeypatch)


def use_fake(monkeypatch: pytest.MonkeyPatch, behaviour: str = "good") -> None:
    """The real command, except that the fake stands in for vLLM's module."""
    real = command._command

    def fake_command(spec, release, python, port, *rest):
        built = real(spec, release, python, port, *rest)
        return replace(built, argv=(sys.executable, str(FAKE), str(port), spec.target, behaviour, *built.argv))

    monkeypatch.setattr(command, "_command", fake_command)


def run(spec: ServeSpec, out: Path, *, multirun: bool = True) -> dict:
    assert run_serve(spec, base_dir=out.parent, out_dir=out, multirun=multirun) == 0
    return result(out)


def result(out: Path) -> dict:
    return json.loads((out / "result.json").read_text())


def servers(out: Path) -> list[str]:
    return sorted(path.name for path in out.glob("server_*.log"))


def test_levels_subsets_and_latency_are_in_the_result(spec, fake, tmp_path, capsys) -> None:
    bench = run(replace(spec, benchmark=replace(spec.benchmark, concurrency=(1, 3))), tmp_path / "out")["benchmark"]
    assert [level["concurrency"] for level in bench["levels"]] == [1, 3]
    assert (bench["prompts"], bench["requests"], bench["output_tokens"]) == (4, 6, 48)
    assert [(s["name"], s["requests"]) for s in bench["subsets"]] == [("x", 2), ("y", 4)]
    assert bench["levels"][0]["tokens_per_s"] == bench["tokens_per_s"]
    assert bench["levels"][1]["acceptance"]["num_drafts"] == 6 * 4
    assert bench["latency"]["ttft_ms"]["p50"] > 0 and bench["baseline_latency"]["itl_ms"]["p99"] > 0
    assert bench["acceptance_length_interval"] == [1.5, 1.5] and bench["acceptance_source"] == "counters"
    said = capsys.readouterr().err
    assert "3 at once" in said and "subset y" in said and "time to first token" in said


def test_every_figure_follows_from_the_answer_files(spec, fake, tmp_path) -> None:
    out = tmp_path / "out"
    bench = run(spec, out, multirun=False)["benchmark"]
    served, base = (from_plain(Measured, json.loads((out / f"answers_{kind}.json").read_text()))
                    for kind in ("speculative", "baseline"))  # fmt: skip
    again = build_result(served, base, None, k=4, spec_digest=bench["spec_digest"],
                         baseline_digest=bench["baseline_digest"])  # fmt: skip
    assert json.loads(json.dumps(again.to_dict())) == bench


def test_a_sweep_measures_one_baseline_and_takes_it_as_the_job_without_speculation(spec, fake, tmp_path) -> None:
    two = replace(spec, num_speculative_tokens=2)
    none = replace(spec, num_speculative_tokens=0, benchmark=replace(spec.benchmark, min_acceptance_length=9.0))
    results = [run(s, tmp_path / "sweep" / name) for name, s in zip("012", (spec, none, two))]
    assert [servers(tmp_path / "sweep" / name) for name in "012"] == [
        ["server_baseline.log", "server_speculative.log"], [], ["server_speculative.log"],
    ]  # fmt: skip
    benches = [r["benchmark"] for r in results]
    assert [b["k"] for b in benches] == [4, 0, 2]
    assert len({b["baseline_tokens_per_s"] for b in benches}) == len({b["baseline_digest"] for b in benches}) == 1
    assert (benches[1]["speedup"], results[1]["export"]) == (1.0, None)
    assert "--speculative-config" not in results[1]["command"]["argv"]
    longer = replace(spec, num_speculative_tokens=0, benchmark=replace(spec.benchmark, max_new_tokens=6))
    run(longer, tmp_path / "sweep" / "3")
    assert servers(tmp_path / "sweep" / "3") == ["server_baseline.log"]  # another question, another baseline


def test_a_job_that_is_done_is_not_measured_again_unless_asked(spec, fake, tmp_path, capsys) -> None:
    out = tmp_path / "sweep" / "0"
    first = run(spec, out)
    again = run(spec, out)
    assert "measured before" in capsys.readouterr().err
    assert (again["benchmark"], again["server"]) == (first["benchmark"], first["server"])
    assert again["command"] == first["command"] and again["status"] == "ok"
    other = run(replace(spec, num_speculative_tokens=3), out)
    assert other["benchmark"]["k"] == 3
    logs = (out / "server_speculative.log").stat().st_mtime_ns
    run(replace(spec, num_speculative_tokens=3, benchmark=replace(spec.benchmark, rerun=True)), out)
    assert (out / "server_speculative.log").stat().st_mtime_ns > logs


def test_a_gate_may_be_moved_without_measuring_again(spec, fake, tmp_path, capsys) -> None:
    gated = replace(spec, benchmark=replace(spec.benchmark, min_speedup=1000.0))
    with pytest.raises(GateError, match="times the tokens/s") as caught:
        run(gated, tmp_path / "sweep" / "0")
    assert caught.value.exit_code == 3
    failed = result(tmp_path / "sweep" / "0")
    assert (failed["status"], failed["stage"], failed["benchmark"]["k"]) == ("failed", "gate", 4)
    assert run(spec, tmp_path / "sweep" / "0")["status"] == "ok"
    assert "measured before" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("behaviour", "told"),
    [
        ("dies_in_an_answer", "died at work, exit code 1: torch.OutOfMemoryError: CUDA out of memory"),
        ("killed_in_an_answer", "died at work, exit code 137: ended by SIGKILL .*out of memory"),
        ("killed_between_answers", "died at work, exit code 137: ended by SIGKILL .*out of memory"),
    ],
)
def test_a_server_that_dies_in_mid_benchmark_fails_with_its_last_words(
    spec, monkeypatch, tmp_path, behaviour: str, told: str
) -> None:
    use_fake(monkeypatch, behaviour)
    with pytest.raises(LaunchError, match=told):
        run(spec, tmp_path / "out")
    assert result(tmp_path / "out")["stage"] == "benchmark"
    assert not result(tmp_path / "out")["benchmark"]  # no number of a run that broke off


def test_a_broken_shared_file_is_measured_again(spec, fake, tmp_path) -> None:
    none = replace(spec, num_speculative_tokens=0)
    run(none, tmp_path / "sweep" / "0")
    (answers,) = (tmp_path / "sweep" / "shared").glob("*.json")
    answers.write_text("{")
    run(none, tmp_path / "sweep" / "1")
    assert servers(tmp_path / "sweep" / "1") == ["server_baseline.log"]


def test_printing_without_speculation_names_no_draft(spec, fake, tmp_path, capsys) -> None:
    run_serve(replace(spec, num_speculative_tokens=0, print_only=True), base_dir=tmp_path, out_dir=None)
    line = capsys.readouterr().out
    assert line.count("\n") == 1 and "speculative" not in line and "&&" not in line


def test_sampled_text_is_neither_compared_nor_predicted(spec, fake, tmp_path, capsys) -> None:
    bench = replace(spec.benchmark, temperature=0.7, parity=True)
    got = run(replace(spec, benchmark=bench), tmp_path / "out")["benchmark"]
    assert (got["text_equal"], got["predicted"], got["temperature"]) == (None, None, 0.7)
    assert "drawn at random" in capsys.readouterr().err


def test_jobs_side_by_side_take_different_gpus_and_share_all_the_same(spec, fake, tmp_path, capsys) -> None:
    two = replace(spec, benchmark=replace(spec.benchmark, gpu_sets=("0,1", "2,3")))
    with gpu_set(("0,1", "2,3"), tmp_path / "sweep", lambda _: None) as taken:
        assert taken == "0,1"
        first = run(two, tmp_path / "sweep" / "0")
    second = run(replace(two, num_speculative_tokens=2), tmp_path / "sweep" / "1")
    assert [r["command"]["env"]["CUDA_VISIBLE_DEVICES"] for r in (first, second)] == ["2,3", "0,1"]
    assert first["benchmark"]["baseline_digest"] == second["benchmark"]["baseline_digest"]
    assert servers(tmp_path / "sweep" / "1") == ["server_speculative.log"]
    assert "GPUs 2,3" in capsys.readouterr().err


def test_the_export_is_made_anew_to_judge_what_was_served(spec, tmp_path) -> None:
    plan = pipeline.plan_only(spec, base_dir=tmp_path)
    served = Path(export(plan.export).dir)
    with anew(plan.export, tmp_path) as fresh:
        assert fresh != served and compare_folders(fresh, served) == ()
        (served / "config.json").write_text((served / "config.json").read_text().replace("10000.0", "500000.0"))
        assert {cause.area for cause in compare_folders(fresh, served)} == {"rope"}
    assert not fresh.exists()
