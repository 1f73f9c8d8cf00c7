"""The memory that an environment's process and its workers share, and the bells by which they wake each other."""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch

from funcollect.processes.layout import LeafPlace, MemoryLayout
from funcollect.processes.shared_memory import Memory
from funcollect.processes.system import PORTABLE
from funcollect.specs import ActionSpec, Leaf, torch_dtype
from funcollect.tree import Path

Array = npt.NDArray[Any]

NO_SEED, NO_RESTART = -1, -2
INFO_BYTES = 1 << 15  # of a worker's pickled infos; larger ones are asked for by a call
_SPIN = 50e-6  # seconds; waking a process that sleeps takes about as long
_MOST_RINGS = 1 << 12  # that are read from a pipe at once

# Orders to a worker; plain numbers, since enumerations are slow to read.
STEP = 0  # all its lanes
STEP_CHOSEN = 1  # those that are marked
RESET = 2  # marked lanes


@dataclass(frozen=True)
class LaneBlock:
    """Arrays over one piece of shared memory, for P lanes of W workers."""

    observation: Mapping[Path, Array]  # [P, ...]
    ends: Mapping[Path, Array]  # [P, ...], the last observations of episodes whose lanes were restarted
    action: Array  # [P, ...], as in a batch
    reward: Array  # [P] float64
    terminated: Array  # [P] bool
    truncated: Array  # [P] bool
    chosen: Array  # [P] bool, the lanes of an order that is not for all lanes of a worker
    seeds: Array  # [P] int64, for resets; `NO_SEED` for none
    next_seeds: Array  # [P] int64, for the restart after an episode's end; `NO_RESTART` if there is none
    asked: Array  # [W] int64, the number of the last order
    answered: Array  # [W] int64, the number of the last order after whose answer the bell rang
    order: Array  # [W] int8, see above
    failed: Array  # [W] bool, whether the last order has failed
    info: Array  # [W, INFO_BYTES] uint8, pickled
    info_size: Array  # [W] int64, in bytes; -1 if the infos are too large for `info`


def block_layout(
    leaves: tuple[Leaf, ...], action: ActionSpec, num_envs: int, num_workers: int, *, infos: bool
) -> MemoryLayout:
    """Where the arrays of a `LaneBlock` lie."""
    places: dict[Path, tuple[torch.dtype, tuple[int, ...]]] = {
        (name, *leaf.path): (torch_dtype(leaf.dtype), (num_envs, *leaf.shape))
        for name in ("observation", "ends")
        for leaf in leaves
    }
    places["action",] = action.dtype, (num_envs, *action.shape)
    places["reward",] = torch.float64, (num_envs,)
    for names, dtype, count in (
        (("terminated", "truncated", "chosen"), torch.bool, num_envs),
        (("seeds", "next_seeds"), torch.int64, num_envs),
        (("asked", "answered", "info_size"), torch.int64, num_workers),
        (("order",), torch.int8, num_workers),
        (("failed",), torch.bool, num_workers),
    ):
        places |= {(name,): (dtype, (count,)) for name in names}
    places["info",] = torch.uint8, (num_workers, INFO_BYTES if infos else 0)
    return MemoryLayout(tuple(LeafPlace(path, *place) for path, place in places.items()))


def block_over(memory: Memory, layout: MemoryLayout) -> LaneBlock:
    """The arrays over this memory."""
    arrays = {path: leaf.numpy() for path, leaf in layout.leaves(memory).items()}
    columns: dict[str, Any] = {path[0]: array for path, array in arrays.items() if not path[1:]}
    for name in ("observation", "ends"):
        columns[name] = {path[1:]: array for path, array in arrays.items() if path[0] == name}
    return LaneBlock(**columns)


class Bell:
    """A counter that one process waits for. What others add arrives as a sum; all they wrote before is visible then.

    A short wait keeps the processor, a long one gives it up. It is an eventfd. Where the system has none, a pipe takes
    a byte for each ring.
    """

    def __init__(self, fds: Sequence[int] = ()) -> None:
        """Make a counter, or use the descriptors `fds` of one."""
        self.fds = tuple(fds) or _new_counter()
        self._poll = select.poll()
        self._poll.register(self.fds[0], select.POLLIN)

    def ring(self) -> None:
        """Count one ring."""
        if PORTABLE:
            os.write(self.fds[1], b"\0")
        else:
            os.eventfd_write(self.fds[0], 1)

    def watch(self, fd: int) -> None:
        """Let `wait` also end when this descriptor becomes readable."""
        self._poll.register(fd, select.POLLIN)

    def unwatch(self, fd: int) -> None:
        """Undo `watch`, if it was called."""
        with contextlib.suppress(KeyError):
            self._poll.unregister(fd)

    def heard(self) -> int:
        """The rings since the last call."""
        try:
            return len(os.read(self.fds[0], _MOST_RINGS)) if PORTABLE else os.eventfd_read(self.fds[0])
        except BlockingIOError:
            return 0

    def wait(self, timeout: float | None = None) -> int:
        """Wait for rings; 0 if `timeout` seconds have passed, or another watched descriptor is readable."""
        until = time.perf_counter() + _SPIN
        while not (rings := self.heard()) and time.perf_counter() < until:
            os.sched_yield()
        if not rings:
            self._poll.poll(None if timeout is None else timeout * 1000)
            rings = self.heard()
        return rings

    def close(self) -> None:
        """Free the descriptors."""
        for fd in self.fds:
            os.close(fd)


def _new_counter() -> tuple[int, ...]:
    """The descriptors of a new counter, which do not block."""
    if not PORTABLE:
        return (os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC),)
    fds = os.pipe()
    for fd in fds:
        os.set_blocking(fd, False)
    return fds
