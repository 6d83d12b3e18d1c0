# SPDX-License-Identifier: Apache-2.0
"""Layers of the draft: what vLLM 0.32 computes in `model_executor/models/llama_eagle3.py`, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from nemo_automodel.components.speculative.draft.spec import DraftSpec
from nemo_automodel.errors import ConfigError

ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # computed once from the config, whatever the length

# (q [B, N, heads, D], k and v [B, N, kv_heads, D]) -> [B, N, heads, D]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class RMSNorm(nn.Module):
    """x / rms(x) * weight, the mean square in fp32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> the same shape and dtype."""
        if x.dtype == self.weight.dtype:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


class Rotary(LlamaRotaryEmbedding):
    """HF's tables, whose frequencies stay fp32 when the module's weights are cast (bf16 is a radian off at 1,000)."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Rotary:
        exact = {name: buffer for name, buffer in self.named_buffers()}
        super()._apply(fn, recurse)
        for name, buffer in exact.items():
            setattr(self, name, buffer.to(getattr(self, name).device))  # a device is followed, a dtype is not
        return self


def build_rotary(spec: DraftSpec) -> Rotary:
    """Rotary tables in HF's convention (halves rotated, not pairs), scaling included.

    Raises:
        ConfigError: a rope type whose frequencies depend on the length at hand.
    """
    scaling = dict(spec.rope.scaling or {})
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise ConfigError(
            f"rope type {kind!r} of the target is not supported for a draft",
            where="target.path",
            remedy=f"take a target with one of {', '.join(ROPE_TYPES)}",
        )
    config = LlamaConfig(
        hidden_size=spec.num_attention_heads * spec.head_dim,  # the tables do not depend on it; a multiple is demanded
        num_attention_heads=spec.num_attention_heads,
        head_dim=spec.head_dim,
        max_position_embeddings=spec.max_position_embeddings,
        rope_parameters={**scaling, "rope_type": kind, "rope_theta": spec.rope.theta},
    )
    return Rotary(config)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate halves. x [B, N, heads, D]; cos, sin [B, N, 1, D] in fp32; the result has x's dtype.

    As vLLM 0.32 does (`model_executor/layers/rotary_embedding/base.py`): tables are made in fp32 and rounded to the
    model's dtype, the sums are in fp32.
    """
    return _Rotated.apply(x, cos.to(x.dtype).float(), sin.to(x.dtype).float())


class _Rotated(torch.autograd.Function):
    """A rotation, whose gradient is the rotation back: a third of the operations that autograd would find for it."""

    @staticmethod
    def forward(ctx, x, cos, sin):  # noqa: ANN001
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin)

    @staticmethod
    def backward(ctx, d_out):  # noqa: ANN001
        cos, sin = ctx.saved_tensors
        return _rotate(d_out, cos, -sin), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The two halves of cos and of sin are equal, as HF makes them."""
    half = x.shape[-1] // 2
    wide = x.float()
    turned = torch.cat((-wide[..., half:], wide[..., :half]), dim=-1)
    return (wide * cos + turned * sin).to(x.dtype)


class Attention(nn.Module):
    """Projections of one attention layer; which elements see which is `attend`'s business.

    With `spec.qk_norm`, queries and keys are normalised per head before rope (vLLM's `qwen3_eagle3.py`).
    """

    def __init__(self, spec: DraftSpec, input_size: int) -> None:
        super().__init__()
        self.head_dim = spec.head_dim
        self.q_proj = nn.Linear(input_size, spec.num_attention_heads * spec.head_dim, bias=False)
        self.k_proj = nn.Linear(input_size, spec.num_key_value_heads * spec.head_dim, bias=False)
        self.v_proj = nn.Linear(input_size, spec.num_key_value_heads * spec.head_dim, bias=False)
        self.o_proj = nn.Linear(spec.num_attention_heads * spec.head_dim, spec.hidden_size, bias=False)
        self.q_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps) if spec.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps) if spec.qk_norm else nn.Identity()

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, N, input] -> q [B, N, heads, D], k and v [B, N, kv_heads, D], not rotated."""
        q, k, v = (proj(x).unflatten(-1, (-1, self.head_dim)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        return self.q_norm(q), self.k_norm(k), v


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, spec: DraftSpec) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.up_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.down_proj = nn.Linear(spec.intermediate_size, spec.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(_Gated.apply(self.gate_proj(x), self.up_proj(x)))


class _Gated(torch.autograd.Function):
    """silu(gate) * up, which keeps nothing but its inputs: the widest activation of a layer less."""

    @staticmethod
    def forward(ctx, gate, up):  # noqa: ANN001
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx, d_out):  # noqa: ANN001
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(d_out * up, gate), F.silu(gate).mul_(d_out)


class DraftLayer(nn.Module):
    """One decoder layer. The first reads [norm(embedding), norm(hidden)], 2H wide; the others the hidden state only.

    Every layer owns `hidden_norm`, as vLLM builds it in every layer; only the first one's is used.
    """

    def __init__(self, spec: DraftSpec, index: int) -> None:
        super().__init__()
        size, eps = spec.hidden_size, spec.rms_norm_eps
        self.norm_before_residual = spec.norm_before_residual
        self.input_layernorm = RMSNorm(size, eps)
        self.hidden_norm = RMSNorm(size, eps)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.self_attn = Attention(spec, 2 * size if index == 0 else size)
        self.mlp = MLP(spec)
        if index > 0:
            self.hidden_norm.weight.requires_grad_(False)

    def fuse(self, embeds: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """First layer: embeds, hidden [..., H] -> attention input [..., 2H], residual [..., H]."""
        normed = self.hidden_norm(hidden)
        residual = normed if self.norm_before_residual else hidden
        return torch.cat((self.input_layernorm(embeds), normed), dim=-1), residual

    def finish(self, attended: Tensor, residual: Tensor) -> Tensor:
        """Output projection, residual, MLP, residual. attended [..., heads, D], residual [..., H] -> [..., H]."""
        residual = residual + self.self_attn.o_proj(attended.flatten(-2))
        return residual + self.mlp(self.post_attention_layernorm(residual))
