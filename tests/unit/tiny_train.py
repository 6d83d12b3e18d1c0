# SPDX-License-Identifier: Apache-2.0
"""A tiny random Qwen3 target with its tokenizer, a few chat rows, and jobs over them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tiny_chat import CHATML, SPECIAL
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from nemo_automodel.components.speculative.train.job import TrainJob
from nemo_automodel.config.schema import DataConfig, DraftConfig, TargetConfig, TrainConfig

LETTERS = "abcdefghijklmnopqrstuvwxyz \n"
VOCAB = 64


def write_target(folder: Path) -> Path:
    """4 layers, hidden 32, 64 tokens (one per letter); max 128 positions."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=128, initializer_range=0.2,
        eos_token_id=2, pad_token_id=0, bos_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    letter_tokenizer().save_pretrained(folder)
    return folder


def letter_tokenizer() -> PreTrainedTokenizerFast:
    vocab = {token: i for i, token in enumerate([*SPECIAL, *LETTERS])}
    core = Tokenizer(models.WordLevel(vocab, unk_token="a"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    core.decoder = decoders.Fuse()
    core.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = CHATML
    return tokenizer


def write_rows(path: Path, count: int, offset: int = 0) -> Path:
    """Questions and answers of various lengths."""
    words = ["alpha", "beta", "gamma delta", "one two three", "x"]
    with path.open("w") as file:
        for i in range(offset, offset + count):
            answer = " ".join(words[(i + j) % 5] for j in range(1 + i % 4))
            turns = [{"role": "user", "content": words[i % 5]}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": turns}) + "\n")
    return path


def make_job(
    root: Path, run: str, *, rows: int = 16, draft: dict | None = None, data: dict | None = None, **train
) -> TrainJob:
    """A job in `root/run`; target and rows in `root` are made once."""
    target = root / "target"
    if not target.exists():
        write_target(target)
    held_out = write_rows(root / "heldout.jsonl", 4, offset=100)
    source = write_rows(root / f"rows{rows}.jsonl", rows)
    settings = {"seq_length": 64, "micro_batch_size": 2, "log_every_steps": 1, "num_threads": 1, "lr": 3e-3}
    (root / run).mkdir(parents=True, exist_ok=True)
    return TrainJob(
        TargetConfig(path=str(target)),
        DataConfig(**{"train": str(source), "validation": str(held_out), **(data or {})}),
        DraftConfig(**{"num_layers": 1, "num_depths": 3, **(draft or {})}),
        TrainConfig(**{**settings, **train}),
        root / run,
    )


def metrics_of(job: TrainJob) -> list[dict]:
    """The lines of metrics.jsonl."""
    return [json.loads(line) for line in (job.run_dir / "metrics.jsonl").read_text().splitlines()]


def losses_of(job: TrainJob) -> list[float]:
    return [line["loss"] for line in metrics_of(job) if "loss" in line]
