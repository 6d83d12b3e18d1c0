# SPDX-License-Identifier: Apache-2.0
"""What to expect of a draft after training: said in numbers at the end of a run, so that nobody waits for a 6."""

from __future__ import annotations

from typing import Any, Mapping

FEW_TOKENS = 20_000_000  # supervised, each counted once
LOW_LENGTH = 3.0
# EAGLE-3 (arXiv 2503.01840, section 4): about 68k ShareGPT and 464k UltraChat-200K conversations for its 4 to 6.
PUBLISHED = "published drafts that reach 4 to 6 saw about 500,000 conversations"


def describe_end(
    *, rows: int, supervised_tokens: int, source: str, epochs: float, num_depths: int,
    validation: Mapping[str, Any] | None, held_out: str | None, decoded: Mapping[str, Any] | None = None,
) -> tuple[str, ...]:  # fmt: skip
    """Lines for a person.

    Args:
        source, held_out: what `data.train` and `data.validation` name.
        epochs: passes over the rows so far, those before a resumption included.
        num_depths: K.
        validation: `Totals.summary` of the last pass over the held-out rows.
        decoded: what was decoded last with the target (`DecodeCheck.figures`).
    """
    once = f"{_short(supervised_tokens)} in {rows:,} rows of {source}"
    learnt = f"trained on {_short(supervised_tokens * epochs)} supervised tokens ({once}, {epochs:.3g} times)"
    if validation is None:
        advice = "how much of it will be accepted is not known: name held-out rows with data.validation=PATH"
        return learnt, advice
    length = (decoded or validation)["acceptance_length"]
    certainty = "vLLM's own count may differ by a few tenths"
    if decoded:
        certainty = f"decoded greedily with the target on {decoded['prompts']} prompts, as vLLM counts"
    expected = (
        f"expect an acceptance length near {length:.2f} (K={num_depths}, at most {num_depths + 1}) on chats like those "
        f"of {held_out}, less on others; {certainty}"
    )
    return (learnt, expected, *_advice(length, num_depths, supervised_tokens))


def _advice(length: float, num_depths: int, tokens: int) -> tuple[str, ...]:
    if length >= min(LOW_LENGTH, 0.75 * (num_depths + 1)):
        return ()
    if tokens < FEW_TOKENS:
        return (
            f"that is what {_short(tokens)} tokens give: 4 to 6 is not to be expected of a few thousand rows "
            f"({PUBLISHED}). More rows, answered by the target itself, help most; then more epochs",
        )
    return ("little for so many tokens: were the rows answered by the target itself, is the loss still falling?",)


def _short(count: float) -> str:
    """1234567 -> 1.23M."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return f"{count:.0f}"
