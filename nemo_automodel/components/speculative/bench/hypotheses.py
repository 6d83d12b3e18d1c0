# SPDX-License-Identifier: Apache-2.0
"""Why did the server count otherwise? Decode once more with one thing wrong at a time, and see which gives its counts.

    python -m nemo_automodel.components.speculative.bench.hypotheses --job job.json --out out.json

The target decodes once; only the draft's proposals are made anew for each hypothesis. Everything that differs silently
between engines, converters and trainers is tried (docs/measuring.md lists it).
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Callable, Iterator, Sequence

import torch
from torch import Tensor
from transformers import AutoTokenizer

from nemo_automodel.components.speculative.bench.reference import DTYPES, Job, answer_job, load_questions
from nemo_automodel.components.speculative.decoder import (
    BATCH,
    Counts,
    Row,
    add_counts,
    continue_greedily,
    count_drafts,
    prompt_ids,
    stop_ids,
)
from nemo_automodel.components.speculative.draft.build import empty_draft
from nemo_automodel.components.speculative.draft.io import load_draft
from nemo_automodel.components.speculative.draft.network import DraftNetwork
from nemo_automodel.components.speculative.draft.spec import DraftSpec, RopeSpec
from nemo_automodel.components.speculative.target import Target

State = dict[str, Tensor]
ROPE_THETAS = (10_000.0, 500_000.0, 1_000_000.0)  # HF's default, Llama 3's, Qwen's
EPSILONS = (1e-6, 1e-5)  # HF's default and Qwen's; Llama's
FC, MASK, HEAD, EMBED = "model.fc.weight", "mask_hidden", "lm_head.weight", "model.embed_tokens.weight"


@dataclass(frozen=True)
class Hypothesis:
    """One thing that may be wrong: another spec, or tensors changed by `edit`."""

    area: str
    name: str
    spec: DraftSpec
    edit: Callable[[State], State] = dict


@dataclass(frozen=True)
class Tried:
    """A hypothesis and what the server would have counted under it."""

    area: str
    name: str
    num_drafts: int
    accepted_per_position: tuple[int, ...]  # [K]


def plan_hypotheses(spec: DraftSpec, state: State, target: Target, special_ids: Sequence[int]) -> Iterator[Hypothesis]:
    """Every hypothesis that means something for this draft."""
    yield from _aux(spec, target.dims.num_layers)
    yield from _rope(spec, target.dims.rope)
    if spec.parallel_drafting:
        yield from _mask(spec, special_ids)
    if spec.draft_vocab_size < spec.vocab_size:
        yield from _map(spec, state)
    yield from _norms(spec, state)
    yield from _fc(spec)
    yield from _conventions(spec)
    yield from _shared(spec, target)


def _aux(spec: DraftSpec, layers: int) -> Iterator[Hypothesis]:
    ids = spec.aux_layer_ids
    others = {
        "one higher: an output-of-layer id taken for an input-of-layer one": tuple(i + 1 for i in ids),
        "one lower: an input-of-layer id taken for an output-of-layer one": tuple(i - 1 for i in ids),
        "vLLM's guess for a draft that names none": tuple(sorted({2, layers // 2, layers - 3})),
    }
    for why, other in others.items():
        if other != ids and len(set(other)) == len(ids) and 0 <= min(other) and max(other) < layers:
            yield Hypothesis("aux layers", f"aux layer ids {list(other)}, {why}", replace(spec, aux_layer_ids=other))


def _rope(spec: DraftSpec, target: RopeSpec) -> Iterator[Hypothesis]:
    for theta in dict.fromkeys((*ROPE_THETAS, target.theta)):
        if theta != spec.rope.theta:
            yield Hypothesis("rope", f"rope theta {theta:g}", replace(spec, rope=replace(spec.rope, theta=theta)))
    if target.scaling and target.scaling != spec.rope.scaling:
        yield Hypothesis("rope", "the target's rope scaling in place of the draft's",
                         replace(spec, rope=replace(spec.rope, scaling=target.scaling)))  # fmt: skip
    if spec.rope.scaling:
        yield Hypothesis("rope", "rope scaling lost", replace(spec, rope=replace(spec.rope, scaling=None)))


def _mask(spec: DraftSpec, special_ids: Sequence[int]) -> Iterator[Hypothesis]:
    near = (spec.mask_token_id - 1, spec.mask_token_id + 1)
    for token in dict.fromkeys((0, *special_ids, *near, spec.vocab_size - 1)):
        if token != spec.mask_token_id and 0 <= token < spec.vocab_size:
            yield Hypothesis("mask token", f"mask token id {token}", replace(spec, mask_token_id=token))
    zero = lambda state: state | {MASK: torch.zeros_like(state[MASK])}  # noqa: E731
    yield Hypothesis("mask token", "mask_hidden missing (zeros)", spec, zero)


def _map(spec: DraftSpec, state: State) -> Iterator[Hypothesis]:
    """Only what names tokens of the target: with others no server would have answered."""
    count = torch.arange(spec.draft_vocab_size)
    edits = {
        "d2t missing: draft ids taken for target ids": lambda d2t: torch.zeros_like(d2t),
        "d2t read as target ids, not as offsets": lambda d2t: d2t - count,
        "d2t in reverse order": lambda d2t: (d2t + count).flip(0) - count,
        "d2t shifted by one row": lambda d2t: (d2t + count).roll(1) - count,
    }
    for name, change in edits.items():
        ids = change(state["d2t"]) + count
        if 0 <= int(ids.min()) and int(ids.max()) < spec.vocab_size:
            yield Hypothesis(
                "vocabulary map", name, spec, lambda state, change=change: state | {"d2t": change(state["d2t"])}
            )


def _norms(spec: DraftSpec, state: State) -> Iterator[Hypothesis]:
    """vLLM leaves a weight that it does not find at its initial value: ones, for a norm."""
    for name in state:
        if "norm" in name and name.endswith("weight") and not bool((state[name] == 1).all()):
            ones = lambda state, name=name: state | {name: torch.ones_like(state[name])}  # noqa: E731
            yield Hypothesis("missing tensors", f"{name} left out (ones)", spec, ones)


def _fc(spec: DraftSpec) -> Iterator[Hypothesis]:
    for name, order in {
        "rotated by one": (1, 2, 0),
        "rotated by two": (2, 0, 1),
        "in reverse order": (2, 1, 0),
        "with the first two swapped": (1, 0, 2),
        "with the last two swapped": (0, 2, 1),
    }.items():

        def edit(state: State, order: tuple[int, ...] = order) -> State:
            blocks = state[FC].chunk(3, dim=1)
            return state | {FC: torch.cat([blocks[i] for i in order], dim=1)}

        yield Hypothesis("fc", f"fc blocks {name}", spec, edit)


def _conventions(spec: DraftSpec) -> Iterator[Hypothesis]:
    for eps in EPSILONS:
        if eps != spec.rms_norm_eps:
            yield Hypothesis("conventions", f"rms_norm_eps {eps:g}", replace(spec, rms_norm_eps=eps))
    flipped = not spec.norm_before_residual
    yield Hypothesis("conventions", f"norm_before_residual={flipped}", replace(spec, norm_before_residual=flipped))
    if not spec.parallel_drafting:
        yield Hypothesis(
            "conventions", f"norm_output={not spec.norm_output}", replace(spec, norm_output=not spec.norm_output)
        )
    if spec.num_layers > 1:
        yield Hypothesis("layers", "only the first layer runs", replace(spec, num_layers=1), _first_layer)


def _first_layer(state: State) -> State:
    return {name: t for name, t in state.items() if not name.startswith("model.layers.") or ".layers.0." in name}


def _shared(spec: DraftSpec, target: Target) -> Iterator[Hypothesis]:
    embed, head = target.embed_weight, target.lm_head_weight
    if embed.shape == (spec.vocab_size, spec.hidden_size):
        yield Hypothesis("shared weights", "the target's embeddings in place of the draft's", spec,
                         lambda state: state | {EMBED: embed.float().cpu()})  # fmt: skip
    if head.shape == (spec.draft_vocab_size, spec.hidden_size):
        yield Hypothesis("shared weights", "the target's lm_head in place of the draft's", spec,
                         lambda state: state | {HEAD: head.float().cpu()})  # fmt: skip


@dataclass(frozen=True)
class Asked:
    """The target's own answers to everything that the job asks, made once."""

    job: Job
    target: Target
    batches: tuple[list[Row], ...]
    stops: frozenset[int]
    special_ids: tuple[int, ...]

    def counts(self, draft: DraftNetwork) -> Counts:
        """What vLLM would count if this draft proposed."""
        target = Target(self.target.model, draft.spec.aux_layer_ids)
        draft = draft.to(DTYPES[self.job.dtype]).to(target.model.device).eval()
        counts = []
        for rows in self.batches:
            counts += count_drafts(draft, target, rows, self.stops, self.job.limits)
        return add_counts(counts)


