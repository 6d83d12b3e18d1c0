# SPDX-License-Identifier: Apache-2.0
"""Tiny real drafts and targets on disk, in the layouts of several trainers. Sizes: H=16, 2 heads of 8, V=64."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

H, HEADS, KV, HEAD, INNER, V = 16, 2, 1, 32, 24, 64


def layer_tensors(i: int) -> dict[str, tuple[int, ...]]:
    wide = 2 * H if i == 0 else H
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (H,),
        "post_attention_layernorm.weight": (H,),
        "self_attn.q_proj.weight": (HEADS * HEAD, wide),
        "self_attn.k_proj.weight": (KV * HEAD, wide),
        "self_attn.v_proj.weight": (KV * HEAD, wide),
        "self_attn.o_proj.weight": (H, HEADS * HEAD),
        "mlp.gate_proj.weight": (INNER, H),
        "mlp.up_proj.weight": (INNER, H),
        "mlp.down_proj.weight": (H, INNER),
    }
    if i == 0:
        shapes["hidden_norm.weight"] = (H,)
    return {f"layers.{i}.{name}": shape for name, shape in shapes.items()}


def draft_tensors(
    *, layers: int = 1, draft_vocab: int = V, prefix: str = "model.", mask: bool = True
) -> dict[str, Any]:
    """NeMo Automodel's names with `prefix`, vLLM's without. A reduced vocabulary keeps every second id."""
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (V, H), "fc.weight": (H, 3 * H), "norm.weight": (H,)}
    for i in range(layers):
        shapes |= layer_tensors(i)
    random = np.random.default_rng(0)
    tensors: dict[str, Any] = {
        prefix + name: random.standard_normal(shape).astype("float32") for name, shape in shapes.items()
    }
    tensors["lm_head.weight"] = random.standard_normal((draft_vocab, H)).astype("float16")
    if mask:
        tensors["mask_hidden"] = random.standard_normal((1, 1, 3 * H)).astype("float32")
    if draft_vocab < V:
        tensors["d2t"] = np.arange(draft_vocab, dtype="int64")  # i + i = every second id
        tensors["t2d"] = np.isin(np.arange(V), np.arange(draft_vocab) * 2)
    return tensors


def draft_config(**changes: Any) -> dict[str, Any]:
    """A NeMo Automodel P-EAGLE config; a value of `...` takes the key out."""
    config: dict[str, Any] = {
        "architectures": ["LlamaEagle3DraftModel"],
        "model_type": "llama",
        "parallel_drafting": True,
        "num_depths": 4,
        "mask_token_id": 3,
        "hidden_size": H,
        "target_hidden_size": H,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV,
        "head_dim": HEAD,
        "intermediate_size": INNER,
        "rms_norm_eps": 1e-6,
        "vocab_size": V,
        "draft_vocab_size": V,
        "max_position_embeddings": 256,
        "rope_theta": 10000.0,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
    }
    return {key: value for key, value in (config | changes).items() if value is not ...}


def write_draft(
    folder: Path, config: dict[str, Any] | None = None, tensors: dict[str, Any] | None = None, shards: int = 1
) -> Path:
    """A model folder; with `shards` > 1 an index and several files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(draft_config() if config is None else config))
    tensors = draft_tensors() if tensors is None else tensors
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    names, weight_map = sorted(tensors), {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = names[i::shards]
        save_file({name: tensors[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def write_target(folder: Path, **changes: Any) -> Path:
    """A target of 8 layers: its config.json is all that the serve stage reads."""
    folder.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": H,
        "num_hidden_layers": 8,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV,
        "vocab_size": V,
        "intermediate_size": INNER,
        "max_position_embeddings": 256,
    }
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder
