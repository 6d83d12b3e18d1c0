# SPDX-License-Identifier: Apache-2.0
"""The shipped quickstart target and chat data are what their README promises."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch

QUICKSTART = Path(__file__).resolve().parents[2] / "recipes" / "quickstart"
TARGET = QUICKSTART / "target"
MASK, END = 3, 2


@pytest.fixture(scope="module")
def corpus():
    sys.path.insert(0, str(QUICKSTART))
    try:
        import corpus as module

        yield module
    finally:
        sys.path.remove(str(QUICKSTART))
        # These names are too common to leave behind for other tests.
        for name in ("corpus", "phrases"):
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(TARGET)


@pytest.fixture(scope="module")
def data():
    def read(name):
        rows = [json.loads(line) for line in (QUICKSTART / "data" / name).read_text().splitlines()]
        for row in rows:
            assert [message["role"] for message in row["messages"]] == ["user", "assistant"]
        return [tuple(message["content"] for message in row["messages"]) for row in rows]

    return {"train": read("train.jsonl"), "heldout": read("heldout.jsonl")}


def patterns(corpus):
    """(kind, regular expression) of every prompt wording, to read the slots back."""
    found = []
    for kind, (_, prompts, _) in corpus.KINDS.items():
        for prompt in prompts:
            seen = set()

            def group(match):
                slot = match.group(1)
                text = f"(?P={slot})" if slot in seen else f"(?P<{slot}>\\w+)"
                seen.add(slot)
                return text

            escaped = re.escape(prompt).replace(r"\{", "{").replace(r"\}", "}")
            found.append((kind, re.compile(re.sub(r"\{(\w+)\}", group, escaped))))
    return found


def parse(expressions, prompt):
    hits = [(kind, m.groupdict()) for kind, e in expressions if (m := e.fullmatch(prompt))]
    assert len(hits) == 1, prompt
    return hits[0]


def test_files_are_small():
    assert sum(path.stat().st_size for path in TARGET.iterdir()) < 4_000_000
    assert (QUICKSTART / "data" / "train.jsonl").stat().st_size <= 2_000_000


def test_config():
    config = json.loads((TARGET / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["num_hidden_layers"] >= 8 and config["hidden_size"] == 128
    assert config["vocab_size"] == 512 and config["dtype"] == "bfloat16"
    assert (config["pad_token_id"], config["eos_token_id"]) == (0, END)


def test_special_tokens(tokenizer):
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"]
    assert tokenizer.convert_tokens_to_ids(names) == [0, 1, END, MASK]
    assert len(tokenizer) == 512
    assert (tokenizer.pad_token, tokenizer.eos_token) == (names[0], names[END])


def test_rows(tokenizer, data):
    assert 3000 <= len(data["train"]) <= 5000 and len(data["heldout"]) == 60
    rows = data["train"] + data["heldout"]
    assert len({prompt for prompt, _ in rows}) == len(rows)
    lengths = [len(ids) for ids in tokenizer([answer for _, answer in rows])["input_ids"]]
    assert min(lengths) > 20 and max(lengths) < 150


def test_mask_token_never_occurs(tokenizer, data):
    texts = [text for row in data["train"] + data["heldout"] for text in row]
    assert not any(MASK in ids for ids in tokenizer(texts)["input_ids"])


def test_heldout_combinations_are_new(corpus, data):
    expressions = patterns(corpus)
    for name, rows in data.items():
        for prompt, _ in rows:
            kind, slots = parse(expressions, prompt)
            assert corpus.is_held_out(kind, slots) == (name == "heldout"), prompt


def test_training_stream_respects_the_rule(corpus):
    expressions, stream = patterns(corpus), corpus.pairs(7)
    for _ in range(300):
        assert not corpus.is_held_out(*parse(expressions, next(stream)[0]))


def test_heldout_answers_are_distinct_and_not_in_train(data):
    answers = {answer for _, answer in data["heldout"]}
    assert len(answers) == len(data["heldout"])
    assert not answers & {answer for _, answer in data["train"]}


def test_no_sentence_repeats_inside_an_answer(data):
    for _, answer in data["heldout"]:
        sentences = re.split(r"(?<=[.!?]) ", answer)
        assert len(set(sentences)) == len(sentences)


def test_template_marks_the_answer_with_its_end(tokenizer, data):
    prompt, answer = data["heldout"][0]
    chat = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    whole = tokenizer.apply_chat_template(chat, return_assistant_tokens_mask=True, return_dict=True)
    marked = [i for i, on in zip(whole["input_ids"], whole["assistant_masks"]) if on]
    assert marked == tokenizer.encode(answer) + [END]
    start = tokenizer.apply_chat_template(chat[:1], add_generation_prompt=True, return_dict=True)["input_ids"]
    assert whole["input_ids"][: len(start) + len(marked)] == start + marked


@torch.no_grad()
def test_answers_are_greedy_output_of_the_target(tokenizer, data):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    for prompt, answer in data["heldout"][:4] + data["train"][:2]:
        chat = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
        start = tokenizer.apply_chat_template(chat[:1], add_generation_prompt=True, return_dict=True)["input_ids"]
        want = tokenizer.encode(answer) + [END]
        # One forward over the answer: every token must be the first choice at its place.
        logits = model(torch.tensor([start + want])).logits[0, len(start) - 1 : -1]
        assert logits.argmax(-1).tolist() == want, prompt
