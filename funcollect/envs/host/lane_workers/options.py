"""How the lanes of an environment are spread over processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Self, get_args

from funcollect.arguments import check_count, check_flags, check_number
from funcollect.processes.child import OnFailure
from funcollect.processes.system import check_platform, usable_cpus


class Group(NamedTuple):
    """Lanes that one worker steps at once.

    Attributes:
        worker: the worker's index.
        part: which part of the lanes they belong to, while the policy acts for another one.
        first, end: the lanes are ``first … end - 1``.
    """

    worker: int
    part: int
    first: int
    end: int


@dataclass(frozen=True, kw_only=True)
class LaneWorkers:
    """Worker processes of an environment.

    Attributes:
        num_workers: their number.
        overlap: the number of parts of the lanes: some of them step while the policy acts for another.
        timeout: the seconds after which a worker that has neither answered nor stepped a lane counts as hung.
        on_failure: what happens to a run when a worker is lost.
    """

    num_workers: int
    overlap: int = 1
    timeout: float = 60.0
    on_failure: OnFailure = "raise"

    def __str__(self) -> str:
        return f"{self.num_workers} worker process{'' if self.num_workers == 1 else 'es'}"

    @classmethod
    def checked(
        cls, num_envs: int, *, parallel: bool, num_workers: int, overlap: int, timeout: float, on_failure: OnFailure
    ) -> Self | None:
        """The workers that an adapter's arguments ask for; None for none. Raises the errors of `from_gymnasium`."""
        check_flags(parallel=parallel)
        check_count("num_workers", num_workers)
        if parallel and num_workers:
            raise ValueError(f"parallel=True means num_workers={num_envs}, and num_workers={num_workers} was given too")
        count = num_envs if parallel else num_workers
        check_number("timeout", timeout, positive=True, example=60)
        if on_failure not in get_args(OnFailure):
            raise ValueError(
                f"on_failure is {on_failure!r}, expected 'raise' (a lost worker ends the rollout) or 'restart' "
                "(another takes its place): pass one of them"
            )
        if timeout != cls.timeout and not count:
            raise ValueError(f"timeout={timeout} was given without workers, which it is for: pass num_workers")
        if on_failure == "restart" and not count:
            raise ValueError("on_failure='restart' was given without workers, which it replaces: pass num_workers")
        if type(overlap) is not int or overlap not in (1, 2):
            raise ValueError(
                f"overlap is {overlap!r}, expected 1, or 2 (one half of the lanes steps while the policy acts for the "
                "other): pass one of them"
            )
        if count > num_envs:
            raise ValueError(
                f"num_workers is {count}, expected at most num_envs={num_envs}: pass num_envs={count}, or fewer workers"
            )
        if overlap > 1 and (count == 0 or num_envs < overlap):
            raise ValueError(
                f"overlap={overlap} was given with num_workers={count} and {num_envs} lanes, expected workers, and two "
                "lanes at least, since one half steps while the policy acts for the other: pass num_workers, or leave "
                "overlap out"
            )
        if count:
            check_platform("leave num_workers and parallel out")
        return cls(num_workers=count, overlap=overlap, timeout=timeout, on_failure=on_failure) if count else None

    def crowded(self, cores: int) -> bool:
        """Whether the workers leave none of so many processors to the policy."""
        return self.num_workers >= max(cores, self.overlap)

    def groups(self, num_envs: int) -> list[Group]:
        """The groups of the lanes, in order.

        Each part is spread over all workers: they step one part while the policy acts for the other. `crowded` workers
        have lanes of one part only, and rest while the policy acts for that part.
        """
        crowded = self.crowded(len(usable_cpus()))
        groups: list[Group] = []
        for part, first, end in _split(num_envs, self.overlap, 0):
            workers = list(range(self.num_workers))
            if crowded:
                _, low, high = _split(self.num_workers, self.overlap, 0)[part]
                workers = workers[low:high]
            else:
                turn = first % self.num_workers  # so that they take turns to have one lane more than others
                workers = workers[turn:] + workers[:turn]
            shares = _split(end - first, min(len(workers), end - first), first)
            groups += [Group(workers[place], part, low, high) for place, low, high in shares]
        return groups


def _split(count: int, parts: int, first: int) -> list[tuple[int, int, int]]:
    """The numbers ``first … first + count - 1`` in parts of about the same size: the index, first and end of each."""
    size, longer = divmod(count, parts)
    ends = [first + place * size + min(place, longer) for place in range(parts + 1)]
    return [(place, ends[place], ends[place + 1]) for place in range(parts)]


def lanes_in_words(groups: list[Group]) -> str:
    """The lanes of some groups, for a message: ``lane 3``, or ``lanes 0 to 3 and 8 to 11``."""
    ranges = [f"{low} to {high - 1}" if high > low + 1 else str(low) for _, _, low, high in groups]
    single = len(groups) == 1 and groups[0].end == groups[0].first + 1
    return f"lane{'' if single else 's'} {' and '.join(ranges)}"
