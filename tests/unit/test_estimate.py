# SPDX-License-Identifier: Apache-2.0
"""The memory estimate follows from sizes, and names the knob that helps."""

from __future__ import annotations

from test_alignment import DRAFT_VOCAB, V, small_spec

from nemo_automodel.components.speculative.draft.build import empty_draft
from nemo_automodel.components.speculative.train.estimate import GIB, MemoryEstimate, draft_parameters, estimate_memory


def estimate(changes: dict | None = None, **sizes: object) -> MemoryEstimate:
    given = {"target_parameters": 10**6, "target_bytes": 4, "seq_length": 4096, "micro_batch_size": 1} | sizes
    spec = small_spec(**({"hidden_size": 512, "target_hidden_size": 512, "num_layers": 2} | (changes or {})))
    return estimate_memory(spec, **given)


def test_parameters_are_counted_as_the_network_has_them() -> None:
    for changes in ({}, {"draft_vocab_size": V, "num_layers": 1}):
        spec = small_spec(**changes)
        network = empty_draft(spec)
        count = sum(p.numel() for p in network.parameters())
        vectors = sum(p.numel() for p in network.parameters() if p.ndim == 1)  # norms: left out
        assert abs(sum(draft_parameters(spec)) - count) <= vectors
        trained, frozen = draft_parameters(spec, freeze_embeddings=True)
        assert frozen == network.model.embed_tokens.weight.numel() and trained + frozen == sum(draft_parameters(spec))


def test_activations_grow_with_the_tokens_and_shrink_with_partitions() -> None:
    one, two, parts = estimate(), estimate(seq_length=8192), estimate(partitions=4)
    assert abs(two.activations - 2 * one.activations) <= 2 and two.optimizer == one.optimizer
    assert parts.activations < 0.7 * one.activations and parts.gradients == one.gradients
    assert estimate(supervised_share=0.2).activations < one.activations
    assert estimate(compute_bytes=2).activations < 0.51 * one.activations
    frozen = estimate(freeze_embeddings=True)
    assert one.gradients - frozen.gradients == 4 * V * 512 and frozen.draft_weights == one.draft_weights


def test_what_fits_needs_no_knob_and_what_does_not_names_a_key_that_helps() -> None:
    long = estimate(seq_length=65_536)
    assert long.knob(long.total) is None
    assert "draft.sequence_partitions=2" in long.knob(long.total - 1)
    assert "train.micro_batch_size=2" in long.knob(long.total - 1, micro_batch_size=4)
    wide = estimate({"vocab_size": 150_000, "draft_vocab_size": 150_000}, seq_length=64)
    assert "draft.freeze_embeddings=true" in wide.knob(wide.total - 1)
    assert "or a device with more memory" in wide.knob(1)


def test_a_persons_line_gives_the_total_and_its_parts() -> None:
    said = MemoryEstimate(*(GIB for _ in vars(estimate())))
    assert said.line().startswith("memory of a step: about 8.0 GiB") and "optimizer 1.00" in said.line()


def test_a_smaller_draft_vocabulary_takes_less_for_everything_that_has_its_width() -> None:
    full, small = (estimate({"vocab_size": 150_000, "draft_vocab_size": size}) for size in (150_000, len(DRAFT_VOCAB)))
    assert small.logits < full.logits and small.optimizer < 0.6 * full.optimizer
