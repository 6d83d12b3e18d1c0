# SPDX-License-Identifier: Apache-2.0
"""Encoded rows as four flat arrays, in memory or mapped from a file: a million rows are no million Python objects."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import BinaryIO, Callable, Iterable, Iterator

import numpy as np

BLOCK = 1 << 22  # elements looked at together: memory stays flat whatever the size


@dataclass(frozen=True)
class EncodedRow:
    """One row, cut to the sequence length."""

    number: int  # in the source, from 1
    input_ids: np.ndarray  # [T] int32
    loss_mask: np.ndarray  # [T] bool; True: a token the assistant wrote

    def __len__(self) -> int:
        return len(self.input_ids)


@dataclass(frozen=True, eq=False)
class EncodedRows(Sequence):
    """A read-only sequence of `EncodedRow` (views into the arrays)."""

    input_ids: np.ndarray  # [N] int32, all rows one after the other
    loss_mask: np.ndarray  # [N] bool
    lengths: np.ndarray  # [R] int64
    numbers: np.ndarray  # [R] int64

    @classmethod
    def of(cls, rows: Iterable[EncodedRow]) -> EncodedRows:
        """Gather rows in memory."""
        writer = RowWriter()
        for row in rows:
            writer.add(row)
        return writer.rows()

    @cached_property
    def _begins(self) -> np.ndarray:  # [R+1]
        return np.concatenate([[0], np.cumsum(self.lengths)])

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> EncodedRow:
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index = int(index) % len(self)
        begin, end = self._begins[index], self._begins[index + 1]
        return EncodedRow(int(self.numbers[index]), self.input_ids[begin:end], self.loss_mask[begin:end])

    def __iter__(self) -> Iterator[EncodedRow]:
        return (self[index] for index in range(len(self)))

    def blocks(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(input_ids, loss_mask) of all tokens, some at a time."""
        for begin in range(0, len(self.input_ids), BLOCK):
            yield self.input_ids[begin : begin + BLOCK], self.loss_mask[begin : begin + BLOCK]

    def first_row_with(self, test: Callable[[np.ndarray], np.ndarray]) -> int | None:
        """The number of the first row in which `test(ids)` ([n] bool) holds for a token; None: no row."""
        seen = 0
        for ids, _ in self.blocks():
            places = np.flatnonzero(test(ids))
            if len(places):
                return int(self.numbers[np.searchsorted(self._begins, seen + places[0], side="right") - 1])
            seen += len(ids)
        return None

    def supervised_counts(self, vocab_size: int) -> np.ndarray:
        """[V] int64: how often each token id is supervised."""
        counts = np.zeros(vocab_size, dtype=np.int64)
        for ids, mask in self.blocks():
            counts += np.bincount(ids[mask], minlength=vocab_size)
        return counts

    @cached_property
    def digest(self) -> str:
        """Names the content: ids, masks, lengths and numbers, in order."""
        digest = hashlib.sha256(self.lengths.tobytes() + self.numbers.tobytes())
        for ids, mask in self.blocks():
            digest.update(ids.tobytes())
            digest.update(mask.tobytes())
        return digest.hexdigest()


class RowWriter:
    """Takes rows one by one. With `tokens`, two open binary files, the bulk goes there and memory stays flat."""

    def __init__(self, tokens: tuple[BinaryIO, BinaryIO] | None = None) -> None:
        self._files = tokens
        self._ids, self._masks = bytearray(), bytearray()
        self._lengths, self._numbers = array("q"), array("q")
        self.tokens = self.supervised_tokens = 0

    def __len__(self) -> int:
        return len(self._lengths)

    def add(self, row: EncodedRow) -> None:
        """Append a row."""
        ids, mask = row.input_ids.tobytes(), row.loss_mask.tobytes()
        if self._files is None:
            self._ids += ids
            self._masks += mask
        else:
            self._files[0].write(ids)
            self._files[1].write(mask)
        self._lengths.append(len(row))
        self._numbers.append(row.number)
        self.tokens += len(row)
        self.supervised_tokens += int(row.loss_mask.sum())

    def index(self) -> tuple[np.ndarray, np.ndarray]:
        """Lengths and numbers, [R] int64 each."""
        return np.array(self._lengths), np.array(self._numbers)

    def rows(self) -> EncodedRows:
        """The rows gathered in memory; none when they went to files."""
        if self._files is not None:
            return EncodedRows.of(())
        return EncodedRows(np.frombuffer(self._ids, np.int32), np.frombuffer(self._masks, bool), *self.index())
