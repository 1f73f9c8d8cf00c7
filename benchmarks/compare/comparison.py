"""Contestants with two revisions of the package in interleaved rounds: the ratio of their speeds, and the verdict."""

from __future__ import annotations

import contextlib
import math
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Literal, NamedTuple, Self

from benchmarks.compare.served import Block, Work
from benchmarks.compare.side import FailedError, Side
from benchmarks.harness.runner import AbsentError

SIDES = BEFORE, AFTER = "before", "after"
Clock = Literal["wall", "cpu"]
CLOCKS: tuple[Clock, ...] = ("wall", "cpu")
SHORTEST = 0.5  # seconds of a block at least, before `scale`
GROUP = 8  # cells that share the processes of a round, because processes take seconds to start


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


class Name(NamedTuple):
    """The name of a comparison."""

    work: Work
    contestant: str


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The blocks of each side, one per round, and the error that ended them, if any."""

    blocks: Mapping[str, list[Block]] = field(default_factory=lambda: {side: [] for side in SIDES})
    errors: dict[str, Exception] = field(default_factory=dict)

    def seconds(self, side: str, clock: Clock) -> list[float]:
        """Seconds per frame [rounds]."""
        return [getattr(block, clock) / block.frames for block in self.blocks[side]]

    def ratio(self, clock: Clock) -> Ratio:
        """The ratio of the speeds; by CPU time, which other programs on the machine disturb less, or by wall time."""
        return speed_ratio(self.seconds(BEFORE, clock), self.seconds(AFTER, clock))

    @property
    def verdict(self) -> Verdict:
        """By wall time, if both revisions ran in every round.

        `absent` if neither can run here, `new` if only the second revision ever ran, else `broken`.
        """
        if not self.errors:
            return verdict(self.ratio("wall"), len(self.blocks[AFTER]))
        if all(isinstance(self.errors.get(side), AbsentError) for side in SIDES):
            return "absent"
        return "new" if AFTER not in self.errors and not self.blocks[BEFORE] else "broken"


def compared(
    trees: Mapping[str, Path], works: Sequence[Work], rounds: int, scale: float, tick: Callable[[], object]
) -> Iterator[dict[Name, Comparison]]:
    """Yield the comparisons of a few cells at a time.

    Each round has a new process per side. Where memory happens to lie makes a process a few percent faster or slower
    for as long as it lives, so the rounds of one pair of processes would agree with each other about chance.

    Args:
        trees: folder of each side.
        works: the cells.
        rounds: pairs of blocks per contestant.
        scale: factor on the length of a block.
        tick: called after each pair of blocks.
    """
    draw = random.Random(0)
    for start in range(0, len(works), GROUP):
        found = {Name(work, each): Comparison() for work in works[start : start + GROUP] for each in work.ours}
        for seed in range(rounds):
            with Pair(trees, seed) as pair:
                for name, comparison in found.items():
                    if not comparison.errors:
                        pair.measure(name, comparison, scale, draw.sample(SIDES, 2))
                    tick()
        yield found


class Pair:
    """The processes of one round, both of which are replaced after one has failed."""

    def __init__(self, trees: Mapping[str, Path], seed: int) -> None:
        self._trees, self._seed = trees, seed
        self._sides: dict[str, Side] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._end()

    def measure(self, name: Name, comparison: Comparison, scale: float, order: Sequence[str]) -> None:
        """Add one block per side, or the error.

        A block has two halves, in the order A B B A: a machine that steadily grows slower does so for both sides.
        After one side has failed, the other one still runs, so that it is known which of them are at fault.
        """
        half = max(name.work.block, SHORTEST) * scale / 2
        errors, halves = comparison.errors, dict[str, list[Block]]({side: [] for side in SIDES})
        self._open(name, half, errors)
        for side in (*order, *reversed(order)):
            if side not in errors:
                with _kept(errors, side):
                    halves[side].append(self._sides[side].ask("block", half))
        self._close(errors)
        if not errors:
            for side in SIDES:
                comparison.blocks[side].append(joined(halves[side]))

    def _open(self, name: Name, seconds: float, errors: dict[str, Exception]) -> None:
        """Build and warm up both sides at once."""
        if not self._sides:
            self._sides = {side: Side(tree, self._seed) for side, tree in self._trees.items()}
        for side in self._sides.values():
            side.resume()
            side.request("open", name.work.benchmark, name.work.cell, name.contestant, seconds)
        for each, side in self._sides.items():
            with _kept(errors, each):
                side.answer()
        for side in self._sides.values():
            side.stop()

    def _close(self, errors: dict[str, Exception]) -> None:
        for name, side in self._sides.items():
            if name not in errors:
                with _kept(errors, name):
                    side.ask("close")
        if any(isinstance(error, FailedError) for error in errors.values()):
            self._end()

    def _end(self) -> None:
        while self._sides:
            self._sides.popitem()[1].end()


def joined(blocks: Sequence[Block]) -> Block:
    """One block of all frames."""
    return Block(*map(sum, zip(*blocks, strict=True)))


@contextlib.contextmanager
def _kept(errors: dict[str, Exception], name: str) -> Iterator[None]:
    try:
        yield
    except (AbsentError, FailedError) as error:
        errors[name] = error
