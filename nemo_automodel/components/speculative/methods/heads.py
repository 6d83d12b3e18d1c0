# SPDX-License-Identifier: Apache-2.0
"""From final states of the draft to what they cost, the same for both methods."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_automodel.components.speculative.draft.network import DraftNetwork
from nemo_automodel.components.speculative.methods.batch import TrainBatch
from nemo_automodel.components.speculative.methods.losses import kl_from_hidden
from nemo_automodel.components.speculative.target import TargetStates


@dataclass(frozen=True)
class Held:
    """Elements held to the target."""

    loss_sum: Tensor  # [] fp32, nats
    correct_per_depth: Tensor  # [K] int64


def hold_to_target(
    draft: DraftNetwork, hidden: Tensor, teacher: Tensor, depths: Tensor, batch: TrainBatch, states: TargetStates,
    teacher_weight: Tensor, *, decay: float = 1.0,
) -> Held:  # fmt: skip
    """Sum decay^depth * KL(target || draft) over the elements.

    An element whose token has no id in the draft vocabulary bears no loss and counts as wrong: the target's
    probabilities, renormalised over the other tokens, say nothing there (EAGLE-3's own training leaves such positions
    out as well), and no proposal can be accepted. Whether it has one is told by the token of the data, which the target
    said itself or might have: its own choice would take logits over the whole vocabulary.

    Args:
        hidden: [N, H] after the last norm.
        teacher: [N] the position whose distribution each is held to, into the flat [B * L].
        depths: [N]
        teacher_weight: [draft_vocab, H] the target's lm_head rows.
    """
    order = teacher.argsort(stable=True)
    hidden, teacher, depths = hidden.index_select(0, order), teacher[order], depths[order]
    weight = None if decay == 1.0 else decay ** depths.float()
    sayable = draft.sayable(batch.input_ids)
    if sayable is not None:
        sayable = sayable.flatten()[teacher + 1]
        weight = sayable.float() if weight is None else weight * sayable
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        hidden = hidden.to(torch.get_autocast_dtype(device))
    with torch.autocast(device, enabled=False):
        last = states.last.flatten(0, 1)
        head = kl_from_hidden(hidden, draft.lm_head.weight, last, teacher_weight, teacher, weight)
    correct = head.correct if sayable is None else head.correct & sayable
    return Held(head.loss_sum, torch.bincount(depths[correct], minlength=draft.spec.num_depths))
