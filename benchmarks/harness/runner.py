"""Interleaved rounds over named contestants."""

from __future__ import annotations

import contextlib
import gc
import importlib
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import jax
import torch

_MODULES = {"ray": "cluster"}  # benchmarks named after a package; a module with its name would hide it
WARM_UP = 2  # calls of `run` at least, before anything is measured


def file_of(benchmark: str) -> Path:
    """The file of a benchmark."""
    return Path(__file__).parents[1] / f"{_MODULES.get(benchmark, benchmark)}.py"


def module_of(benchmark: str) -> ModuleType:
    """Import the module of a benchmark."""
    return importlib.import_module(f"benchmarks.{_MODULES.get(benchmark, benchmark)}")


class AbsentError(Exception):
    """A contestant that does not do this work here, and why."""


class Contestant(Protocol):
    """The interface of a contestant: it works and counts frames."""

    def run(self) -> int:
        """Do a piece of work, such as one batch, and return its number of frames."""
        ...

    def close(self) -> None:
        """Close simulators and end processes."""
        ...


Factory = Callable[[], Contestant]


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the command line says."""

    rounds: int
    scale: float
    only: str
    platform: str = ""  # of the benchmark `gpu`: "cuda" or "cpu"
    seconds: float = 0.0  # of the benchmark `gpu`: how long it may take


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Contestants that do the same work.

    Args:
        block: length of one measured block in seconds.
        ours: the contestants that `compare` runs with two revisions; they use nothing but public names.
        stale: how many batches may be ready as a block begins, for contestants that collect ahead.
        rest: seconds before each block, for contestants whose processes use the processors for a while after theirs.
    """

    name: str
    note: str
    contestants: Mapping[str, Factory]
    block: float = 0.5
    ours: Sequence[str] = ("funcollect",)
    stale: Mapping[str, int] = field(default_factory=dict)
    rest: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of one cell: a table to print, and plain data to save."""

    name: str
    table: str
    data: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Frames per second of each contestant, one number per round, and which contestants are not installed."""

    rates: Mapping[str, list[float]]
    absent: Mapping[str, str]


def measure(cell: Cell, options: Options) -> Measured:
    """Warm every contestant up, then give each one block per round, in a new order each round."""
    one_thread()
    contestants, absent = _build(cell.contestants)
    seconds = cell.block * options.scale
    rates: dict[str, list[float]] = {name: [] for name in contestants}
    order = random.Random(0)
    try:
        for contestant in contestants.values():
            _warm_up(contestant, seconds)
        gc.collect()
        gc.freeze()  # the garbage collector need not traverse the frameworks' objects in a block
        for _ in range(options.rounds):
            for name in order.sample(list(contestants), len(contestants)):
                time.sleep(cell.rest)
                rates[name].append(block(contestants[name], seconds))
    finally:
        gc.unfreeze()
        for contestant in contestants.values():
            contestant.close()
    return Measured(rates=rates, absent=absent)


def one_thread() -> None:
    """One thread each; JAX calls return when they are done (JAX reads this from no environment variable)."""
    torch.set_num_threads(1)
    jax.config.update("jax_cpu_enable_async_dispatch", False)


def quiet_mujoco() -> None:
    """No warning about HalfCheetah's model for each environment, on the terminal and in a log file."""
    with contextlib.suppress(ModuleNotFoundError):
        import mujoco

        mujoco.set_mju_user_warning(lambda message: None)


def _build(factories: Mapping[str, Factory]) -> tuple[dict[str, Contestant], dict[str, str]]:
    contestants, absent = {}, {}
    for name, factory in factories.items():
        try:
            contestants[name] = factory()
        except AbsentError as error:
            absent[name] = f"{name} {error}"
        except ModuleNotFoundError as error:
            package = (error.name or "").partition(".")[0]
            if package in ("funcollect", "benchmarks"):
                raise
            absent[name] = f"{package} is not installed"
    return contestants, absent


def _warm_up(contestant: Contestant, seconds: float) -> None:
    for _ in range(WARM_UP):
        contestant.run()
    block(contestant, seconds)


def block(contestant: Contestant, seconds: float) -> float:
    gc.collect()
    frames = 0
    start = time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds or not frames:
        frames += contestant.run()
    return frames / elapsed
