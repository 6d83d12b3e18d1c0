# SPDX-License-Identifier: Apache-2.0
"""One part of the elements at a time: the gradient of the whole with the activations of one part.

Depth 0 is computed once. What the parts need of it becomes leaves; each part runs forward and backward at once and
leaves its gradient there, and at the end depth 0 runs backward. So nothing is computed twice.
"""

from __future__ import annotations

import contextlib
import ctypes
from typing import Callable, Sequence

import torch
from torch import Tensor, nn

M_MMAP_THRESHOLD, MMAP_BYTES = -3, 2**21  # mallopt(3)
Part = Callable[[Sequence[Tensor]], Tensor]  # the shared tensors -> this part's loss sum []


def return_freed_memory() -> None:
    """Have glibc give what a part frees back to the system, for the rest of this process.

    Otherwise the heap, in pieces after a few parts of different sizes, keeps twice what is in use (8,192 tokens in 4
    parts: 1,426 MiB). It costs page faults, so it is for those who ask for partitions. Elsewhere than glibc: nothing.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MMAP_BYTES)


def sum_of_parts(shared: Callable[[], Sequence[Tensor]], parts: Sequence[Part], model: nn.Module) -> Tensor:
    """The sum of the parts' losses, differentiable with respect to the model's parameters.

    Args:
        shared: computes what all parts read; called once.
        parts: each makes its loss from these.
        model: whose parameters all of it follows from.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not torch.is_grad_enabled() or not parameters:
        tensors = shared()
        return sum(part(tensors) for part in parts)
    return _PartsLoss.apply(shared, parts, *parameters)


class _PartsLoss(torch.autograd.Function):
    """Gradients are made in the forward pass and only scaled in the backward pass."""

    @staticmethod
    def forward(ctx, shared, parts, *parameters):  # noqa: ANN001
        with torch.enable_grad():
            roots = list(shared())
            leaves = [t.detach().requires_grad_() for t in roots]
            sums = _Sums(len(parameters))
            total = torch.zeros((), dtype=torch.float32, device=parameters[0].device)
            for part in parts:
                loss = part(leaves)
                total += loss.detach()
                wanted = [*parameters, *leaves]
                gradients = torch.autograd.grad(loss, wanted, allow_unused=True)
                sums.add(gradients[: len(parameters)])
                for leaf, gradient in zip(leaves, gradients[len(parameters) :], strict=True):
                    if gradient is not None:
                        leaf.grad = gradient if leaf.grad is None else leaf.grad.add_(gradient)
                del loss, gradients
            pairs = [(root, leaf.grad) for root, leaf in zip(roots, leaves, strict=True) if leaf.grad is not None]
            if pairs:
                below = [root for root, _ in pairs], parameters, [gradient for _, gradient in pairs]
                sums.add(torch.autograd.grad(*below, allow_unused=True))
        ctx.gradients = sums.values
        return total

    @staticmethod
    def backward(ctx, d_loss):  # noqa: ANN001
        gradients, ctx.gradients = ctx.gradients, None  # let go, so that autograd may keep them as `.grad` uncopied
        for gradient in gradients:
            if gradient is not None:
                gradient.mul_(d_loss)
        return None, None, *gradients


class _Sums:
    """Gradients added up in place."""

    def __init__(self, count: int) -> None:
        self.values: list[Tensor | None] = [None] * count

    def add(self, gradients: Sequence[Tensor | None]) -> None:
        for index, gradient in enumerate(gradients):
            if gradient is not None:
                old = self.values[index]
                self.values[index] = gradient if old is None else old.add_(gradient)
