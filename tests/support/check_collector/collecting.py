"""A collector on trial: how one is built, and its batches lane by lane."""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from tensordict import TensorDict

from funcollect.testing.report import NotApplicableError, expect_equal, fail
from funcollect.tree import flatten, to_tensordict


@dataclass(frozen=True, kw_only=True)
class CollectorTrial:
    """What the checks of `check_collector` are given.

    Attributes:
        make: builds a collector, from keyword arguments where it takes any.
        kwargs: its keyword arguments.
        batches: how many batches a run has, at least.
        lanes: the lanes that a run has to show: asynchronous workers are waited for, however slow one of them is.
        seed: of the runs.
    """

    make: Callable[..., Any]
    kwargs: dict[str, Any] = field(default_factory=dict)
    batches: int = 3
    lanes: int = 0
    seed: int = 0

    def takes(self, name: str) -> bool:
        """Whether `make` has a parameter of this name."""
        parameters = inspect.signature(self.make).parameters.values()
        return any(each.name == name or each.kind is each.VAR_KEYWORD for each in parameters)

    @contextlib.contextmanager
    def built(self, **changes: Any) -> Iterator[Any]:
        """A collector, shut down afterwards, whatever comes; that this works is a check of its own.

        Raises:
            NotApplicableError: where `make` does not take one of `changes`.
        """
        if missing := [name for name in changes if not self.takes(name)]:
            raise NotApplicableError(f"make takes no {missing[0]}: pass the class and its keyword arguments")
        seed = {"seed": self.seed} if self.takes("seed") else {}
        collector = self.make(**(self.kwargs | seed | changes))
        try:
            yield collector
        finally:
            with contextlib.suppress(Exception):
                collector.shutdown()

    def run(self, **changes: Any) -> list[TensorDict]:
        """The first batches of a collector."""
        with self.built(**changes) as collector:
            return self.take(collector)

    def enough(self, collector: Any, begun: Sequence[TensorDict] = ()) -> Iterator[TensorDict]:
        """A collector's next batches, until those of the run, with the ones that it has `begun` with, are enough."""
        count, seen = len(begun), set(lanes_of(begun)) if begun else set()
        for batch in collector:
            count, seen = count + 1, seen | set(batch["collector", "lane"].flatten().tolist())
            yield batch
            if count >= self.batches and len(seen) >= self.lanes:
                return

    def take(self, collector: Any, begun: Sequence[TensorDict] = ()) -> list[TensorDict]:
        """The same, copied."""
        return [batch.clone() for batch in self.enough(collector, begun)]

    @cached_property
    def delivered(self) -> list[TensorDict]:
        """The batches that most checks look at."""
        return self.run()

    @cached_property
    def frames(self) -> int:
        """Frames in a batch."""
        return int(self.delivered[0].numel())

    @cached_property
    def repeatable(self) -> bool:
        """Whether a seed can be given; without one, runs cannot be compared."""
        return self.takes("seed")


def take(collector: Any, count: int) -> list[TensorDict]:
    """The next `count` batches, copied; fewer at the end of the run."""
    return [batch.clone() for batch in itertools.islice(collector, count)]


def lanes_of(batches: Sequence[TensorDict]) -> dict[int, TensorDict]:
    """The rows of each lane in the order of time, [1, N]: however batches arrange their workers."""
    columns = [flatten(batch.reshape(-1)) for batch in batches]
    whole = {path: torch.cat([each[path] for each in columns]) for path in columns[0]}
    lanes = whole["collector", "lane"]
    return {
        lane: to_tensordict(
            {path: leaf[lanes == lane].unsqueeze(0) for path, leaf in whole.items()}, (1, int((lanes == lane).sum()))
        )
        for lane in sorted(set(lanes.tolist()))
    }


def ids_of(rows: TensorDict) -> list[int]:
    """The trajectories of these rows, each once."""
    return sorted(set(rows["collector", "traj_ids"].flatten().tolist()))


def expect_same_lanes(
    got: Sequence[TensorDict], wanted: Sequence[TensorDict], *, what: str, source: str, mend: str
) -> None:
    """Fail unless each lane shows the same, as far as both runs go: batches of asynchronous workers may come anyhow."""
    ours, theirs = lanes_of(got), lanes_of(wanted)
    if not ours.keys() & theirs.keys():
        raise fail(what, expected=f"lanes {sorted(theirs)} as in {source}", got=sorted(ours), mend="number them from 0")
    for lane in sorted(ours.keys() & theirs.keys()):
        length = min(ours[lane].shape[1], theirs[lane].shape[1])
        expect_equal(
            ours[lane][:, :length],
            theirs[lane][:, :length],
            what=f"{what}, lane {lane} (below: lane 0)",
            source=source,
            mend=mend,
        )
