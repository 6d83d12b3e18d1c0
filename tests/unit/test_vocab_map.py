# SPDX-License-Identifier: Apache-2.0
"""The reduced vocabulary keeps what the assistant says most."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tiny_train import make_job

from nemo_automodel.components.datasets.encoded_rows import EncodedRow, EncodedRows
from nemo_automodel.components.datasets.vocab_map import build_vocab_map, reuse_vocab_map
from nemo_automodel.components.speculative.train.data import read_data
from nemo_automodel.components.speculative.train.setup import build_models
from nemo_automodel.errors import ConfigError


def row(ids, mask):
    return EncodedRow(1, np.array(ids, dtype=np.int32), np.array(mask, dtype=bool))


ROWS = EncodedRows.of([row([9, 9, 9, 7, 7, 3], [0, 0, 0, 1, 1, 1]), row([7, 3, 5], [1, 1, 1])])
# supervised: 7 x3, 3 x2, 5 x1; 9 never


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


def test_the_map_of_an_earlier_draft_is_taken_as_it_is():
    made = reuse_vocab_map(np.array([7, 8]), ROWS, vocab_size=10, draft_vocab_size=2, where="old")
    assert np.flatnonzero(made.t2d).tolist() == [7, 9] and made.d2t.tolist() == [7, 8]
    assert made.coverage == pytest.approx(3 / 6)


@pytest.mark.parametrize(
    ("d2t", "message"),
    [
        (None, "full vocabulary, wanted are 2 .*draft.vocab_map=null"),
        ([0, 0, 0], "vocabulary of 3 tokens, wanted are 2 .*draft.draft_vocab_size=3"),
        ([7, 9], "not ascending within a target vocabulary of 10"),
        ([7, 6], "not ascending"),
    ],
)
def test_a_map_that_does_not_fit_is_refused(d2t, message):
    with pytest.raises(ConfigError, match=message):
        reuse_vocab_map(None if d2t is None else np.array(d2t), ROWS, vocab_size=10, draft_vocab_size=2, where="old")


def test_a_run_takes_the_vocabulary_of_an_earlier_run(tmp_path):
    said = []
    shape = {"draft_vocab_size": 12}
    first = make_job(tmp_path, "first", max_steps=1, draft=shape)
    build_models(first, read_data(first, said.append), None, said.append)
    frequent = [line for line in said if line.startswith("draft vocabulary")]
    earlier = tmp_path / "earlier"
    earlier.mkdir()
    (earlier / "config.json").write_text("{}")
    d2t = torch.full((12,), 40)  # the last letters: never the most frequent
    save_file({"d2t": d2t}, earlier / "model.safetensors")
    second = make_job(tmp_path, "second", max_steps=1, draft={**shape, "vocab_map": str(earlier)})
    models = build_models(second, read_data(second, said.append), None, said.append)
    assert torch.equal(models.draft.d2t, d2t) and said[-1] != frequent
