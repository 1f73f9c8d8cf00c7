"""How lanes are spread over processes, the memory that these share, and the bells by which they wake each other."""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Self

import numpy.typing as npt
import torch

from funcollect.arguments import check_choice, check_count, check_flags, check_number, check_positive
from funcollect.processes.memory import LeafPlace, Memory, MemoryLayout
from funcollect.processes.system import PORTABLE, check_platform
from funcollect.protocols import HostEnv
from funcollect.specs import torch_dtype

Array = npt.NDArray[Any]

NO_SEED, NO_RESTART = -1, -2
INFO_BYTES = 1 << 15  # for a worker's pickled infos; larger ones are fetched by a call
_SPIN = 50e-6  # seconds of busy waiting: as long as it takes to wake a process that sleeps
_MOST_RINGS = 1 << 12  # read from a pipe at once

REMOVED = {  # keywords of earlier versions, and why they were removed
    "overlap": "it was slower for nearly all environments",
    "on_failure": "recover(env, state), or a collector's next batch, begins new episodes in place of a lost worker's",
}


@dataclass(frozen=True, kw_only=True)
class LaneWorkers:
    """Worker processes of an environment."""

    num_workers: int
    least_ready: int = 0  # number of lanes that the policy waits for, if workers go at their own pace; 0 for all lanes
    timeout: float = 60.0  # seconds after which a worker that has neither answered nor stepped a lane counts as hung

    def __str__(self) -> str:
        pace = ", each at its own pace" * bool(self.least_ready)
        return f"{self.num_workers} worker process{'es' * (self.num_workers != 1)}{pace}"

    @classmethod
    def checked(
        cls, num_envs: int, *, parallel: bool, num_workers: int, timeout: float, wait: str, min_ready: int | None
    ) -> Self | None:
        """The workers that an adapter's arguments ask for; None for none. Raises the errors of `from_gymnasium`."""
        check_flags(parallel=parallel)
        check_count("num_workers", num_workers)
        if parallel and num_workers:
            raise ValueError(f"parallel=True means num_workers={num_envs}, and num_workers={num_workers} was given too")
        count = num_envs if parallel else num_workers
        check_number("timeout", timeout, positive=True, example=60)
        if timeout != cls.timeout and not count:
            raise ValueError(f"timeout={timeout} was given without workers, which it is for: pass num_workers")
        if count > num_envs:
            mend = f"pass num_envs={count}, or fewer workers"
            raise ValueError(f"num_workers is {count}, expected at most num_envs={num_envs}: {mend}")
        if count:
            check_platform("leave num_workers and parallel out")
        check_choice("wait", wait, ("all", "any"))
        if wait == "any" and not count:
            raise ValueError("wait='any' was given without workers, which it is for: pass num_workers")
        if min_ready is not None and wait == "all":
            raise ValueError(f"min_ready={min_ready} was given, which is for wait='any': pass that, or leave it out")
        if min_ready is not None:
            check_positive("min_ready", min_ready)
        if (min_ready or 1) > num_envs:
            raise ValueError(f"min_ready is {min_ready}, expected at most num_envs={num_envs}: pass fewer")
        least = (min_ready or max(1, num_envs // 8)) if wait == "any" else 0
        return cls(num_workers=count, timeout=timeout, least_ready=least) if count else None

    def shares(self, num_envs: int) -> list[range]:
        """The lanes of each worker, in order; the first ones may have one lane more."""
        size, longer = divmod(num_envs, self.num_workers)
        ends = [place * size + min(place, longer) for place in range(self.num_workers + 1)]
        return [range(*bounds) for bounds in itertools.pairwise(ends)]


def refuse_removed(given: Mapping[str, Any]) -> None:
    """Raise TypeError for keywords that adapters took in earlier versions."""
    for name in REMOVED.keys() & given.keys():
        raise TypeError(f"{name} is no keyword of environments any more, since {REMOVED[name]}: leave it out")


# Orders to a worker; plain numbers, since enumerations are slow to read.
STEP = 0  # step all its lanes, and restart those that have a next seed when their episodes end
STEP_CHOSEN = 1  # step the chosen lanes, without restarts
RESET = 2  # reset the chosen lanes
STEP_APART = 3  # step the chosen lanes, with restarts

_OF_LANES = {  # [P]
    "reward": torch.float64,
    "terminated": torch.bool,
    "truncated": torch.bool,
    "chosen": torch.bool,  # the lanes of an order that is not for all lanes of a worker
    "seeds": torch.int64,  # for resets; `NO_SEED` for none
    "next_seeds": torch.int64,  # for the restart after an episode's end; `NO_RESTART` if there is none
}
_OF_WORKERS = {  # [W]
    "asked": torch.int64,  # the number of the last order
    "carried_out": torch.int64,  # the number of the last order whose results are in the block
    "answered": torch.int64,  # the number of the last order for which the worker has rung the answers' bell
    "order": torch.int8,  # the last order, one of the above
    "failed": torch.bool,  # whether it raised
    "info_size": torch.int64,  # in bytes; -1 if the infos are too large for `info`
}


class LaneBlock(SimpleNamespace):
    """Arrays in one piece of shared memory, for P lanes of W workers: those of both tables above, and four others.

    `action` is [P, ...], `info` [W, INFO_BYTES] uint8, pickled. By path and [P, ...] are `observation` and `ends`, the
    last observations of the episodes after which workers restarted lanes.
    """

    @staticmethod
    def layout(env: HostEnv, num_workers: int) -> MemoryLayout:
        """Where the arrays of all lanes lie in memory."""
        num_envs, action = env.num_envs or 1, env.action_spec
        places = [
            LeafPlace((name, *leaf.path), torch_dtype(leaf.dtype), (num_envs, *leaf.shape))
            for name in ("observation", "ends")
            for leaf in env.observation_leaves
        ]
        places += [LeafPlace((name,), dtype, (num_envs,)) for name, dtype in _OF_LANES.items()]
        places += [LeafPlace((name,), dtype, (num_workers,)) for name, dtype in _OF_WORKERS.items()]
        info = LeafPlace(("info",), torch.uint8, (num_workers, INFO_BYTES if env.info_keys else 0))
        return MemoryLayout((*places, LeafPlace(("action",), action.dtype, (num_envs, *action.shape)), info))

    @classmethod
    def over(cls, memory: Memory, layout: MemoryLayout) -> Self:
        """The arrays over this memory."""
        block = cls(observation={}, ends={})
        for path, leaf in layout.leaves(memory).items():
            holder: dict[Any, Any] = vars(block)[path[0]] if path[1:] else vars(block)
            holder[path[1:] or path[0]] = leaf.numpy()
        return block

    @staticmethod
    def rows(workers: Sequence[int]) -> slice | Sequence[int]:
        """An index for arrays [W]: a slice for a range, since NumPy reads slices faster."""
        return slice(workers.start, workers.stop) if isinstance(workers, range) else workers

    @staticmethod
    def encoded(seeds: Sequence[int | None]) -> list[int]:
        """Seeds, as the arrays hold them."""
        return [NO_SEED if seed is None else seed for seed in seeds]

    @staticmethod
    def decoded(numbers: Array) -> list[int | None]:
        """Seeds, from what the arrays hold."""
        return [None if number == NO_SEED else number for number in numbers.tolist()]


class Bell:
    """A counter that a process waits for, an eventfd or a pipe: whoever hears it sees all memory written before it."""

    def __init__(self, fds: Sequence[int] = ()) -> None:
        self.fds = tuple(fds)  # of an existing bell
        if not fds and not PORTABLE:
            self.fds = (os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC),)
        elif not fds:
            self.fds = os.pipe()
            for fd in self.fds:
                os.set_blocking(fd, False)
        self._poll = select.poll()
        self._poll.register(self.fds[0], select.POLLIN)

    def ring(self) -> None:
        """Add one to the counter."""
        if PORTABLE:
            os.write(self.fds[1], b"\0")
        else:
            os.eventfd_write(self.fds[0], 1)

    def watch(self, fd: int) -> None:
        """End `wait` also when this descriptor becomes readable."""
        self._poll.register(fd, select.POLLIN)

    def unwatch(self, fd: int) -> None:
        """Undo `watch`, if it was called."""
        with contextlib.suppress(KeyError):
            self._poll.unregister(fd)

    def heard(self) -> int:
        """The number of rings since the last call."""
        try:
            return len(os.read(self.fds[0], _MOST_RINGS)) if PORTABLE else os.eventfd_read(self.fds[0])
        except BlockingIOError:
            return 0

    def wait(self, timeout: float | None = None) -> int:
        """Wait, and return the number of rings; 0 after `timeout` seconds, or if a watched descriptor is readable."""
        until = time.perf_counter() + _SPIN  # until then, it keeps the processor
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
