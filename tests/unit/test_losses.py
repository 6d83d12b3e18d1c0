# SPDX-License-Identifier: Apache-2.0
"""The fused KL against the plain formula."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nemo_automodel.components.speculative.methods import losses


def case(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    hidden, weight, states, teacher = (torch.randn(n, 8, generator=g).to(dtype) for n in (11, 30, 6, 30))
    index = torch.tensor([0, 0, 0, 1, 1, 2, 3, 3, 5, 5, 5])
    return hidden.requires_grad_(), weight.requires_grad_(), states, teacher, index


def plain(hidden: Tensor, weight: Tensor, states: Tensor, teacher: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    wanted = torch.log_softmax((states @ teacher.T).float(), -1)[index]
    got = torch.log_softmax((hidden @ weight.T).float(), -1)
    return (wanted.exp() * (wanted - got)).sum(), wanted.argmax(-1) == got.argmax(-1)


@pytest.mark.parametrize("entries", [1, 30 * 4, 2**24])  # 1, 4 and all elements at a time
def test_value_gradients_and_hits_equal_the_plain_formula(entries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "CHUNK_ENTRIES", entries)
    hidden, weight, states, teacher, index = case()
    out = losses.kl_from_hidden(hidden, weight, states, teacher, index)
    (out.loss_sum / 11).backward()
    got = hidden.grad.clone(), weight.grad.clone()
    hidden.grad = weight.grad = None
    loss, hits = plain(hidden, weight, states, teacher, index)
    (loss / 11).backward()
    torch.testing.assert_close(out.loss_sum, loss, atol=1e-5, rtol=1e-5)
    assert torch.equal(out.correct, hits)
    torch.testing.assert_close(got, (hidden.grad, weight.grad), atol=1e-5, rtol=1e-5)


def test_a_draft_equal_to_its_target_has_no_loss_and_every_hit() -> None:
    _, _, states, teacher, index = case()
    out = losses.kl_from_hidden(states[index], teacher, states, teacher, index)
    assert float(out.loss_sum) == pytest.approx(0.0, abs=1e-4) and bool(out.correct.all())


def test_bf16_hidden_with_fp32_master_weights_stays_close_and_gradients_keep_their_dtype() -> None:
    hidden, weight, states, teacher, index = case()
    low = hidden.detach().to(torch.bfloat16).requires_grad_()
    out = losses.kl_from_hidden(low, weight, states.to(torch.bfloat16), teacher.to(torch.bfloat16), index)
    out.loss_sum.backward()
    loss, _ = plain(hidden, weight, states, teacher, index)
    assert out.loss_sum.dtype == torch.float32 and out.loss_sum.item() == pytest.approx(loss.item(), rel=0.05)
    assert low.grad.dtype == torch.bfloat16 and weight.grad.dtype == torch.float32


def test_a_frozen_head_and_no_elements() -> None:
    hidden, weight, states, teacher, index = case()
    out = losses.kl_from_hidden(hidden[:0], weight.detach(), states, teacher, index[:0])
    out.loss_sum.backward()
    assert out.loss_sum.item() == 0.0 and out.correct.shape == (0,) and float(hidden.grad.abs().sum()) == 0.0
