# SPDX-License-Identifier: Apache-2.0
"""Loss and accuracy on held-out rows: every supervised element of every depth, no down-sampling."""

from __future__ import annotations

from typing import Any

import torch

from nemo_automodel.components.datasets.encoded_rows import EncodedRow
from nemo_automodel.components.speculative.methods.method import method_of
from nemo_automodel.components.speculative.train.setup import Models
from nemo_automodel.components.speculative.train.totals import Totals
from nemo_automodel.components.speculative.train.world import World


@torch.no_grad()
def validate(
    models: Models, rows: tuple[EncodedRow, ...], *, micro_batch_size: int, world: World = World()
) -> dict[str, Any]:
    """`Totals.summary` over the rows, which the processes share. Leaves every random state as it was."""
    method = method_of(models.spec, partitions=models.partitions, attention=models.attention)
    ordered = sorted(rows, key=len)
    total = Totals.zeros(models.spec.num_depths, models.device)
    for start in range(0, len(ordered), micro_batch_size)[world.rank :: world.size]:
        batch, states = models.prepare(ordered[start : start + micro_batch_size])
        with models.autocast():
            out = Totals.of(method.full_loss(models.draft, batch, states, models.teacher_weight))
        total = total + out
    return world.sum_totals(total).summary()
