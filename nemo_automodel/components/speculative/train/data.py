# SPDX-License-Identifier: Apache-2.0
"""The data of a run, before any weight is loaded: tokenizer, encoded rows, and what can be checked on them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Callable

from nemo_automodel.components.datasets.encode import EncodedSet, RowEncoder
from nemo_automodel.components.datasets.encode_parallel import default_workers
from nemo_automodel.components.datasets.encoded_rows import EncodedRows
from nemo_automodel.components.datasets.mask_token import check_mask_token_unused, resolve_mask_token_id
from nemo_automodel.components.datasets.packing import PackedRows, plan_lines
from nemo_automodel.components.datasets.token_cache import RowsWanted, load_or_encode
from nemo_automodel.components.datasets.tokenizer import load_tokenizer
from nemo_automodel.components.speculative.target import TargetDims, read_target_dims
from nemo_automodel.components.speculative.train.job import TrainJob
from nemo_automodel.config.schema import DataConfig, DraftKind
from nemo_automodel.errors import ConfigError

Say = Callable[[str], None]


@dataclass(frozen=True)
class TrainData:
    """Encoded rows and the tokenizer that made them."""

    tokenizer: Any
    train: EncodedSet
    validation: EncodedSet | None
    mask_token_id: int | None  # None: an EAGLE-3 draft has no use for it

    lines: EncodedRows | PackedRows  # what a micro batch is made of: training rows, or with packing several in each

    @cached_property
    def digest(self) -> str:
        """Names the training lines: their ids, masks and order."""
        packed = repr(self.lines.lines) if isinstance(self.lines, PackedRows) else ""
        return hashlib.sha256((self.train.rows.digest + packed).encode()).hexdigest()


def read_data(job: TrainJob, say: Say) -> TrainData:
    """Load the tokenizer, read and encode the rows, and check what can be checked without the target's weights.

    Raises:
        DataError, ConfigError: see `load_or_encode`, `resolve_mask_token_id`; `seq_length` too long for the target.
    """
    dims = read_target_dims(job.target.path, trust_remote_code=job.target.trust_remote_code)
    check_seq_length(job.train.seq_length, dims)
    tokenizer = load_tokenizer(job.target.path, trust_remote_code=job.target.trust_remote_code)
    parallel = job.draft.kind is DraftKind.peagle
    mask_token_id = resolve_mask_token_id(tokenizer, job.draft.mask_token_id) if parallel else None
    data = job.data
    train = _encode(job, tokenizer, _wanted(data, data.train, "data.train", data.split, data.max_rows), say)
    validation = None
    if data.validation is not None:
        split = data.validation_split or data.split
        wanted = _wanted(data, data.validation, "data.validation", split, data.max_validation_rows)
        validation = _encode(job, tokenizer, wanted, say)
    for where, rows in (("data.train", train), ("data.validation", validation)):
        if rows is not None:
            check_vocabulary(rows.rows, dims, where=where)
            if mask_token_id is not None:
                check_mask_token_unused(rows.rows, mask_token_id, where=where)
    return TrainData(tokenizer, train, validation, mask_token_id, _lines(job, train, say))


def check_vocabulary(rows: EncodedRows, dims: TargetDims, *, where: str) -> None:
    """Raises ConfigError when the tokenizer makes ids that the target has no row for."""
    number = rows.first_row_with(lambda ids: ids >= dims.vocab_size)
    if number is not None:
        raise ConfigError(
            f"row {number} of {where} has a token id of {dims.vocab_size} or more, the size of the target's vocabulary",
            where="target.path",
            remedy="put the tokenizer files that belong to the target's weights beside them",
        )


def check_seq_length(seq_length: int, dims: TargetDims) -> None:
    """Raises ConfigError when rows would run beyond the target's positions."""
    if seq_length > dims.max_position_embeddings:
        raise ConfigError(
            f"{seq_length} tokens, but the target knows {dims.max_position_embeddings} positions",
            where="train.seq_length",
            remedy=f"set train.seq_length={dims.max_position_embeddings} or less",
        )


def _wanted(data: DataConfig, path: str, where: str, split: str, max_rows: int | None) -> RowsWanted:
    return RowsWanted(path, where, split, data.column, max_rows, data.max_bad_row_share)


def _encode(job: TrainJob, tokenizer: Any, wanted: RowsWanted, say: Say) -> EncodedSet:
    data = job.data
    encoder = RowEncoder(tokenizer, job.train.seq_length, data.mask_reasoning_content, dict(data.chat_template_kwargs))
    workers = data.num_workers or default_workers()
    encoded = load_or_encode(wanted, encoder, cache_dir=data.cache_dir, workers=workers, say=say)
    _say_what_came_in(encoded, wanted.where, job.train.seq_length, say)
    return encoded


def _lines(job: TrainJob, train: EncodedSet, say: Say) -> EncodedRows | PackedRows:
    """The training rows, or with `data.packing` lines of several."""
    if not job.data.packing:
        return train.rows
    capacity = job.train.seq_length
    packed = PackedRows(train.rows, plan_lines(train.rows.lengths, capacity=capacity, seed=job.train.seed))
    share = train.tokens / (len(packed) * capacity)
    say(f"data.train: packed into {len(packed)} lines of up to {capacity} tokens, {share:.1%} full")
    return packed


def _say_what_came_in(encoded: EncodedSet, where: str, seq_length: int, say: Say) -> None:
    for named in encoded.bad_rows:
        say(f"warning: {where}: {named}")
    bad = f", {encoded.rows_bad} bad of {encoded.rows_read} left out" if encoded.rows_bad else ""
    dropped = f", {encoded.rows_dropped} dropped (nothing to learn in them)" if encoded.rows_dropped else ""
    cut = f", {encoded.rows_cut} cut to {seq_length} tokens" if encoded.rows_cut else ""
    say(
        f"{where}: {len(encoded.rows)} rows, {encoded.tokens:,} tokens, {encoded.supervised_tokens:,} of them "
        f"supervised{cut}{dropped}{bad}"
    )
