"""Policies that `check_env` puts in an environment's way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import optree
from torch import Tensor
from typing_extensions import override

from funcollect.keys import Noise
from funcollect.policies.base import PolicyBase
from funcollect.policies.random_policy import RandomPolicy
from funcollect.protocols import Exploration
from funcollect.specs import ActionSpec
from funcollect.tree import NAMESPACE


class OverwritingPolicy(PolicyBase):
    """Acts at random, keeps a copy of each action, and then writes zeros over the observation it was given."""

    backend: Literal["torch"] = "torch"
    params = None

    def __init__(self, spec: ActionSpec) -> None:
        self._inner = RandomPolicy(spec)
        self.actions: list[Tensor] = []  # [P, ...] each, as they were answered

    @override
    def noise(self, spec: ActionSpec, /) -> Noise | None:
        return self._inner.noise(spec)

    @override
    def __call__(
        self,
        params: Any,
        policy_state: Any,
        observation: Any,
        noise: Any,
        spec: ActionSpec,
        exploration: Exploration,
        /,
    ) -> tuple[None, Mapping[str, Any]]:
        """A random action; the observation is gone afterwards."""
        _, outputs = self._inner(params, policy_state, observation, noise, spec, exploration)
        self.actions.append(outputs["action"].clone())
        for leaf in optree.tree_leaves(observation, namespace=NAMESPACE):
            leaf.zero_()
        return None, outputs


class Replay(PolicyBase):
    """Answers with given actions [T, P, ...], one after the other: good for one run."""

    backend: Literal["torch"] = "torch"
    params = None

    def __init__(self, actions: Tensor) -> None:
        self._actions = iter(actions)

    @override
    def __call__(
        self,
        params: Any,
        policy_state: Any,
        observation: Any,
        noise: Any,
        spec: ActionSpec,
        exploration: Exploration,
        /,
    ) -> tuple[None, Mapping[str, Any]]:
        """The next action."""
        return None, {"action": next(self._actions)}
