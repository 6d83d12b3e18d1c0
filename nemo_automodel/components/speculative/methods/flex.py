# SPDX-License-Identifier: Apache-2.0
"""The masks of `attention` as BlockMasks of flex_attention: one compiled kernel, for GPUs.

torch's flex_attention has no backward pass on a CPU: there the chunked form trains, and tests compare the two forward.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Callable

import torch
from torch import Tensor

from nemo_automodel.errors import ConfigError

if TYPE_CHECKING:
    from nemo_automodel.components.speculative.methods.attention import Queries

logger = logging.getLogger("nemo_automodel.train")
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # (batch, head, query, key) -> bool


def is_wanted(kind: str, device: torch.device) -> bool:
    """`kind` "auto": on CUDA where torch has flex_attention and triton; "flex" or "chunked": as told."""
    return kind == "flex" or (kind == "auto" and device.type == "cuda" and _tools() is not None)


def check_kind(kind: str, device: torch.device) -> None:
    """Raises ConfigError where `kind` cannot train."""
    if kind == "flex" and (device.type != "cuda" or _tools() is None):
        raise ConfigError(
            "flex_attention trains on GPUs with triton only", where="train.attention", remedy="train.attention=auto"
        )


@lru_cache(maxsize=1)
def _tools() -> tuple[Callable[..., Tensor], Callable[..., Any]] | None:
    """flex_attention and create_block_mask, compiled; None where they cannot be."""
    try:
        import triton  # noqa: F401
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    except ImportError as error:
        logger.info("no flex_attention (%s): chunked attention", error)
        return None
    return torch.compile(flex_attention, dynamic=True), torch.compile(create_block_mask, dynamic=True)


def _eager() -> tuple[Callable[..., Tensor], Callable[..., Any]]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    return flex_attention, create_block_mask


@dataclass(frozen=True)
class FlexMasks:
    """Block masks of one step, made once for all layers."""

    attend: Callable[..., Tensor]
    ground_mask: Any
    chain_mask: Any | None  # None: there are no chains

    def ground(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[B, T, heads, D] -> the same"""
        return self._run(q, k, v, self.ground_mask)

    def chain(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [B, M, heads, D]; k, v [B, T + M, kv_heads, D], depth 0 first -> [B, M, heads, D]."""
        return self._run(q, k, v, self.chain_mask)

    def _run(self, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return self.attend(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1]).transpose(1, 2)


def masks_of(ground: Queries, chain: Queries) -> FlexMasks:
    """The masks of one step; T and M are those of the queries."""
    batch, depth0 = ground.anchors.shape
    num_chain = chain.anchors.shape[1]
    device = ground.anchors.device
    tools = _tools() if device.type == "cuda" else None
    attend, build = tools or _eager()
    ground_mask = build(ground_mod(ground), batch, None, depth0, depth0, device=device)
    chain_mask = None
    if num_chain:
        chain_mask = build(chain_mod(chain, depth0), batch, None, num_chain, depth0 + num_chain, device=device)
    return FlexMasks(attend, ground_mask, chain_mask)


def ground_mod(queries: Queries) -> MaskMod:
    """Causal, within the own row."""
    starts = queries.starts

    def sees(batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key >= starts[batch, query])

    return sees


def chain_mod(queries: Queries, depth0: int) -> MaskMod:
    """Keys 0..T-1: the own row's up to the anchor; keys T..T+M-1: earlier in the same chain, or itself."""
    anchors, starts = queries.anchors, queries.starts

    def sees(batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        mine, other = anchors[batch, query], (key - depth0).clamp(min=0)
        ground = (key < depth0) & (key <= mine) & (key >= starts[batch, query])
        chain = (key >= depth0) & (other <= query) & (anchors[batch, other] == mine)
        return ground | chain

    return sees
