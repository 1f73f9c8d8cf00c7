"""Runs an environment and a policy for the checks, and calls the policy on rows that a check chooses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from funcollect.arguments import check_count, check_positive
from funcollect.core import api
from funcollect.core.state import CollectorState
from funcollect.interop.memory import fixed
from funcollect.keys import Key, draw_ahead, key_from_seed
from funcollect.policies.random_policy import RandomPolicy
from funcollect.policies.torch_modules.torch_backed import TorchPolicyState
from funcollect.protocols import ActorInputs, Env, Exploration, Policy
from funcollect.specs import ExplorationType, assemble
from funcollect.testing.report import to_tensor
from funcollect.tree import Path, to_tensordict

ObservationRows = dict[Path, Tensor]  # an observation by key, each [N, ...]

_ROWS = 4  # N, if the environment has fewer than two lanes
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


class PolicyOutput(NamedTuple):
    """The result of calling a policy several times (steps) on the same N rows."""

    columns: TensorDict  # its outputs, [N, steps]
    recurrent: Any  # its recurrent state after the last step, each [N, ...], or None
    rows: ObservationRows  # the observation after the last step


def recurrent_of(policy_state: Any) -> Any:
    """The part of a policy's state that has a row per lane; of a Torch policy's, the recurrent state, maybe None."""
    return policy_state.recurrent if isinstance(policy_state, TorchPolicyState) else policy_state


@dataclass(frozen=True, kw_only=True)
class PolicyTrial(Trial):
    """A policy and its environment, for checks; `query` calls the policy on chosen rows, without the environment."""

    @cached_property
    def count(self) -> int:
        """N, the number of rows of a query: the number of lanes if possible, so that a jitted policy compiles once."""
        return self.lanes if self.lanes > 1 else _ROWS

    @cached_property
    def seen(self) -> tuple[ObservationRows, ObservationRows]:
        """Two sets of N rows from a run of random actions."""
        length = max(self.steps, 2 * self.count)
        batch = self.run(length, policy=RandomPolicy(self.env.action_spec))
        picked = torch.linspace(0, batch.numel() - 1, 2 * self.count).long()
        flat = {leaf.path: batch[leaf.path].flatten(0, 1)[picked] for leaf in self.env.observation_leaves}
        first, second = ({path: rows.chunk(2)[half] for path, rows in flat.items()} for half in (0, 1))
        return first, second

    def query(
        self,
        rows: ObservationRows | None = None,
        *,
        exploration_type: ExplorationType = ExplorationType.DETERMINISTIC,
        steps: int = 1,
        restart: Sequence[int] = (),  # the lanes that begin an episode before the last step
        order: Tensor | None = None,  # a permutation of the lanes of the noise
        policy_state: Any = None,  # by default that of a new run
        key: Key | None = None,  # for the policy's state, and for the keys of a function that takes them
        noise_key: Key | None = None,  # for the noise of a head; by default `key`
    ) -> PolicyOutput:
        """Call the policy on the same rows (by default the first set in `seen`), with the same noise at each step."""
        key = key_from_seed(self.seed) if key is None else key
        memory = {path: fixed(leaf.cpu()) for path, leaf in (self.seen[0] if rows is None else rows).items()}
        leaves = memory if self.policy.backend == "torch" else {path: leaf.numpy() for path, leaf in memory.items()}
        initial = self.policy.init(key, self.count)
        inputs = ActorInputs(
            observation=assemble(self.env.observation_space, leaves),
            params=self.policy.prepare(None),
            policy_state=initial if policy_state is None else policy_state,
            initial_state=initial,
            noise=self._noise(key, key if noise_key is None else noise_key, order, steps),
            exploration=Exploration(exploration_type),
            spec=self.env.action_spec,
            num_envs=self.count,
            length=steps,
        )
        actor = self.policy.actor(inputs)
        with actor.running():
            for t in range(steps):
                if t == steps - 1:
                    actor.restart(restart)
                actor.act(t)
            after, columns = actor.finish()
        outputs = {path: column.transpose(0, 1) if column.ndim > 1 else column for path, column in columns.items()}
        return PolicyOutput(to_tensordict(outputs, (self.count, steps)), recurrent_of(after), memory)

    def _noise(self, key: Key, noise_key: Key, order: Tensor | None, steps: int) -> Tensor | None:
        """The noise that the policy asks for, the same at each step: [steps, N, ...], or None."""
        wanted = self.policy.noise(self.env.action_spec)
        if wanted is None:
            return None
        drawn = draw_ahead(wanted, key if wanted.kind == "key" else noise_key, np.arange(self.count), 0, 1)
        if order is not None and wanted.kind != "key":
            drawn = drawn[:, order]
        return drawn.expand(steps, *drawn.shape[1:]).clone()
