# SPDX-License-Identifier: Apache-2.0
"""Small hand-made tokenizers and chat templates for the unit tests."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHATML_MARKED = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] }}<|im_end|>{% endgeneration %}{% else %}{{ m['content'] }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>", "<|begin_of_text|>", "<|start_header_id|>",
    "<|end_header_id|>", "<|eot_id|>",
)  # fmt: skip


def byte_tokenizer(template: str | None, *, merges: tuple[tuple[str, str], ...] = ()) -> PreTrainedTokenizerFast:
    """One token per byte (plus `merges`), special tokens first: ids 0.. are SPECIAL."""
    vocab = {token: i for i, token in enumerate(SPECIAL)}
    for token in [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in merges)]:
        vocab[token] = len(vocab)
    core = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>", bos_token="<|begin_of_text|>"
    )
    tokenizer.chat_template = template
    return tokenizer


def turns(*pairs: tuple[str, str]) -> list[dict[str, str]]:
    """(role, content) pairs as messages."""
    return [{"role": role, "content": content} for role, content in pairs]


def supervised_runs(encoder, row) -> list[str]:
    """What of the row is trained on, one string per contiguous run of supervised tokens."""
    encoded, _ = encoder.encode(row)
    runs: list[list[int]] = [[]]
    for token, on in zip(encoded.input_ids.tolist(), encoded.loss_mask.tolist()):
        if on:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    return [encoder.tokenizer.decode(run) for run in runs if run]