def ask_target(job: Job, aux_layer_ids: tuple[int, ...]) -> Asked:
    """Load the target and let it answer.

    Raises:
        UserError: the job or target cannot be used.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    target = Target.load(job.target, aux_layer_ids=aux_layer_ids, dtype=DTYPES[job.dtype], device=device,
                         trust_remote_code=job.trust_remote_code)  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(job.target, trust_remote_code=job.trust_remote_code)
    stops = stop_ids(target, tokenizer)
    prompts = [prompt_ids(tokenizer, row, job.chat_template_kwargs) for row in load_questions(job)]
    parts = [prompts[i : i + BATCH] for i in range(0, len(prompts), BATCH)]
    batches = tuple(continue_greedily(target, part, stops, job.limits) for part in parts)
    return Asked(job, target, batches, stops, tuple(tokenizer.all_special_ids))


def try_all(job: Job) -> list[Tried]:
    """The counts under every hypothesis, the draft as it is first (area "").

    Raises:
        UserError: the job, target or draft cannot be used; which part is named.
    """
    draft, spec = load_draft(Path(job.draft))
    return try_each(ask_target(job, spec.aux_layer_ids), draft)


def try_each(asked: Asked, draft: DraftNetwork) -> list[Tried]:
    """As `try_all`, for a target that has answered already."""
    spec, state = draft.spec, draft.state_dict()
    tried = []
    for one in (Hypothesis("", "as it is", spec), *plan_hypotheses(spec, state, asked.target, asked.special_ids)):
        counts = asked.counts(build_changed(one, state))
        tried.append(Tried(one.area, one.name, counts.num_drafts, counts.accepted_per_position))
    return tried


def build_changed(hypothesis: Hypothesis, state: State) -> DraftNetwork:
    """The draft under a hypothesis, fp32 on the CPU; `state` is left as it is."""
    draft = empty_draft(hypothesis.spec)
    draft.load_state_dict(hypothesis.edit(dict(state)))
    return draft


def main(argv: list[str] | None = None) -> int:
    """Command line: the counts of a job under every hypothesis."""
    description = "Predict vLLM's counts with one thing wrong at a time."
    return answer_job(argv, description, lambda job: {"tried": [asdict(one) for one in try_all(job)]})


if __name__ == "__main__":
    sys.exit(main())
