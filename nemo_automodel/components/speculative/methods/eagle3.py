# SPDX-License-Identifier: Apache-2.0
"""EAGLE-3's training-time test: from a batch and the target's states to the loss (arXiv 2503.01840, section 3).

The draft is unrolled for `ttt_steps` on its own states, as it will be when it drafts, while the tokens it reads stay
the true ones: what it will have proposed itself, wherever a proposal is still standing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_automodel.components.speculative.draft.chain_attention import ChainAttention
from nemo_automodel.components.speculative.draft.eagle3 import Eagle3Draft, Unroll
from nemo_automodel.components.speculative.methods.batch import LossOut, TrainBatch
from nemo_automodel.components.speculative.methods.heads import hold_to_target
from nemo_automodel.components.speculative.target import TargetStates


@dataclass(frozen=True)
class Chains:
    """The anchors of which any step bears loss, and which steps those are."""

    anchors: Tensor  # [B, M] int64, ascending; padding: other positions, which bear no loss
    supervised: Tensor  # [B, M, K] bool


def supervised_steps(batch: TrainBatch, size: int, steps: int) -> Tensor:
    """[B, size, K] bool: step s of anchor a predicts token a + 2 + s; it bears loss when `loss_mask` marks that token
    and the token lies in the anchor's own row."""
    length = batch.loss_mask.shape[1]
    anchors = torch.arange(size, device=batch.loss_mask.device)
    predicted = anchors[:, None] + 2 + torch.arange(steps, device=anchors.device)  # [T, K]
    inside = predicted < batch.lengths[:, None, None]  # [B, T, K]
    predicted = predicted.clamp(max=length - 1)
    same_row = batch.starts[:, predicted] == batch.starts[:, :size, None]
    return batch.loss_mask[:, predicted] & inside & same_row


def plan_chains(batch: TrainBatch, size: int, steps: int) -> Chains:
    """Choose the anchors among the positions 0..size-1; padded to the most that a row has, at least one."""
    supervised = supervised_steps(batch, size, steps)
    needed = supervised.any(-1)
    most = max(1, int(needed.sum(1).max()))
    anchors = needed.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :most]  # needed ones, in order
    return Chains(anchors, supervised.gather(1, anchors[..., None].expand(-1, -1, steps)))


def forward_to_loss(draft: Eagle3Draft, batch: TrainBatch, states: TargetStates, teacher_weight: Tensor) -> LossOut:
    """One micro batch: unroll the draft, sum decay^s * KL(target || draft) over the supervised steps s of all anchors.

    Step s of anchor a reads the embedding of token a + 1 + s, at position a + s of its row, and is held to the target's
    distribution at a + 1 + s (over token a + 2 + s). Nothing is drawn: the loss is the same on every call.

    Args:
        states: the target's aux states [B, L, 3H] and final states [B, L, H] of the batch.
        teacher_weight: the target's lm_head rows in the draft vocabulary's order [draft_vocab, H].
    """
    steps, length = draft.spec.num_depths, batch.input_ids.shape[1]
    size = int(batch.lengths.max()) - 1  # T: positions that have a next token
    chains = plan_chains(batch, size, steps)
    unroll = Unroll(draft, states.aux[:, :size], ChainAttention(chains.anchors, batch.starts[:, :size]))
    first = torch.arange(len(batch.input_ids), device=chains.anchors.device)[:, None] * length  # [B, 1]
    hidden, teacher, depths = [], [], []
    for step in range(steps):
        places = (chains.anchors + 1 + step).clamp(max=length - 1)  # [B, M]; beyond the row nothing bears loss
        tokens = batch.input_ids[:, 1 : size + 1] if step == 0 else batch.input_ids.gather(1, places)
        chosen = chains.supervised[..., step].flatten().nonzero()[:, 0]  # [n] into [B * M]
        hidden.append(draft.model.norm(unroll(tokens).flatten(0, 1).index_select(0, chosen)))
        teacher.append((first + places).flatten()[chosen])
        depths.append(torch.full_like(chosen, step))
    every = (torch.cat(hidden), torch.cat(teacher), torch.cat(depths))
    decay = draft.spec.ttt_loss_decay
    held = hold_to_target(draft, *every, batch, states, teacher_weight, decay=decay)
    counts = chains.supervised.sum((0, 1))  # [K]
    return LossOut(held.loss_sum, counts.sum(), held.correct_per_depth, counts)
