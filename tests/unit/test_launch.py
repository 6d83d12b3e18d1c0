# SPDX-License-Identifier: Apache-2.0
"""Starting, judging and stopping a server, against fakes that misbehave as real ones have been seen to."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from launching import HOST, fake, launch

from nemo_automodel.components.speculative.serve import readiness
from nemo_automodel.components.speculative.serve.launch import running_server, serve_foreground, stopping_servers
from nemo_automodel.components.speculative.serve.port import find_port, server_url
from nemo_automodel.components.speculative.serve.process import LogFile, ServerProcess, child_environment
from nemo_automodel.components.speculative.serve.supervisor import session_members
from nemo_automodel.components.speculative.serve.types import LaunchCommand
from nemo_automodel.errors import ConfigError, Interrupted, LaunchError


def test_a_good_server_is_ready_and_gone_afterwards(tmp_path: Path) -> None:
    with launch(tmp_path, "good") as (client, info):
        assert client.counters().num_drafts > 0
        assert len(session_members(info.pid)) >= 2
    assert not session_members(info.pid)


def test_a_server_that_dies_is_reported_with_its_cause(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="exit code 1: ValueError: mask_hidden not found in weights"):
        with launch(tmp_path, "dies_at_start"):
            pass


def test_a_jobs_new_cache_knows_what_vllm_has_learnt_of_model_classes(tmp_path: Path) -> None:
    (tmp_path / "modelinfos").mkdir()
    (tmp_path / "modelinfos" / "llama.json").write_text("{}")
    job = tmp_path / "jobs" / "abc"
    for _ in range(2):
        command = LaunchCommand((sys.executable, "-c", ""), {"VLLM_CACHE_ROOT": str(job)}, ())
        with ServerProcess(command, LogFile(tmp_path / "log")) as process:
            process.wait()
        assert (job / "modelinfos" / "llama.json").read_text() == "{}"
    mine = LaunchCommand((sys.executable, "-c", ""), {"VLLM_CACHE_ROOT": str(tmp_path / "mine")}, ())
    with ServerProcess(mine, LogFile(tmp_path / "log")) as process:
        process.wait()
    assert not (tmp_path / "mine").exists(), "a cache that was asked for is left alone"


def test_an_executable_that_does_not_exist_is_reported(tmp_path: Path) -> None:
    command = LaunchCommand((str(tmp_path / "nothing"), "--model", "target"), {}, ())
    with pytest.raises(LaunchError, match="No such file"):
        with running_server(
            command, host=HOST, port=find_port(HOST, 0), log=tmp_path / "log", speculative=False, say=lambda _: None
        ):
            pass


def test_another_models_server_is_not_taken_for_ours(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="answers as stranger, not as target"):
        with launch(tmp_path, "good", answers_as="stranger"):
            pass


@pytest.mark.parametrize(
    ("behaviour", "found"),
    [
        ("no_counters", "keeps no spec-decode counters"),
        ("never_drafts", "drafted nothing"),
        ("fails_first_request", "shape '"),
    ],
)
def test_a_green_health_is_not_enough(tmp_path: Path, monkeypatch, behaviour: str, found: str) -> None:
    monkeypatch.setattr(readiness, "COUNTER_LAG_S", 0.5)
    with pytest.raises(LaunchError) as caught:
        with launch(tmp_path, behaviour):
            pass
    assert found in str(caught.value)


def test_without_speculation_no_counters_are_asked_for(tmp_path: Path) -> None:
    with launch(tmp_path, "no_counters", speculative=False) as (client, _):
        assert client.counters() is None


def test_a_slow_server_is_waited_for_with_progress_and_an_interrupt_ends_it(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(readiness, "PROGRESS_S", 0.2)
    port, lines = find_port(HOST, 0), []

    def say(line: str) -> None:
        lines.append(line)
        if sum("waiting" in line for line in lines) == 2:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted, match="SIGINT") as caught, stopping_servers():
        log = tmp_path / "log"
        with running_server(fake(port, "hangs"), host=HOST, port=port, log=log, speculative=True, say=say):
            pass
    assert caught.value.exit_code == 130
    pid = int(lines[0].split("pid ")[1].split(",")[0])
    assert not session_members(pid)


@pytest.mark.parametrize("behaviour", ["ignores_sigterm", "grandchild_stays"])
def test_the_stop_leaves_nothing_behind(tmp_path: Path, behaviour: str) -> None:
    port = find_port(HOST, 0)
    process = ServerProcess(fake(port, behaviour), LogFile(tmp_path / "log"), grace_s=0.5)
    _wait(lambda: "all up" in (tmp_path / "log").read_text())
    process.stop()
    assert not session_members(process.pid)


def test_what_a_killed_server_leaves_is_ended(tmp_path: Path) -> None:
    port = find_port(HOST, 0)
    with ServerProcess(fake(port, "grandchild_stays"), LogFile(tmp_path / "log"), grace_s=0.5) as process:
        _wait(lambda: "all up" in (tmp_path / "log").read_text())
        server = next(pid for pid, cmd in session_members(process.pid).items() if "supervisor" not in cmd)
        os.kill(server, signal.SIGKILL)
        assert process.wait() == 128 + signal.SIGKILL
        assert "exit code 137" in process.cause().line and "out of memory?" in process.cause().remedy
    assert not session_members(process.pid)


def test_the_server_does_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    port = find_port(HOST, 0)
    script = (
        "import sys, pathlib, time\n"
        "from nemo_automodel.components.speculative.serve.process import LogFile, ServerProcess\n"
        "from nemo_automodel.components.speculative.serve.types import LaunchCommand\n"
        f"command = LaunchCommand({fake(port, 'grandchild_stays').argv!r}, {{}}, ())\n"
        f"log = LogFile(pathlib.Path({str(tmp_path / 'log')!r}))\n"
        "p = ServerProcess(command, log, grace_s=0.5)\n"
        "print(p.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    pid = int(parent.stdout.readline())
    _wait(lambda: "all up" in (tmp_path / "log").read_text())
    assert len(session_members(pid)) == 3
    parent.kill()
    parent.wait()
    _wait(lambda: not session_members(pid))


def test_the_foreground_passes_output_and_exit_code_through(tmp_path: Path, capfd) -> None:
    port = find_port(HOST, 0)
    ready: list[int] = []

    def on_ready(info) -> None:
        ready.append(info.pid)
        server = next(pid for pid, cmd in session_members(info.pid).items() if "supervisor" not in cmd)
        threading.Timer(0.2, os.kill, (server, signal.SIGTERM)).start()

    code = serve_foreground(fake(port), host=HOST, port=port, say=lambda _: None, on_ready=on_ready)
    assert code == 128 + signal.SIGTERM
    assert ready and not session_members(ready[0])


def test_sigterm_stops_the_foreground_server() -> None:
    port = find_port(HOST, 0)
    pids: list[int] = []

    def on_ready(info) -> None:
        pids.append(info.pid)
        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted, match="SIGTERM"):
        serve_foreground(fake(port), host=HOST, port=port, say=lambda _: None, on_ready=on_ready)
    assert not session_members(pids[0])


def test_a_taken_port_is_named_and_zero_gives_a_free_one() -> None:
    with socket.create_server((HOST, 0), reuse_port=True) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(LaunchError, match=rf"port {port} .*in use.*serve.port=0"):
            find_port(HOST, port)
        free = find_port(HOST, 0)
    assert free not in (0, port)
    assert find_port(HOST, free) == free


def test_an_impossible_host_or_port_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="serve.host"):
        find_port("no such host", 0)
    with pytest.raises(ConfigError, match="serve.port"):
        find_port(HOST, 99999999)


def test_a_wildcard_host_is_reached_by_loopback() -> None:
    assert server_url("0.0.0.0", 80) == "http://127.0.0.1:80"
    assert server_url("::", 80) == "http://[::1]:80"


def test_torchruns_variables_do_not_reach_the_server(monkeypatch) -> None:
    monkeypatch.setenv("RANK", "3")
    environment = child_environment(LaunchCommand((), {"A": "b"}, ("RANK",)))
    assert "RANK" not in environment and environment["A"] == "b"


def _wait(done, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.05)
