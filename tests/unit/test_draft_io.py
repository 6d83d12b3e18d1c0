# SPDX-License-Identifier: Apache-2.0
"""Drafts survive the disk, in both forms, and wrong files are refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Callable

import pytest
import torch
from safetensors.torch import load_file, save_file

from nemo_automodel.components.speculative.draft.io import load_draft, save_draft
from nemo_automodel.components.speculative.draft.layers import build_rotary
from nemo_automodel.components.speculative.draft.build import build_draft
from nemo_automodel.components.speculative.draft.peagle import PEagleDraft
from nemo_automodel.components.speculative.draft.spec import DraftSpec, RopeSpec
from nemo_automodel.errors import ConfigError, ResolveError

PEERS = Path(__file__).parents[2].parent / "shared" / "peers"
VOCAB = torch.tensor([0, 3, 4, 9])
LAYER = ("input_layernorm", "hidden_norm", "post_attention_layernorm", "self_attn.q_proj", "self_attn.k_proj",
         "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")  # fmt: skip


def make_spec(draft_vocab: int = 4, dtype: str = "float32", rope: RopeSpec = RopeSpec(1e4)) -> DraftSpec:
    return DraftSpec(8, 8, 2, 2, 1, 4, 12, 1e-6, 10, draft_vocab, 64, rope, (1, 2, 3), 7, 4, 0.8, 0.2, dtype)


def saved(folder: Path, draft_vocab: int = 4, dtype: str = "float32") -> tuple[PEagleDraft, DraftSpec]:
    spec = make_spec(draft_vocab, dtype)
    vocab = VOCAB if draft_vocab < 10 else None
    draft = build_draft(spec, embed_weight=torch.randn(10, 8), lm_head_weight=torch.randn(10, 8), vocab_ids=vocab)
    save_draft(folder, draft, spec, getattr(torch, dtype))
    return draft, spec


def test_names_are_those_that_nemo_automodel_writes(tmp_path: Path) -> None:
    saved(tmp_path)
    layers = {f"model.layers.{i}.{name}.weight" for i in range(2) for name in LAYER}
    ends = {f"model.{name}.weight" for name in ("embed_tokens", "fc", "norm")}
    ends |= {"lm_head.weight", "d2t", "t2d", "mask_hidden"}
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors.keys() == layers | ends
    assert tensors["mask_hidden"].shape == (1, 1, 24)
    assert tensors["model.layers.0.self_attn.q_proj.weight"].shape == (8, 16)
    assert (torch.arange(4) + tensors["d2t"]).tolist() == VOCAB.tolist()
    assert tensors["t2d"].nonzero().flatten().tolist() == VOCAB.tolist()


def test_round_trip_is_exact(tmp_path: Path) -> None:
    draft, spec = saved(tmp_path)
    again, read = load_draft(tmp_path)
    assert read == spec
    for name, tensor in draft.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


def test_full_vocabulary_writes_no_map(tmp_path: Path) -> None:
    saved(tmp_path, draft_vocab=10, dtype="bfloat16")
    tensors = load_file(tmp_path / "model.safetensors")
    assert "d2t" not in tensors and all(t.dtype == torch.bfloat16 for t in tensors.values())
    assert load_draft(tmp_path)[0].vocab_ids() is None


def rewrite(folder: Path, change: Callable[[dict], dict]) -> None:
    save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors")


def test_vllm_form_and_shards_are_read(tmp_path: Path) -> None:
    draft, _ = saved(tmp_path)
    bare = {n.removeprefix("model."): t for n, t in load_file(tmp_path / "model.safetensors").items() if n != "t2d"}
    names = sorted(bare)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for shard, part in shards.items():
        save_file({n: bare[n] for n in part}, tmp_path / shard)
    (tmp_path / "model.safetensors").unlink()
    index = {"weight_map": {n: shard for shard, part in shards.items() for n in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    again, _ = load_draft(tmp_path)
    for name, tensor in draft.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


FAULTS = {
    "missing model.layers.1.self_attn.k_proj.weight": lambda t: {
        n: x for n, x in t.items() if n != "model.layers.1.self_attn.k_proj.weight"
    },
    "missing d2t": lambda t: {n: x for n, x in t.items() if n != "d2t"},
    "unknown model.layers.0.self_attn.q_norm.weight": lambda t: t | {"layers.0.self_attn.q_norm.weight": torch.ones(4)},
    "two tensors would be model.fc.weight": lambda t: t | {"fc.weight": torch.ones(8, 24)},
    "mask_hidden [8] instead of [1, 1, 24]": lambda t: t | {"mask_hidden": torch.ones(8)},
}


@pytest.mark.parametrize("found", FAULTS)
def test_wrong_tensors_are_refused_by_name(tmp_path: Path, found: str) -> None:
    saved(tmp_path)
    rewrite(tmp_path, FAULTS[found])
    with pytest.raises(ResolveError) as caught:
        load_draft(tmp_path)
    assert found in str(caught.value) and str(tmp_path) in str(caught.value)


def test_half_written_weights_and_missing_keys_are_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    data = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[:-8])
    with pytest.raises(ResolveError, match="cannot read model.safetensors"):
        load_draft(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["num_depths"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ResolveError, match="num_depths"):
        load_draft(tmp_path)


def test_an_index_that_leads_outside_is_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    index = {"weight_map": {"fc.weight": "../x.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ResolveError, match="outside"):
        load_draft(tmp_path)


@pytest.mark.skipif(not PEERS.is_dir(), reason="no shared/peers beside this checkout")
def test_a_draft_of_nemo_automodel_is_read_once_its_aux_layers_are_named(tmp_path: Path) -> None:
    source = PEERS / "nemo_peagle" / "epoch_2_step_1000" / "model" / "consolidated"
    for file in source.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(ResolveError, match="eagle_aux_hidden_state_layer_ids"):
        load_draft(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    draft, spec = load_draft(tmp_path)
    assert spec.num_layers == 2 and spec.num_depths == 4 and float(draft.mask_hidden.detach().abs().sum()) > 0


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}  # fmt: skip


@pytest.mark.parametrize(
    "scaling",
    [None, {"rope_type": "linear", "factor": 4.0}, {"type": "linear", "factor": 4.0}, LLAMA3,
     {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}],
)  # fmt: skip
def test_rope_scaling_is_the_one_of_transformers_own_llama(scaling: dict | None) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    kind = {("rope_type" if k == "type" else k): v for k, v in (scaling or {"rope_type": "default"}).items()}
    config = LlamaConfig(hidden_size=8, num_attention_heads=2, head_dim=4, max_position_embeddings=64,
                         rope_parameters=kind | {"rope_theta": 5e5})  # fmt: skip
    positions = torch.arange(40)[None]
    got = build_rotary(make_spec(rope=RopeSpec.from_config({"rope_theta": 5e5, "rope_scaling": scaling})))
    want = LlamaRotaryEmbedding(config)
    for a, b in zip(got(torch.zeros(1), positions), want(torch.zeros(1), positions), strict=True):
        torch.testing.assert_close(a, b)
    if scaling:
        plain = build_rotary(make_spec(rope=RopeSpec(5e5)))(torch.zeros(1), positions)[0]
        assert not torch.allclose(plain, want(torch.zeros(1), positions)[0])


def test_rope_angles_stay_exact_whatever_the_dtype_of_the_weights() -> None:
    spec = replace(make_spec(rope=RopeSpec(1e6)), head_dim=64, max_position_embeddings=2048)
    draft = PEagleDraft(spec).to(torch.bfloat16)
    positions = torch.tensor([[0, 1, 1000, 2000]])
    pair = torch.arange(32, dtype=torch.float64)
    angles = positions[0, :, None] * 1e6 ** (-pair / 32)
    cos, sin = draft.rotary(torch.empty(0, dtype=torch.float32), positions)
    torch.testing.assert_close(cos[0, :, :32].double(), angles.cos(), atol=1e-3, rtol=0)
    torch.testing.assert_close(sin[0, :, :32].double(), angles.sin(), atol=1e-3, rtol=0)
    assert draft.model.fc.weight.dtype == torch.bfloat16  # the rest did follow
    assert draft.to("meta").rotary.inv_freq.device.type == "meta"  # and a device moves the tables too


def test_a_rope_that_changes_with_length_is_refused() -> None:
    with pytest.raises(ConfigError, match="dynamic"):
        build_rotary(make_spec(rope=RopeSpec(1e4, {"rope_type": "dynamic", "factor": 2.0})))


def test_vocabulary_map_must_fit() -> None:
    weights = {"embed_weight": torch.randn(10, 8), "lm_head_weight": torch.randn(10, 8)}
    with pytest.raises(ValueError, match="4 ascending"):
        build_draft(make_spec(), **weights, vocab_ids=torch.tensor([3, 0, 4, 9]))
    head = build_draft(make_spec(), **weights, vocab_ids=VOCAB).lm_head.weight
    assert torch.equal(head, weights["lm_head_weight"][VOCAB])


def test_an_index_that_is_none_is_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    for text in ("{", "[]", "{}", '{"weight_map": ["model.safetensors"]}'):
        (tmp_path / "model.safetensors.index.json").write_text(text)
        with pytest.raises(ResolveError, match="no readable weight_map"):
            load_draft(tmp_path)


def test_a_draft_that_transformers_would_refuse_is_not_trained(tmp_path: Path) -> None:
    """GLM-4.5 has 96 heads at a hidden size of 4096 or 5120."""
    weights = {"embed_weight": torch.randn(10, 8), "lm_head_weight": torch.randn(10, 8), "vocab_ids": VOCAB}
    with pytest.raises(ConfigError, match="hidden size 8 with the target's 6 attention heads"):
        build_draft(replace(make_spec(), num_attention_heads=6, num_key_value_heads=2), **weights)
