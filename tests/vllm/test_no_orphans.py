# SPDX-License-Identifier: Apache-2.0
"""Whatever ends us, nothing of a real vLLM is left. Its engine core is a grandchild that holds the memory.

The signal comes as soon as the engine core is there, in the middle of loading: the worst moment, and the cheapest.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import wait_for

from nemo_automodel.components.speculative.serve.supervisor import session_members

pytestmark = pytest.mark.vllm
ROOT = Path(__file__).parents[2]
ENV = {**os.environ, "PYTHONPATH": str(ROOT), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
RECIPE = [sys.executable, str(ROOT / "recipes" / "train_then_serve.py"), "-cn", "serve_only", "serve.mode=benchmark"]
CLI = [sys.executable, "-m", "nemo_automodel.components.speculative.serve_vllm"]


def plain(peers: Path, work: Path) -> list[str]:
    words = ["--draft", str(peers / "nemo_eagle3"), "--target", str(peers / "target"), "--max-model-len", "512"]
    return [*CLI, *words, "--port", "0", "--export-dir", str(work / "export"), "--", "--enforce-eager"]


def benchmark(peers: Path, work: Path) -> list[str]:
    words = [f"serve.checkpoint={peers / 'nemo_eagle3'}", f"target.path={peers / 'target'}", "serve.max_model_len=512"]
    words += [f"serve.benchmark.prompts={peers / 'heldout.jsonl'}", f"serve.export_dir={work / 'export'}"]
    return [*RECIPE, *words, "serve.port=0", f"hydra.run.dir={work / 'run'}", "+serve.extra_args.enforce_eager=true"]


@pytest.mark.parametrize(
    ("line", "number", "code"),
    [
        (plain, signal.SIGTERM, 130),
        (benchmark, signal.SIGINT, 130),
        (benchmark, signal.SIGKILL, -signal.SIGKILL),
    ],
    ids=["serve_vllm-SIGTERM", "benchmark-SIGINT", "benchmark-SIGKILL"],
)
def test_nothing_is_left(line, number: signal.Signals, code: int, peers: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as output:
        argv = line(peers, tmp_path)
        parent = subprocess.Popen(argv, env=ENV, cwd=tmp_path, stdout=output, stderr=output, start_new_session=True)
    try:
        family = wait_for(lambda: _with_engine_core(parent, log), 300)
        parent.send_signal(number)
        assert parent.wait(120) == code, log.read_text(errors="replace")[-2000:]
    finally:
        parent.kill()
        parent.wait()
    wait_for(lambda: not _alive(family), 60)
    assert 'Traceback (most recent call last):\n  File "/' + str(ROOT)[1:] not in log.read_text(errors="replace")
    if line is benchmark and number is signal.SIGINT:
        assert '"reason": "SIGINT received' in (tmp_path / "run" / "result.json").read_text()


def _with_engine_core(parent: subprocess.Popen, log: Path) -> dict[int, str] | None:
    """All descendants of the parent, once vLLM's engine core is among them."""
    assert parent.poll() is None, log.read_text(errors="replace")[-2000:]
    family = session_members(parent.pid)
    return family if any("EngineCore" in command for command in family.values()) else None


def _alive(family: dict[int, str]) -> list[int]:
    """Those that still run; a zombie whose parent is gone is collected by init."""
    found = []
    for pid in family:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state not in "ZX":
            found.append(pid)
    return found
