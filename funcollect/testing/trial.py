"""An environment and a policy on trial: runs of theirs that the checks look at."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from funcollect.arguments import check_positive
from funcollect.core import api
from funcollect.core.state import CollectorState
from funcollect.protocols import Env, Policy
from funcollect.testing.parameters import to_tensor
from funcollect.tree import Path

_FEWEST = 6  # steps of a run


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What the checks of `check_env` and `check_policy` are given.

    Attributes:
        env: the environment.
        policy: the policy.
        steps: T, the steps of a run.
        seed: of the first run; others take those that follow.
        single: the same environment with one lane, or None where there is none to be had.
    """

    env: Env
    policy: Policy
    steps: int
    seed: int
    single: Env | None = None

    @property
    def lanes(self) -> int:
        """P."""
        return self.env.num_envs or 1

    @property
    def third(self) -> int:
        """A third of a run's steps: few lengths serve all checks, as a traced loop is compiled for each."""
        return max(1, self.steps // 3)

    @cached_property
    def batch(self) -> TensorDict:
        """The run with which others are compared: [P, T]."""
        return self.run(self.steps)

    @cached_property
    def done(self) -> torch.Tensor:
        """[P, T] bool: where an episode of that run ends by itself."""
        return self.batch["next", "done"][..., 0]  # type: ignore[no-any-return]

    def run(self, *lengths: int, seed: int | None = None, policy: Policy | None = None, **options: Any) -> TensorDict:
        """A run from `seed` on, cut into rollouts of `lengths` steps: [P, sum of lengths]."""
        with self.started(seed, policy) as state:
            return self.go_on(state, *lengths, policy=policy, **options)[1]

    def go_on(
        self, state: CollectorState, *lengths: int, policy: Policy | None = None, **options: Any
    ) -> tuple[CollectorState, TensorDict]:
        """Further rollouts from a state."""
        batches = []
        for length in lengths:
            state, batch = api.rollout(self.env, policy or self.policy, state, length, **options)
            batches.append(by_lane(self.env, batch).clone())
        return state, torch.cat(batches, 1)

    @contextlib.contextmanager
    def started(self, seed: int | None = None, policy: Policy | None = None) -> Iterator[CollectorState]:
        """A first state, whose simulators are freed afterwards; that closing works is a check of its own."""
        state = api.init(self.env, policy or self.policy, seed=self.seed if seed is None else seed)
        try:
            yield state
        finally:
            release(state)


def check_steps(steps: Any) -> None:
    """Raise unless `steps` is enough for a run to be cut in three."""
    check_positive("steps", steps)
    if steps < _FEWEST:
        raise ValueError(f"steps is {steps}, expected at least {_FEWEST}: pass for example steps=100")


def release(state: CollectorState) -> None:
    """Free a state's simulators, come what may."""
    with contextlib.suppress(Exception):
        api.close(state)


def by_lane(env: Env, batch: TensorDictBase) -> Any:
    """The batch as [P, T], also where the environment has no batch dimension."""
    return batch.unsqueeze(0) if env.num_envs is None else batch


def root_of(state: CollectorState) -> dict[Path, torch.Tensor]:
    """The root observation of a state, each [P, ...], as tensors on the host."""
    return {path: to_tensor(leaf).cpu() for path, leaf in state.observation.items()}
