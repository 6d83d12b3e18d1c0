# SPDX-License-Identifier: Apache-2.0
"""The target's states of lines already seen, kept in host memory: later epochs do not run the target."""

from __future__ import annotations

import hashlib
from typing import Sequence

import torch

from nemo_automodel.components.datasets.collate import collate
from nemo_automodel.components.datasets.encoded_rows import EncodedRow
from nemo_automodel.components.datasets.packing import PackedRow
from nemo_automodel.components.speculative.target import Target, TargetStates


class StateCache:
    """Lines go through the target one by one, so that a state is the same whoever its neighbours are, kept or not: a
    resumed run, whose memory is empty, goes on bit for bit. Lines beyond the limit are computed every time.
    """

    def __init__(self, target: Target, limit_gb: float) -> None:
        """`limit_gb`: 10^9 bytes of aux and final states, 4 * H values per token."""
        self.target, self.limit = target, int(limit_gb * 1e9)
        self.bytes = 0
        self._kept: dict[bytes, TargetStates] = {}

    def states(self, lines: Sequence[EncodedRow | PackedRow]) -> TargetStates:
        """aux [B, T, 3H] and last [B, T, H] on the target's device, zeros beyond a line's end; T: the longest line."""
        device, parts = self.target.model.device, [self._line(line) for line in lines]
        width = max(map(len, lines))
        aux, last = (t.new_zeros(len(lines), width, t.shape[1]) for t in (parts[0].aux, parts[0].last))
        for index, part in enumerate(parts):
            aux[index, : len(part.aux)] = part.aux
            last[index, : len(part.last)] = part.last
        return TargetStates(aux.to(device), last.to(device))

    def _line(self, line: EncodedRow | PackedRow) -> TargetStates:
        """aux [T, 3H] and last [T, H] of one line, in host memory."""
        batch = collate([line], pad_token_id=0)  # no padding in it
        name = hashlib.sha256(batch.input_ids.numpy().tobytes() + batch.starts.numpy().tobytes()).digest()
        if name in self._kept:
            return self._kept[name]
        ids, starts = (t.to(self.target.model.device) for t in (batch.input_ids, batch.starts))
        found = self.target.states(ids, torch.ones_like(ids), starts)
        made = TargetStates(found.aux[0].cpu(), found.last[0].cpu())
        size = made.aux.nbytes + made.last.nbytes
        if self.bytes + size <= self.limit:
            self._kept[name] = made
            self.bytes += size
        return made
