# SPDX-License-Identifier: Apache-2.0
"""A real vLLM serves other trainers' drafts, through the whole serve stage."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
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
