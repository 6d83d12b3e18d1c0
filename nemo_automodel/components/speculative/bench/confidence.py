# SPDX-License-Identifier: Apache-2.0
"""How sure a figure is: a 95 % interval by bootstrap over prompts.

Tokens of one prompt are not independent of each other, prompts are: so whole prompts are drawn, with replacement, as
many as there were, and the figure is computed anew; the interval holds the middle 95 % of RESAMPLES such figures
(the percentile method; Efron and Tibshirani, An Introduction to the Bootstrap, section 13.3). The seed is fixed: the
same measurement gives the same interval.
"""

from __future__ import annotations

from typing import Sequence

import numpy as np

RESAMPLES, LEVEL, SEED = 2000, 0.95, 0
Interval = tuple[float, float]


def ratio_interval(over: Sequence[float], under: Sequence[float], *, plus: float = 0.0, times: float = 1.0):
    """Interval of plus + times * sum(over) / sum(under); one value per prompt. None when it cannot be told.

    Draws in which `under` sums to zero are left out.
    """
    return _interval(lambda draws: plus + times * _ratio(over, under, draws), len(over))


def paired_interval(
    over: Sequence[float],
    under: Sequence[float],
    base_over: Sequence[float],
    base_under: Sequence[float],
    *,
    times: float = 1.0,
) -> Interval | None:
    """Interval of times * (sum(over) / sum(under)) / (sum(base_over) / sum(base_under)), the same prompts drawn for
    both, so that easy and hard prompts weigh alike above and below."""

    def figure(draws: np.ndarray) -> np.ndarray:
        return times * _ratio(over, under, draws) / _ratio(base_over, base_under, draws)

    return _interval(figure, len(over))


def _ratio(over: Sequence[float], under: Sequence[float], draws: np.ndarray) -> np.ndarray:
    top, bottom = np.asarray(over, float)[draws].sum(1), np.asarray(under, float)[draws].sum(1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return top / bottom


def _interval(figure, prompts: int) -> Interval | None:
    if prompts < 2:
        return None
    draws = np.random.default_rng(SEED).integers(0, prompts, (RESAMPLES, prompts))
    figures = figure(draws)
    figures = figures[np.isfinite(figures)]
    if not len(figures):
        return None
    low, high = np.quantile(figures, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)
