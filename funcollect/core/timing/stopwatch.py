"""Adds up the time of calls, by the part of a rollout that they belong to."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

_CALLS = 1_000  # of a function that does nothing, which are timed
_ROUNDS = 5

_now = time.perf_counter


class Overhead(NamedTuple):
    """What timing one call costs, in seconds."""

    counted: float  # in the time that the stopwatch has counted for the call
    whole: float  # in the time of the caller


class Stopwatch:
    """Adds up the seconds that calls take.

    Attributes:
        seconds: of all calls, by part.
        calls: their number, by part.
    """

    def __init__(self, wait: Callable[[], None] | None = None) -> None:
        """`wait` blocks until an accelerator has done all its work; it is called before and after each timed call."""
        self.seconds: dict[str, float] = {}
        self.calls: dict[str, int] = {}
        self._wait = wait

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that does what `function` does, and adds its time to that of `part`."""
        seconds, calls, wait = self.seconds, self.calls, self._wait
        seconds.setdefault(part, 0.0)
        calls.setdefault(part, 0)

        def call(*args: Any) -> Any:
            began = _now()
            try:
                return function(*args)
            finally:
                seconds[part] += _now() - began
                calls[part] += 1

        def call_and_wait(*args: Any) -> Any:
            assert wait is not None
            wait()
            began = _now()
            try:
                return function(*args)
            finally:
                wait()
                seconds[part] += _now() - began
                calls[part] += 1

        return call if wait is None else call_and_wait


class Delegate:
    """Stands for another object, also to `isinstance`. Members that are given by name take the place of its own."""

    def __init__(self, inner: Any, **members: Any) -> None:
        self._inner = inner
        vars(self).update(members)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def overhead() -> Overhead:
    """Measure what timing a call costs here and now: the median of a few rounds."""

    def nothing(_: Any) -> None:
        pass

    rounds = []
    for _ in range(_ROUNDS):
        stopwatch = Stopwatch()
        bare, whole = _seconds(nothing), _seconds(stopwatch.timed("", nothing))
        rounds.append((max(stopwatch.seconds[""] - bare, 0.0) / _CALLS, max(whole - bare, 0.0) / _CALLS))
    counted, both = (statistics.median(column) for column in zip(*rounds, strict=True))
    return Overhead(min(counted, both), both)


def _seconds(function: Callable[[Any], None]) -> float:
    """The seconds of many calls."""
    began = _now()
    for each in range(_CALLS):
        function(each)
    return _now() - began
