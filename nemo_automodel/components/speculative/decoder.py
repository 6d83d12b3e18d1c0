# SPDX-License-Identifier: Apache-2.0
"""Greedy speculative decoding in plain PyTorch, counted as vLLM counts it (design section 6).

The target answers first, without a draft: greedy text does not depend on one. Then all drafts along that text are made
at once and walked through as vLLM's loop would. Used while training (train/decode.py) and to predict what a server will
count (bench/reference.py).

vLLM's counting (0.32, `v1/core/sched/scheduler.py`): the prefill's token counts no draft; every later step counts one
draft and all K positions, also when fewer tokens are left; accepted tokens past the end are counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase

from nemo_automodel.components.datasets.rows import ChatRow
from nemo_automodel.components.speculative.draft.network import DraftNetwork
from nemo_automodel.components.speculative.draft.peagle import PEagleDraft
from nemo_automodel.components.speculative.methods.attention import CrossDepthAttention
from nemo_automodel.components.speculative.methods.cod import pack_elements
from nemo_automodel.components.speculative.target import Target
from nemo_automodel.errors import ConfigError

BATCH = 16  # prompts at a time


@dataclass(frozen=True)
class Counts:
    """What vLLM's counters would say, added up over the prompts."""

    num_drafts: int
    accepted_per_position: tuple[int, ...]  # [K]
    num_prompts: int
    output_tokens: int  # end-of-turn tokens included

    @property
    def acceptance_length(self) -> float:
        """1 + accepted / drafts; 1 where nothing was drafted."""
        return 1 + sum(self.accepted_per_position) / max(1, self.num_drafts)

    @property
    def acceptance_per_position(self) -> tuple[float, ...]:
        """[K] accepted at the position / drafts"""
        return tuple(accepted / max(1, self.num_drafts) for accepted in self.accepted_per_position)


@dataclass(frozen=True)
class Limits:
    """How long an answer may be, and how many tokens are drafted at a time."""

    max_new_tokens: int
    depths: int  # K

    @property
    def extra(self) -> int:
        """Tokens past an answer's end that drafts are still verified against."""
        return self.depths + 1


@dataclass(frozen=True)
class Row:
    """One prompt and what the target says greedily, K + 1 tokens past the end of the answer."""

    prompt: list[int]
    continuation: list[int]

    @property
    def ids(self) -> list[int]:
        return self.prompt + self.continuation


def stop_ids(target: Target, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids that end an answer in vLLM: the tokenizer's end of sequence and those of generation_config.json.

    Raises:
        ConfigError: generation_config.json asks for a repetition penalty, which vLLM applies and this decoder does not.
    """
    config: GenerationConfig = target.model.generation_config
    if config.repetition_penalty not in (None, 1.0):
        raise ConfigError(
            f"the target's generation_config.json sets repetition_penalty={config.repetition_penalty}",
            where="target.path",
            remedy="serve.benchmark.parity=false",
        )
    ids = config.eos_token_id
    listed = ids if isinstance(ids, list) else [ids]
    return frozenset(i for i in [*listed, tokenizer.eos_token_id] if i is not None)


def cut_answer(row: ChatRow) -> ChatRow | None:
    """The row up to its last question; None when nobody asks."""
    turns = list(row.messages)
    while turns and turns[-1]["role"] == "assistant":
        turns.pop()
    return replace(row, messages=tuple(turns)) if turns else None


def prompt_ids(tokenizer: PreTrainedTokenizerBase, row: ChatRow, template_kwargs: Mapping[str, Any]) -> list[int]:
    """Token ids as vLLM's chat endpoint builds them: the template's text, tokenised without extra special tokens."""
    fixed = {"tools": list(map(dict, row.tools)) or None, "tokenize": False, "add_generation_prompt": True}
    text = tokenizer.apply_chat_template(list(map(dict, row.messages)), **{**template_kwargs, **fixed})
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@torch.no_grad()
def continue_greedily(target: Target, prompts: list[list[int]], stops: frozenset[int], limits: Limits) -> list[Row]:
    """The target's greedy answers, each K + 1 tokens past its end: vLLM verifies drafts there too."""
    model, extra = target.model, limits.extra
    width, device = max(map(len, prompts)), model.device
    ids = torch.zeros(len(prompts), width, dtype=torch.int64, device=device)  # padded on the left
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt, device=device)
        mask[row, width - len(prompt) :] = 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    answers: list[list[int]] = [[] for _ in prompts]
    wanted, cache = [limits.max_new_tokens + extra] * len(prompts), None
    while any(len(a) < w for a, w in zip(answers, wanted, strict=True)):
        out = model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        cache, ids = out.past_key_values, out.logits[:, -1].argmax(-1, keepdim=True)
        mask = torch.cat((mask, torch.ones_like(ids)), dim=1)
        positions = positions[:, -1:] + 1
        for row, token in enumerate(ids[:, 0].tolist()):
            answers[row].append(token)
            if token in stops:
                wanted[row] = min(wanted[row], len(answers[row]) + extra)
    return [Row(p, a[:w]) for p, a, w in zip(prompts, answers, wanted, strict=True)]


