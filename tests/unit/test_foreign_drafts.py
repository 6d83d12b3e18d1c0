# SPDX-License-Identifier: Apache-2.0
"""The real configs of other trainers' drafts, with weights of full size that are all header and hole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drafts import write_target

from nemo_automodel.components.speculative.serve.doctor import Severity, diagnose
from nemo_automodel.components.speculative.serve.types import ServeSpec
from nemo_automodel.files import TensorInfo, build_safetensors_header

CONFIGS = Path(__file__).parents[2].parent / "shared" / "draft-configs"


def stand_in(folder: Path, config: dict[str, Any], *, embeddings: bool, layers: int, mask: bool = False) -> Path:
    """A draft in SpecForge's and AngelSlim's naming, of full size; only d2t (the first ids) takes space."""
    hidden, inner, vocab, draft = (
        config[key] for key in ("hidden_size", "intermediate_size", "vocab_size", "draft_vocab_size")
    )
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    head = config.get("head_dim", hidden // heads)
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, 3 * hidden), "norm.weight": (hidden,)}
    shapes["lm_head.weight"] = (draft, hidden)
    for i in range(layers):
        stem = "midlayer" if layers == 1 else f"layers.{i}"
        wide = 2 * hidden if i == 0 else hidden
        norms = ("input_layernorm", "post_attention_layernorm", *(("hidden_norm",) if i == 0 else ()))
        shapes |= {f"{stem}.{norm}.weight": (hidden,) for norm in norms}
        shapes |= {
            f"{stem}.self_attn.{x}_proj.weight": (n * head, wide) for x, n in (("q", heads), ("k", kv), ("v", kv))
        }
        shapes[f"{stem}.self_attn.o_proj.weight"] = (hidden, heads * head)
        shapes |= {f"{stem}.mlp.{x}_proj.weight": (inner, hidden) for x in ("gate", "up")}
        shapes[f"{stem}.mlp.down_proj.weight"] = (hidden, inner)
    if embeddings:
        shapes["embed_tokens.weight"] = (vocab, hidden)
    if mask:
        shapes["mask_hidden"] = (1, 1, 3 * hidden)
    infos, at = [TensorInfo("d2t", "I64", (draft,), 0, 8 * draft)], 8 * draft
    for name, shape in shapes.items():
        size = 2 * int(np.prod(shape))
        infos.append(TensorInfo(name, "BF16", shape, at, at + size))
        at += size
    folder.mkdir(parents=True)
    header = build_safetensors_header(infos, {"format": "pt"})
    with (folder / "model.safetensors").open("wb") as file:
        file.write(header + np.full(draft, 1, "int64").tobytes())
        file.truncate(len(header) + at)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


# config file -> the target's family and depth, what the doctor must say besides
FOREIGN: dict[str, tuple[str, str, int, int, str]] = {
    "angelslim_hunyuan-4b-eagle3": ("HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense", 36, 0, "[2, 18, 33] of 36"),
    "angelslim_qwen2.5-0.5b-eagle3": ("Qwen2ForCausalLM", "qwen2", 24, 0, "[2, 12, 21] of 24"),
    "angelslim_qwen3-30b-a3b-eagle3": ("Qwen3MoeForCausalLM", "qwen3_moe", 48, 0, "[2, 24, 45] of 48"),
    "angelslim_qwen3-8b-eagle3": ("Qwen3ForCausalLM", "qwen3", 36, 0, "[2, 18, 33] of 36"),
    "eagle_traineagle3_config": ("LlamaForCausalLM", "llama", 32, 0, "names no rope_theta"),
    "qwen3_8b_eagle3": ("Qwen3ForCausalLM", "qwen3", 36, 0, "[2, 18, 33] of 36"),
    "specforge_deepseek-v3-671b-eagle3": ("DeepseekV3ForCausalLM", "deepseek_v3", 61, 0, "they are [2, 30, 58]"),
    "specforge_gpt-oss-20B-eagle3": ("GptOssForCausalLM", "gpt_oss", 24, 0, "taken as layer inputs"),
    "specforge_llama3-8B-eagle3": ("LlamaForCausalLM", "llama", 32, 0, "names no rope_theta"),
    "specforge_phi4-eagle3": ("Phi3ForCausalLM", "phi3", 40, 0, "[2, 20, 37] of 40"),
    "specforge_qwen3-8b-eagle3": ("Qwen3ForCausalLM", "qwen3", 36, 0, "[2, 18, 33] of 36"),
    "specforge_qwen3-8b-peagle": ("Qwen3ForCausalLM", "qwen3", 36, 1, "P-EAGLE draft without mask_token_id"),
    "qwen3_8b_eagle3_mla": ("Qwen3ForCausalLM", "qwen3", 36, 1, "latent attention"),
}


@pytest.mark.skipif(not CONFIGS.is_dir(), reason="no shared/draft-configs beside the checkout")
@pytest.mark.parametrize("embeddings", [False, True])
@pytest.mark.parametrize("name", FOREIGN)
def test_drafts_of_other_trainers(tmp_path: Path, name: str, embeddings: bool) -> None:
    architecture, family, depth, code, text = FOREIGN[name]
    config = json.loads((CONFIGS / f"{name}.json").read_text())
    parallel = config["architectures"] == ["PEagleDraftModel"]
    sizes = {"head_dim": config.get("head_dim", 128), "draft_vocab_size": 32000}
    written = config if "mla" not in name else config | sizes
    draft = stand_in(
        tmp_path / "draft", written, embeddings=embeddings, layers=config["num_hidden_layers"], mask=parallel
    )
    target = write_target(
        tmp_path / "target",
        architectures=[architecture],
        model_type=family,
        hidden_size=config["hidden_size"],
        vocab_size=config["vocab_size"],
        num_hidden_layers=depth,
        max_position_embeddings=8192,
    )
    found = diagnose(ServeSpec(str(draft), str(target), print_only=True, vllm_version="0.32"), tmp_path)
    assert found.exit_code == code, [finding.line() for finding in found.of(Severity.error)]
    assert any(text in finding.line() for finding in found.findings)
    if "mla" in name:
        assert len(found.of(Severity.error)) == 1
    if parallel:
        (draft / "config.json").write_text(json.dumps(config | {"mask_token_id": 151669}))
        assert diagnose(ServeSpec(str(draft), str(target), vllm_version="0.32"), tmp_path).exit_code == 0
