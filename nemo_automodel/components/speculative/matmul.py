# SPDX-License-Identifier: Apache-2.0
"""fp32 matrix products on CPUs through oneDNN, which torch itself gives to MKL.

MKL runs its AVX2 kernels on CPUs that are not Intel's: on an AMD EPYC with AVX-512, one thread, 78-95 GFLOP/s against
oneDNN's 140-200 at the shapes of a draft. The rounding is fp32's in both. Where
torch was built without oneDNN, without AVX-512, in bf16 and on GPUs the ordinary products run.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def _find_onednn() -> bool:
    wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return wide and torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


HAS_ONEDNN = _find_onednn()


def is_fast(*tensors: Tensor) -> bool:
    """Whether `times_transposed` goes to oneDNN for these."""
    return (
        HAS_ONEDNN
        and all(t.device.type == "cpu" and t.dtype == torch.float32 and t.numel() for t in tensors)
        and not torch.is_autocast_enabled("cpu")
    )


def times_transposed(left: Tensor, right: Tensor) -> Tensor:
    """left [..., k] @ right [m, k].T -> [..., m]; either may be a transposed view. No gradient of its own."""
    if is_fast(left, right):
        return torch.ops.mkldnn._linear_pointwise(left, right, None, "none", [], "")
    return left @ right.T


class _Product(torch.autograd.Function):
    """x [..., in] @ weight [out, in].T"""

    @staticmethod
    def forward(ctx, x, weight):  # noqa: ANN001
        ctx.save_for_backward(x, weight)
        return times_transposed(x, weight)

    @staticmethod
    def backward(ctx, grad):  # noqa: ANN001
        x, weight = ctx.saved_tensors
        d_x = times_transposed(grad, weight.T) if ctx.needs_input_grad[0] else None
        d_weight = None
        if ctx.needs_input_grad[1]:
            d_weight = times_transposed(grad.flatten(0, -2).T, x.flatten(0, -2).T)
        return d_x, d_weight


class FastLinear(nn.Linear):
    """nn.Linear whose fp32 products on a CPU go through oneDNN."""

    def forward(self, x: Tensor) -> Tensor:
        if not is_fast(x, self.weight):
            return F.linear(x, self.weight, self.bias)
        out = _Product.apply(x, self.weight) if torch.is_grad_enabled() else times_transposed(x, self.weight)
        return out if self.bias is None else out + self.bias


def use_fast_linears(model: nn.Module) -> None:
    """Make the plain nn.Linear modules in `model` `FastLinear`s, in place: same parameters, names and hooks."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = FastLinear
