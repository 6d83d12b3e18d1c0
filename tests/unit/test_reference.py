# SPDX-License-Identifier: Apache-2.0
"""The reference decoder's counting, and its one-forward predictions against a loop that decodes step by step."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from nemo_automodel.components.datasets.rows import ChatRow
from nemo_automodel.components.speculative.bench.reference import main
from nemo_automodel.components.speculative.decoder import Row, prompt_ids, walk
from nemo_automodel.components.speculative.draft.eagle3 import Eagle3Draft
from nemo_automodel.components.speculative.draft.io import save_draft
from nemo_automodel.components.speculative.draft.layers import apply_rotary
from nemo_automodel.components.speculative.draft.network import DraftNetwork
from nemo_automodel.components.speculative.draft.build import build_draft
from nemo_automodel.components.speculative.draft.peagle import PEagleDraft
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


def lean(draft: DraftNetwork) -> None:
    """Follow the target's deepest aux state, so that something is accepted; no norm is the identity."""
    with torch.no_grad():
        draft.model.fc.weight[:, 32:] += torch.eye(16)
        for name, p in draft.named_parameters():
            if "norm" in name:
                p.uniform_(0.8, 1.2)


def make_parallel(folder: Path, target: Qwen3ForCausalLM, **changes: object) -> PEagleDraft:
    spec = DraftSpec(16, 16, 2, 2, 1, 8, 24, 1e-6, V, V, 512, RopeSpec(1e4), (1, 2, 3), 3, K, 0.8, 0.2)
    spec = replace(spec, **changes)
    torch.manual_seed(1)
    head = target.lm_head.weight.detach()
    draft = build_draft(spec, embed_weight=target.model.embed_tokens.weight.detach(), lm_head_weight=head)
    lean(draft)
    save_draft(folder, draft, spec, torch.float32)
    edit(folder, {"pard_token": 3, "parallel_drafting": True})
    return draft


def edit(folder: Path, keys: dict) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | keys))


