"""Policies that `check_env` puts in an environment's way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import optree
from torch import Tensor

from funcollect.keys import Key, Noise
from funcollect.policies.random_policy import RandomPolicy
from funcollect.specs import ActionSpec, ExplorationType
from funcollect.tree import NAMESPACE


class OverwritingPolicy:
    """Acts at random, keeps a copy of each action, and then writes zeros over the observation it was given."""

    backend: Literal["torch"] = "torch"
    params = None

    def __init__(self, spec: ActionSpec) -> None:
        self._inner = RandomPolicy(spec)
        self.actions: list[Tensor] = []  # [P, ...] each, as they were answered

    def noise(self, spec: ActionSpec) -> Noise | None:
        """What random actions take."""
        return self._inner.noise(spec)

    def init(self, key: Key, num_envs: int) -> None:
        """There is no state."""

    def prepare(self, params: Any) -> None:
        """There are no parameters."""

    def __call__(
        self, params: Any, policy_state: Any, observation: Any, noise: Any, exploration_type: ExplorationType
    ) -> tuple[None, Mapping[str, Any]]:
        """A random action; the observation is gone afterwards."""
        _, outputs = self._inner(params, policy_state, observation, noise, exploration_type)
        self.actions.append(outputs["action"].clone())
        for leaf in optree.tree_leaves(observation, namespace=NAMESPACE):
            leaf.zero_()
        return None, outputs


class Replay:
    """Answers with given actions [T, P, ...], one after the other: good for one run."""

    backend: Literal["torch"] = "torch"
    params = None

    def __init__(self, actions: Tensor) -> None:
        self._actions = iter(actions)

    def noise(self, spec: ActionSpec) -> Noise | None:
        """None is needed."""

    def init(self, key: Key, num_envs: int) -> None:
        """There is no state."""

    def prepare(self, params: Any) -> None:
        """There are no parameters."""

    def __call__(
        self, params: Any, policy_state: Any, observation: Any, noise: Any, exploration_type: ExplorationType
    ) -> tuple[None, Mapping[str, Any]]:
        """The next action."""
        return None, {"action": next(self._actions)}
