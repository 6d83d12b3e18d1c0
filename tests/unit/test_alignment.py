# SPDX-License-Identifier: Apache-2.0
"""The training forward against a naive drafter written here: one position at a time, a list of keys and values, as vLLM
drafts. It reads the saved safetensors and shares no code with the product."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from nemo_automodel.components.speculative.draft.io import save_draft
from nemo_automodel.components.speculative.draft.build import build_draft
from nemo_automodel.components.speculative.draft.peagle import PEagleDraft
from nemo_automodel.components.speculative.draft.spec import DraftSpec, RopeSpec
from nemo_automodel.components.speculative.methods import losses
from nemo_automodel.components.speculative.methods.attention import CrossDepthAttention
from nemo_automodel.components.speculative.methods.batch import TrainBatch
from nemo_automodel.components.speculative.methods.cod import DepthElements, pack_elements, sample_depths
from nemo_automodel.components.speculative.methods.peagle import loss_of_elements, teacher_head
from nemo_automodel.components.speculative.target import TargetStates

H, V, K, LENGTHS = 16, 23, 4, (9, 5, 12)
DRAFT_VOCAB = torch.tensor([1, 2, 4, 5, 6, 9, 11, 15, 17, 20, 22])


def small_spec(**changes: object) -> DraftSpec:
    values: dict = dict(
        hidden_size=H, target_hidden_size=H, num_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=6,
        intermediate_size=24, rms_norm_eps=1e-5, vocab_size=V, draft_vocab_size=len(DRAFT_VOCAB),
        max_position_embeddings=64, rope=RopeSpec(100.0), aux_layer_ids=(1, 2, 3), mask_token_id=3, num_depths=K,
        down_sample_ratio=0.8, down_sample_ratio_min=0.5,
    )  # fmt: skip
    return DraftSpec(**(values | changes))


def rope_speeds(theta: float, half: int, scaling: dict | None) -> tuple[list[float], float]:
    """Radians per position of every pair, and the factor on cos and sin; one pair at a time, from the papers.

    llama3: Llama 3.1's rule (long wavelengths divided by the factor, short ones kept, a ramp between, linear in turns
    per original context). yarn: arXiv 2309.00071, the ramp linear in the pair's index as in its authors' code and HF's;
    queries and keys both grow by 0.1 ln(factor) + 1.
    """
    plain = [theta ** (-i / half) for i in range(half)]
    if not scaling:
        return plain, 1.0
    factor, context = scaling["factor"], scaling["original_max_position_embeddings"]
    turns = [context * s / (2 * math.pi) for s in plain]  # of each pair within the original context
    if scaling["rope_type"] == "llama3":
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        kept = [min(max((t - low) / (high - low), 0.0), 1.0) for t in turns]
        return [s * k + s / factor * (1 - k) for s, k in zip(plain, kept, strict=True)], 1.0
    assert scaling["rope_type"] == "yarn"
    # the (broken) index of the pair that makes n turns: context * theta ** (-i / half) = 2 pi n
    first, last = (half * math.log(context / (2 * math.pi * scaling[b]), theta) for b in ("beta_fast", "beta_slow"))
    first, last = max(math.floor(first), 0), min(math.ceil(last), 2 * half - 1)
    slowed = [min(max((i - first) / (last - first), 0.0), 1.0) for i in range(half)]
    speeds = [s * (1 - r) + s / factor * r for s, r in zip(plain, slowed, strict=True)]
    return speeds, 0.1 * math.log(factor) + 1.0


class NaiveDrafter:
    """One position at a time, from the files alone."""

    def __init__(self, folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        self.w = {k: t.requires_grad_(t.is_floating_point()) for k, t in weights.items()}
        self.c = json.loads((folder / "config.json").read_text())

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x / torch.sqrt((x * x).mean() + self.c["rms_norm_eps"]) * self.w[f"model.{name}.weight"]

    def lin(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return self.w[f"model.{name}.weight"] @ x

    def rotate(self, x: torch.Tensor, position: int) -> torch.Tensor:  # x [heads, D]
        half = x.shape[-1] // 2
        speeds, size = rope_speeds(self.c["rope_theta"], half, self.c.get("rope_scaling"))
        angles = position * torch.tensor(speeds)
        a, b, cos, sin = x[:, :half], x[:, half:], size * angles.cos(), size * angles.sin()
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=1)

    def step(self, token: int, aux: torch.Tensor, position: int, cache: list) -> torch.Tensor:
        """One more position after those in `cache` (a list per layer of (k, v)); returns the final hidden state."""
        hidden, embed = self.lin(aux, "fc"), self.w["model.embed_tokens.weight"][token]
        for i in range(self.c["num_hidden_layers"]):
            name = f"layers.{i}."
            if i == 0:
                normed = self.norm(hidden, name + "hidden_norm")
                x = torch.cat((self.norm(embed, name + "input_layernorm"), normed))
                hidden = normed if self.c["norm_before_residual"] else hidden
            else:
                x = self.norm(hidden, name + "input_layernorm")
            q, k, v = (self.lin(x, f"{name}self_attn.{p}_proj").view(-1, self.c["head_dim"]) for p in "qkv")
            if self.c["architectures"] == ["Eagle3Qwen3ForCausalLM"]:
                q, k = (
                    torch.stack([self.norm(head, f"{name}self_attn.{n}_norm") for head in heads])
                    for n, heads in (("q", q), ("k", k))
                )
            cache[i] = cache[i] + [(self.rotate(k, position), v)]
            hidden = hidden + self.lin(self.attend(self.rotate(q, position), cache[i]), name + "self_attn.o_proj")
            x = self.norm(hidden, name + "post_attention_layernorm")
            gate = self.lin(x, name + "mlp.gate_proj")
            up = gate * torch.sigmoid(gate) * self.lin(x, name + "mlp.up_proj")
            hidden = hidden + self.lin(up, name + "mlp.down_proj")
        return self.norm(hidden, "norm")

    def attend(self, q: torch.Tensor, cache: list) -> torch.Tensor:
        heads = []
        for h in range(q.shape[0]):
            shared = h * self.c["num_key_value_heads"] // q.shape[0]
            scores = torch.stack([q[h] @ k[shared] / math.sqrt(q.shape[1]) for k, _ in cache])
            heads.append(sum(p * v[shared] for p, (_, v) in zip(torch.softmax(scores, 0), cache, strict=True)))
        return torch.cat(heads)

    def draft(self, ids: list[int], aux: torch.Tensor) -> dict[tuple[int, int], torch.Tensor]:
        """Final hidden states of every (anchor, depth) of one row; ids [len], aux [len, 3H]."""
        out, cache = {}, [[] for _ in range(self.c["num_hidden_layers"])]
        for a in range(len(ids) - 1):
            out[a, 0] = self.step(ids[a + 1], aux[a], a, cache)
            slots = list(cache)  # the mask slots' keys are thrown away before the next anchor
            for d in range(1, self.c["num_depths"]):
                mask = self.w["mask_hidden"].flatten()
                out[a, d] = self.step(self.c["mask_token_id"], mask, a + d, slots)
        return out


Case = tuple[PEagleDraft, TrainBatch, TargetStates, torch.Tensor, NaiveDrafter]


def make_case(tmp_path: Path, spec: DraftSpec) -> Case:
    torch.manual_seed(5)
    head = torch.randn(V, H)
    vocab = DRAFT_VOCAB if spec.draft_vocab_size < V else None
    draft = build_draft(spec, embed_weight=torch.randn(V, H), lm_head_weight=torch.randn(V, H), vocab_ids=vocab)
    with torch.no_grad():
        for name, p in draft.named_parameters():
            if "norm" in name:
                p.uniform_(0.5, 1.5)
            elif "proj" in name or name in ("model.fc.weight", "mask_hidden"):
                p.normal_(std=0.3)
    lengths = torch.tensor(LENGTHS)
    loss_mask = torch.rand(len(LENGTHS), max(LENGTHS)) < 0.8
    ids = torch.randint(0, V, loss_mask.shape)
    batch = TrainBatch(ids, loss_mask, lengths, torch.zeros_like(ids))
    states = TargetStates(torch.randn(*loss_mask.shape, 3 * H), torch.randn(*loss_mask.shape, H))
    save_draft(tmp_path, draft, spec, torch.float32)
    return draft, batch, states, head, NaiveDrafter(tmp_path)


def naive_rows(naive: NaiveDrafter, batch: TrainBatch, states: TargetStates) -> list[dict]:
    return [naive.draft(batch.input_ids[b, :n].tolist(), states.aux[b, :n]) for b, n in enumerate(LENGTHS)]


def all_elements(lengths: tuple[int, ...], depths: int) -> DepthElements:
    kept = torch.zeros(len(lengths), max(lengths) - 1, depths, dtype=torch.bool)
    for row, n in enumerate(lengths):
        kept[row, : n - 1] = True
    return pack_elements(kept)


# each has a pair of every kind: kept, between, slowed (head_dim 6: three pairs)
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 2, "beta_slow": 0.6}

SPECS = {
    "plain": {},
    "norm_before_residual": {"norm_before_residual": True},
    "full vocabulary, one layer": {"draft_vocab_size": V, "num_layers": 1},
    "K=1": {"num_depths": 1},
    "q_norm and k_norm": {"qk_norm": True},
    "llama3 rope": {"rope": RopeSpec(100.0, LLAMA3)},
    "yarn rope": {"rope": RopeSpec(100.0, YARN)},
}


@pytest.mark.parametrize("chunk", [4, 128])
@pytest.mark.parametrize("changes", SPECS.values(), ids=SPECS)
def test_every_anchor_and_depth_equals_the_naive_drafter(tmp_path: Path, changes: dict, chunk: int) -> None:
    spec = small_spec(**changes)
    draft, batch, states, _, naive = make_case(tmp_path, spec)
    elements = all_elements(LENGTHS, spec.num_depths)
    size = max(LENGTHS) - 1
    attention = CrossDepthAttention(elements, size, chunk=chunk)
    with torch.no_grad():
        hidden = draft(batch.input_ids[:, 1 : size + 1], states.aux[:, :size], attention)
        logits = draft.lm_head(hidden)
        want = naive_rows(naive, batch, states)
    for row, length in enumerate(LENGTHS):
        places = {(a, 0): a for a in range(length - 1)}
        for slot in elements.valid[row].nonzero().flatten().tolist():
            places[int(elements.anchors[row, slot]), int(elements.depths[row, slot])] = size + slot
        assert places.keys() == want[row].keys()
        for key, place in places.items():
            # a scaled frequency may differ in its last fp32 bit, which counts `position` times in the angle
            atol = 5e-5 if spec.rope.scaling else 1e-5
            torch.testing.assert_close(hidden[row, place], want[row][key], atol=atol, rtol=1e-5)
            expected = naive.w["lm_head.weight"] @ want[row][key]
            torch.testing.assert_close(logits[row, place], expected, atol=atol, rtol=1e-5)


def at_depth(elements: DepthElements, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and anchors of the supervised elements of one depth."""
    if depth == 0:
        return elements.supervised.nonzero(as_tuple=True)
    rows, slots = (elements.depths == depth).nonzero(as_tuple=True)
    return rows, elements.anchors[rows, slots]


