# SPDX-License-Identifier: Apache-2.0
"""vLLM's spec-decode counters, as /metrics shows them.

Names and labels are the same in vLLM 0.14 to 0.33: `vllm:spec_decode_num_{drafts,draft_tokens,accepted_tokens}_total`
and `..._num_accepted_tokens_per_pos_total{position=}`, labelled by model_name and engine. The prefill's token counts no
draft; every later step counts one draft and K positions, also past the end of the answer.
"""

from __future__ import annotations

from dataclasses import dataclass

_DRAFTS = "vllm:spec_decode_num_drafts_total"
_DRAFT_TOKENS = "vllm:spec_decode_num_draft_tokens_total"
_ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
_PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"


@dataclass(frozen=True)
class SpecDecodeCounters:
    """Counts since the server started, or between two readings; summed over engines."""

    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    accepted_per_position: tuple[int, ...]  # [K]

    def __sub__(self, before: SpecDecodeCounters) -> SpecDecodeCounters:
        earlier = before.accepted_per_position + (0,) * len(self.accepted_per_position)
        return SpecDecodeCounters(
            self.num_drafts - before.num_drafts,
            self.num_draft_tokens - before.num_draft_tokens,
            self.num_accepted_tokens - before.num_accepted_tokens,
            tuple(now - then for now, then in zip(self.accepted_per_position, earlier, strict=False)),
        )


def parse_counters(text: str, model_name: str) -> SpecDecodeCounters | None:
    """Read the counters of one model out of a /metrics page; None when the page holds none of it.

    Raises:
        ValueError: the text is not in Prometheus' format.
    """
    from prometheus_client.parser import text_string_to_metric_families

    totals: dict[str, float] = {}
    positions: dict[int, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.labels.get("model_name") != model_name:
                continue
            if sample.name == _PER_POSITION:
                position = int(sample.labels["position"])
                positions[position] = positions.get(position, 0) + sample.value
            elif sample.name in (_DRAFTS, _DRAFT_TOKENS, _ACCEPTED):
                totals[sample.name] = totals.get(sample.name, 0) + sample.value
    if _DRAFTS not in totals:
        return None
    per_position = tuple(int(positions.get(i, 0)) for i in range(max(positions, default=-1) + 1))
    return SpecDecodeCounters(
        int(totals[_DRAFTS]), int(totals.get(_DRAFT_TOKENS, 0)), int(totals.get(_ACCEPTED, 0)), per_position
    )
