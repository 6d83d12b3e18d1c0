# SPDX-License-Identifier: Apache-2.0
"""The figures that follow from vLLM's spec-decode counters (design section 6)."""

from __future__ import annotations

from nemo_automodel.components.speculative.serve.counters import SpecDecodeCounters


def acceptance_length(counters: SpecDecodeCounters) -> float:
    """1 + accepted / drafts: tokens per verification step as vLLM counts them (tokens past the end included)."""
    return 1 + counters.num_accepted_tokens / counters.num_drafts if counters.num_drafts else 1.0


def acceptance_rate(counters: SpecDecodeCounters) -> float:
    """Accepted / drafted tokens."""
    return counters.num_accepted_tokens / counters.num_draft_tokens if counters.num_draft_tokens else 0.0


def per_position(counters: SpecDecodeCounters) -> tuple[float, ...]:
    """Share of drafts whose token at position 0..K-1 was accepted.  # [K]"""
    drafts = counters.num_drafts
    return tuple(count / drafts if drafts else 0.0 for count in counters.accepted_per_position)


def useful_tokens_per_step(counters: SpecDecodeCounters, output_tokens: int, num_prompts: int) -> float:
    """Tokens really returned per verification step; each prompt's first token comes from the prefill."""
    return (output_tokens - num_prompts) / counters.num_drafts if counters.num_drafts else 1.0


def tokens_per_step_overall(counters: SpecDecodeCounters, output_tokens: int, num_prompts: int) -> float:
    """The same over all steps, for a drafter that does not propose in each: vLLM counts only those that do.

    A step returns one token and what it accepted, so steps = tokens after the prefill's - accepted.
    """
    later = output_tokens - num_prompts
    steps = later - counters.num_accepted_tokens
    return later / steps if steps > 0 else 1.0
