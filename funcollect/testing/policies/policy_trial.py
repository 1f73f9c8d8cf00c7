"""Calls a policy on rows that a check chooses, through the same actor that a loop uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from funcollect.interop.memory import fixed
from funcollect.keys import Key, draw_ahead, key_from_seed
from funcollect.policies.random_policy import RandomPolicy
from funcollect.policies.torch_modules.torch_backed import TorchPolicyState
from funcollect.protocols import ActorInputs, Exploration
from funcollect.specs import ExplorationType, assemble
from funcollect.testing.trial import Trial
from funcollect.tree import Path, to_tensordict

ObservationRows = dict[Path, Tensor]  # an observation by key, each [N, ...]

_ROWS = 4  # N, if the environment has fewer than two lanes


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