def make_sequential(folder: Path, target: Qwen3ForCausalLM, norm_output: bool, **changes: object) -> Eagle3Draft:
    """The same network without mask slot, half a vocabulary, as an exported EAGLE-3 folder."""
    same = make_parallel(folder, target, **changes)
    spec = replace(same.spec, draft_vocab_size=V // 2, parallel_drafting=False, norm_output=norm_output)
    draft = Eagle3Draft(spec)
    tensors = {n: t for n, t in same.state_dict().items() if n != "mask_hidden"}
    ids = torch.arange(V // 2) + 6
    tensors |= {"lm_head.weight": tensors["lm_head.weight"][ids], "d2t": torch.full((V // 2,), 6)}
    tensors["t2d"] = torch.isin(torch.arange(V), ids)
    draft.load_state_dict(tensors)
    bare = {n.removeprefix("model."): t.contiguous() for n, t in tensors.items()}
    save_file(bare, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    kept = {k: v for k, v in config.items() if k not in ("pard_token", "mask_token_id", "num_depths")}
    kept |= {"parallel_drafting": False, "draft_vocab_size": V // 2, "norm_output": norm_output}
    (folder / "config.json").write_text(json.dumps(kept))
    return draft


def draft_parallel(draft: PEagleDraft, ids: list[int], aux: torch.Tensor) -> list[int]:
    kept = torch.zeros(1, len(ids) - 1, K, dtype=torch.bool)
    kept[0, -1] = True
    attention = CrossDepthAttention(pack_elements(kept), len(ids) - 1)
    hidden = draft(torch.tensor([ids[1:]]), aux, attention)[0, len(ids) - 2 :]
    return draft.lm_head(hidden).argmax(-1).tolist()


def draft_sequential(draft: Eagle3Draft, ids: list[int], aux: torch.Tensor) -> list[int]:
    """One growing causal sequence, every forward from scratch: the real states, then the draft's own ones."""
    tokens, hidden, proposal = ids[1:], draft.model.fc(aux), []
    for _ in range(K):
        x, residual = draft.model.layers[0].fuse(draft.model.embed_tokens(torch.tensor([tokens])), hidden)
        cos, sin = draft.angles(torch.arange(len(tokens))[None])
        for index, layer in enumerate(draft.model.layers):
            q, k, v = layer.self_attn.project(layer.input_layernorm(residual) if index else x)
            q, k, v = (t.transpose(1, 2) for t in (apply_rotary(q, cos, sin), apply_rotary(k, cos, sin), v))
            mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            residual = layer.finish(mixed.transpose(1, 2), residual)
        last = draft.model.norm(residual)
        token = int(draft.lm_head(last[0, -1]).argmax()) + 6
        proposal.append(token)
        tokens = tokens + [token]
        hidden = torch.cat((hidden, (last if draft.spec.norm_output else residual)[:, -1:]), dim=1)
    return proposal


@torch.no_grad()
def decode_step_by_step(target: Qwen3ForCausalLM, draft: DraftNetwork, prompt: list[int], limit: int) -> tuple:
    """Draft, verify, accept, one step at a time, every forward from scratch; as vLLM's loop does."""

    def run(ids: list[int]) -> tuple[list[int], torch.Tensor]:
        out = target(input_ids=torch.tensor([ids]), output_hidden_states=True)
        return out.logits[0].argmax(-1).tolist(), torch.cat([out.hidden_states[k] for k in (1, 2, 3)], dim=-1)

    one = draft_parallel if isinstance(draft, PEagleDraft) else draft_sequential
    drafts, accepted, answer = 0, [0] * K, [run(prompt)[0][-1]]
    while EOS not in answer and len(answer) < limit:
        ids = prompt + answer
        proposal = one(draft, ids, run(ids[:-1])[1])
        verified = run(ids + proposal)[0][len(ids) - 1 :]
        matched = 0
        while matched < K and proposal[matched] == verified[matched]:
            accepted[matched] += 1
            matched += 1
        drafts += 1
        answer += verified[: matched + 1]
        answer = answer[: answer.index(EOS) + 1] if EOS in answer else answer
    return drafts, accepted, min(len(answer), limit)


DRAFTS = {
    "parallel": lambda folder, target: make_parallel(folder, target),
    "parallel, norm_before_residual, q_norm": lambda folder, target: make_parallel(
        folder, target, qk_norm=True, norm_before_residual=True
    ),
    "sequential": lambda folder, target: make_sequential(folder, target, False),
    "sequential, norm_output, q_norm": lambda folder, target: make_sequential(folder, target, True, qk_norm=True),
}


def write_job(folder: Path, target_dir: Path, rows: list[dict], **changes: object) -> list[str]:
    (folder / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    job = dict(target=str(target_dir), draft=str(folder), prompts=str(folder / "rows.jsonl"), num_prompts=len(rows),
               max_new_tokens=5, num_speculative_tokens=K, dtype="float32")  # fmt: skip
    (folder / "job.json").write_text(json.dumps(job | changes))
    return ["--job", str(folder / "job.json"), "--out", str(folder / "out.json")]


@pytest.mark.parametrize(("make", "limit"), [(m, 24) for m in DRAFTS.values()] + [(DRAFTS["parallel"], 5)],
                         ids=[*DRAFTS, "short"])  # fmt: skip
def test_one_forward_predicts_what_step_by_step_decoding_does(
    target_dir: Path, tmp_path: Path, make: Callable, limit: int
) -> None:
    target = Qwen3ForCausalLM.from_pretrained(target_dir, dtype=torch.float32).eval()
    draft = make(tmp_path, target)
    texts = [" ".join(f"t{6 + (7 * i + 3 * j) % 18}" for j in range(1 + i % 7)) for i in range(20)]
    rows = [{"messages": [{"role": "user", "content": t}, {"role": "assistant", "content": "t1"}]} for t in texts]
    rows[3:5] = [{"conversations": [{"from": "human", "value": t}, {"from": "gpt", "value": "t1"}]} for t in texts[3:5]]
    assert main(write_job(tmp_path, target_dir, rows, max_new_tokens=limit)) == 0
    got = json.loads((tmp_path / "out.json").read_text())

    total, accepted, tokens = 0, [0] * K, 0
    for text in texts:
        prompt = [4, *(int(word[1:]) for word in text.split()), 5]
        one = decode_step_by_step(target, draft, prompt, limit)
        total, tokens = total + one[0], tokens + one[2]
        accepted = [a + b for a, b in zip(accepted, one[1], strict=True)]
    assert got == {"num_drafts": total, "accepted_per_position": accepted, "num_prompts": 20, "output_tokens": tokens}
    assert accepted[0] > 0 and (isinstance(draft, PEagleDraft) or accepted[1] > 0)  # chains are fed back and verified


def test_a_prompt_is_built_with_the_rows_tools_and_the_jobs_template_values(target_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(target_dir)
    tokenizer.chat_template = (
        "{% for t in tools or [] %}{{ t['name'] }} {% endfor %}{{ messages[0]['content'] }}{% if hush %} t9{% endif %}"
    )
    row = ChatRow(1, ({"role": "user", "content": "t6"},), ({"name": "t7"}, {"name": "t8"}))
    assert prompt_ids(tokenizer, row, {"hush": True}) == [7, 8, 6, 9]
    assert prompt_ids(tokenizer, replace(row, tools=()), {}) == [6]


def test_rows_longer_than_a_sliding_window_are_refused(
    target_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_parallel(tmp_path, Qwen3ForCausalLM.from_pretrained(target_dir), qk_norm=True)
    argv = write_job(tmp_path, target_dir, [{"messages": [{"role": "user", "content": "t6"}]}])
    edit(tmp_path, {"layer_types": ["sliding_attention"] * 2, "sliding_window": 2048})
    assert main(argv) == 0
    edit(tmp_path, {"sliding_window": 4})
    assert main(argv) == 1 and "sliding window is 4" in capsys.readouterr().err


def test_a_bad_job_is_one_line_and_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "job.json").write_text('{"target": "x"}')
    assert main(["--job", str(tmp_path / "job.json"), "--out", str(tmp_path / "out.json")]) == 1
    assert "job.json" in (text := capsys.readouterr().err) and text.count("\n") == 1
    assert not (tmp_path / "out.json").exists()
