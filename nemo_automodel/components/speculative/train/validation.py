# SPDX-License-Identifier: Apache-2.0
"""Loss and accuracy on held-out rows: every supervised element of every depth, no down-sampling."""

from __future__ import annotations

from typing import Any

import torch

from nemo_automodel.components.datasets.encode import EncodedRow
from nemo_automodel.components.speculative.methods.cod import sample_depths
from nemo_automodel.components.speculative.methods.peagle import loss_of_elements
from nemo_automodel.components.speculative.train.setup import Models
from nemo_automodel.components.speculative.train.totals import Totals


@torch.no_grad()
def validate(models: Models, rows: tuple[EncodedRow, ...], *, micro_batch_size: int) -> dict[str, Any]:
    """`Totals.summary` over the rows. Leaves every random state as it was."""
    ordered = sorted(rows, key=len)
    total: Totals | None = None
    for start in range(0, len(ordered), micro_batch_size):
        batch, states = models.prepare(ordered[start : start + micro_batch_size])
        elements = sample_depths(
            batch.loss_mask, batch.lengths, num_depths=models.spec.num_depths, ratio=1.0, ratio_min=1.0,
            generator=torch.Generator().manual_seed(0),
        )  # fmt: skip
        with models.autocast():
            out = Totals.of(loss_of_elements(models.draft, batch, states, models.teacher_weight, elements))
        total = out if total is None else total + out
    return total.summary()
