# SPDX-License-Identifier: Apache-2.0
"""Before the first step with `data.packing`: the target must not let one row of a line see another."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nemo_automodel.components.datasets.packing import PackedRows
from nemo_automodel.errors import ConfigError

if TYPE_CHECKING:
    from nemo_automodel.components.speculative.train.setup import Models

# Relative to the largest state: rounding of the two ways of computing them stays far below, a leak far above.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 1e-1}


@torch.no_grad()
def check_packing(models: Models, lines: PackedRows) -> None:
    """Compare the target's states of a row inside a line with those of the row alone.

    Attention layers keep rows apart by their positions; layers that carry a state along (Mamba, linear attention) and
    models with code of their own may not.

    Raises:
        ConfigError: they differ.
    """
    index = next((i for i, line in enumerate(lines.lines) if len(line) > 1), None)
    if index is None:  # every row fills a line
        return
    begin = int(lines[index].begins[1])
    row = lines.source[lines.lines[index][1]]
    packed = models.prepare([lines[index]])[1].last[0, begin : begin + len(row)].float()  # [T, H]
    alone = models.prepare([row])[1].last[0].float()
    dtype = torch.bfloat16 if models.bf16 else torch.float32
    difference = float((packed - alone).abs().max() / alone.abs().max())
    if not difference <= TOLERANCE[dtype]:
        raise ConfigError(
            f"the target lets rows packed into one line see each other (its states differ by {difference:.1%})",
            where="data.packing", remedy="set data.packing=false",
        )  # fmt: skip
