"""The protocols of policies; ``P`` is the number of environments in one batch, ``T`` the number of steps."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, TypeGuard, runtime_checkable

import numpy as np
from torch import Tensor

from funcollect.keys import Key, Noise
from funcollect.specs import ActionSpec, ExplorationType
from funcollect.tree import Path

Columns = dict[Path, Tensor]  # each [T, P, ...]

BoundParams = tuple[Any, Mapping[str, Any]]  # prepared parameters, and the values of `Exploration`

_NO_VALUES: Mapping[str, Any] = {}


class Exploration(NamedTuple):
    """How a policy explores.

    Attributes:
        type: whether it samples, or acts deterministically.
        values: the numbers that may change during a run, under the names in `Policy.exploration`.

    >>> import funcollect as fc
    >>> exploration = fc.Exploration(values={"epsilon": 0.05})
    >>> exploration.type, exploration.values["epsilon"]
    (<InteractionType.RANDOM: 'random'>, 0.05)
    """

    type: ExplorationType = ExplorationType.RANDOM
    values: Mapping[str, Any] = _NO_VALUES


def traced_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values of `Exploration` as float32 arrays, so that a program of JAX takes others without compiling again."""
    return {name: np.float32(value) if isinstance(value, float) else value for name, value in values.items()}


@dataclass(frozen=True, kw_only=True)
class ActorInputs:
    """The inputs of a policy for one rollout.

    Attributes:
        observation: the current observation, always in the same arrays [P, ...], in the structure of the space.
        params: the result of `Policy.prepare`.
        policy_state: the state to start from.
        initial_state: the state of a lane at the start of an episode.
        noise: [T, P, ...], or None.
        exploration: how the policy explores.
        spec: the action space, and the form of an action in a batch.
        num_envs: the number of lanes, P.
        length: the number of steps, T.
        single: whether the environment has no batch dimension; then P is 1.
    """

    observation: Any
    params: Any
    policy_state: Any
    initial_state: Any
    noise: Tensor | None
    exploration: Exploration
    spec: ActionSpec
    num_envs: int
    length: int
    single: bool = False

    @property
    def bound(self) -> BoundParams:
        """The parameters, and the values of `exploration` as arguments of a program of JAX."""
        return self.params, traced_values(self.exploration.values)

    @property
    def stochastic(self) -> bool:
        """Whether a head samples; otherwise it takes the mode."""
        return self.exploration.type is ExplorationType.RANDOM


class Actor(Protocol):
    """A policy that is bound to one rollout."""

    def running(self) -> contextlib.AbstractContextManager[Any]:
        """The context in which `act` and `finish` are called; by default none."""
        return contextlib.nullcontext()

    def act(self, t: int) -> Any:
        """The action [P, ...] of step `t`, for the current values of `ActorInputs.observation`."""

    def restart(self, lanes: Sequence[int] | Tensor) -> None:
        """Reset the recurrent state of these lanes (indices or a mask [P]): they begin an episode at the next `act`."""

    def finish(self) -> tuple[Any, Columns]:
        """Return the policy's next state, and its outputs of all steps."""


@runtime_checkable
class Policy(Protocol):
    """A policy: a pure function with parameters as an argument and its recurrent state threaded through.

    `funcollect.PolicyBase` has a default for every member but `backend`, `params` and the call.
    """

    @property
    def backend(self) -> Literal["torch", "jax"]:
        """Whether it takes Torch tensors, or arrays for JAX."""

    @property
    def params(self) -> Any:
        """The policy's own current parameters."""

    @property
    def exploration(self) -> Mapping[str, float]:
        """The numbers that may change during a run, by name, as they are unless a rollout is given others."""

    @property
    def nested(self) -> Sequence[Path]:
        """The outputs that have dotted names in a traced loop and nested keys in a batch."""

    def check(self, spec: ActionSpec, /) -> None:
        """Raise ValueError if the policy cannot act in this action space."""

    def noise(self, spec: ActionSpec, /) -> Noise | None:
        """The noise to draw in advance for each lane and step, or None."""

    def init(self, key: Key, num_envs: int, /) -> Any:
        """The policy's state at the start of a run: its recurrent state, or that of its random generator.

        The loop brings tensors in it to the device of the observation.
        """

    def prepare(self, params: Any, /) -> Any:
        """Check parameters and convert them to the form that the call takes.

        They are a pytree like `params`, the result of `state_dict`, or None, which means the policy's own.
        """

    def state_dict(self, params: Any = None) -> Mapping[str, Tensor]:
        """A copy of `params`, or for None of the policy's own, as tensors by name: for workers and for saving.

        It is empty if the policy has no parameters.
        """

    def load(self, params: Any) -> None:
        """Act with a copy of `params`, or of the result of `state_dict`, as the policy's own from the next rollout on.

        ValueError for parameters of another structure; the message names the paths, and both shapes.
        """

    def remembers(self, policy_state: Any, /) -> bool:
        """Whether a step may depend on those before it; if so, the loop calls `Actor.restart` for new episodes."""

    def actor(self, inputs: ActorInputs, /) -> Actor:
        """Bind the policy to one rollout."""

    def finish(self, columns: Columns, spec: ActionSpec, /) -> Columns:
        """Check the outputs of a rollout, and convert them to the dtypes of a batch."""

    def __call__(
        self,
        params: Any,
        policy_state: Any,
        observation: Any,
        noise: Any,
        spec: ActionSpec,
        exploration: Exploration,
        /,
    ) -> tuple[Any, Mapping[str, Any]]:
        """Choose one action for each of P environments.

        Args:
            params: the result of `prepare`.
            policy_state: the result of `init` or of the last call.
            observation: arrays [P, ...] in the structure of the observation space.
            noise: the noise that `noise` describes, [P, ...], or None.
            spec: the action space, and the form of an action in a batch.
            exploration: how to explore.

        Returns:
            The next policy state and the outputs, ``action`` among them.
        """


_KNOWN: weakref.WeakSet[type] = weakref.WeakSet()


def is_policy(value: Any) -> TypeGuard[Policy]:
    """Whether it has all members of a policy. Cached by class, since the test reads every member."""
    if type(value) not in _KNOWN:
        if isinstance(value, type) or not isinstance(value, Policy):
            return False
        _KNOWN.add(type(value))
    return True
