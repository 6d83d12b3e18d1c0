# SPDX-License-Identifier: Apache-2.0
"""A real vLLM serves another trainer's P-EAGLE draft, through the whole serve stage."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from waiting import wait_for

from nemo_automodel.components.speculative.serve.pipeline import run_serve
from nemo_automodel.components.speculative.serve.supervisor import session_members
from nemo_automodel.components.speculative.serve.types import BenchmarkSpec, ServeSpec

pytestmark = pytest.mark.vllm
KEYS = {"status", "stage", "reason", "checkpoint", "export", "fixups", "command", "server", "benchmark", "versions"}


def _spec(peers: Path, export_dir: Path) -> ServeSpec:
    return ServeSpec(
        checkpoint=str(peers / "nemo_peagle"),
        target=str(peers / "target"),
        port=0,
        max_model_len=512,
        export_dir=str(export_dir),
        extra_args={"enforce_eager": True, "max_num_seqs": 8},
        env={"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"},
        benchmark=BenchmarkSpec(
            prompts=str(peers / "heldout.jsonl"), num_prompts=50, max_new_tokens=96, baseline=False, parity=True
        ),
    )


# ../shared/peers/README.md: what a correct launch reaches. The tools' own launchers serve the second at 1.00 and, given
# the third, at 1.91.
@pytest.mark.parametrize(
    ("draft", "known"), [("nemo_peagle", 3.297), ("nemo_eagle3", 2.797), ("speculators_peagle", 3.510)]
)
def test_a_peers_draft_reaches_its_known_acceptance(draft: str, known: float, peers: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    spec = replace(
        _spec(peers, tmp_path / "export"),
        checkpoint=str(peers / draft),
        num_speculative_tokens=4,
        benchmark_mode=True,
    )
    assert run_serve(spec, base_dir=tmp_path, out_dir=out) == 0
    result = json.loads((out / "result.json").read_text())
    bench = result["benchmark"]
    assert KEYS <= set(result) and result["status"] == "ok"
    assert bench["acceptance_length"] == pytest.approx(known, abs=0.05)
    per_position = bench["acceptance_per_position"]
    assert len(per_position) == bench["k"] == 4 and per_position == sorted(per_position, reverse=True)
    assert bench["acceptance_length"] == pytest.approx(1 + sum(per_position))
    assert 1.5 < bench["useful_tokens_per_step"] < bench["acceptance_length"]
    assert bench["predicted"]["max_difference"] <= 0.02  # bfloat16 on both sides
    assert bench["prompts"] == 50 and bench["tokens_per_s"] > 0
    assert not session_members(result["server"]["pid"])


def test_a_real_server_does_not_outlive_its_killed_parent(peers: Path, tmp_path: Path) -> None:
    """vLLM's engine core is a grandchild; it must go as well."""
    out = tmp_path / "out"
    script = (
        "import pickle, sys\n"
        "from pathlib import Path\n"
        "from nemo_automodel.components.speculative.serve.pipeline import run_serve\n"
        "run_serve(pickle.loads(bytes.fromhex(sys.argv[1])), base_dir=Path('/'), out_dir=Path(sys.argv[2]))\n"
    )
    spec = pickle.dumps(_spec(peers, tmp_path / "export")).hex()
    with (tmp_path / "parent.log").open("wb") as log:
        parent = subprocess.Popen([sys.executable, "-c", script, spec, str(out)], stdout=log, stderr=log)
    try:
        pid = wait_for(lambda: _server_pid(parent, out), 240)
        members = session_members(pid)
        assert any("EngineCore" in command for command in members.values()), members
    finally:
        parent.kill()
        parent.wait()
    wait_for(lambda: not session_members(pid), 60)


def _server_pid(parent: subprocess.Popen, out: Path) -> int | None:
    assert parent.poll() is None, (out.parent / "parent.log").read_text()[-2000:]
    path = out / "result.json"
    server = json.loads(path.read_text())["server"] if path.is_file() else None
    return server["pid"] if server else None
