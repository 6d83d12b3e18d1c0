# SPDX-License-Identifier: Apache-2.0
"""Several short rows in one line of the batch. Each row keeps its own positions and attends to itself alone.

The packing follows from the lengths, the line's length and the seed, and is the same in every epoch: so an epoch has
always as many steps, and a run resumes by its position in the list of lines.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from nemo_automodel.components.datasets.encoded_rows import EncodedRows

WINDOW = 8192  # rows packed together: lines stay random mixtures, and time stays linear


@dataclass(frozen=True)
class PackedRow:
    """A line: rows one after the other."""

    input_ids: np.ndarray  # [T] int32
    loss_mask: np.ndarray  # [T] bool
    begins: np.ndarray  # [rows] int64: the position at which each row begins, ascending from 0

    def __len__(self) -> int:
        return len(self.input_ids)


@dataclass(frozen=True, eq=False)
class PackedRows(Sequence):
    """Encoded rows as the lines of a packing."""

    source: EncodedRows
    lines: tuple[tuple[int, ...], ...]  # row indices of each line

    @cached_property
    def lengths(self) -> np.ndarray:  # [lines]
        lengths = self.source.lengths
        return np.array([int(lengths[list(line)].sum()) for line in self.lines], dtype=np.int64)

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: int) -> PackedRow:
        rows = [self.source[i] for i in self.lines[index]]
        ends = np.cumsum([len(row) for row in rows])
        return PackedRow(
            np.concatenate([row.input_ids for row in rows]), np.concatenate([row.loss_mask for row in rows]),
            np.concatenate([[0], ends[:-1]]).astype(np.int64),
        )  # fmt: skip


def plan_lines(lengths: np.ndarray, *, capacity: int, seed: int) -> tuple[tuple[int, ...], ...]:
    """Distribute rows over lines of at most `capacity` tokens (a longer row has a line of its own); pure.

    Best fit, longest row first, within random windows of the rows.
    """
    order = np.random.default_rng([seed, capacity]).permutation(len(lengths))
    lines: list[tuple[int, ...]] = []
    for start in range(0, len(order), WINDOW):
        window = order[start : start + WINDOW]
        window = window[np.argsort(-lengths[window], kind="stable")]
        lines += _best_fit([(int(i), int(lengths[i])) for i in window], capacity)
    return tuple(lines)


def _best_fit(rows: list[tuple[int, int]], capacity: int) -> list[tuple[int, ...]]:
    """`rows`: (index, length), longest first. Each goes where it leaves the least room, else into a new line."""
    lines: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (room left, line), ascending
    for index, length in rows:
        at = bisect_left(room, (length, 0))
        if at < len(room):
            left, line = room.pop(at)
            lines[line].append(index)
        else:
            left, line = capacity, len(lines)
            lines.append([index])
        if left - length > 0:
            insort(room, (left - length, line))
    return [tuple(line) for line in lines]
