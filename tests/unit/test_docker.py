# SPDX-License-Identifier: Apache-2.0
"""The `docker run` line, and running it: `docker` on PATH is a script that starts the fake server."""

from __future__ import annotations

import csv
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from drafts import write_draft, write_target
from launching import FAKE

from nemo_automodel.components.speculative.serve import docker
from nemo_automodel.components.speculative.serve.command import build_baseline_command, build_command
from nemo_automodel.components.speculative.serve.docker import check_docker, release_of_image
from nemo_automodel.components.speculative.serve.pipeline import run_serve
from nemo_automodel.components.speculative.serve.types import (
    BenchmarkSpec,
    Fixups,
    LaunchCommand,
    RuntimeKind,
    RuntimeSpec,
    ServeSpec,
)
from nemo_automodel.components.speculative.serve.vllm_release import release_for
from nemo_automodel.errors import ConfigError, LaunchError, PreflightError

IN_DOCKER = RuntimeSpec(RuntimeKind.docker)
FIXUPS = Fixups({}, (), {}, (), (), parallel_drafting=True, num_speculative_tokens=4)


@pytest.fixture(autouse=True)
def one_gpu(monkeypatch) -> None:
    monkeypatch.setattr(docker, "visible_gpus", lambda: 1)


def line(spec: ServeSpec, draft: Path = Path("/d/vllm_export"), environ: dict[str, str] | None = None) -> LaunchCommand:
    return build_command(draft, FIXUPS, spec, release_for("0.31"), spec.python, 8123, environ or {})


def after(argv: tuple[str, ...], flag: str) -> list[str]:
    return [argv[i + 1] for i, word in enumerate(argv) if word == flag]


def mounts(argv: tuple[str, ...]) -> list[list[str]]:
    return [next(csv.reader([text])) for text in after(argv, "--mount")]


def test_the_line(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target, with comma")
    spec = ServeSpec("c", str(target), runtime=IN_DOCKER, vllm_version="0.31", env={"VLLM_LOGGING_LEVEL": "ERROR"})
    command = line(spec, tmp_path / "d" / "vllm_export")
    argv = command.argv
    assert argv[:5] == ("docker", "run", "--rm", "--init", "--ipc=host") and after(argv, "--gpus") == ["all"]
    assert after(argv, "--publish") == ["127.0.0.1:8123:8123"]
    assert mounts(argv) == [
        ["type=bind", f"source={path}", f"target={path}", "readonly"] for path in (target, tmp_path / "d/vllm_export")
    ]
    assert after(argv, "--env") == ["VLLM_LOGGING_LEVEL=ERROR"] and (command.env, command.unset) == ({}, ())
    image = argv.index("vllm/vllm-openai:v0.31.0")
    assert argv[image - 2 : image] == ("--entrypoint", "python3")
    plain = line(replace(spec, runtime=RuntimeSpec())).argv
    assert argv[image + 1 : image + 3] == plain[1:3]
    inner = list(argv[image + 3 :])
    assert inner[inner.index("--host") + 1] == "0.0.0.0"
    inner[inner.index("--host") + 1] = "127.0.0.1"
    assert json.loads(after(argv, "--speculative-config")[0])["model"] == str(tmp_path / "d" / "vllm_export")
    assert [w for w in inner if not w.startswith("{")] == [w for w in plain[3:] if not w.startswith("{")]


def test_a_baseline_has_no_draft_to_mount(tmp_path: Path) -> None:
    target = str(write_target(tmp_path / "t"))
    spec = ServeSpec("c", target, runtime=IN_DOCKER)
    argv = build_baseline_command(spec, release_for("0.33"), None, 1, environ={}).argv
    assert [m[1] for m in mounts(argv)] == [f"source={target}"] and "vllm/vllm-openai:v0.33.0" in argv


def test_a_key_goes_by_name_and_is_never_printed() -> None:
    spec = ServeSpec("c", "org/model", runtime=IN_DOCKER)
    command = line(spec, environ={"VLLM_API_KEY": "s3cret", "HF_TOKEN": "t0ken", "HOME": "/h"})
    assert after(command.argv, "--env") == ["VLLM_API_KEY", "HF_TOKEN"]
    assert "s3cret" not in command.shell() and "t0ken" not in command.shell()


def test_a_hub_id_mounts_the_cache_which_may_be_written() -> None:
    spec = ServeSpec("c", "org/model", runtime=IN_DOCKER)
    hub = mounts(line(spec, environ={"HF_HOME": "/hf"}).argv)[-1]
    assert hub == ["type=bind", "source=/hf/hub", "target=/root/.cache/huggingface/hub"]


def test_what_a_snapshot_links_to_is_mounted_where_the_links_point(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "m/blobs", tmp_path / "m/snapshots/abc"
    for folder in (blobs, snapshot):
        folder.mkdir(parents=True)
    (blobs / "f00").write_text("x")
    (snapshot / "config.json").symlink_to("../../blobs/f00")
    (tmp_path / "link").symlink_to(snapshot)
    found = mounts(line(ServeSpec("c", str(snapshot), runtime=IN_DOCKER)).argv)
    assert ["type=bind", f"source={blobs}", f"target={blobs}", "readonly"] in found
    found = mounts(line(ServeSpec("c", str(tmp_path / "link"), runtime=IN_DOCKER)).argv)
    assert ["type=bind", f"source={snapshot}", f"target={tmp_path / 'link'}", "readonly"] in found
    moved = os.path.normpath(tmp_path / "link/../../blobs")  # where ../../blobs leads from /link in the container
    assert ["type=bind", f"source={blobs}", f"target={moved}", "readonly"] in found


@pytest.mark.parametrize(
    ("host", "published"),
    [("0.0.0.0", "0.0.0.0:8123:8123"), ("::1", "[::1]:8123:8123"), ("localhost", "127.0.0.1:8123:8123")],
)
def test_the_port_is_bound_on_the_asked_address_only(host: str, published: str) -> None:
    assert after(line(ServeSpec("c", "o/m", host=host, runtime=IN_DOCKER)).argv, "--publish") == [published]


def test_a_host_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="serve.host"):
        line(ServeSpec("c", "o/m", host="box.example", runtime=IN_DOCKER))


def test_gpus_and_images(monkeypatch) -> None:
    spec = ServeSpec("c", "o/m", runtime=IN_DOCKER)
    assert after(line(spec, environ={"CUDA_VISIBLE_DEVICES": "0,2"}).argv, "--gpus") == ['"device=0,2"']
    named = replace(spec, runtime=replace(IN_DOCKER, image="mine/cpu:v0.29.0", docker_args=("--shm-size", "8g")))
    argv = line(named).argv
    assert "mine/cpu:v0.29.0" in argv and after(argv, "--shm-size") == ["8g"] and after(argv, "--gpus") == ["all"]
    assert release_of_image(named).release.version == "0.29"
    monkeypatch.setattr(docker, "visible_gpus", lambda: None)
    assert "--gpus" not in line(named).argv and after(line(spec).argv, "--gpus") == ["all"]
    assert "needs one" in release_of_image(spec).warnings[0]
    untagged = replace(spec, runtime=replace(IN_DOCKER, image="mine/vllm"))
    assert "serve.vllm.version" in release_of_image(untagged).warnings[0]
    assert release_of_image(replace(untagged, vllm_version="0.30.1")).installed == "0.30.1"


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("-e", None),
        ("VLLM_API_KEY=x", "secret"),
        ("--env=HF_TOKEN=x", "secret"),
        ("-d", "managed"),
        ("--entrypoint=sh", "managed"),
    ],
)
def test_words_that_would_break_or_betray_are_refused(word: str, text: str | None) -> None:
    spec = ServeSpec("c", "o/m", runtime=replace(IN_DOCKER, docker_args=(word,)))
    if text is None:
        assert word in line(spec).argv
        return
    with pytest.raises(ConfigError, match=text):
        line(spec)


