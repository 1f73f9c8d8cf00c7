"""A contestant in a process of its own, for a peer that changes what the others of its process do."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection

from benchmarks.runner import Contestant, one_thread

_TO_END = 10.0  # seconds


class Elsewhere:
    """Runs the contestant that `factory`, which must be picklable, makes in a fresh process."""

    def __init__(self, factory: Callable[[], Contestant]) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._orders, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(factory, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def run(self) -> int:
        self._orders.send(True)
        return int(self._orders.recv())

    def close(self) -> None:
        self._orders.close()
        self._process.join(_TO_END)
        self._process.kill()


def _serve(factory: Callable[[], Contestant], orders: Connection) -> None:
    one_thread()
    contestant = factory()
    try:
        while orders.recv():
            orders.send(contestant.run())
    except EOFError:
        contestant.close()
