# SPDX-License-Identifier: Apache-2.0
"""KL(target || draft) over the draft vocabulary, fused with both heads; its backward runs inside its forward."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK_ENTRIES = 2**25  # logits held at once, per head: 128 MiB in fp32


@dataclass(frozen=True)
class HeadLoss:
    """Sum over the elements, in nats, and whether the draft's first choice is the target's."""

    loss_sum: Tensor  # [] fp32
    correct: Tensor  # [N] bool


def kl_from_hidden(
    hidden: Tensor, weight: Tensor, teacher_states: Tensor, teacher_weight: Tensor, teacher_index: Tensor
) -> HeadLoss:
    """KL divergence of each element, summed, without ever holding [N, V].

    Matrix products run in `hidden`'s dtype (the teacher's in its own), softmax and sums in fp32.

    Args:
        hidden: [N, H] final states of the draft, ordered so that equal `teacher_index` are neighbours.
        weight: [V, H] the draft's lm_head.
        teacher_states: [P, H] final states of the target (no gradient).
        teacher_weight: [V, H] the target's lm_head rows, in the draft vocabulary's order (no gradient).
        teacher_index: [N] which teacher state each element is held to; ascending.
    """
    loss_sum, correct = _FusedKL.apply(hidden, weight, teacher_states, teacher_weight, teacher_index)
    return HeadLoss(loss_sum, correct)


class _FusedKL(torch.autograd.Function):
    """Gradients are made chunk by chunk in the forward pass and only scaled in the backward pass."""

    @staticmethod
    def forward(ctx, hidden, weight, teacher_states, teacher_weight, index):  # noqa: ANN001
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        compute = weight.to(hidden.dtype)
        d_hidden = torch.empty_like(hidden) if need_hidden else None
        d_weight = torch.zeros_like(weight, dtype=torch.float32) if need_weight else None
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        correct = torch.empty(len(hidden), dtype=torch.bool, device=hidden.device)
        step = max(1, CHUNK_ENTRIES // weight.shape[0])
        for start in range(0, len(hidden), step):
            part = slice(start, start + step)
            places, inverse = index[part].unique_consecutive(return_inverse=True)
            probs, entropy, best = _teacher(teacher_states[places], teacher_weight)
            chunk = hidden[part]
            logits = (chunk @ compute.T).float()  # [n, V]
            drafted, norm, choice = _softmax(logits)
            correct[part] = choice == best[inverse]
            wanted = probs[inverse]  # [n, V]
            loss += (norm - torch.linalg.vecdot(wanted, logits) - entropy[inverse]).sum()
            slope = drafted.sub_(wanted).to(hidden.dtype)  # d loss / d logits
            if need_hidden:
                torch.mm(slope, compute, out=d_hidden[part])
            if need_weight:
                _accumulate(d_weight, slope.T, chunk)
        ctx.save_for_backward(d_hidden, d_weight)
        ctx.weight_dtype = weight.dtype
        ctx.mark_non_differentiable(correct)
        return loss, correct

    @staticmethod
    def backward(ctx, d_loss, _):  # noqa: ANN001
        d_hidden, d_weight = ctx.saved_tensors
        scaled_hidden = None if d_hidden is None else d_hidden * d_loss.to(d_hidden.dtype)
        scaled_weight = None if d_weight is None else (d_weight * d_loss).to(ctx.weight_dtype)
        return scaled_hidden, scaled_weight, None, None, None


def _accumulate(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, without a temporary where the dtypes allow it."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


def _teacher(states: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Probabilities [n, V], entropy [n] and first choice [n] of the target, renormalised over the draft vocabulary."""
    logits = (states.to(weight.dtype) @ weight.T).float()
    probs, norm, best = _softmax(logits)
    return probs, norm - torch.linalg.vecdot(probs, logits), best


def _softmax(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Probabilities [n, V], log of the normaliser [n] and first choice [n]; one pass of exponentials."""
    probs = torch.softmax(logits, dim=-1)
    best = logits.argmax(-1)
    column = best[:, None]
    return probs, (logits.gather(1, column) - probs.gather(1, column).log())[:, 0], best
