# SPDX-License-Identifier: Apache-2.0
"""The models of a run: target, and draft made or read from a checkpoint (the data, read before, is in `data`)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Sequence

import torch
from torch import Tensor

from nemo_automodel.components.datasets.collate import collate
from nemo_automodel.components.datasets.encoded_rows import EncodedRow
from nemo_automodel.components.datasets.vocab_map import build_vocab_map, reuse_vocab_map
from nemo_automodel.components.speculative.draft.build import build_draft
from nemo_automodel.components.speculative.draft.from_target import start_from_layer
from nemo_automodel.components.speculative.draft.io import canonical_names, load_draft, read_tensors
from nemo_automodel.components.speculative.draft.network import DraftNetwork
from nemo_automodel.components.speculative.draft.spec import DraftSpec
from nemo_automodel.components.speculative.methods.batch import TrainBatch
from nemo_automodel.components.speculative.methods.flex import check_kind
from nemo_automodel.components.speculative.methods.partition import return_freed_memory
from nemo_automodel.components.speculative.methods.peagle import teacher_head
from nemo_automodel.components.speculative.target import (
    Target, TargetStates, build_draft_spec, read_target_dims,
)  # fmt: skip
from nemo_automodel.components.speculative.train.data import Say, TrainData
from nemo_automodel.components.speculative.train.job import TrainJob
from nemo_automodel.components.speculative.train.state_cache import StateCache
from nemo_automodel.components.speculative.train.warm_start import EarlierDraft, find_weights
from nemo_automodel.config.schema import Precision
from nemo_automodel.errors import TrainError


@dataclass(frozen=True)
class Models:
    """Target and draft on their device, and how to run them."""

    target: Target
    draft: DraftNetwork
    spec: DraftSpec
    teacher_weight: Tensor  # [draft_vocab, H]
    device: torch.device
    bf16: bool
    pad_token_id: int
    partitions: int = 1  # P-EAGLE: parts that the elements of a micro batch are computed in
    attention: str = "auto"
    cache: StateCache | None = None

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.bf16)

    def prepare(self, rows: Sequence[EncodedRow]) -> tuple[TrainBatch, TargetStates]:
        """Padded tensors of the rows on the device, and what the target makes of them."""
        batch = collate(rows, pad_token_id=self.pad_token_id)
        input_ids, loss_mask, lengths, starts = (tensor.to(self.device) for tensor in batch)
        places = torch.arange(input_ids.shape[1], device=self.device)
        made = TrainBatch(input_ids, loss_mask, lengths, starts)
        if self.cache is not None:
            return made, self.cache.states(rows)
        attention_mask = (places < lengths[:, None]).long()  # [B, T]
        return made, self.target.states(input_ids, attention_mask, starts)


def build_models(job: TrainJob, data: TrainData, resume: Path | None, say: Say) -> Models:
    """Load the target, and make the draft or read it from the checkpoint `resume`.

    Raises:
        ConfigError: target or draft settings that do not fit.
        TrainError: the checkpoint's draft has another shape than the configuration asks for.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    check_kind(job.train.attention, device)
    if job.draft.sequence_partitions > 1:
        return_freed_memory()
    wanted = job.train.precision
    bf16 = wanted is Precision.bf16 or (wanted is Precision.auto and device.type == "cuda")
    dims = read_target_dims(job.target.path, trust_remote_code=job.target.trust_remote_code)
    config = replace(job.draft, mask_token_id=data.mask_token_id)
    dtype = "bfloat16" if bf16 else "float32"
    spec = build_draft_spec(dims, config, seq_length=job.train.seq_length, dtype=dtype)
    earlier = None
    if job.draft.init_from is not None and resume is None:
        earlier = EarlierDraft(find_weights(job.draft.init_from), spec)
    target = Target.load(
        job.target.path, aux_layer_ids=spec.aux_layer_ids, dtype=getattr(torch, dtype), device=device,
        trust_remote_code=job.target.trust_remote_code,
    )  # fmt: skip
    draft = _first_draft(job, data, spec, target, earlier, say) if resume is None else _resumed_draft(job, spec, resume)
    draft.to(device)
    trained = sum(p.numel() for p in draft.parameters() if p.requires_grad)
    say(f"draft: {job.draft.kind.value}, {trained:,} trained parameters, {spec.num_layers} layers, "
        f"K={spec.num_depths}, on {device}, {dtype}")  # fmt: skip
    teacher = teacher_head(draft, target.lm_head_weight)
    pad = data.tokenizer.pad_token_id
    return Models(
        target, draft, spec, teacher, device, bf16, pad if pad is not None else 0,
        partitions=job.draft.sequence_partitions, attention=job.train.attention,
        cache=StateCache(target, job.train.cache_target_gb) if job.train.cache_target_gb else None,
    )  # fmt: skip


def _first_draft(
    job: TrainJob, data: TrainData, spec: DraftSpec, target: Target, earlier: EarlierDraft | None, say: Say
) -> DraftNetwork:
    """A fresh draft, or one with the weights and the vocabulary map of an earlier one."""
    ids = earlier.vocab_ids() if earlier is not None else None
    if ids is None:
        ids = _vocabulary(job, data, spec, say)
    torch.manual_seed(job.train.seed)
    draft = build_draft(
        spec, embed_weight=target.embed_weight, lm_head_weight=target.lm_head_weight, vocab_ids=ids,
        freeze_embeddings=job.draft.freeze_embeddings,
    )  # fmt: skip
    if job.draft.init_from_target:
        start_from_layer(draft, target.last_layer, target.final_norm_weight)
    if earlier is not None:
        say(", ".join([f"draft: starts with the weights of {earlier.folder}", *earlier.copy_into(draft)]))
    return draft


def _vocabulary(job: TrainJob, data: TrainData, spec: DraftSpec, say: Say) -> Tensor | None:
    """Target ids of the draft vocabulary [draft_vocab]; None: it is full."""
    sizes = {"vocab_size": spec.vocab_size, "draft_vocab_size": spec.draft_vocab_size}
    if job.draft.vocab_map is None:
        made = build_vocab_map(data.train.rows, **sizes)
    else:
        folder = find_weights(job.draft.vocab_map, "draft.vocab_map")
        d2t = canonical_names(read_tensors(folder), folder).get("d2t")
        offsets = None if d2t is None else d2t.numpy()
        made = reuse_vocab_map(offsets, data.train.rows, where=str(folder), **sizes)
    if made is None:
        return None
    ids = torch.arange(len(made.d2t)) + torch.from_numpy(made.d2t)
    say(f"draft vocabulary: {len(ids)} of {spec.vocab_size} tokens, {made.coverage:.1%} of the supervised ones")
    return ids


def _resumed_draft(job: TrainJob, spec: DraftSpec, checkpoint: Path) -> DraftNetwork:
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
