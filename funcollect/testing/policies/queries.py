"""A policy asked about rows that a check chooses, through the same actor that a loop drives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from funcollect.interop.memory import aligned
from funcollect.keys import Key, draw_ahead, key_from_seed
from funcollect.policies.random_policy import RandomPolicy
from funcollect.policies.torch_backed import TorchPolicyState
from funcollect.protocols import ActorInputs, Columns, Exploration
from funcollect.specs import ExplorationType, assemble
from funcollect.testing.trial import Trial
from funcollect.tree import Path, to_tensordict

ObservationRows = dict[Path, Tensor]  # an observation by key, each [N, ...]

_ROWS = 4  # where the environment has fewer than two lanes


@dataclass(frozen=True, kw_only=True)
class PolicyTrial(Trial):
    """A trial of a policy, which may also be asked about rows."""

    @cached_property
    def count(self) -> int:
        """N, the rows of one question: as many as there are lanes, so that a jitted policy is compiled once."""
        return self.lanes if self.lanes > 1 else _ROWS

    @cached_property
    def seen(self) -> tuple[ObservationRows, ObservationRows]:
        """Two sets of N rows, from a run of random actions."""
        length = max(self.steps, 2 * self.count)
        batch = self.run(length, policy=RandomPolicy(self.env.action_spec))
        picked = torch.linspace(0, batch.numel() - 1, 2 * self.count).long()
        flat = {leaf.path: batch[leaf.path].flatten(0, 1)[picked] for leaf in self.env.observation_leaves}
        return (
            {path: rows[: self.count] for path, rows in flat.items()},
            {path: rows[self.count :] for path, rows in flat.items()},
        )

    def query(self, rows: ObservationRows | None = None, **changes: Any) -> Query:
        """A question to the policy; about the first rows that were seen, unless said otherwise."""
        asked = Query(trial=self, rows=self.seen[0] if rows is None else rows, key=key_from_seed(self.seed))
        return replace(asked, **changes)


@dataclass(frozen=True)
class PolicyOutput:
    """What a policy answered.

    Attributes:
        columns: its outputs as a batch [N, steps].
        policy_state: its state after the last step.
        rows: what it left of the observation.
    """

    columns: TensorDict
    policy_state: Any
    rows: ObservationRows

    @property
    def recurrent(self) -> Any:
        """The part of the policy's state that has a row per lane, or None."""
        return recurrent_of(self.policy_state)


def recurrent_of(policy_state: Any) -> Any:
    """The part of a policy's state that has a row per lane, or None."""
    return policy_state.recurrent if isinstance(policy_state, TorchPolicyState) else policy_state


@dataclass(frozen=True, kw_only=True)
class Query:
    """The same rows, shown for some steps.

    Attributes:
        rows: the observation.
        key: from which the policy's state is made, and keys for a function that takes them.
        noise_key: from which a head's noise is drawn; `key` unless given.
        order: how the lanes of the noise are permuted, or None.
        steps: how often it is asked; each time with the same noise.
        restart: lanes that begin an episode before the last step.
        policy_state: the state to start from; unless given, as at the start of a run.
    """

    trial: PolicyTrial
    rows: ObservationRows
    key: Key
    noise_key: Key | None = None
    order: Tensor | None = None
    steps: int = 1
    restart: Sequence[int] = ()
    policy_state: Any = None
    exploration_type: ExplorationType = ExplorationType.RANDOM

    def run(self) -> PolicyOutput:
        """The policy's answer."""
        memory = {path: _fixed(rows) for path, rows in self.rows.items()}
        actor = self.trial.policy.actor(self._actor_inputs(memory))
        with actor.running():
            for t in range(self.steps):
                if t == self.steps - 1:
                    actor.restart(self.restart)
                actor.act(t)
            policy_state, columns = actor.finish()
        return PolicyOutput(self._by_row(columns), policy_state, memory)

    def _by_row(self, columns: Columns) -> TensorDict:
        leaves = {path: column.transpose(0, 1) if column.ndim > 1 else column for path, column in columns.items()}
        return to_tensordict(leaves, (self.trial.count, self.steps))

    def _actor_inputs(self, memory: ObservationRows) -> ActorInputs:
        trial, policy = self.trial, self.trial.policy
        leaves = memory if policy.backend == "torch" else {path: rows.numpy() for path, rows in memory.items()}
        initial = policy.init(self.key, trial.count)
        return ActorInputs(
            observation=assemble(trial.env.observation_space, leaves),
            params=policy.prepare(None),
            policy_state=initial if self.policy_state is None else self.policy_state,
            initial_state=initial,
            noise=self._noise(),
            exploration=Exploration(self.exploration_type),
            spec=trial.env.action_spec,
            num_envs=trial.count,
            length=self.steps,
        )

    def _noise(self) -> Tensor | None:
        wanted = self.trial.policy.noise(self.trial.env.action_spec)
        if wanted is None:
            return None
        own = wanted.kind == "key" or self.noise_key is None
        drawn = draw_ahead(wanted, self.key if own else self.noise_key, 0, self.trial.count, 0, 1)  # type: ignore[arg-type]
        if self.order is not None and wanted.kind != "key":
            drawn = drawn[:, self.order]
        return drawn.expand(self.steps, *drawn.shape[1:]).clone()


def _fixed(rows: Tensor) -> Tensor:
    """A copy in aligned memory, as loops keep it."""
    return torch.from_numpy(aligned(tuple(rows.shape), rows.cpu().numpy().dtype)).copy_(rows)
