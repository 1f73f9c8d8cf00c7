"""The program of a `Side` process: it runs contestants over one revision's package, one at a time."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import signal
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import jax

from benchmarks.harness.processes import cpu_seconds, cpu_times, family
from benchmarks.harness.runner import WARM_UP, AbsentError, Cell, Contestant, module_of, one_thread, quiet_mujoco

REST = 0.1  # seconds in which batches that are begun are finished, before those that are ready are read
_SET_PARENT_DEATH_SIGNAL = 1  # of prctl(2)


class Work(NamedTuple):
    """The cell that a process measures."""

    benchmark: str
    cell: str
    note: str
    block: float  # seconds
    ours: Sequence[str]


class Block(NamedTuple):
    """The measurements of one block."""

    frames: int
    wall: float  # seconds
    cpu: float  # seconds of user and system time, of the process and of all that it started


def serve(fd: int, parent: int, tree: str) -> None:
    """Answer the requests that arrive over a pipe until it is closed.

    An answer is a value, the kind of an error ("", "absent" or "failed") and its text.

    Args:
        fd: of the pipe.
        parent: process id of the command, without which this process ends.
        tree: folder from which the package and the benchmarks must come.
    """
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended before the line above
        return
    end, server = Connection(fd), Server(tree)
    with contextlib.suppress(EOFError):
        while True:
            name, *arguments = end.recv()
            end.send(_answer(server, name, arguments))


def _answer(server: Server, name: str, arguments: Sequence[Any]) -> tuple[Any, str, str]:
    try:
        return getattr(server, name)(*arguments), "", ""
    except AbsentError as error:
        return None, "absent", str(error)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        ours = package in ("funcollect", "benchmarks")
        return None, "failed" if ours else "absent", str(error) if ours else f"{package} is not installed"
    except Exception as error:
        return None, "failed", f"{type(error).__name__}: {str(error)[:200]}"


class Server:
    """The requests: `cells`; or `open`, `block` as often as wanted, and `close`, for one contestant after the other."""

    def __init__(self, tree: str) -> None:
        self._tree = tree
        self._contestant: Contestant | None = None
        quiet_mujoco()
        one_thread()
        _keep_programs(tree)

    def cells(self, benchmark: str, only: str) -> list[Work]:
        """The cells that hold `only` in their names and have contestants of ours."""
        return [
            Work(benchmark, cell.name, cell.note, cell.block, tuple(cell.ours))
            for cell in self._cells(benchmark)
            if cell.ours and only in cell.name
        ]

    def open(self, benchmark: str, cell: str, contestant: str, seconds: float) -> None:
        """Build a contestant and warm it up with a block of this length."""
        chosen = next(each for each in self._cells(benchmark) if each.name == cell)
        self._stale = chosen.stale.get(contestant, 0)
        self._contestant = made = chosen.contestants[contestant]()
        for _ in range(WARM_UP):
            made.run()
        self.block(seconds)
        gc.collect()
        gc.freeze()  # the frameworks' objects are not traversed again in a block

    def block(self, seconds: float) -> Block:
        """Run the contestant for this long, at least once."""
        assert self._contestant
        gc.collect()
        pids = family(os.getpid())
        _settle(self._contestant, self._stale)
        earlier = cpu_times(pids)
        frames, elapsed = _timed(self._contestant, seconds)
        later = cpu_times(family(os.getpid()))  # also of workers that were replaced meanwhile
        return Block(frames=frames, wall=elapsed, cpu=cpu_seconds(earlier, later))

    def close(self) -> None:
        """Close the contestant, if there is one."""
        contestant, self._contestant = self._contestant, None
        gc.unfreeze()
        if contestant:
            contestant.close()

    def _cells(self, benchmark: str) -> Iterator[Cell]:
        for name in ("funcollect", "benchmarks"):
            _check_origin(name, self._tree)
        cells: Iterator[Cell] = module_of(benchmark).cells()
        return cells


def _keep_programs(tree: str) -> None:
    """Keep JAX's compiled programs for the processes of later rounds."""
    jax.config.update("jax_compilation_cache_dir", f"{tree}/.xla")
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def _check_origin(name: str, tree: str) -> None:
    found = importlib.import_module(name).__file__ or ""
    if not Path(found).is_relative_to(tree):
        raise ImportError(f"{name} comes from {found}, expected a file in {tree}: check PYTHONPATH")


def _settle(contestant: Contestant, stale: int) -> None:
    """Read the batches that workers finished while nothing was measured."""
    if stale:
        time.sleep(REST)
    for _ in range(stale):
        contestant.run()


def _timed(contestant: Contestant, seconds: float) -> tuple[int, float]:
    """Frames, and the seconds that they took, by the contestant's own clock where it has one."""
    if own := getattr(contestant, "timed", None):
        frames, elapsed = own()
        return frames, elapsed
    frames = 0
    start = time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds or not frames:
        frames += contestant.run()
    return frames, elapsed
