# SPDX-License-Identifier: Apache-2.0
"""KL(target || draft) over the draft vocabulary, fused with both heads; its backward runs inside its forward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterator

import torch
from torch import Tensor

from nemo_automodel.components.speculative.matmul import times_transposed

CHUNK_ENTRIES = 2**26  # logits held at once: 256 MiB in fp32
CPU_ELEMENTS, CPU_COLUMNS = 512, 4096
LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class HeadLoss:
    """Sum over the elements, in nats, and whether the draft's first choice is the target's."""

    loss_sum: Tensor  # [] fp32
    correct: Tensor  # [N] bool


def kl_from_hidden(
    hidden: Tensor,
    weight: Tensor,
    teacher_states: Tensor,
    teacher_weight: Tensor,
    teacher_index: Tensor,
    element_weight: Tensor | None = None,
) -> HeadLoss:
    """KL divergence of each element, summed, without ever holding [N, V].

    Matrix products run in `hidden`'s dtype (the teacher's in its own), softmax and sums in fp32.

    Args:
        hidden: [N, H] final states of the draft, ordered so that equal `teacher_index` are neighbours.
        weight: [V, H] the draft's lm_head.
        teacher_states: [P, H] final states of the target (no gradient).
        teacher_weight: [V, H] the target's lm_head rows, in the draft vocabulary's order (no gradient).
        teacher_index: [N] which teacher state each element is held to; ascending.
        element_weight: [N] fp32 factor of each element's term (EAGLE-3's decay over its steps); None: 1.
    """
    loss_sum, correct = _FusedKL.apply(hidden, weight, teacher_states, teacher_weight, teacher_index, element_weight)
    return HeadLoss(loss_sum, correct)


class _FusedKL(torch.autograd.Function):
    """Gradients are made chunk by chunk in the forward pass and only scaled in the backward pass."""

    @staticmethod
    def forward(ctx, hidden, weight, teacher_states, teacher_weight, index, element_weight):  # noqa: ANN001
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        compute = weight.to(hidden.dtype)
        d_hidden = torch.zeros_like(hidden) if need_hidden else None
        d_weight = torch.zeros_like(weight, dtype=torch.float32) if need_weight else None
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        correct = torch.empty(len(hidden), dtype=torch.bool, device=hidden.device)
        step = chunk_elements(weight.shape[0], hidden.device.type)
        logits = torch.empty(min(step, len(hidden)), weight.shape[0], dtype=torch.float32, device=hidden.device)
        for start in range(0, len(hidden), step):
            part = slice(start, start + step)
            places, inverse = index[part].unique_consecutive(return_inverse=True)
            probs, entropy, best = _teacher(teacher_states[places], teacher_weight)
            chunk = hidden[part]
            drafted = _fill(logits[: len(chunk)], chunk, compute)  # [n, V], logits first, then probabilities
            cross = sum(torch.linalg.vecdot(p[inverse], z) for p, z in _blocks(probs, drafted))
            norm, choice = _softmax_(drafted)
            correct[part] = choice == best[inverse]
            scale = None if element_weight is None else element_weight[part]
            terms = norm - cross - entropy[inverse]  # [n]
            loss += (terms if scale is None else terms * scale).sum()
            for p, q, rows, d_rows in _blocks(probs, drafted, compute.T, None if d_weight is None else d_weight.T):
                slope = q - p[inverse]  # [n, block]: d loss / d logits
                slope = (slope if scale is None else slope.mul_(scale[:, None])).to(hidden.dtype)
                if need_hidden:
                    d_hidden[part] += times_transposed(slope, rows)
                if need_weight:
                    d_rows.T.add_(times_transposed(slope.T, chunk.T))
        ctx.gradients = d_hidden, d_weight
        ctx.weight_dtype = weight.dtype
        ctx.mark_non_differentiable(correct)
        return loss, correct

    @staticmethod
    def backward(ctx, d_loss, _):  # noqa: ANN001
        d_hidden, d_weight = ctx.gradients
        ctx.gradients = None  # let go, so that autograd may keep them as `.grad` without a copy
        scaled_hidden = None if d_hidden is None else d_hidden.mul_(d_loss)
        scaled_weight = None if d_weight is None else d_weight.mul_(d_loss).to(ctx.weight_dtype)
        return scaled_hidden, scaled_weight, None, None, None, None


def chunk_elements(vocab: int, device: str) -> int:
    """Elements whose logits are held at once. On a CPU no more than keep a chunk's products in its caches."""
    most = max(1, CHUNK_ENTRIES // vocab)
    return min(most, CPU_ELEMENTS) if device == "cpu" else most


def _blocks(*tensors: Tensor | None) -> Iterator[tuple[Tensor | None, ...]]:
    """The same columns [.., V] of all tensors, block by block: on a CPU each is still in the cache when used again."""
    first = tensors[0]
    width = CPU_COLUMNS if first.device.type == "cpu" else first.shape[1]
    for begin in range(0, first.shape[1], width):
        yield tuple(None if t is None else t[:, begin : begin + width] for t in tensors)


def _fill(out: Tensor, states: Tensor, weight: Tensor) -> Tensor:
    """out [n, V] fp32 = states [n, H] @ weight [V, H].T"""
    for part, rows in _blocks(out, weight.T):
        part.copy_(times_transposed(states, rows.T))
    return out


def _teacher(states: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Probabilities [n, V], entropy [n] and first choice [n] of the target, renormalised over the draft vocabulary."""
    logits = torch.empty(len(states), len(weight), dtype=torch.float32, device=weight.device)
    probs = torch.softmax(_fill(logits, states.to(weight.dtype), weight), dim=-1)
    top, best = logits.max(-1)
    norm = top - probs.gather(1, best[:, None])[:, 0].log()
    return probs, norm - sum(torch.linalg.vecdot(p, z) for p, z in _blocks(probs, logits)), best


def _softmax_(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities, in place of the logits [n, V]; log of the normaliser [n] and first choice [n]."""
    top, best = logits.max(-1)
    # 2 ** ((logits - top) * log2(e)): on a CPU torch's exp2 takes a quarter of exp's time
    total = torch.add(top[:, None] * -LOG2_E, logits, alpha=LOG2_E, out=logits).exp2_().sum(-1)
    logits.div_(total[:, None])
    return top + total.log(), best