def fake_docker(folder: Path, monkeypatch, body: str) -> None:
    folder.mkdir()
    script = folder / "docker"
    script.write_text(f"#!/bin/sh\n{body}\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_no_docker_is_said(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="no docker here"):
        check_docker(ServeSpec("c", "/t", runtime=IN_DOCKER))


def test_an_engine_that_does_not_answer_is_said(monkeypatch, tmp_path: Path) -> None:
    fake_docker(tmp_path / "bin", monkeypatch, "echo 'Cannot connect to the Docker daemon' >&2; exit 1")
    with pytest.raises(LaunchError, match="does not answer: Cannot connect to the Docker daemon") as caught:
        check_docker(ServeSpec("c", "/t", runtime=IN_DOCKER))
    assert caught.value.exit_code == 1


def test_vllms_own_image_without_a_gpu_is_refused(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(docker, "visible_gpus", lambda: None)
    fake_docker(tmp_path / "bin", monkeypatch, "echo 27.0")
    with pytest.raises(PreflightError, match="needs a GPU"):
        check_docker(ServeSpec("c", "/t", runtime=IN_DOCKER))
    check_docker(ServeSpec("c", "/t", runtime=replace(IN_DOCKER, image="mine/cpu")))


def test_a_benchmark_runs_the_printed_line(monkeypatch, tmp_path: Path, capsys) -> None:
    said = tmp_path / "argv"
    body = (
        f'[ "$1" = version ] && {{ echo 27.0; exit 0; }}\necho "$@" >> {said}\nmodel=; port=\n'
        'while [ $# -gt 0 ]; do case "$1" in --model) model="$2";; --port) port="$2";; esac; shift; done\n'
        f'exec {sys.executable} {FAKE} "$port" "$model" good'
    )
    fake_docker(tmp_path / "bin", monkeypatch, body)
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    (tmp_path / "rows.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 2)
    spec = ServeSpec(
        checkpoint=str(write_draft(tmp_path / "draft")),
        target=str(write_target(tmp_path / "target")),
        port=0,
        export_dir=str(tmp_path / "export"),
        runtime=IN_DOCKER,
        benchmark_mode=True,
        benchmark=BenchmarkSpec(prompts=str(tmp_path / "rows.jsonl"), num_prompts=2, max_new_tokens=8),
    )
    assert run_serve(spec, base_dir=tmp_path, out_dir=tmp_path / "out") == 0
    result = json.loads((tmp_path / "out/result.json").read_text())
    assert result["status"] == "ok" and result["benchmark"]["speedup"] and result["versions"]["vllm"] == "0.33.0"
    argv = result["command"]["argv"]
    speculative, baseline = said.read_text().splitlines()
    assert speculative == " ".join(argv[1:]) and "--speculative-config" not in baseline
    run_serve(replace(spec, print_only=True), base_dir=tmp_path, out_dir=None)
    assert capsys.readouterr().out.startswith("docker run --rm")
