# SPDX-License-Identifier: Apache-2.0
"""The reduced vocabulary keeps what the assistant says most."""

from __future__ import annotations

import numpy as np
import pytest

from nemo_automodel.components.datasets.encode import EncodedRow
from nemo_automodel.components.datasets.vocab_map import build_vocab_map
from nemo_automodel.errors import ConfigError


def row(ids, mask):
    return EncodedRow(1, np.array(ids, dtype=np.int32), np.array(mask, dtype=bool))


ROWS = [row([9, 9, 9, 7, 7, 3], [0, 0, 0, 1, 1, 1]), row([7, 3, 5], [1, 1, 1])]  # supervised: 7 x3, 3 x2, 5 x1; 9 never


def test_most_frequent_supervised_tokens_ascending():
    made = build_vocab_map(ROWS, vocab_size=10, draft_vocab_size=2)
    assert (np.arange(2) + made.d2t).tolist() == [3, 7]
    assert made.d2t.dtype == np.int64
    assert np.flatnonzero(made.t2d).tolist() == [3, 7]
    assert made.coverage == pytest.approx(5 / 6)


def test_unseen_tokens_fill_up_from_the_lowest_id():
    made = build_vocab_map(ROWS, vocab_size=10, draft_vocab_size=5)
    assert (np.arange(5) + made.d2t).tolist() == [0, 1, 3, 5, 7]
    assert made.coverage == 1.0


@pytest.mark.parametrize("size", [None, 10])
def test_full_vocabulary_needs_no_map(size):
    assert build_vocab_map(ROWS, vocab_size=10, draft_vocab_size=size) is None


@pytest.mark.parametrize("size", [0, 11])
def test_an_impossible_size_names_the_key(size):
    with pytest.raises(ConfigError) as caught:
        build_vocab_map(ROWS, vocab_size=10, draft_vocab_size=size)
    assert caught.value.where == "draft.draft_vocab_size"
