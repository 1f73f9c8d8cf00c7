"""Runs an environment and a policy for the checks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from funcollect.arguments import check_count, check_positive
from funcollect.core import api
from funcollect.core.state import CollectorState
from funcollect.protocols import Env, Policy
from funcollect.testing.compare import to_tensor
from funcollect.tree import Path

_FEWEST = 6  # the smallest number of steps of a run: checks cut it into thirds and single steps


@dataclass(frozen=True, kw_only=True)
class Trial:
    """An environment and a policy, which a check runs together."""

    env: Env
    policy: Policy
    steps: int  # T, the number of steps of a run
    seed: int  # of the first run; others use the seeds after it
    single: Env | None = None  # the same environment with one lane, or None if it cannot be made

    @property
    def lanes(self) -> int:
        """P, the number of environments in one batch."""
        return self.env.num_envs or 1

    @property
    def third(self) -> int:
        """A third of a run's steps. The checks use few lengths, since a traced loop is compiled for each."""
        return max(1, self.steps // 3)

    @cached_property
    def batch(self) -> TensorDict:
        """The batch [P, T] of the first run, for comparison with other runs."""
        return self.run(self.steps)

    @cached_property
    def done(self) -> torch.Tensor:
        """Whether an episode of the first run ends with this row: [P, T] bool."""
        return self.batch["next", "done"][..., 0]  # type: ignore[no-any-return]

    def run(self, *lengths: int, seed: int | None = None, policy: Policy | None = None, **options: Any) -> TensorDict:
        """Start a run with `seed`; return its rollouts of `lengths` steps, joined into one batch [P, total steps]."""
        with self.started(seed, policy) as state:
            return self.go_on(state, *lengths, policy=policy, **options)[1]

    def go_on(
        self, state: CollectorState, *lengths: int, policy: Policy | None = None, **options: Any
    ) -> tuple[CollectorState, TensorDict]:
        """Continue from a state with rollouts of `lengths` steps; return the last state, and one batch of all steps."""
        batches = []
        for length in lengths:
            state, batch = api.rollout(self.env, policy or self.policy, state, length, **options)
            batches.append(by_lane(self.env, batch).clone())
        return state, torch.cat(batches, 1)

    def started(self, seed: int | None = None, policy: Policy | None = None) -> AbstractContextManager[CollectorState]:
        """A context with the first state of a run, whose simulators are freed at its end."""
        return freed(api.init(self.env, policy or self.policy, seed=self.seed if seed is None else seed))


def check_run(steps: Any, seed: Any) -> None:
    """Raise ValueError or TypeError unless `seed` is an int of at least 0, and `steps` one of at least `_FEWEST`."""
    check_positive("steps", steps)
    if steps < _FEWEST:
        raise ValueError(f"steps is {steps}, expected at least {_FEWEST}: pass for example steps=100")
    check_count("seed", seed)


@contextmanager
def freed(state: CollectorState) -> Iterator[CollectorState]:
    """A context with `state`, whose simulators are freed at its end; the check `close` reports errors of that."""
    try:
        yield state
    finally:
        with suppress(Exception):
            api.close(state)


def by_lane(env: Env, batch: TensorDictBase) -> Any:
    """The batch as [P, T], also if the environment has no batch dimension."""
    return batch.unsqueeze(0) if env.num_envs is None else batch


def root_of(state: CollectorState) -> dict[Path, torch.Tensor]:
    """A copy of a state's current observation: by key, tensors [P, ...] on the CPU."""
    return {path: to_tensor(leaf).cpu() for path, leaf in state.observation.items()}
