# SPDX-License-Identifier: Apache-2.0
"""Train the quickstart target model: tokenizer first, then a small Qwen3, on the CPU.

    python recipes/quickstart/build_target.py

The text is made while training, so no answer is seen often enough to be memorised.
"""

import argparse
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from corpus import pairs

HERE = Path(__file__).resolve().parent
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"]
PAD, IM_END = 0, 2
PROMPT_WEIGHT = 0.1  # the prompt is random words: learn its shape, spend little on it
CHAT_TEMPLATE = """{% for m in messages %}<|im_start|>{{ m['role'] }}
{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}{% else %}\
{{ m['content'] }}<|im_end|>{% endif %}

{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def build_tokenizer(out, vocab_size, rows, seed):
    """Byte-level BPE: any text can be encoded, words of the grammar take about two pieces."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIALS,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    stream = pairs(seed)
    bpe.train_from_iterator(("user\n%s\nassistant\n%s" % next(stream) for _ in range(rows)), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=SPECIALS[IM_END],
        pad_token=SPECIALS[PAD],
        additional_special_tokens=[SPECIALS[1], SPECIALS[3]],
        model_max_length=1024,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(out)
    return AutoTokenizer.from_pretrained(out)


def build_model(vocab_size, layers, seed):
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=IM_END,
        pad_token_id=PAD,
        use_sliding_window=False,
    )
    model = Qwen3ForCausalLM(config)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    return model


def encode(tokenizer, prompt, answer):
    """Token ids and loss weights of one chat, spelled as the chat template spells it."""
    head = tokenizer.encode(f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n")
    tail = tokenizer.encode(f"{answer}<|im_end|>")
    return head + tail, [PROMPT_WEIGHT] * len(head) + [1.0] * len(tail)


def batches(tokenizer, stream, size):
    """Endless padded batches; similar lengths go together so that little is padding."""
    while True:
        pool = sorted((encode(tokenizer, *next(stream)) for _ in range(size * 8)), key=lambda row: len(row[0]))
        groups = [pool[i : i + size] for i in range(0, len(pool), size)]
        for i in torch.randperm(len(groups)).tolist():
            width = max(len(ids) for ids, _ in groups[i])
            ids = torch.full((size, width), PAD)
            weights = torch.zeros(size, width)
            for row, (tokens, weight) in enumerate(groups[i]):
                ids[row, : len(tokens)] = torch.tensor(tokens)
                weights[row, : len(tokens)] = torch.tensor(weight)
            yield ids, weights


def loss_of(model, ids, weights):
    """Weighted next-token loss. Padding stands at the right, so causality hides it."""
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    weights = weights[:, 1:].flatten()
    return (losses * weights).sum() / weights.sum()


def make_optimizers(model, lr):
    """Muon for the matrices inside the layers (fewer steps than AdamW here), AdamW for the rest."""
    inner = [p for n, p in model.named_parameters() if p.ndim == 2 and ".layers." in n]
    known = {id(p) for p in inner}
    outer = [p for p in model.parameters() if id(p) not in known]
    muon = torch.optim.Muon(inner, lr=lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(outer, lr=lr, betas=(0.9, 0.98), weight_decay=0.0)]


def rate(step, steps):
    """Warm up over 3 percent of the run, stay, then fall to zero over the last half."""
    return min((step + 1) / max(1, 0.03 * steps), 1.0, max(0.0, 2.0 * (1 - step / steps)))


def train(model, data, steps, lr):
    optimizers = make_optimizers(model, lr)
    began, seen = time.time(), 0
    for step in range(steps):
        ids, weights = next(data)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr * rate(step, steps)
        loss = loss_of(model, ids, weights)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        seen += ids.numel()
        if step % 25 == 0 or step == steps - 1:
            print(f"step {step} loss {loss.item():.4f} tokens {seen} seconds {time.time() - began:.0f}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE / "target")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocab-size", type=int, default=512)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    tokenizer = build_tokenizer(args.out, args.vocab_size, 20000, args.seed)
    model = build_model(len(tokenizer), args.layers, args.seed)
    train(model, batches(tokenizer, pairs(args.seed + 1), args.batch), args.steps, args.lr)
    model.generation_config.update(do_sample=False, eos_token_id=IM_END, pad_token_id=PAD)
    model.to(torch.bfloat16).save_pretrained(args.out)


if __name__ == "__main__":
    main()
