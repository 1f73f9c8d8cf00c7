"""Statistics of a run for a file, and tables for a person."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from tensordict import TensorDict
from torch import Tensor

from funcollect.progress import EpisodeWindow, track
from funcollect.trajectories.stats import EpisodeStats
from funcollect.tree import flatten


class RunSummary:
    """Counts the episodes, frames and seconds of a run."""

    def __init__(self) -> None:
        self._window = EpisodeWindow()
        self._parts: list[EpisodeStats] = []
        self._seconds = 0.0

    def follow(self, collector: Iterable[TensorDict]) -> Iterator[TensorDict]:
        """Iterate over the batches with a progress bar."""
        began = time.perf_counter()
        for batch in track(collector, window=self._window):
            if self._window.last is not None:
                self._parts.append(replace(self._window.last, open_returns={}))
            yield batch
        self._seconds = time.perf_counter() - began

    @property
    def episodes(self) -> EpisodeStats:
        """The episodes that ended, and those that were open at the end."""
        whole = EpisodeStats.concatenate(self._parts)
        return whole if self._window.last is None else replace(whole, open_returns=self._window.last.open_returns)

    def statistics(self) -> dict[str, Any]:
        """The counts of the run, and the spread of episode returns and lengths, as values for JSON."""
        return {
            "frames": self._window.frames,
            "seconds": self._seconds,
            "frames_per_second": self._window.frames / self._seconds,
            **_episode_statistics(self.episodes),
        }

    def table(self) -> str:
        """The statistics as two tables."""
        return _tables(self.statistics())


def episode_table(episodes: EpisodeStats) -> str:
    """The number of episodes, and the spread of their returns and lengths, as two tables."""
    return _tables(_episode_statistics(episodes))


def _episode_statistics(episodes: EpisodeStats) -> dict[str, Any]:
    """The counts of episodes, and the spread of their returns and lengths, as values for JSON."""
    terminated, returns = int(episodes.terminated.sum()), episodes.returns
    players = {"": returns} if returns.ndim == 1 else {f"_{n}": column for n, column in enumerate(returns.mT)}
    return {
        "episodes": len(episodes),
        "terminated": terminated,
        "truncated": len(episodes) - terminated,
        **{f"return{player}": _spread(column) for player, column in players.items()},
        "length": _spread(episodes.lengths.double()),
    }


def _tables(statistics: dict[str, Any]) -> str:
    """Counts and spreads, each as a table."""
    spreads = {name: value for name, value in statistics.items() if isinstance(value, dict)}
    counts = {name: value for name, value in statistics.items() if name not in spreads}
    rows = [(name, *map(_number, spread.values())) for name, spread in spreads.items()]
    totals = _table([(name.replace("_per_", "/"), _number(value)) for name, value in counts.items()])
    return f"{totals}\n\n{_table([('per episode', 'mean', 'std', 'min', 'max'), *rows])}"


def _spread(values: Tensor) -> dict[str, float | None]:
    """The mean, standard deviation, minimum and maximum; None for one that does not exist or is not finite."""
    if not len(values):
        return dict.fromkeys(("mean", "std", "min", "max"))
    numbers = {"mean": values.mean(), "std": values.std(correction=0), "min": values.min(), "max": values.max()}
    return {name: float(number) if number.isfinite() else None for name, number in numbers.items()}


def _number(value: float | None) -> str:
    """A number as text: commas in thousands, two decimals if it is a float; "-" for None."""
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"


def layout(batch: TensorDict) -> str:
    """The keys of a batch with their shapes and dtypes."""
    rows = [(".".join(path), str(list(leaf.shape)), str(leaf.dtype)) for path, leaf in flatten(batch).items()]
    return _table([("key", "shape", "dtype"), *sorted(rows)])


def _table(rows: Sequence[Sequence[str]]) -> str:
    """The rows as lines of text: the first column is aligned on the left, the others on the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
