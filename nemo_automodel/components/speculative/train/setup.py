# SPDX-License-Identifier: Apache-2.0
"""Everything a run needs before its first step, cheapest checks first: data, then target, draft, state to resume."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Callable, Sequence

import torch
from torch import Tensor
from transformers import AutoTokenizer

from nemo_automodel.components.datasets.collate import collate
from nemo_automodel.components.datasets.encode import EncodedRow, EncodedSet, RowEncoder, encode_rows
from nemo_automodel.components.datasets.mask_token import check_mask_token_unused, resolve_mask_token_id
from nemo_automodel.components.datasets.rows import read_rows
from nemo_automodel.components.datasets.vocab_map import build_vocab_map
from nemo_automodel.components.speculative.draft.io import load_draft
from nemo_automodel.components.speculative.draft.peagle import PEagleDraft, build_draft
from nemo_automodel.components.speculative.draft.spec import DraftSpec
from nemo_automodel.components.speculative.methods.peagle import TrainBatch, teacher_head
from nemo_automodel.components.speculative.target import (
    Target, TargetDims, TargetStates, build_draft_spec, read_target_dims,
)  # fmt: skip
from nemo_automodel.components.speculative.train.job import TrainJob
from nemo_automodel.config.schema import Precision
from nemo_automodel.errors import ConfigError, TrainError

Say = Callable[[str], None]
REPORT_ROWS = 5000  # a line of progress per so many encoded rows


@dataclass(frozen=True)
class TrainData:
    """Encoded rows and the tokenizer that made them."""

    tokenizer: Any
    train: EncodedSet
    validation: EncodedSet | None
    mask_token_id: int

    def digest(self) -> str:
        """Names the training rows: their ids, masks and order."""
        digest = hashlib.sha256()
        for row in self.train.rows:
            digest.update(row.input_ids.tobytes() + row.loss_mask.tobytes())
        return digest.hexdigest()


@dataclass(frozen=True)
class Models:
    """Target and draft on their device, and how to run them."""

    target: Target
    draft: PEagleDraft
    spec: DraftSpec
    teacher_weight: Tensor  # [draft_vocab, H]
    device: torch.device
    bf16: bool
    pad_token_id: int

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.bf16)

    def prepare(self, rows: Sequence[EncodedRow]) -> tuple[TrainBatch, TargetStates]:
        """Padded tensors of the rows on the device, and what the target makes of them."""
        input_ids, loss_mask, lengths = (t.to(self.device) for t in collate(rows, pad_token_id=self.pad_token_id))
        places = torch.arange(input_ids.shape[1], device=self.device)
        attention_mask = (places < lengths[:, None]).long()  # [B, T]
        return TrainBatch(input_ids, loss_mask, lengths), self.target.states(input_ids, attention_mask)


def read_data(job: TrainJob, say: Say) -> TrainData:
    """Load the tokenizer, read and encode the rows, and check what can be checked without the target's weights.

    Raises:
        DataError, ConfigError: see `read_rows`, `encode_rows`, `resolve_mask_token_id`; `seq_length` too long.
    """
    dims = read_target_dims(job.target.path, trust_remote_code=job.target.trust_remote_code)
    check_seq_length(job.train.seq_length, dims)
    tokenizer = load_tokenizer(job)
    mask_token_id = resolve_mask_token_id(tokenizer, job.draft.mask_token_id)
    data = job.data
    train = _encode(job, tokenizer, data.train, "data.train", data.split, data.max_rows, say)
    validation = None
    if data.validation is not None:
        split = data.validation_split or data.split
        validation = _encode(job, tokenizer, data.validation, "data.validation", split, data.max_validation_rows, say)
    for where, rows in (("data.train", train), ("data.validation", validation)):
        if rows is not None:
            check_mask_token_unused(rows.rows, mask_token_id, where=where)
    return TrainData(tokenizer, train, validation, mask_token_id)


def check_seq_length(seq_length: int, dims: TargetDims) -> None:
    """Raises ConfigError when rows would run beyond the target's positions."""
    if seq_length > dims.max_position_embeddings:
        raise ConfigError(
            f"{seq_length} tokens, but the target knows {dims.max_position_embeddings} positions",
            where="train.seq_length",
            remedy=f"set train.seq_length={dims.max_position_embeddings} or less",
        )


