# SPDX-License-Identifier: Apache-2.0
"""P-EAGLE: from a batch and the target's states to the loss (design section 5, arXiv 2602.01469)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_automodel.components.speculative.draft.peagle import PEagleDraft
from nemo_automodel.components.speculative.methods.attention import CrossDepthAttention
from nemo_automodel.components.speculative.methods.batch import LossOut, TrainBatch
from nemo_automodel.components.speculative.methods.cod import DepthElements, sample_depths
from nemo_automodel.components.speculative.methods.losses import kl_from_hidden
from nemo_automodel.components.speculative.target import TargetStates


@dataclass(frozen=True)
class Supervised:
    """The elements that bear loss, ordered by the position they are held to."""

    flat: Tensor  # [N] index into the flat [B * (T + M)] elements
    teacher: Tensor  # [N] index into the flat [B * L] target states: position p + 1 of the element's row
    depths: Tensor  # [N]


def teacher_head(draft: PEagleDraft, lm_head_weight: Tensor) -> Tensor:
    """The target's lm_head rows in the draft vocabulary's order [draft_vocab, H]; make it once per run."""
    ids = draft.vocab_ids()
    return lm_head_weight if ids is None else lm_head_weight[ids.to(lm_head_weight.device)]


def supervised_elements(elements: DepthElements, row_length: int) -> Supervised:
    """List the elements that bear loss; `row_length` = L, the width of the target's states."""
    batch, size = elements.supervised.shape
    width = size + elements.anchors.shape[1]
    ground = torch.arange(size, device=elements.anchors.device).expand(batch, size)
    bears = torch.cat((elements.supervised, elements.valid), dim=1)  # [B, T + M]
    depths = torch.cat((torch.zeros_like(ground), elements.depths), dim=1)
    places = torch.cat((ground, elements.anchors + elements.depths), dim=1)  # p
    rows, columns = bears.nonzero(as_tuple=True)
    teacher = rows * row_length + places[rows, columns] + 1
    order = teacher.argsort(stable=True)
    return Supervised((rows * width + columns)[order], teacher[order], depths[rows, columns][order])


def forward_to_loss(
    draft: PEagleDraft,
    batch: TrainBatch,
    states: TargetStates,
    teacher_weight: Tensor,
    generator: torch.Generator,
) -> LossOut:
    """One micro batch: sample elements, run the draft, sum KL(target || draft) over the supervised ones.

    Element (a, d) sits at position p = a + d: at depth 0 it reads the target's state of p with the embedding of token
    p + 1, deeper the mask slot; it is held to the target's distribution at p + 1 (over token p + 2).

    Args:
        states: the target's aux states [B, L, 3H] and final states [B, L, H] of the batch.
        teacher_weight: `teacher_head(draft, target's lm_head)` [draft_vocab, H].
        generator: CPU generator of the element draw.
    """
    spec = draft.spec
    elements = sample_depths(
        batch.loss_mask,
        batch.lengths,
        num_depths=spec.num_depths,
        ratio=spec.down_sample_ratio,
        ratio_min=spec.down_sample_ratio_min,
        generator=generator,
    )
    return loss_of_elements(draft, batch, states, teacher_weight, elements)


def loss_of_elements(
    draft: PEagleDraft, batch: TrainBatch, states: TargetStates, teacher_weight: Tensor, elements: DepthElements
) -> LossOut:
    """`forward_to_loss` for elements already chosen (validation takes all of them)."""
    size = elements.supervised.shape[1]  # T
    chosen = supervised_elements(elements, states.last.shape[1])
    attention = CrossDepthAttention(elements, size)
    hidden = draft(batch.input_ids[:, 1 : size + 1], states.aux[:, :size], attention, chosen.flat)  # [N, H]
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        hidden = hidden.to(torch.get_autocast_dtype(device))
    with torch.autocast(device, enabled=False):
        head = kl_from_hidden(hidden, draft.lm_head.weight, states.last.flatten(0, 1), teacher_weight, chosen.teacher)
    depths = chosen.depths
    counts = torch.bincount(depths, minlength=elements.num_depths)
    correct = torch.bincount(depths[head.correct], minlength=elements.num_depths)
    return LossOut(head.loss_sum, counts.sum(), correct, counts)
