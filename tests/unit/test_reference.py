# SPDX-License-Identifier: Apache-2.0
"""The reference decoder's counting, and its one-forward predictions against a loop that decodes step by step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from nemo_automodel.components.speculative.bench.reference import Row, main, walk
from nemo_automodel.components.speculative.draft.io import save_draft
from nemo_automodel.components.speculative.draft.peagle import PEagleDraft, build_draft
from nemo_automodel.components.speculative.draft.spec import DraftSpec, RopeSpec
from nemo_automodel.components.speculative.methods.attention import CrossDepthAttention
from nemo_automodel.components.speculative.methods.cod import pack_elements

V, EOS, K = 24, 2, 3


def counted(continuation: list[int], proposals: dict[int, list[int]], limit: int = 99) -> tuple:
    """`walk` over a prompt of one token: proposals[i] follows continuation[i]."""
    got = walk(Row([9], continuation), proposals, frozenset({EOS}), limit)
    return got.num_drafts, got.accepted_per_position, got.output_tokens


MISS = [0, 0]


def test_prefill_counts_no_draft() -> None:
    assert counted([EOS, 5, 5, 5], {0: MISS}) == (0, (0, 0), 1)
    assert counted([7, 5, 5, 5], {0: MISS}, limit=1) == (0, (0, 0), 1)


def test_a_miss_hides_later_hits_and_a_step_gives_one_token_more_than_it_accepts() -> None:
    # after 7: [0, 6] misses at once, though 6 would be right; after 5: both right, and EOS comes as the bonus token
    assert counted([7, 5, 6, 8, EOS, 1, 1], {0: [0, 6], 1: [6, 8], 2: MISS, 3: MISS, 4: MISS}) == (2, (1, 1), 5)


def test_accepted_tokens_past_the_end_are_counted_but_not_returned() -> None:
    assert counted([7, EOS, 4, 4, 4], {0: [EOS, 4]}) == (1, (1, 1), 2)
    assert counted([7, 5, 4, 4, 4], {0: [5, 4]}, limit=2) == (1, (1, 1), 2)


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    torch.manual_seed(3)
    config = Qwen3Config(vocab_size=V, hidden_size=16, intermediate_size=24, num_hidden_layers=5, num_attention_heads=2,
                         num_key_value_heads=1, head_dim=8, eos_token_id=EOS, initializer_range=0.4)  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({"<eos>" if i == EOS else f"t{i}": i for i in range(V)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>")
    tokenizer.chat_template = (
        "{% for m in messages %}t4 {{ m['content'] }} {% endfor %}{% if add_generation_prompt %}t5{% endif %}"
    )
    tokenizer.save_pretrained(folder)
    return folder


def make_draft(folder: Path, target: Qwen3ForCausalLM) -> PEagleDraft:
    spec = DraftSpec(16, 16, 2, 2, 1, 8, 24, 1e-6, V, V, 512, RopeSpec(1e4), (1, 2, 3), 3, K, 0.8, 0.2)
    torch.manual_seed(1)
    head = target.lm_head.weight.detach()
    draft = build_draft(spec, embed_weight=target.model.embed_tokens.weight.detach(), lm_head_weight=head)
    with torch.no_grad():  # lean on the target's deepest aux state, so that something is accepted
        draft.model.fc.weight[:, 32:] += torch.eye(16)
    save_draft(folder, draft, spec, torch.float32)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"pard_token": 3}))
    return draft


@torch.no_grad()
def decode_step_by_step(target: Qwen3ForCausalLM, draft: PEagleDraft, prompt: list[int], limit: int) -> tuple:
    """Draft, verify, accept, one step at a time, every forward from scratch; as vLLM's loop does."""

    def run(ids: list[int]) -> tuple[list[int], torch.Tensor]:
        out = target(input_ids=torch.tensor([ids]), output_hidden_states=True)
        return out.logits[0].argmax(-1).tolist(), torch.cat([out.hidden_states[k] for k in (1, 2, 3)], dim=-1)

    drafts, accepted, answer = 0, [0] * K, [run(prompt)[0][-1]]
    while EOS not in answer and len(answer) < limit:
        ids = prompt + answer
        kept = torch.zeros(1, len(ids) - 1, K, dtype=torch.bool)
        kept[0, -1] = True
        aux = run(ids[:-1])[1]
        attention = CrossDepthAttention(pack_elements(kept), len(ids) - 1)
        hidden = draft(torch.tensor([ids[1:]]), aux, attention)[0, len(ids) - 2 :]
        proposal = draft.lm_head(hidden).argmax(-1).tolist()
        verified = run(ids + proposal)[0][len(ids) - 1 :]
        matched = 0
        while matched < K and proposal[matched] == verified[matched]:
            accepted[matched] += 1
            matched += 1
        drafts += 1
        answer += verified[: matched + 1]
        answer = answer[: answer.index(EOS) + 1] if EOS in answer else answer
    return drafts, accepted, min(len(answer), limit)


@pytest.mark.parametrize("limit", [5, 24])
def test_one_forward_predicts_what_step_by_step_decoding_does(target_dir: Path, tmp_path: Path, limit: int) -> None:
    target = Qwen3ForCausalLM.from_pretrained(target_dir, dtype=torch.float32).eval()
    draft = make_draft(tmp_path, target)
    texts = [" ".join(f"t{6 + (7 * i + 3 * j) % 18}" for j in range(1 + i % 7)) for i in range(20)]
    rows = [{"messages": [{"role": "user", "content": t}, {"role": "assistant", "content": "t1"}]} for t in texts]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    job = dict(target=str(target_dir), draft=str(tmp_path), prompts=str(tmp_path / "rows.jsonl"), num_prompts=20,
               max_new_tokens=limit, num_speculative_tokens=K, dtype="float32")  # fmt: skip
    (tmp_path / "job.json").write_text(json.dumps(job))
    assert main(["--job", str(tmp_path / "job.json"), "--out", str(tmp_path / "out.json")]) == 0
    got = json.loads((tmp_path / "out.json").read_text())

    total, accepted, tokens = 0, [0] * K, 0
    for text in texts:
        prompt = [4, *(int(word[1:]) for word in text.split()), 5]
        one = decode_step_by_step(target, draft, prompt, limit)
        total, tokens = total + one[0], tokens + one[2]
        accepted = [a + b for a, b in zip(accepted, one[1], strict=True)]
    assert got == {"num_drafts": total, "accepted_per_position": accepted, "num_prompts": 20, "output_tokens": tokens}
    assert accepted[0] > 0


def test_a_bad_job_is_one_line_and_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "job.json").write_text('{"target": "x"}')
    assert main(["--job", str(tmp_path / "job.json"), "--out", str(tmp_path / "out.json")]) == 1
    assert "job.json" in (text := capsys.readouterr().err) and text.count("\n") == 1
    assert not (tmp_path / "out.json").exists()


def test_a_sequential_draft_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{}")
    job = dict(target="x", draft=str(tmp_path), prompts="x", num_prompts=1, max_new_tokens=1, num_speculative_tokens=K,
               dtype="float32")  # fmt: skip
    (tmp_path / "job.json").write_text(json.dumps(job))
    assert main(["--job", str(tmp_path / "job.json"), "--out", str(tmp_path / "out.json")]) == 1
    assert "EAGLE-3" in capsys.readouterr().err
