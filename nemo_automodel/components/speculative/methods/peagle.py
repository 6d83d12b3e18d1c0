# SPDX-License-Identifier: Apache-2.0
"""P-EAGLE: from a batch and the target's states to the loss (design section 5, arXiv 2602.01469)."""

from __future__ import annotations

from functools import partial
from typing import Sequence

import torch
from torch import Tensor

from nemo_automodel.components.speculative.draft.peagle import Ground, PEagleDraft
from nemo_automodel.components.speculative.methods.attention import CrossDepthAttention
from nemo_automodel.components.speculative.methods.batch import LossOut, TrainBatch
from nemo_automodel.components.speculative.methods.cod import DepthElements, sample_depths, split_elements
from nemo_automodel.components.speculative.methods.heads import hold_to_target
from nemo_automodel.components.speculative.methods.partition import sum_of_parts
from nemo_automodel.components.speculative.target import TargetStates


def teacher_head(draft: PEagleDraft, lm_head_weight: Tensor) -> Tensor:
    """The target's lm_head rows in the draft vocabulary's order [draft_vocab, H]; make it once per run."""
    ids = draft.vocab_ids()
    return lm_head_weight if ids is None else lm_head_weight[ids.to(lm_head_weight.device)]


def forward_to_loss(
    draft: PEagleDraft,
    batch: TrainBatch,
    states: TargetStates,
    teacher_weight: Tensor,
    generator: torch.Generator,
    *,
    partitions: int = 1,
    attention: str = "auto",
) -> LossOut:
    """One micro batch: sample elements, run the draft, sum KL(target || draft) over the supervised ones.

    Element (a, d) sits at position p = a + d: at depth 0 it reads the target's state of p with the embedding of token
    p + 1, deeper the mask slot; it is held to the target's distribution at p + 1 (over token p + 2).

    Args:
        states: the target's aux states [B, L, 3H] and final states [B, L, H] of the batch.
        teacher_weight: `teacher_head(draft, target's lm_head)` [draft_vocab, H].
        generator: CPU generator of the element draw.
        partitions: how many parts the elements are computed in, one after the other; the gradient is the same.
        attention: "auto", "chunked" or "flex" (see `CrossDepthAttention`).
    """
    spec = draft.spec
    elements = sample_depths(
        batch.loss_mask,
        batch.lengths,
        num_depths=spec.num_depths,
        ratio=spec.down_sample_ratio,
        ratio_min=spec.down_sample_ratio_min,
        generator=generator,
        starts=batch.starts,
    )
    return loss_of_elements(draft, batch, states, teacher_weight, elements, partitions=partitions, attention=attention)


def loss_of_elements(
    draft: PEagleDraft,
    batch: TrainBatch,
    states: TargetStates,
    teacher_weight: Tensor,
    elements: DepthElements,
    *,
    partitions: int = 1,
    attention: str = "auto",
) -> LossOut:
    """`forward_to_loss` for elements already chosen (validation takes all of them)."""
    size = elements.supervised.shape[1]  # T
    whole = CrossDepthAttention(elements, size, batch.starts, kind=attention)
    bears = elements.supervised.flatten()  # [B * T]
    correct = torch.zeros(elements.num_depths, dtype=torch.int64, device=bears.device)

    def ground() -> tuple[Tensor, ...]:
        wanted = bears.nonzero()[:, 0]
        return draft.ground(batch.input_ids[:, 1 : size + 1], states.aux[:, :size], whole, wanted).tensors()

    def part_loss(part: DepthElements, tensors: Sequence[Tensor]) -> Tensor:
        same = part is elements
        sees = whole if same else CrossDepthAttention(part, size, batch.starts, kind=attention)
        below = Ground.of(tensors)
        places = part.supervised.flatten().nonzero()[:, 0]  # of depth 0, into the flat [B * T]
        last = below.last if same else below.last.index_select(0, (bears.cumsum(0) - 1)[places])
        slots = part.valid.flatten().nonzero()[:, 0]  # into the flat [B * M]
        hidden = torch.cat((last, draft.chain(below, sees, slots)))
        teacher, depths = _held_to(part, places, slots, batch.input_ids.shape[1])
        held = hold_to_target(draft, hidden, teacher, depths, batch, states, teacher_weight)
        correct.add_(held.correct_per_depth)
        return held.loss_sum

    if partitions == 1:
        loss = part_loss(elements, ground())
    else:
        parts = split_elements(elements, partitions)
        loss = sum_of_parts(ground, [partial(part_loss, part) for part in parts], draft)
    counts = torch.bincount(elements.depths.flatten(), minlength=elements.num_depths)
    counts[0] = elements.supervised.sum()  # padding has depth 0
    return LossOut(loss, counts.sum(), correct, counts)


def _held_to(part: DepthElements, places: Tensor, slots: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """The positions (into the flat [B * length]) that elements are held to [N], and their depths [N]: depth-0 elements
    `places` (into the flat [B * T]), then chain elements `slots` (into the flat [B * M])."""
    size, width = max(part.supervised.shape[1], 1), max(part.anchors.shape[1], 1)
    chain = (part.anchors + part.depths).flatten()[slots] + slots // width * length
    teacher = torch.cat((places % size + places // size * length, chain)) + 1  # position p + 1 of the element's line
    depths = torch.cat((torch.zeros_like(places), part.depths.flatten()[slots]))
    return teacher, depths
