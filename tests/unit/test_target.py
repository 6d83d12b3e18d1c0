# SPDX-License-Identifier: Apache-2.0
"""The target's states are transformers' own, and a draft's shape follows from target and config."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from nemo_automodel.components.speculative.target import Target, build_draft_spec, read_target_dims
from nemo_automodel.config.schema import DraftConfig
from nemo_automodel.errors import ConfigError

SIZES = dict(vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=6, num_attention_heads=4,
             num_key_value_heads=2, head_dim=8, max_position_embeddings=128)  # fmt: skip


def llama3() -> PreTrainedModel:
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64}  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=rope))


def qwen3(**changes: object) -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(**(SIZES | changes), tie_word_embeddings=True, eos_token_id=2))


def save(model: PreTrainedModel, folder: Path) -> str:
    torch.manual_seed(0)
    model.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("make", [llama3, qwen3])
def test_states_are_transformers_hidden_states(make: type, tmp_path: Path) -> None:
    path = save(make(), tmp_path)
    target = Target.load(path, aux_layer_ids=(1, 3, 5), dtype=torch.float32, device="cpu")
    ids = torch.randint(0, 40, (2, 9))
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    states = target.states(ids, mask)
    with torch.no_grad():
        want = target.model(input_ids=ids, attention_mask=mask, output_hidden_states=True)
    torch.testing.assert_close(states.aux, torch.cat([want.hidden_states[k] for k in (1, 3, 5)], dim=-1))
    torch.testing.assert_close(states.last @ target.lm_head_weight.T, want.logits)
    short = target.states(ids[1:, :6], mask[1:, :6])
    torch.testing.assert_close(short.aux, states.aux[1:, :6])
    assert not any(p.requires_grad for p in target.model.parameters()) and not states.aux.requires_grad
    assert target.embed_weight.shape == (40, 16)


@pytest.mark.parametrize("make", [llama3, qwen3])
def test_rows_packed_into_one_line_have_the_states_they_have_alone(make: type) -> None:
    torch.manual_seed(0)
    target = Target(make(), (1, 3, 5))
    rows = [torch.randint(0, 40, (1, n)) for n in (7, 1, 12, 5)]
    ends = torch.tensor([7, 8, 20, 25])
    starts = torch.cat([torch.full((r.shape[1],), int(e) - r.shape[1]) for r, e in zip(rows, ends, strict=True)])
    padded = torch.nn.functional.pad(torch.cat(rows, 1), (0, 3))
    starts = torch.nn.functional.pad(starts, (0, 3))[None]
    states = target.states(padded, (torch.arange(28) < 25).long()[None], starts)
    for row, end in zip(rows, ends.tolist(), strict=True):
        alone = target.states(row, torch.ones_like(row))
        place = slice(end - row.shape[1], end)
        torch.testing.assert_close(states.aux[:, place], alone.aux, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(states.last[:, place], alone.last, atol=1e-5, rtol=1e-5)


def test_aux_ids_are_taken_in_ascending_order_as_vllm_does(tmp_path: Path) -> None:
    model = qwen3().eval()
    ids = torch.randint(0, 40, (1, 5))
    one, other = (Target(model, order).states(ids, torch.ones_like(ids)).aux for order in ((1, 2, 4), (4, 1, 2)))
    assert torch.equal(one, other)


def test_dims_come_from_the_config_alone_and_reach_the_draft(tmp_path: Path) -> None:
    model = llama3()
    model.config.save_pretrained(tmp_path)
    dims = read_target_dims(str(tmp_path))
    spec = build_draft_spec(dims, DraftConfig(mask_token_id=7), seq_length=500, dtype="bfloat16")
    assert (spec.hidden_size, spec.num_key_value_heads, spec.head_dim, spec.vocab_size) == (16, 2, 8, 40)
    assert spec.draft_vocab_size == 40 and spec.num_layers == 2 and spec.mask_token_id == 7 and spec.dtype == "bfloat16"
    assert len(set(spec.aux_layer_ids)) == 3 and 1 <= spec.aux_layer_ids[0] and spec.aux_layer_ids[-1] <= 5
    assert spec.max_position_embeddings >= 500
    assert spec.rope.theta == 5e5 and spec.rope.scaling["rope_type"] == "llama3" and spec.rope.scaling["factor"] == 8.0


def test_rope_angles_of_a_bfloat16_target_stay_exact(tmp_path: Path) -> None:
    path = save(llama3(), tmp_path)
    exact, loaded = (
        Target.load(path, aux_layer_ids=(1, 2, 3), dtype=dtype, device="cpu").model.model.rotary_emb.inv_freq
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert torch.equal(exact, loaded) and loaded.dtype == torch.float32


BAD = {
    "draft.mask_token_id": [{"mask_token_id": None}, {"mask_token_id": 40}, {"mask_token_id": -1}],
    "draft.aux_layer_ids": [{"aux_layer_ids": ids} for ids in ([1, 3], [0, 2, 3], [1, 3, 6], [1, 3, 3], [3, 2, 1])],
    "draft.draft_vocab_size": [{"draft_vocab_size": 41}],
}


@pytest.mark.parametrize(("where", "values"), [(w, v) for w, many in BAD.items() for v in many])
def test_values_that_do_not_fit_name_their_key(where: str, values: dict) -> None:
    dims = Target(qwen3(), (1, 2, 3)).dims
    with pytest.raises(ConfigError) as caught:
        build_draft_spec(dims, replace(DraftConfig(mask_token_id=7), **values), seq_length=64)
    assert where in caught.value.where and "draft." in caught.value.remedy


def test_targets_that_cannot_be_drafted_for_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="target.path"):
        read_target_dims(str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="at least 4 layers"):
        build_draft_spec(Target(qwen3(num_hidden_layers=3), (1, 2)).dims, DraftConfig(mask_token_id=7), seq_length=64)
    softcapped = qwen3()
    softcapped.config.final_logit_softcapping = 30.0
    with pytest.raises(ConfigError, match="final_logit_softcapping"):
        Target(softcapped, (1, 2, 3))


def test_learnt_positions_instead_of_rope_are_refused() -> None:
    with pytest.raises(ConfigError, match="gpt2"):
        Target(GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=4, n_head=2, vocab_size=40)), (1, 2, 3))
