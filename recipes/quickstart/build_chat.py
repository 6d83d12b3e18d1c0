# SPDX-License-Identifier: Apache-2.0
"""Let the quickstart target answer prompts itself and write the chat files.

    python recipes/quickstart/build_chat.py

A draft learns to guess its target, so the answers are the target's greedy output, right or
wrong. Held-out prompts come from the side of the corpus that is in no training text.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from corpus import pairs

HERE = Path(__file__).resolve().parent
LIMIT = 150  # answers that do not end within so many tokens are dropped


def load(path):
    """The shipped bf16 weights, computed in float32 so that answers do not hang on kernels."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(path, padding_side="left")


def distinct_prompts(seed, held_out, count):
    stream, found = pairs(seed, held_out), {}
    while len(found) < count:
        found[next(stream)[0]] = None
    return list(found)


@torch.no_grad()
def answer(model, tokenizer, prompts):
    """Greedy answers of one batch; None where the answer is empty or does not end."""
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    inputs = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**inputs, max_new_tokens=LIMIT, do_sample=False)
    texts = []
    for row in output[:, inputs["input_ids"].shape[1] :].tolist():
        end = row.index(tokenizer.eos_token_id) if tokenizer.eos_token_id in row else 0
        texts.append(tokenizer.decode(row[:end]) if end else None)
    return texts


def answer_all(model, tokenizer, prompts, batch):
    """Chats of all prompts; equal lengths share a batch, the order of the prompts stays."""
    order = sorted(range(len(prompts)), key=lambda i: len(tokenizer.encode(prompts[i])))
    texts = [None] * len(prompts)
    for begin in range(0, len(order), batch):
        chosen = order[begin : begin + batch]
        for i, text in zip(chosen, answer(model, tokenizer, [prompts[i] for i in chosen])):
            texts[i] = text
    return [
        {"messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": text}]}
        for prompt, text in zip(prompts, texts)
        if text
    ]


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{path}: {len(rows)} rows, {path.stat().st_size:,} bytes", flush=True)


def accuracy(rows, seed, held_out):
    """Share of answers equal to the grammar's reference."""
    stream, want = pairs(seed, held_out), {row["messages"][0]["content"]: row["messages"][1]["content"] for row in rows}
    right, seen = 0, set()
    while len(seen) < len(want):
        prompt, reference = next(stream)
        if prompt in want and prompt not in seen:
            seen.add(prompt)
            right += want[prompt] == reference
    return right / len(rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", type=Path, default=HERE / "target")
    parser.add_argument("--out", type=Path, default=HERE / "data")
    parser.add_argument("--train-rows", type=int, default=4000)
    parser.add_argument("--heldout-rows", type=int, default=60)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--seed", type=int, default=100)
    args = parser.parse_args()
    model, tokenizer = load(args.target)
    plan = (("heldout", True, args.heldout_rows), ("train", False, args.train_rows))
    for name, held_out, count in plan:
        began, seed = time.time(), args.seed + held_out
        # A few more prompts than rows, since unfinished answers are dropped.
        prompts = distinct_prompts(seed, held_out, count + count // 20)
        rows = answer_all(model, tokenizer, prompts, args.batch)[:count]
        write(args.out / f"{name}.jsonl", rows)
        print(f"  {accuracy(rows, seed, held_out):.1%} as the grammar says, {time.time() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