def naive_loss(
    naive: NaiveDrafter, batch: TrainBatch, states: TargetStates, head: torch.Tensor, elements: DepthElements
) -> tuple[torch.Tensor, list[int], list[int]]:
    """Plain KL, element by element, straight from the definition."""
    rows = naive_rows(naive, batch, states)
    w, total = naive.w["lm_head.weight"], torch.zeros(())
    correct, count = [0] * elements.num_depths, [0] * elements.num_depths
    for d in range(elements.num_depths):
        for row, a in zip(*(x.tolist() for x in at_depth(elements, d)), strict=True):
            assert batch.loss_mask[row, a + d + 2] and a + d + 2 < LENGTHS[row]
            count[d] += 1
            if len(head) < V and batch.input_ids[row, a + d + 2] not in DRAFT_VOCAB:
                continue  # wrong whatever is drafted, and nothing to learn from
            teacher = torch.log_softmax(head @ states.last[row, a + d + 1], 0)
            student = torch.log_softmax(w @ rows[row][a, d], 0)
            total = total + (teacher.exp() * (teacher - student)).sum()
            correct[d] += int(teacher.argmax() == student.argmax())
    return total, correct, count


@pytest.mark.parametrize("changes", SPECS.values(), ids=SPECS)
def test_loss_and_gradients_equal_the_naive_ones(
    tmp_path: Path, changes: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = small_spec(**changes)
    monkeypatch.setattr(losses, "CHUNK_ENTRIES", 4 * spec.draft_vocab_size)  # four elements at a time
    draft, batch, states, head, naive = make_case(tmp_path, spec)
    elements = sample_depths(
        batch.loss_mask, batch.lengths, num_depths=spec.num_depths, ratio=spec.down_sample_ratio,
        ratio_min=spec.down_sample_ratio_min, generator=torch.Generator().manual_seed(1),
    )  # fmt: skip
    out = loss_of_elements(draft, batch, states, teacher_head(draft, head), elements)
    out.loss_sum.mul(0.5).backward()

    rows = DRAFT_VOCAB if spec.draft_vocab_size < V else torch.arange(V)
    total, correct, count = naive_loss(naive, batch, states, head[rows], elements)
    total.mul(0.5).backward()
    assert count[0] > 5 and min(count) > 0 and out.count_per_depth.tolist() == count and int(out.count) == sum(count)
    assert out.correct_per_depth.tolist() == correct
    torch.testing.assert_close(out.loss_sum, total, atol=1e-5, rtol=1e-5)
    for name, p in draft.named_parameters():
        if p.requires_grad:
            want, got = (torch.zeros_like(p) if g is None else g for g in (naive.w[name].grad, p.grad))
            scale = max(1.0, float(want.abs().max()))  # fp32 rounds sums of large terms, whatever the entry's own size
            atol = 5e-5 if spec.rope.scaling else 1e-5  # as above
            torch.testing.assert_close(got, want, atol=atol * scale, rtol=0.0, msg=lambda m, n=name: f"{n}: {m}")
