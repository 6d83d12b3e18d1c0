# SPDX-License-Identifier: Apache-2.0
"""EAGLE-3's training-time test against a naive drafter written here: one token at a time, lists of keys and values, as
vLLM drafts, but reading the true tokens. It reads the saved safetensors and shares no code with the product."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_alignment import H, V, YARN, NaiveDrafter, small_spec

from nemo_automodel.components.speculative.draft.build import build_draft
from nemo_automodel.components.speculative.draft.chain_attention import QUERY_CHUNK, ChainAttention
from nemo_automodel.components.speculative.draft.eagle3 import Eagle3Draft
from nemo_automodel.components.speculative.draft.io import save_draft
from nemo_automodel.components.speculative.draft.spec import DraftSpec, RopeSpec
from nemo_automodel.components.speculative.methods import eagle3, losses
from nemo_automodel.components.speculative.methods.batch import LossOut, TrainBatch
from nemo_automodel.components.speculative.methods.peagle import teacher_head
from nemo_automodel.components.speculative.target import TargetStates

DECAY = 0.8
EAGLE3 = {"parallel_drafting": False, "ttt_loss_decay": DECAY, "mask_token_id": None, "num_depths": 3}


class NaiveEagle3(NaiveDrafter):
    """`NaiveDrafter`'s layers, fed with tokens and states of one chain after the other."""

    def combined(self, aux: torch.Tensor) -> torch.Tensor:
        if self.c["fc_norm"]:
            aux = torch.cat([self.norm(part, f"fc_norm.{i}") for i, part in enumerate(aux.split(H))])
        return self.lin(aux, "fc")

    def one(self, token: int, hidden: torch.Tensor, position: int, cache: list) -> tuple[torch.Tensor, torch.Tensor]:
        """(after the last norm, what is fed back)"""
        states: list[torch.Tensor] = []
        lin, norm = self.lin, self.norm
        self.lin = lambda x, name: x if name == "fc" else lin(x, name)  # the state goes in as it is
        self.norm = lambda x, name: states.append(x) or norm(x, name) if name == "norm" else norm(x, name)
        try:
            final = self.step(token, hidden, position, cache)
        finally:
            del self.lin, self.norm
        return final, final if self.c["norm_output"] else states[0]

    def unroll(self, ids: list[int], aux: torch.Tensor) -> dict[tuple[int, int], torch.Tensor]:
        """Final states of every (anchor, step) of one row whose token is there; ids [len], aux [len, 3H]."""
        out, cache = {}, [[] for _ in range(self.c["num_hidden_layers"])]
        for a in range(len(ids) - 1):
            out[a, 0], hidden = self.one(ids[a + 1], self.combined(aux[a]), a, cache)
            chain = list(cache)  # thrown away before the next anchor
            for s in range(1, min(self.c["ttt_steps"], len(ids) - 1 - a)):
                out[a, s], hidden = self.one(ids[a + 1 + s], hidden, a + s, chain)
        return out


SPECS = {
    "plain": {},
    "norm_output, fc_norm": {"norm_output": True, "fc_norm": True},
    "norm_before_residual, one layer, full vocabulary": {
        "norm_before_residual": True, "num_layers": 1, "draft_vocab_size": V,
    },
    "K=1": {"num_depths": 1},
    "K=5, yarn": {"num_depths": 5, "rope": RopeSpec(100.0, YARN)},
}  # fmt: skip
ROWS = [(0, 0, 9), (1, 0, 5), (2, 0, 12)]  # (line, start, length) without packing
PACKED = [(0, 0, 5), (0, 5, 7), (1, 0, 3), (1, 3, 2), (1, 5, 6)]


def random_draft(spec: DraftSpec) -> Eagle3Draft:
    vocab = torch.arange(V)[::2][: spec.draft_vocab_size] if spec.draft_vocab_size < V else None
    draft = build_draft(spec, embed_weight=torch.randn(V, H), lm_head_weight=torch.randn(V, H), vocab_ids=vocab)
    with torch.no_grad():
        for name, p in draft.named_parameters():
            if "norm" in name:
                p.uniform_(0.5, 1.5)
            elif "proj" in name or name == "model.fc.weight":
                p.normal_(std=0.2)
    return draft


def make_batch(rows: list[tuple[int, int, int]]) -> tuple[TrainBatch, TargetStates]:
    lengths = torch.zeros(max(line for line, _, _ in rows) + 1, dtype=torch.int64)
    for line, start, length in rows:
        lengths[line] = start + length
    shape = (len(lengths), int(lengths.max()))
    starts = torch.zeros(shape, dtype=torch.int64)
    for line, start, length in rows:
        starts[line, start : start + length] = start
    batch = TrainBatch(torch.randint(0, V, shape), torch.rand(shape) < 0.7, lengths, starts)
    return batch, TargetStates(torch.randn(*shape, 3 * H), torch.randn(*shape, H))


def naive_loss(
    naive: NaiveEagle3, batch: TrainBatch, states: TargetStates, head: torch.Tensor, rows: list, said: set[int]
) -> LossOut:
    """Straight from the definition, element by element; `said`: the tokens of the draft vocabulary."""
    steps, w = naive.c["ttt_steps"], naive.w["lm_head.weight"]
    total, correct, count = torch.zeros(()), [0] * steps, [0] * steps
    for line, start, length in rows:
        part = slice(start, start + length)
        drafted = naive.unroll(batch.input_ids[line, part].tolist(), states.aux[line, part])
        for (a, s), final in drafted.items():
            if a + 2 + s >= length or not batch.loss_mask[line, start + a + 2 + s]:
                continue
            count[s] += 1
            if int(batch.input_ids[line, start + a + 2 + s]) not in said:
                continue  # wrong whatever is drafted, and nothing to learn from
            teacher = torch.log_softmax(head @ states.last[line, start + a + 1 + s], 0)
            student = torch.log_softmax(w @ final, 0)
            total = total + DECAY**s * (teacher.exp() * (teacher - student)).sum()
            correct[s] += int(teacher.argmax() == student.argmax())
    return LossOut(total, torch.tensor(sum(count)), torch.tensor(correct), torch.tensor(count))


