# SPDX-License-Identifier: Apache-2.0
"""The two training methods behind one interface: all that the loop and validation know of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Callable

import torch
from torch import Tensor

from nemo_automodel.components.speculative.draft.eagle3 import Eagle3Draft
from nemo_automodel.components.speculative.draft.peagle import PEagleDraft
from nemo_automodel.components.speculative.draft.spec import DraftSpec
from nemo_automodel.components.speculative.methods import eagle3, peagle
from nemo_automodel.components.speculative.methods.batch import LossOut, TrainBatch
from nemo_automodel.components.speculative.methods.cod import sample_depths
from nemo_automodel.components.speculative.target import TargetStates


@dataclass(frozen=True)
class Method:
    """How a draft of one kind is held to the target. Arguments: draft, batch, the target's states of the batch and
    `teacher_head` [draft_vocab, H]."""

    # and the CPU generator of what is drawn: one micro batch's loss, with its graph
    train_loss: Callable[..., LossOut]
    # every supervised element of every depth, nothing drawn: what validation reports
    full_loss: Callable[..., LossOut]


def method_of(spec: DraftSpec, *, partitions: int = 1, attention: str = "auto") -> Method:
    """P-EAGLE for parallel drafts, else EAGLE-3, to which `partitions` and `attention` mean nothing."""
    if not spec.parallel_drafting:
        return EAGLE3
    how = {"partitions": partitions, "attention": attention}
    return Method(partial(peagle.forward_to_loss, **how), partial(_peagle_full, **how))


def _peagle_full(
    draft: PEagleDraft, batch: TrainBatch, states: TargetStates, teacher_weight: Tensor, **how: Any
) -> LossOut:
    elements = sample_depths(
        batch.loss_mask, batch.lengths, num_depths=draft.spec.num_depths, ratio=1.0, ratio_min=1.0,
        generator=torch.Generator().manual_seed(0), starts=batch.starts,
    )  # fmt: skip
    return peagle.loss_of_elements(draft, batch, states, teacher_weight, elements, **how)


def _eagle3_train(
    draft: Eagle3Draft, batch: TrainBatch, states: TargetStates, teacher_weight: Tensor, _generator: torch.Generator
) -> LossOut:
    return eagle3.forward_to_loss(draft, batch, states, teacher_weight)


EAGLE3 = Method(_eagle3_train, eagle3.forward_to_loss)
