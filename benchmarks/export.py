# SPDX-License-Identifier: Apache-2.0
"""How long an export takes and how much memory it holds, beside `cp` and beside safetensors.torch.

    python benchmarks/export.py [--gigabytes 2.5] [--folder DIR]

Each way runs three times in a process of its own, in turn; the best time and the highest peak memory are printed. The
draft is P-EAGLE with Qwen3-8B's hidden size and random bytes. Page cache is warm for all alike.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from nemo_automodel.files import TensorInfo, build_safetensors_header

H, HEADS, KV, HEAD, INNER = 4096, 32, 8, 128, 12288
WAYS = ("export", "cp", "safetensors.torch")


def write_draft(folder: Path, gigabytes: float) -> None:
    """A one-layer draft in NeMo Automodel's layout; the vocabulary is what fills it up to the size."""
    layer = {
        "input_layernorm": (H,), "post_attention_layernorm": (H,), "hidden_norm": (H,),
        "self_attn.q_proj": (HEADS * HEAD, 2 * H), "self_attn.k_proj": (KV * HEAD, 2 * H),
        "self_attn.v_proj": (KV * HEAD, 2 * H), "self_attn.o_proj": (H, HEADS * HEAD),
        "mlp.gate_proj": (INNER, H), "mlp.up_proj": (INNER, H), "mlp.down_proj": (H, INNER),
    }  # fmt: skip
    shapes = {f"model.layers.0.{name}.weight": shape for name, shape in layer.items()}
    shapes |= {"model.fc.weight": (H, 3 * H), "model.norm.weight": (H,), "mask_hidden": (1, 1, 3 * H)}
    left = gigabytes * 1e9 / 2 - sum(TensorInfo("", "BF16", shape, 0, 0).numel for shape in shapes.values())
    vocab = max(64, int(left / (2 * H)))
    shapes |= {"model.embed_tokens.weight": (vocab, H), "lm_head.weight": (vocab, H)}
    tensors, at = [], 0
    for name, shape in shapes.items():
        end = at + 2 * TensorInfo(name, "BF16", shape, 0, 0).numel
        tensors.append(TensorInfo(name, "BF16", shape, at, end))
        at = end
    folder.mkdir()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(build_safetensors_header(tensors, {"format": "pt"}))
        block = os.urandom(1 << 24)
        for start in range(0, at, len(block)):
            file.write(block[: at - start])
    config = {
        "architectures": ["LlamaEagle3DraftModel"], "model_type": "llama", "parallel_drafting": True, "num_depths": 8,
        "mask_token_id": 3, "vocab_size": vocab, "draft_vocab_size": vocab, "hidden_size": H, "num_hidden_layers": 1,
        "num_attention_heads": HEADS, "num_key_value_heads": KV, "head_dim": HEAD, "intermediate_size": INNER,
        "rms_norm_eps": 1e-6, "max_position_embeddings": 40960, "rope_theta": 1e6, "hidden_act": "silu",
        "tie_word_embeddings": False, "eagle_aux_hidden_state_layer_ids": [2, 18, 33], "target_hidden_size": H,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    target = folder.parent / "target"
    target.mkdir()
    keys = ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")
    shape = {key: config[key] for key in (*keys, "rms_norm_eps", "max_position_embeddings", "rope_theta")}
    (target / "config.json").write_text(
        json.dumps(shape | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 36})
    )


def command(way: str, draft: Path, out: Path) -> list[str]:
    """What is timed; `out` does not exist yet."""
    if way == "cp":
        return ["cp", "--reflink=auto", str(draft / "model.safetensors"), str(out)]
    if way == "export":
        serve = "nemo_automodel.components.speculative.serve_vllm"
        words = ["--draft", str(draft), "--target", str(draft.parent / "target"), "--export-dir", str(out)]
        return [sys.executable, "-m", serve, *words, "--vllm-version", "0.32", "--export-only"]
    code = (
        "import sys; from safetensors.torch import load_file, save_file;"
        "save_file({k.removeprefix('model.'): v for k, v in load_file(sys.argv[1]).items()}, sys.argv[2])"
    )
    return [sys.executable, "-c", code, str(draft / "model.safetensors"), str(out)]


def measure(argv: list[str]) -> tuple[float, float]:
    """Wall seconds, and peak resident memory in MB, of one child; its bytes are on the disk when the clock stops."""
    began = time.monotonic()
    child = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    errors = child.stderr.read().decode(errors="replace")
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        sys.exit(f"error: {argv[0]} ended with {child.returncode}: {errors.strip()[-500:]}")
    os.sync()
    return time.monotonic() - began, usage.ru_maxrss / 1024


def main() -> None:
    """Write the draft, run each way three times, print a line each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=2.5)
    parser.add_argument("--folder", type=Path, help="where to write (default: the system's temp folder)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        work = Path(name)
        write_draft(work / "draft", arguments.gigabytes)
        os.sync()
        seen: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
        for turn in range(3):
            for way in WAYS:
                out = work / f"out_{turn}"
                seen[way].append(measure(command(way, work / "draft", out)))
                shutil.rmtree(out) if out.is_dir() else out.unlink()
        floor = min(seconds for seconds, _ in seen["cp"])
        for way, runs in seen.items():
            best = min(seconds for seconds, _ in runs)
            print(f"{way:<18} {best:6.2f} s  {best / floor:5.2f} x cp  {max(mb for _, mb in runs):7.0f} MB peak")


if __name__ == "__main__":
    main()
