"""The worker process: it answers calls by messages, and writes rollouts into slots of shared memory."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import cloudpickle
from tensordict import TensorDictBase
from torch import Tensor

from funcollect.collectors.processes.slots import weights_in
from funcollect.collectors.workers.batch_layout import BatchColumn, BatchLayout, PackedLayout, columns_of, store
from funcollect.collectors.workers.transport import WITH_WEIGHTS
from funcollect.collectors.workers.worker import RolloutReport, Worker
from funcollect.core.request import NOWHERE
from funcollect.processes.channel import Channel
from funcollect.processes.child import enter_child
from funcollect.processes.failures import Failure
from funcollect.processes.shared_memory import mapped
from funcollect.tree import Path


def main(fds: Sequence[int]) -> None:
    """Serve the collector that has started this process, until it asks to close or has ended."""
    channel = enter_child(fds)
    first = channel.receive()
    assert first is not None
    setup, eager = first[0]
    setup.apply()
    served = ServedWorker(channel, eager=eager)
    try:
        while served.answer():
            pass
    except (EOFError, OSError):
        pass  # the collector's process has ended
    sys.stdout.flush()
    sys.stderr.flush()


class ServedWorker:
    """A worker, its shared memory, and the waiting calls."""

    def __init__(self, channel: Channel, *, eager: bool) -> None:
        self._channel = channel
        self._eager = eager
        self._waiting: deque[tuple[int, str, tuple[Any, ...], list[int]]] = deque()
        self._worker: Worker | None = None
        self._single = False
        self._slots: list[Mapping[Path, Tensor]] = []
        self._held: tuple[TensorDictBase, RolloutReport, int] | None = None  # a rollout that waits for its slot
        self._weights: Sequence[Mapping[str, Tensor]] = ()

    def answer(self) -> bool:
        """Answer the next call; False if it was to close."""
        number, name, args, fds = self._next()
        if name == "close":
            if self._worker is not None:
                self._worker.close()
            return False
        try:
            value = self._do(name, args, fds)
        except BaseException as error:
            value = Failure.of(error) if self._worker is None else self._worker.failure(error)
        finally:
            for fd in fds:
                os.close(fd)
        match value:
            case (None, RolloutReport(final=None) as report):
                self._channel.send((number, None, report.packed()), plain=True)
            case _:
                self._channel.send((number, value))
        return True

    def _next(self) -> tuple[int, str, tuple[Any, ...], list[int]]:
        """The next call: one to close, else one with new weights if those go first, else the oldest."""
        waiting = self._waiting
        while (message := self._channel.receive(wait=not waiting)) is not None:
            waiting.append((*message[0], message[1]))
        eager = self._eager and self._worker is not None
        for call in list(waiting):
            if call[1] == "close" or (eager and call[1] in WITH_WEIGHTS):
                waiting.remove(call)
                return call
        return waiting.popleft()

    def _do(self, name: str, args: tuple[Any, ...], fds: list[int]) -> Any:
        """Run a call, and return its result."""
        match name:
            case "describe":
                self._worker = Worker(cloudpickle.loads(args[0]))
                info = self._worker.describe()
                self._single = info.num_envs is None
                return info
            case "collect":
                return self._collect(*args)
            case "attach":
                return self._attach(*args, fd=fds[0])
            case "fetch":
                return self._fetch(*args, fds=fds)
            case _:
                return getattr(self._worker, name)(*args)

    def _collect(self, slot: int) -> tuple[tuple[BatchColumn, ...] | None, RolloutReport]:
        """Write a rollout into a slot; if there are none yet, keep it and return the columns that a slot needs."""
        assert self._worker is not None
        columns = self._slots[slot] if self._slots else NOWHERE
        batch, report = self._worker.collect(columns)
        if not self._slots:
            self._held = batch, report, slot
            return columns_of(batch, self._single), report
        store(batch, columns, self._single)
        return None, report

    def _attach(self, layout: BatchLayout, part: int, count: int, *, fd: int) -> tuple[None, RolloutReport] | None:
        """Attach the slots, and write the rollout that was kept for one; None if none was kept."""
        self._slots = [layout.part(memory, part) for memory in mapped(fd, count, layout.size)]
        if self._held is None:
            return None
        (batch, report, slot), self._held = self._held, None
        store(batch, self._slots[slot], self._single)
        return None, report._replace(seconds=0.0, idle=0.0, restarts=0, lost=0)  # those have been reported

    def _fetch(
        self, slot: int, version: int, policy: bytes | None, layout: PackedLayout, count: int, *, fds: list[int]
    ) -> None:
        """Copy weights. The first call, and the first one after a change of shapes, brings their memory."""
        assert self._worker is not None
        if fds:
            self._weights = weights_in(mapped(fds[0], count, layout.size), layout)
        self._worker.adopt(self._weights[slot], version, policy)
