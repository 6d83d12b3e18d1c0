# SPDX-License-Identifier: Apache-2.0
"""Cross-depth attention by chunks and by flex_attention's masks against one dense mask written from the definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nemo_automodel.components.speculative.methods import flex
from nemo_automodel.components.speculative.methods.attention import CrossDepthAttention
from nemo_automodel.components.speculative.methods.cod import DepthElements, sample_depths
from nemo_automodel.errors import ConfigError

T, K = 30, 5
STARTS = torch.zeros(2, T + 1, dtype=torch.int64)
STARTS[0, 7:] = 7
STARTS[0, 19:] = 19


def draw(starts: Tensor | None) -> DepthElements:
    mask = torch.rand(2, T + 1, generator=torch.Generator().manual_seed(3)) < 0.8
    return sample_depths(
        mask, torch.tensor([T + 1, 17]), num_depths=K, ratio=0.8, ratio_min=0.3, starts=starts,
        generator=torch.Generator().manual_seed(1),
    )  # fmt: skip


def dense_mask(elements: DepthElements, starts: Tensor | None) -> Tensor:
    """[B, T + M, T + M] bool, from the sentence in the module: pair by pair."""
    batch, chains = elements.anchors.shape
    sees = torch.zeros(batch, T + chains, T + chains, dtype=torch.bool)
    for b in range(batch):
        listed = [(t, 0) for t in range(T)]
        listed += list(zip(elements.anchors[b].tolist(), elements.depths[b].tolist(), strict=True))
        for i, (a, d) in enumerate(listed):
            for j, (c, e) in enumerate(listed):
                real = (d > 0 or i < T) and (e > 0 or j < T)
                same_row = starts is None or not real or starts[b, a] == starts[b, c]
                sees[b, i, j] = real and same_row and ((e == 0 and c <= a) or (e > 0 and c == a and e <= d))
    return sees


def real_queries(elements: DepthElements) -> Tensor:
    return torch.cat((torch.ones(2, T, dtype=torch.bool), elements.valid), dim=1)


def inputs(count: int) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    return tuple(torch.randn(2, count, heads, 16, generator=g, requires_grad=True) for heads in (4, 2, 2))


def attend(attention: CrossDepthAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    ground = attention.ground(q[:, :T], k[:, :T], v[:, :T])
    return torch.cat((ground, attention.chain(q[:, T:], (k[:, :T], v[:, :T]), k[:, T:], v[:, T:])), dim=1)


@pytest.mark.parametrize("starts", [None, STARTS], ids=["one row a line", "packed"])
@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_output_and_gradients_equal_those_of_a_dense_mask(starts: Tensor | None, chunk: int) -> None:
    elements = draw(starts)
    real = real_queries(elements)
    q, k, v = inputs(T + elements.anchors.shape[1])
    got = attend(CrossDepthAttention(elements, T, starts, chunk=chunk, kind="chunked"), q, k, v)[real]
    weight = torch.randn(got.shape, generator=torch.Generator().manual_seed(2))
    (got * weight).sum().backward()
    gradients = [t.grad.clone() for t in (q, k, v)]
    q.grad = k.grad = v.grad = None
    swapped = (q.transpose(1, 2), *(t.transpose(1, 2).repeat_interleave(2, dim=1) for t in (k, v)))
    sees = dense_mask(elements, starts) | torch.eye(q.shape[1], dtype=torch.bool)  # padding must see something
    want = torch.nn.functional.scaled_dot_product_attention(*swapped, attn_mask=sees[:, None]).transpose(1, 2)[real]
    (want * weight).sum().backward()
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0.0)
    for mine, theirs in zip(gradients, (q.grad, k.grad, v.grad), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=0.0)


@pytest.mark.parametrize("starts", [None, STARTS], ids=["one row a line", "packed"])
def test_the_masks_of_flex_attention_are_the_dense_ones_and_so_is_its_output(starts: Tensor | None) -> None:
    from torch.nn.attention.flex_attention import create_mask

    elements = draw(starts)
    chains = elements.anchors.shape[1]
    chunked, flexed = (CrossDepthAttention(elements, T, starts, kind=kind) for kind in ("chunked", "flex"))
    dense = dense_mask(elements, starts)
    ground = create_mask(flex.ground_mod(chunked._ground), 2, None, T, T, device="cpu")[:, 0]
    assert torch.equal(ground, dense[:, :T, :T])
    chain = create_mask(flex.chain_mod(chunked._chain, T), 2, None, chains, T + chains, device="cpu")[:, 0]
    valid = elements.valid
    assert torch.equal(chain[valid], dense[:, T:][valid])
    with torch.no_grad():
        q, k, v = (t.detach() for t in inputs(T + chains))  # no backward pass on a CPU
        real = real_queries(elements)
        torch.testing.assert_close(attend(flexed, q, k, v)[real], attend(chunked, q, k, v)[real], atol=1e-5, rtol=0.0)


def test_a_cpu_trains_without_flex_attention_unless_told() -> None:
    assert not flex.is_wanted("auto", torch.device("cpu"))
    assert flex.is_wanted("flex", torch.device("cpu")) and not flex.is_wanted("chunked", torch.device("cuda"))
    with pytest.raises(ConfigError, match="train.attention=auto"):
        flex.check_kind("flex", torch.device("cpu"))