@pytest.mark.parametrize("rows", [ROWS, PACKED], ids=["padded", "packed"])
@pytest.mark.parametrize("changes", SPECS.values(), ids=SPECS)
def test_loss_and_gradients_equal_the_naive_ones(
    tmp_path: Path, changes: dict, rows: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(7)
    spec = small_spec(**(EAGLE3 | changes))
    monkeypatch.setattr(losses, "CHUNK_ENTRIES", 4 * spec.draft_vocab_size)  # four elements at a time
    monkeypatch.setitem(QUERY_CHUNK, "cpu", 4)
    draft, (batch, states), head = random_draft(spec), make_batch(rows), torch.randn(V, H)
    save_draft(tmp_path, draft, spec, torch.float32)
    naive = NaiveEagle3(tmp_path)
    out = eagle3.forward_to_loss(draft, batch, states, teacher_head(draft, head))
    out.loss_sum.backward()
    ids = draft.vocab_ids()
    ids = torch.arange(V) if ids is None else ids
    want = naive_loss(naive, batch, states, head[ids], rows, set(ids.tolist()))
    want.loss_sum.backward()
    assert min(want.count_per_depth) > 0 and want.count_per_depth[0] > 5
    assert out.count_per_depth.tolist() == want.count_per_depth.tolist() and out.count == want.count
    assert out.correct_per_depth.tolist() == want.correct_per_depth.tolist()
    torch.testing.assert_close(out.loss_sum, want.loss_sum, atol=1e-5, rtol=1e-5)
    for name, p in draft.named_parameters():
        if p.requires_grad:
            expected = torch.zeros_like(p) if naive.w[name].grad is None else naive.w[name].grad
            got = torch.zeros_like(p) if p.grad is None else p.grad
            scale = max(1.0, float(expected.abs().max()))  # fp32 rounds sums of large terms
            torch.testing.assert_close(got, expected, atol=1e-5 * scale, rtol=0.0, msg=lambda m, n=name: f"{n}: {m}")


def test_rows_packed_together_learn_what_they_learn_apart() -> None:
    torch.manual_seed(3)
    draft = random_draft(small_spec(**EAGLE3))
    batch, states = make_batch(PACKED)
    head = teacher_head(draft, torch.randn(V, H))
    together = eagle3.forward_to_loss(draft, batch, states, head)
    apart = []
    for line, start, length in PACKED:
        part = slice(start, start + length)
        ids, mask = batch.input_ids[line : line + 1, part], batch.loss_mask[line : line + 1, part]
        alone = TrainBatch(ids, mask, torch.tensor([length]), torch.zeros_like(ids))
        own = TargetStates(states.aux[line : line + 1, part], states.last[line : line + 1, part])
        apart.append(eagle3.forward_to_loss(draft, alone, own, head))
    torch.testing.assert_close(together.loss_sum, sum(out.loss_sum for out in apart), atol=1e-4, rtol=1e-5)
    assert together.count_per_depth.tolist() == sum(out.count_per_depth for out in apart).tolist()


def test_no_tensor_of_the_backward_pass_grows_with_the_square_of_the_row() -> None:
    """What autograd keeps per token is the same for a row four times as long."""

    def kept_per_token(length: int) -> float:
        draft = random_draft(small_spec(**EAGLE3, max_position_embeddings=2048))
        batch, states = make_batch([(0, 0, length)])
        sizes: dict[int, int] = {}

        def note(t: torch.Tensor) -> torch.Tensor:
            sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            eagle3.forward_to_loss(draft, batch, states, teacher_head(draft, torch.randn(V, H)))
        return (sum(sizes.values()) - sum(p.nbytes for p in draft.parameters())) / length

    assert kept_per_token(1024) < 1.2 * kept_per_token(256)


def test_a_batch_of_rows_with_nothing_to_learn_gives_no_loss() -> None:
    draft = random_draft(small_spec(**EAGLE3))
    batch, states = make_batch(ROWS)
    out = eagle3.forward_to_loss(
        draft,
        replace(batch, loss_mask=torch.zeros_like(batch.loss_mask)),
        states,
        teacher_head(draft, torch.randn(V, H)),
    )
    assert float(out.loss_sum.detach()) == 0.0 and int(out.count) == 0


def test_chunks_read_no_further_than_their_queries_reach() -> None:
    """The prefix of each chunk follows the anchors, and packing keeps it within the rows of its queries."""
    anchors, starts = torch.arange(8)[None], torch.tensor([[0, 0, 0, 0, 4, 4, 4, 4]])
    packed = ChainAttention(anchors, starts, chunk=4)
    assert packed.chain_chunks == packed.ground_chunks == [(0, 4, 0, 4), (4, 8, 4, 8)]
    plain = ChainAttention(anchors, torch.zeros_like(starts), chunk=4)
    assert plain.chain_chunks == [(0, 4, 0, 4), (4, 8, 0, 8)] and plain.ground_chunks is None
