# SPDX-License-Identifier: Apache-2.0
"""The true acceptance length while training: held-out prompts, answered by the target, drafted by the draft as it is.

In float32 these are the counts of a server with this checkpoint. The target's answers do not depend on the draft: they
are made once and kept.
"""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass
from typing import Any, Iterator, Sequence

import torch
from torch import nn

from nemo_automodel.components.datasets.rows import BadRow, ChatRow, read_rows
from nemo_automodel.components.speculative.decoder import (
    BATCH, Counts, Limits, Row, add_counts, continue_greedily, count_drafts, cut_answer, prompt_ids, stop_ids,
)  # fmt: skip
from nemo_automodel.components.speculative.draft.network import DraftNetwork
from nemo_automodel.components.speculative.train.data import Say
from nemo_automodel.components.speculative.train.job import TrainJob
from nemo_automodel.components.speculative.train.setup import Models
from nemo_automodel.errors import ConfigError


@dataclass(frozen=True)
class Prompts:
    """What is asked, as token ids, and what ends an answer."""

    ids: tuple[list[int], ...]
    stops: frozenset[int]
    limits: Limits


class DecodeCheck:
    """Decodes the prompts with the models as they are, in one process; leaves every random state as it was."""

    def __init__(self, models: Models, prompts: Prompts) -> None:
        self.models, self.prompts = models, prompts
        self._answered: list[list[Row]] | None = None  # token ids alone

    @torch.no_grad()
    def figures(self) -> dict[str, Any]:
        """`decode` of metrics.jsonl (docs/training.md)."""
        began = time.monotonic()
        if self._answered is None:
            self._answered = list(self._answer())
        draft, prompts = _as_saved(self.models.draft, getattr(torch, self.models.spec.dtype)), self.prompts
        target = self.models.target
        counts = [count_drafts(draft, target, rows, prompts.stops, prompts.limits) for rows in self._answered]
        summed = add_counts([one for batch in counts for one in batch])
        return {**_describe(summed, prompts.limits), "seconds": round(time.monotonic() - began, 2)}

    def _answer(self) -> Iterator[list[Row]]:
        ids, stops, limits = self.prompts.ids, self.prompts.stops, self.prompts.limits
        for start in range(0, len(ids), BATCH):
            yield continue_greedily(self.models.target, list(ids[start : start + BATCH]), stops, limits)


def _describe(counts: Counts, limits: Limits) -> dict[str, Any]:
    return {
        "acceptance_length": round(counts.acceptance_length, 4),
        "acceptance_per_position": [round(share, 4) for share in counts.acceptance_per_position],
        "num_drafts": counts.num_drafts,
        "accepted_per_position": list(counts.accepted_per_position),
        "output_tokens": counts.output_tokens,
        "prompts": counts.num_prompts,
        "max_new_tokens": limits.max_new_tokens,
        "k": limits.depths,
    }


def _as_saved(draft: DraftNetwork, dtype: torch.dtype) -> DraftNetwork:
    """The draft in the dtype that checkpoints have: itself, or a copy whose fp32 weights are rounded."""
    if draft.lm_head.weight.dtype == dtype:
        return draft
    rounded = {id(p): nn.Parameter(p.detach().to(dtype), requires_grad=False) for p in draft.parameters()}
    return copy.deepcopy(draft, rounded)  # parameters are taken from there, so that no fp32 copy is made


def plan_decode(job: TrainJob, models: Models, tokenizer: Any, say: Say) -> DecodeCheck | None:
    """The first prompts of `data.validation`, those that a benchmark of it asks first. None: none, or not possible.

    Raises:
        ConfigError: decoding is asked for, and there is nothing to ask.
        DataError: the rows cannot be read.
    """
    wanted, source = job.train.decode_prompts, job.data.validation
    if not wanted or source is None:
        if job.train.decode_every_steps:
            key = "data.validation=PATH" if source is None else "train.decode_prompts=16"
            raise ConfigError("no prompts to decode", where="train.decode_every_steps", remedy=f"add {key}")
        return None
    try:
        stops = stop_ids(models.target, tokenizer)
    except ConfigError as error:
        say(f"warning: nothing is decoded during training: {error.found}, which this decoder does not apply")
        return None
    limits = Limits(job.train.decode_max_new_tokens, models.spec.num_depths)
    asked = [prompt_ids(tokenizer, row, job.data.chat_template_kwargs) for row in _questions(job, wanted)]
    room = min(job.train.seq_length, models.target.dims.max_position_embeddings - limits.max_new_tokens - limits.extra)
    fitting = tuple(ids for ids in asked if len(ids) <= room)
    say(_announce(job, len(fitting), len(asked), room))
    return DecodeCheck(models, Prompts(fitting, stops, limits)) if fitting else None


def _announce(job: TrainJob, fitting: int, asked: int, room: int) -> str:
    """What will be decoded and when, and what is left out."""
    source, every = job.data.validation, job.train.decode_every_steps
    longer = f" ({asked - fitting} longer than {max(0, room)} tokens are left out)" if fitting < asked else ""
    if not fitting:
        return f"warning: nothing is decoded during training: no prompt of {source} fits{longer}"
    when = f"every {every} steps and at each epoch's end" if every else "at each epoch's end"
    return f"held out: {fitting} prompts of {source} are decoded with the target {when}{longer}"


def _questions(job: TrainJob, count: int) -> Sequence[ChatRow]:
    data, found = job.data, []
    split = data.validation_split or data.split
    for row in read_rows(data.validation, where="data.validation", split=split, column=data.column):
        if not isinstance(row, BadRow) and (asked := cut_answer(row)) is not None:
            found.append(asked)
        if len(found) == count:
            break
    return found
