# SPDX-License-Identifier: Apache-2.0
"""vLLM's counters: read from a real page's form, filtered by model, summed over engines, and what follows from them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from nemo_automodel.components.speculative.bench.metrics import (
    acceptance_length,
    acceptance_rate,
    per_position,
    tokens_per_step_overall,
    useful_tokens_per_step,
)
from nemo_automodel.components.speculative.bench.parity import compare, reference_dtype, unpredictable
from nemo_automodel.components.speculative.serve.counters import SpecDecodeCounters, parse_counters
from nemo_automodel.components.speculative.serve.types import Fixups

PAGE = """# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="/models/a b"} 100.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="/models/a b"} 20.0
vllm:spec_decode_num_drafts_total{engine="0",model_name="other"} 7.0
# HELP vllm:spec_decode_num_drafts_created Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_created gauge
vllm:spec_decode_num_drafts_created{engine="0",model_name="/models/a b"} 1.7e+09
# HELP vllm:spec_decode_num_draft_tokens_total Number of draft tokens.
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="/models/a b"} 480.0
# HELP vllm:spec_decode_num_accepted_tokens_total Number of accepted tokens.
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="/models/a b"} 240.0
# HELP vllm:spec_decode_num_accepted_tokens_per_pos_total Accepted tokens per draft position.
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="/models/a b",position="1"} 80.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="/models/a b",position="0"} 90.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="/models/a b",position="0"} 6.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="/models/a b",position="3"} 64.0
"""


def test_a_page_is_filtered_by_model_and_summed_over_engines() -> None:
    assert parse_counters(PAGE, "/models/a b") == SpecDecodeCounters(120, 480, 240, (96, 80, 0, 64))
    assert parse_counters(PAGE, "other").num_drafts == 7


def test_a_server_without_speculation_has_no_counters() -> None:
    assert parse_counters(PAGE, "a third") is None
    assert parse_counters("", "x") is None


def test_the_difference_of_two_readings_gives_length_rate_and_positions() -> None:
    before, after = SpecDecodeCounters(20, 80, 40, (16,)), SpecDecodeCounters(120, 480, 240, (96, 80, 0, 64))
    counted = after - before
    assert counted == SpecDecodeCounters(100, 400, 200, (80, 80, 0, 64))
    assert acceptance_length(counted) == 3.0
    assert acceptance_rate(counted) == 0.5
    assert per_position(counted) == (0.8, 0.8, 0.0, 0.64)


def test_useful_tokens_leave_out_each_prompts_first_token() -> None:
    # 10 prompts, 250 tokens returned; 10 of them came from prefills, which count no draft
    assert useful_tokens_per_step(SpecDecodeCounters(100, 400, 200, (80, 80)), 250, 10) == 2.4


def test_nothing_drafted_is_no_division_by_zero() -> None:
    none = SpecDecodeCounters(0, 0, 0, ())
    assert (acceptance_length(none), acceptance_rate(none), per_position(none)) == (1.0, 0.0, ())


@pytest.mark.parametrize(
    ("dtype", "served", "agrees"),
    [
        ("float32", (800, 500), True),
        ("float32", (801, 500), False),
        ("bfloat16", (815, 490), True),
        ("bfloat16", (821, 500), False),
    ],
)
def test_parity_is_exact_in_float32_and_within_rounding_in_bfloat16(dtype: str, served: tuple, agrees: bool) -> None:
    predicted = SpecDecodeCounters(1000, 2000, 1300, (800, 500))
    prediction = compare(predicted, SpecDecodeCounters(1000, 2000, sum(served), served), dtype)
    assert prediction.agrees is agrees
    assert prediction.acceptance_per_position == (0.8, 0.5)


OWN = ("embed_tokens.weight", "lm_head.weight")


@pytest.mark.parametrize(
    ("names", "form"),
    [
        ((*OWN, "layers.0.self_attn.q_norm.weight"), None),
        ((*OWN, "fc_norm.0.weight"), None),
        ((*OWN, "input_norm.weight"), "norm_before_fc"),
        ((*OWN, "layers.0.self_attn.q_proj.bias"), "attention_bias"),
        (OWN[1:], "embed_tokens"),
    ],
)
def test_a_draft_that_the_reference_cannot_run_is_named_not_failed(names: tuple[str, ...], form: str | None) -> None:
    found = unpredictable(Fixups({}, (), {"model." + name: name for name in names}, (), (), False, 4))
    assert found is None if form is None else form in found


def test_auto_is_predicted_in_bfloat16() -> None:
    assert reference_dtype("auto") == "bfloat16"  # vLLM casts float32 weights down unless told --dtype float32
    assert reference_dtype("float32") == "float32"


def test_steps_without_a_proposal_count_for_a_lookup_drafter() -> None:
    """100 tokens of 2 prompts, 8 of them accepted in 5 proposals: 90 steps for 98 tokens, whatever vLLM says."""
    counters = SpecDecodeCounters(5, 20, 8, (4, 2, 1, 1))
    assert acceptance_length(counters) == pytest.approx(2.6)
    assert tokens_per_step_overall(counters, 100, 2) == pytest.approx(98 / 90)


def test_serving_does_not_import_the_benchmark() -> None:
    code = (
        "import sys\n"
        "from nemo_automodel.components.speculative.serve import launch, preflight, pipeline\n"
        "print([name for name in sys.modules if '.speculative.bench' in name])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
