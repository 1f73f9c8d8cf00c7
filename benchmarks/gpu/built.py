"""Contestants that are built once for all parts of the benchmark, and what went wrong with them."""

from __future__ import annotations

import gc
import itertools
import math
import time
import traceback
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import jax
import torch

from benchmarks.gpu.machine import memory
from benchmarks.harness.runner import AbsentError, Contestant, Factory

NO_TIME = "no time was left"


class Built(NamedTuple):
    """A contestant that has run twice."""

    contestant: Contestant
    seconds: dict[str, float]  # of the set-up, of both runs, and of the compilation
    memory: dict[str, Any]  # after both, beside the contestants built before; JAX's peaks are those of the process


class Builder:
    """Builds each contestant once. One that could not be built raises its error again."""

    def __init__(self) -> None:
        self._made: dict[Hashable, Built | Exception] = {}

    def build(self, key: Hashable, factory: Factory) -> Built:
        """The contestant of this key; `factory` makes it at the first call."""
        if key not in self._made:
            try:
                self._made[key] = _build(factory)
            except Exception as error:
                self._made[key] = error
                raise
        made = self._made[key]
        if isinstance(made, Exception):
            raise made
        return made

    def close(self, kept: Callable[[Hashable], bool] = lambda key: False) -> None:
        """Close all contestants but those whose keys are `kept`."""
        for key, made in list(self._made.items()):
            if not kept(key):
                del self._made[key]
                if isinstance(made, Built):
                    made.contestant.close()
        gc.collect()


@dataclass
class Notes:
    """Errors, and what else is missing and why, by contestant."""

    errors: dict[str, str] = field(default_factory=dict)
    gaps: dict[str, str] = field(default_factory=dict)

    def attempt(self, name: str, work: Callable[[], Any], deadline: float = math.inf) -> Any:
        """The result of `work`; None after an exception, so that the others still run, and after the deadline."""
        if time.monotonic() > deadline:
            self.gaps[name] = NO_TIME
            return None
        try:
            return work()
        except AbsentError as error:
            self.gaps[name] = str(error)
        except Exception:
            self.errors[name] = traceback.format_exc(limit=-6)
        return None

    def lines(self) -> list[str]:
        """The notes as text."""
        return [f"{name}: {why}" for name, why in (self.gaps | self.errors).items()]


def _build(factory: Factory) -> Built:
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
    moments = [time.perf_counter()]
    contestant = factory()
    moments.append(time.perf_counter())
    saved_before = sum(_seconds_saved())
    for _ in range(2):
        contestant.run()
        moments.append(time.perf_counter())
    set_up, first, second = (after - before for before, after in itertools.pairwise(moments))
    saved = sum(_seconds_saved()) - saved_before
    seconds = {"set_up": set_up, "first": first, "second": second, "compile": max(first - second, 0.0) + saved}
    return Built(contestant, seconds, memory())


@cache
def _seconds_saved() -> list[float]:
    """The seconds that each program from JAX's cache of compiled programs would have taken to compile."""
    saved: list[float] = []

    def listen(name: str, seconds: float, **_: Any) -> None:
        if name.endswith("compile_time_saved_sec"):
            saved.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(listen)
    return saved