@torch.no_grad()
def propose_all(draft: DraftNetwork, target: Target, rows: list[Row], depths: int) -> list[dict[int, list[int]]]:
    """What the draft proposes after every anchor: row -> anchor -> K target ids.

    Anchor a is the last position whose token the target has seen; token a + 1 is the one it just chose.
    """
    device = target.model.device
    lengths = torch.tensor([len(row.ids) for row in rows], device=device)
    ids = torch.zeros(len(rows), int(lengths.max()), dtype=torch.int64, device=device)
    for index, row in enumerate(rows):
        ids[index, : len(row.ids)] = torch.tensor(row.ids, device=device)
    mask = torch.arange(ids.shape[1], device=device) < lengths[:, None]
    aux = target.states(ids, mask.long()).aux
    if isinstance(draft, PEagleDraft):
        proposed = _propose_parallel(draft, ids, aux, rows, depths)
    else:
        proposed = [
            draft.propose(ids[i, 1 : len(row.ids)], aux[i, : len(row.ids) - 1], len(row.prompt) - 1, depths)
            for i, row in enumerate(rows)
        ]
    return [
        {len(row.prompt) - 1 + i: line for i, line in enumerate(tokens.tolist())}
        for row, tokens in zip(rows, proposed, strict=True)
    ]


def _propose_parallel(draft: PEagleDraft, ids: Tensor, aux: Tensor, rows: list[Row], depths: int) -> list[Tensor]:
    """All anchors and depths in one forward; ids [B, L], aux [B, L, 3H] -> per row [anchors, K]."""
    size = ids.shape[1] - 1
    kept = torch.zeros(len(rows), size, depths, dtype=torch.bool, device=ids.device)
    for index, row in enumerate(rows):
        kept[index, len(row.prompt) - 1 : len(row.ids) - 1] = True
    hidden = draft(ids[:, 1:], aux[:, :size], CrossDepthAttention(pack_elements(kept), size))
    proposed: list[Tensor] = []
    for index, row in enumerate(rows):
        count = len(row.continuation)  # anchors
        ground = hidden[index, len(row.prompt) - 1 : len(row.ids) - 1, None]  # [count, 1, H]
        chain = hidden[index, size : size + count * (depths - 1)].unflatten(0, (count, depths - 1))
        proposed.append(draft.choose(torch.cat((ground, chain), dim=1)))
    return proposed


def walk(row: Row, proposals: dict[int, list[int]], stops: frozenset[int], max_new_tokens: int) -> Counts:
    """vLLM's loop over one answer: prefill, then draft, verify and count until a stop token or the limit."""
    depths = len(next(iter(proposals.values())))
    accepted, drafts, done = [0] * depths, 0, 1  # the prefill gives one token and counts nothing
    stopped = row.continuation[0] in stops
    while not stopped and done < max_new_tokens:
        proposal = proposals[len(row.prompt) + done - 2]  # the newest token is continuation[done - 1]
        matched = 0
        while matched < depths and proposal[matched] == row.continuation[done + matched]:
            accepted[matched] += 1
            matched += 1
        drafts += 1
        gained = row.continuation[done : done + matched + 1]
        ends = [i for i, token in enumerate(gained) if token in stops]
        stopped = bool(ends)
        done += ends[0] + 1 if stopped else len(gained)
    return Counts(drafts, tuple(accepted), 1, min(done, max_new_tokens))


def add_counts(counts: list[Counts]) -> Counts:
    """Sum over prompts."""
    per_position = tuple(map(sum, zip(*(c.accepted_per_position for c in counts), strict=True)))
    drafts, tokens = sum(c.num_drafts for c in counts), sum(c.output_tokens for c in counts)
    return Counts(drafts, per_position, len(counts), tokens)


def count_drafts(
    draft: DraftNetwork, target: Target, rows: list[Row], stops: frozenset[int], limits: Limits
) -> list[Counts]:
    """What vLLM would count for each of the rows (made with the same limits) if it served this draft."""
    proposals = propose_all(draft, target, rows, limits.depths)
    return [walk(row, lines, stops, limits.max_new_tokens) for row, lines in zip(rows, proposals, strict=True)]
