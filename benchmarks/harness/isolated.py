"""A contestant in its own process, with a time limit: if it fails or hangs, all its processes are killed."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from operator import methodcaller
from typing import Any

from benchmarks.harness.processes import signal_family
from benchmarks.harness.runner import AbsentError, one_thread, quiet_mujoco

TO_START = 180.0  # seconds that a contestant may take to import its library, in all of its processes
PATIENCE = 120.0  # seconds that a piece of work may take
TO_CLOSE = 5.0  # seconds that a contestant may take to end its own processes
_SET_PARENT_DEATH_SIGNAL = 1  # of prctl(2)


class Isolated:
    """A contestant in its own process. This process and its children are stopped except during a request.

    Some contestants are never idle, so they would slow the others down, and some never end. Children are found by their
    session and by their parents: Ray's actors have process groups of their own, our workers sessions of their own.

    Args:
        make: picklable; what it returns may have `close`.
        patience: seconds that a piece of work may take.

    Raises:
        AbsentError: from all methods but `close`, after a failure or too long a wait; all processes are then killed.
    """

    def __init__(self, make: Callable[[], Any], patience: float = PATIENCE) -> None:
        self._patience = patience
        context = multiprocessing.get_context("spawn")
        self._end, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, make))
        self._process.start()
        theirs.close()
        try:
            self._answer("starts", TO_START)
        except BaseException:  # otherwise the process would never end
            self._kill()
            raise
        self._signal(signal.SIGSTOP)

    def ask(self, work: Callable[..., Any], *args: Any) -> Any:
        """Return ``work(contestant, *args)``, called in the other process."""
        with self._awake():
            self._end.send((work, args))
            return self._answer("collects", self._patience)

    def run(self) -> int:
        """Call the contestant's `run` in the other process."""
        return int(self.ask(methodcaller("run")))

    def close(self) -> None:
        """Let the contestant end its processes, and kill those that are left."""
        with contextlib.suppress(AbsentError, OSError), self._awake():
            self._end.send(None)
            self._answer("shuts down", TO_CLOSE)
        self._kill()

    @contextlib.contextmanager
    def _awake(self) -> Iterator[None]:
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def _answer(self, what: str, patience: float) -> Any:
        try:
            answer, error = self._end.recv() if self._end.poll(patience) else (None, f"no end within {patience:g} s")
        except EOFError:
            answer, error = None, "its process is gone"
        if error:
            self._kill()
            raise AbsentError(f"fails as it {what}: {error}")
        return answer

    def _signal(self, number: signal.Signals) -> None:
        assert self._process.pid
        signal_family(self._process.pid, number)

    def _kill(self) -> None:
        self._signal(signal.SIGKILL)
        self._process.kill()
        self._process.join()


def interleaved(
    makers: Mapping[str, Callable[[], Any]], work: Callable[[str, Isolated], Any], rounds: int
) -> tuple[dict[str, list[Any]], dict[str, str]]:
    """Call `work` for every contestant in every round, in a new order each; also return why others are absent."""
    made: dict[str, Isolated] = {}
    found: dict[str, list[Any]] = {name: [] for name in makers}
    absent: dict[str, str] = {}
    order = random.Random(0)
    try:
        for each in range(-2, rounds):  # the first one builds, the second one warms up
            for name in order.sample(list(found), len(found)):
                try:
                    if each == -2:
                        made[name] = Isolated(makers[name])
                    elif (answer := work(name, made[name])) and each >= 0:
                        found[name].append(answer)
                except AbsentError as error:
                    absent[name] = f"{name} {error}"
                    del found[name]
    finally:
        for contestant in made.values():
            contestant.close()
    return found, absent


def in_new_processes(
    makers: Mapping[str, tuple[Callable[[], Any], Callable[[Any], dict[str, float]]]], rounds: int
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """What each work measures, by name, in a process for each of a few rounds; also return why others are absent.

    `makers` have what is built before the work, which gets it.
    """
    found: dict[str, list[float]] = {}
    absent: dict[str, str] = {}
    for _ in range(max(rounds // 5, 1)):
        for name, (make, work) in makers.items():
            try:
                with contextlib.closing(Isolated(make)) as process:
                    for what, took in process.ask(work).items():
                        found.setdefault(what, []).append(took)
            except AbsentError as error:
                absent[name] = f"{name} {error}"
    return found, absent


def start_twice(name: str, make: Callable[[], Any]) -> dict[str, float]:
    """The seconds until the first batch of the first and the second collector of a process."""
    took = {}
    for which in ("first", "second"):
        began = time.perf_counter()
        contestant = make()
        contestant.run()
        took[f"{name}, {which}"] = time.perf_counter() - began
        contestant.close()
    return took


def _serve(end: Connection, make: Callable[[], Any]) -> None:
    """Answer requests until the one to close."""
    os.setsid()
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    try:
        quiet_mujoco()
        one_thread()
        contestant = make()
        end.send((None, ""))
        while (asked := end.recv()) is not None:
            work, args = asked
            end.send((work(contestant, *args), ""))
        getattr(contestant, "close", lambda: None)()
        end.send((None, ""))
    except Exception as error:
        end.send((None, f"{type(error).__name__}: {str(error)[:80]}"))