def load_tokenizer(job: TrainJob) -> Any:
    """The target's tokenizer. Raises ConfigError when there is none."""
    path = job.target.path
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=job.target.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"no usable tokenizer at {path!r} ({str(error).splitlines()[0]})",
            where="target.path",
            remedy="put tokenizer.json and tokenizer_config.json beside the target's weights",
        ) from error


def _encode(
    job: TrainJob, tokenizer: Any, path: str, where: str, split: str, max_rows: int | None, say: Say
) -> EncodedSet:
    rows = read_rows(path, where=where, split=split, column=job.data.column, max_rows=max_rows)
    encoder = RowEncoder(
        tokenizer, job.train.seq_length, job.data.mask_reasoning_content, dict(job.data.chat_template_kwargs)
    )
    encoded = encode_rows(
        rows, encoder, where=where, max_bad_row_share=job.data.max_bad_row_share,
        on_row=lambda n: say(f"{where}: {n} rows read") if n % REPORT_ROWS == 0 else None,
    )  # fmt: skip
    _say_what_came_in(encoded, where, job.train.seq_length, say)
    return encoded


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


def build_models(job: TrainJob, data: TrainData, resume: Path | None, say: Say) -> Models:
    """Load the target, and make the draft or read it from the checkpoint `resume`.

    Raises:
        ConfigError: target or draft settings that do not fit.
        TrainError: the checkpoint's draft has another shape than the configuration asks for.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    wanted = job.train.precision
    bf16 = wanted is Precision.bf16 or (wanted is Precision.auto and device.type == "cuda")
    dims = read_target_dims(job.target.path, trust_remote_code=job.target.trust_remote_code)
    config = replace(job.draft, mask_token_id=data.mask_token_id)
    dtype = "bfloat16" if bf16 else "float32"
    spec = build_draft_spec(dims, config, seq_length=job.train.seq_length, dtype=dtype)
    target = Target.load(
        job.target.path, aux_layer_ids=spec.aux_layer_ids, dtype=getattr(torch, dtype), device=device,
        trust_remote_code=job.target.trust_remote_code,
    )  # fmt: skip
    draft = _fresh_draft(job, data, spec, target, say) if resume is None else _resumed_draft(job, spec, resume)
    draft.to(device)
    trained = sum(p.numel() for p in draft.parameters() if p.requires_grad)
    say(f"draft: {trained:,} trained parameters, {spec.num_layers} layers, K={spec.num_depths}, on {device}, {dtype}")
    teacher = teacher_head(draft, target.lm_head_weight)
    pad = data.tokenizer.pad_token_id
    return Models(target, draft, spec, teacher, device, bf16, pad if pad is not None else 0)


def _fresh_draft(job: TrainJob, data: TrainData, spec: DraftSpec, target: Target, say: Say) -> PEagleDraft:
    made = build_vocab_map(data.train.rows, vocab_size=spec.vocab_size, draft_vocab_size=spec.draft_vocab_size)
    ids = None
    if made is not None:
        ids = torch.arange(len(made.d2t)) + torch.from_numpy(made.d2t)
        say(f"draft vocabulary: {len(ids)} of {spec.vocab_size} tokens, {made.coverage:.1%} of the supervised ones")
    torch.manual_seed(job.train.seed)
    return build_draft(
        spec, embed_weight=target.embed_weight, lm_head_weight=target.lm_head_weight, vocab_ids=ids,
        freeze_embeddings=job.draft.freeze_embeddings,
    )  # fmt: skip


def _resumed_draft(job: TrainJob, spec: DraftSpec, checkpoint: Path) -> PEagleDraft:
    draft, saved = load_draft(checkpoint / "model")
    was, now = saved.to_config(), spec.to_config()
    changed = [f"{key} {was.get(key)} -> {now[key]}" for key in now if now[key] != was.get(key)]
    if changed:
        raise TrainError(
            f"the checkpoint {checkpoint} holds another draft than asked for: {', '.join(changed)}",
            where="train.resume",
            remedy="give the settings it was trained with, or train.resume=null to start afresh",
        )
    draft.model.embed_tokens.weight.requires_grad_(not job.draft.freeze_embeddings)
    return draft
