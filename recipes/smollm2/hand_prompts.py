# SPDX-License-Identifier: Apache-2.0
"""Prompts made of word lists (hand_prompts.json), for what a small model seldom asks itself: sums, code, rewriting."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, Iterator

LISTS = json.loads((Path(__file__).parent / "hand_prompts.json").read_text(encoding="utf-8"))


class Draw(dict):
    """Words for the places of one prompt, drawn when first asked for: the same place is the same word throughout."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.rng = rng

    def __missing__(self, place: str) -> Any:
        words = LISTS["words"][place]
        numbers = isinstance(words[0], int)  # [lowest, highest]
        self[place] = self.rng.randint(*words) if numbers else self.rng.choice(words)
        return self[place]


def hand_prompts(seed: int) -> Iterator[str]:
    """Prompts without end, each kind in turn; the same seed gives the same ones. Repeats are the reader's to drop."""
    rng = random.Random(seed)
    while True:
        for templates in LISTS["kinds"]:
            yield rng.choice(templates).format_map(Draw(rng))
