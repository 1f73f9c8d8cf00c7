"""The ratio of two speeds from paired rounds: its estimate, its confidence interval, and the verdict."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["no slower", "slower", "faster", "unclear", "absent", "broken", "new"]
ENOUGH = 9  # rounds that a verdict needs
LEVEL = 0.95  # of the confidence interval, at least


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """An estimate with its confidence interval; (0, inf) if there are too few rounds for one."""

    estimate: float
    low: float
    high: float


def speed_ratio(before: Sequence[float], after: Sequence[float]) -> Ratio:
    """How many times as fast the second one is, from seconds per frame [rounds] of each.

    The logarithms of the ratios, one per round, are analysed with Wilcoxon's signed-rank statistic: the estimate is
    Hodges and Lehmann's, the median of the Walsh averages (the means of all pairs, each value with itself included),
    and the limits are the Walsh averages between which the test accepts. The interval is exact for every distribution
    that is symmetric. Here it is, if there is no difference, because the order within each round is random.

    Source: Hollander, Wolfe and Chicken, "Nonparametric Statistical Methods", 3rd edition, sections 3.2 and 3.3.
    """
    logs = [math.log(old / new) for old, new in zip(before, after, strict=True)]
    walsh = sorted((one + other) / 2 for i, one in enumerate(logs) for other in logs[i:])
    rank = _rank(len(logs))
    low, high = (walsh[rank - 1], walsh[-rank]) if rank else (-math.inf, math.inf)
    return Ratio(estimate=math.exp(statistics.median(walsh)), low=math.exp(low), high=math.exp(high))


def _rank(count: int) -> int:
    """Which of the sorted Walsh averages is the lower limit, from 1; 0 if no interval reaches the level.

    It is the largest number of signed-rank sums, counted from the lowest, that have a probability of at most 2.5 %.
    """
    ways = [1]  # in which the ranks so far add up to 0, 1, ...
    for rank in range(1, count + 1):
        ways = [a + b for a, b in zip(ways + [0] * rank, [0] * rank + ways, strict=True)]
    allowed, total, found = (1 - LEVEL) / 2 * 2**count, 0, 0
    while (total := total + ways[found]) <= allowed:
        found += 1
    return found


def verdict(ratio: Ratio, rounds: int) -> Verdict:
    """The project's rule: no slower is a ratio whose interval holds 1 or lies above it, from 9 rounds on."""
    if rounds < ENOUGH:
        return "unclear"
    if ratio.high < 1:
        return "slower"
    return "faster" if ratio.low > 1 else "no slower"
