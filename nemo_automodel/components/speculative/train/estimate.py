# SPDX-License-Identifier: Apache-2.0
"""How much memory a training step will take, from sizes alone, before the first step.

Counted: both models' weights, gradients, AdamW's two moments, what autograd keeps of the draft's layers, the target's
states, the loss's chunk of logits and, on a CPU, what the first step loads. Not counted: Python and torch as they are
before the first step, a GPU's context, and what allocators keep back. Beside measured peaks: docs/training-speed.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from nemo_automodel.components.speculative.draft.spec import DraftSpec
from nemo_automodel.components.speculative.methods.losses import chunk_elements

GIB = 2**30
CPU_LIBRARIES = 80 * 2**20  # code and scratch of MKL and oneDNN, first touched by the first step: measured


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes at the peak of a step, by what they are for."""

    target_weights: int
    draft_weights: int  # fp32 master weights; embeddings and head are copies of the target's
    gradients: int
    optimizer: int  # AdamW's two moments
    activations: int  # of the draft's elements, of one part with `sequence_partitions`
    states: int  # what the target leaves for the draft
    logits: int  # the loss's chunk, for draft and target together
    libraries: int

    @property
    def total(self) -> int:
        return sum(vars(self).values())

    @property
    def above_weights(self) -> int:
        """What the first steps add to what is there when both models are loaded."""
        return self.total - self.target_weights - self.draft_weights

    def knob(self, available: int, *, partitions: int = 1, micro_batch_size: int = 1) -> str | None:
        """What to turn when `available` bytes are less than the estimate; None when it fits."""
        if self.total <= available:
            return None
        fixed = self.draft_weights + self.gradients + self.optimizer
        if micro_batch_size > 1 and self.activations + self.states > fixed // 4:
            return (
                f"train.micro_batch_size={max(1, micro_batch_size // 2)} with twice the train.grad_accumulation_steps"
            )
        if self.activations > fixed // 4:
            return f"draft.sequence_partitions={2 * partitions}, or a smaller train.seq_length"
        if self.total - self.gradients // 3 - self.optimizer // 3 <= available:
            return "draft.freeze_embeddings=true, or draft.draft_vocab_size=32000"
        return "draft.draft_vocab_size=32000 draft.freeze_embeddings=true, or a device with more memory"

    def line(self) -> str:
        """One line for people."""
        parts = ", ".join(f"{name.replace('_', ' ')} {size / GIB:.2f}" for name, size in vars(self).items())
        return f"memory of a step: about {self.total / GIB:.1f} GiB ({parts})"


def estimate_memory(
    spec: DraftSpec,
    *,
    target_parameters: int,
    target_bytes: int,
    seq_length: int,
    micro_batch_size: int,
    supervised_share: float = 1.0,
    compute_bytes: int = 4,
    freeze_embeddings: bool = False,
    partitions: int = 1,
    device: str = "cpu",
) -> MemoryEstimate:
    """Estimate the peak of one optimiser step; pure.

    Args:
        target_parameters: of the target, embeddings and head included (once when tied).
        target_bytes: per parameter, 2 for bf16 and 4 for fp32.
        supervised_share: of the tokens that bear loss.
        compute_bytes: per activation, 2 under bf16 autocast and 4 in fp32.
        partitions: `draft.sequence_partitions`.
        device: "cpu" or "cuda".
    """
    trained, frozen = draft_parameters(spec, freeze_embeddings=freeze_embeddings)
    tokens = seq_length * micro_batch_size
    width = spec.target_hidden_size
    return MemoryEstimate(
        target_weights=target_parameters * target_bytes,
        draft_weights=4 * (trained + frozen),
        gradients=4 * trained,
        optimizer=8 * trained,
        activations=_activations(spec, tokens, supervised_share, compute_bytes, partitions),
        states=tokens * 4 * width * target_bytes,
        libraries=CPU_LIBRARIES if device == "cpu" else 0,
        logits=_logits(spec, tokens, device) + (compute_bytes == 2) * 2 * spec.draft_vocab_size * spec.hidden_size,
    )


def draft_parameters(spec: DraftSpec, *, freeze_embeddings: bool = False) -> tuple[int, int]:
    """Trained and frozen parameters."""
    h, d = spec.hidden_size, spec.head_dim
    heads = (spec.num_attention_heads + 2 * spec.num_key_value_heads) * d
    later = h * heads + spec.num_attention_heads * d * h + 3 * h * spec.intermediate_size
    layers = spec.num_layers * later + h * heads  # the first one's attention reads 2H
    embedding = spec.vocab_size * h
    rest = layers + 3 * spec.target_hidden_size * (h + 1) + spec.draft_vocab_size * h
    return (rest, embedding) if freeze_embeddings else (rest + embedding, 0)


def _activations(spec: DraftSpec, tokens: int, share: float, size: int, partitions: int) -> int:
    """What autograd keeps: depth 0 of every position, and the deeper elements of one part."""
    h, d = spec.hidden_size, spec.head_dim
    attention = (3 * spec.num_attention_heads + 4 * spec.num_key_value_heads) * d  # q twice, output, k and v twice
    layer = 4 * h + attention + 4 * spec.intermediate_size  # norms and residuals; gate, silu, up, product
    ratio, least = spec.down_sample_ratio, spec.down_sample_ratio_min
    deeper = share * sum(max(ratio**depth, least) for depth in range(1, spec.num_depths))
    steps = deeper / partitions if spec.parallel_drafting else share * (spec.num_depths - 1)
    inputs = 8 * spec.target_hidden_size  # aux states, fc, both norms
    kept = tokens * size * (spec.num_layers * layer * (1 + steps) + inputs)
    return int(1.25 * kept)  # a quarter for gradients on their way down and what the heap cannot use again: measured


def _logits(spec: DraftSpec, tokens: int, device: str) -> int:
    """The draft's chunk, and the target's for about a third as many positions, twice; on a GPU their difference too,
    which a CPU makes block by block."""
    elements = min(chunk_elements(spec.draft_vocab_size, device), tokens * spec.num_depths)
    return 4 * spec.draft_vocab_size * (elements + 2 * elements // 3 + (device != "cpu") * 2 * elements)
