"""How the lanes of an environment are spread over processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from funcollect.arguments import check_count, check_flags, check_number
from funcollect.processes.system import check_platform

REMOVED = {  # keywords that earlier versions took, and what to do instead
    "overlap": "it was slower for nearly all environments: leave it out",
    "on_failure": "a lost worker ends the rollout, and recover(env, state), or a collector's next batch, begins new "
    "episodes with another: leave it out",
}


@dataclass(frozen=True, kw_only=True)
class LaneWorkers:
    """Worker processes of an environment."""

    num_workers: int
    timeout: float = 60.0  # seconds after which a worker that has neither answered nor stepped a lane counts as hung

    def __str__(self) -> str:
        return f"{self.num_workers} worker process{'es' * (self.num_workers != 1)}"

    @classmethod
    def checked(cls, num_envs: int, *, parallel: bool, num_workers: int, timeout: float) -> Self | None:
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
            raise ValueError(
                f"num_workers is {count}, expected at most num_envs={num_envs}: pass num_envs={count}, or fewer workers"
            )
        if count:
            check_platform("leave num_workers and parallel out")
        return cls(num_workers=count, timeout=timeout) if count else None

    def shares(self, num_envs: int) -> list[range]:
        """The lanes of each worker, in order; the first ones may have one lane more."""
        size, longer = divmod(num_envs, self.num_workers)
        ends = [place * size + min(place, longer) for place in range(self.num_workers + 1)]
        return [range(ends[place], ends[place + 1]) for place in range(self.num_workers)]


def refuse_removed(given: Mapping[str, Any]) -> None:
    """Raise TypeError for keywords that adapters took in earlier versions."""
    for name in REMOVED.keys() & given.keys():
        raise TypeError(f"{name} is no keyword of environments any more, since {REMOVED[name]}")
