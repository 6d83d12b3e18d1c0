# SPDX-License-Identifier: Apache-2.0
"""Sums over micro batches and what they mean."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Mapping, Sequence

import torch
from torch import Tensor

from nemo_automodel.components.speculative.methods.batch import LossOut


@dataclass(frozen=True)
class Totals:
    """`LossOut`s added up, without their graphs; on the device, so that adding costs no synchronisation."""

    loss_sum: Tensor  # [] nats
    count: Tensor  # [] supervised elements
    correct: Tensor  # [K]
    counted: Tensor  # [K]

    @classmethod
    def of(cls, out: LossOut) -> Totals:
        return cls(out.loss_sum.detach(), out.count, out.correct_per_depth, out.count_per_depth)

    def __add__(self, other: Totals) -> Totals:
        return Totals(
            self.loss_sum + other.loss_sum,
            self.count + other.count,
            self.correct + other.correct,
            self.counted + other.counted,
        )

    @classmethod
    def zeros(cls, depths: int, device: torch.device) -> Totals:
        """Of no micro batch at all."""
        nothing = torch.zeros((), dtype=torch.int64, device=device)
        row = torch.zeros(depths, dtype=torch.int64, device=device)
        return cls(nothing.float(), nothing, row, row)

    def flat(self) -> Tensor:
        """[2 + 2K] float64 on the CPU (exact for counts below 2**53), for adding up over processes."""
        parts = (self.loss_sum[None], self.count[None], self.correct, self.counted)
        return torch.cat([part.double() for part in parts]).cpu()

    @classmethod
    def from_flat(cls, flat: Tensor) -> Totals:
        """What `flat` gave, or a sum of such; on the CPU."""
        correct, counted = flat[2:].long().chunk(2)
        return cls(flat[0], flat[1].long(), correct, counted)

    def summary(self) -> dict[str, Any]:
        """loss (nats per element), accuracy_per_depth, acceptance_length (simulated)."""
        pairs = zip(self.correct.tolist(), self.counted.tolist())
        accuracy = [right / max(1, all_) for right, all_ in pairs]
        return {
            "loss": float(self.loss_sum) / max(1, int(self.count)),
            "accuracy_per_depth": [round(a, 4) for a in accuracy],
            "acceptance_length": round(simulated_acceptance_length(accuracy), 4),
        }


@dataclass
class Window:
    """What has gathered since the last log line. It is saved with the state, so that a resumed run logs the same."""

    totals: Totals | None = None
    tokens: int = 0
    began: float = 0.0  # by the monotonic clock, s; before the loop begins: minus the seconds that have gone into it

    def add(self, totals: Totals, tokens: int) -> None:
        self.totals = totals if self.totals is None else self.totals + totals
        self.tokens += tokens

    def saved(self) -> dict[str, Any]:
        """Plain values and tensors."""
        totals = None if self.totals is None else {k: v.cpu() for k, v in vars(self.totals).items()}
        return {"totals": totals, "tokens": self.tokens, "seconds": time.monotonic() - self.began}

    @classmethod
    def of(cls, saved: Mapping[str, Any] | None, device: torch.device) -> Window:
        """The inverse of `saved`. None: of an older checkpoint, which has none."""
        if saved is None or saved["totals"] is None:
            return cls()
        totals = Totals(**{name: tensor.to(device) for name, tensor in saved["totals"].items()})
        return cls(totals, saved["tokens"], -saved["seconds"])


def simulated_acceptance_length(accuracy_per_depth: Sequence[float]) -> float:
    """1 + sum over depths d of prod_{j <= d} accuracy_j: depth d counts when all before it were right.

    It takes the depths for independent; what vLLM measures can differ by a few tenths.
    """
    length, together = 1.0, 1.0
    for accuracy in accuracy_per_depth:
        together *= accuracy
        length += together
    return length
