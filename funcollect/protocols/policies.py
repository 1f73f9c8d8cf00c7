"""The protocols of policies; ``P`` is the number of environments in one batch, ``T`` the number of steps."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
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

    >>> import funcollect as fc
    >>> fc.Exploration(values={"epsilon": 0.05})
    Exploration(type=<InteractionType.RANDOM: 'random'>, values={'epsilon': 0.05})
    """

    type: ExplorationType = ExplorationType.RANDOM  # whether it samples, or acts deterministically
    values: Mapping[str, Any] = _NO_VALUES  # by the names in `Policy.exploration`: numbers, or [P] if lanes differ


def traced_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values of `Exploration` as NumPy arrays, so that a JAX program takes new ones without compiling again."""
    arrays = {name: value.cpu().numpy() if isinstance(value, Tensor) else value for name, value in values.items()}
    return {name: np.float32(value) if isinstance(value, float) else value for name, value in arrays.items()}


class ActorInputs(NamedTuple):
    """The inputs of a policy for one rollout."""

    observation: Any  #: The current observation, always in the same arrays [P, ...], in the structure of the space.
    params: Any  #: The result of `Policy.prepare`.
    policy_state: Any  #: The state to start from.
    initial_state: Any  #: The state of a lane at the start of an episode.
    noise: Tensor | None  #: [T, P, ...].
    exploration: Exploration  #: How the policy explores.
    spec: ActionSpec  #: The action space, and the form of an action in a batch.
    num_envs: int  #: The number of lanes, P.
    length: int  #: The number of steps, T.
    single: bool = False  #: Whether the environment has no batch dimension; then P is 1.

    @property
    def bound(self) -> BoundParams:
        """The parameters, and the values of `exploration`, as arguments of a JAX program."""
        return self.params, traced_values(self.exploration.values)

    @property
    def stochastic(self) -> bool:
        """Whether a head samples; otherwise it takes the mode."""
        return self.exploration.type is ExplorationType.RANDOM


class Actor(Protocol):
    """A policy bound to one rollout; `again` binds it to the next one."""

    reads_late: bool = False  # whether `act(t)` reads row t of `ActorInputs.noise`, which may be written until then

    def again(self, inputs: ActorInputs, /) -> bool:
        """Begin a rollout with other parameters, states and noise; False, the default, if it needs a new actor."""
        return False

    def running(self) -> AbstractContextManager[Any]:
        """The context in which `act` and `finish` are called; by default none."""
        return nullcontext()

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
        """The numbers that may change during a run, by name, with the values for rollouts that give no others."""

    @property
    def nested(self) -> Sequence[Path]:
        """The outputs that have dotted names in a traced loop and nested keys in a batch."""

    def check(self, spec: ActionSpec, /) -> None:
        """Raise ValueError if the policy cannot act in this action space."""

    def noise(self, spec: ActionSpec, /) -> Noise | None:
        """The noise to draw in advance for each lane and step, or None."""

    def init(self, key: Key, num_envs: int, /) -> Any:
        """The state at the start of a run, recurrent or a generator's; loops move it to the observation's device."""

    def prepare(self, params: Any, /) -> Any:
        """Check parameters (like `params`, a `state_dict`, or None for its own); return what the call takes."""

    def state_dict(self, params: Any = None) -> Mapping[str, Tensor]:
        """A copy of `params`, or of its own, as tensors by name, for workers and files; empty if it has none."""

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

        `params` come from `prepare`, `policy_state` from `init` or the last call. The `observation` has arrays [P, ...]
        in the structure of the observation space, and `noise` [P, ...] is what the method `noise` describes, or None.
        Returns the next policy state and the outputs, ``action`` among them.
        """


_POLICIES: weakref.WeakSet[type] = weakref.WeakSet()


def follows(protocol: Any, value: Any, known: weakref.WeakSet[type]) -> bool:
    """Whether a value has all members of a protocol. If so, its class is added to `known`: the test is slow."""
    if type(value) not in known:
        try:
            if isinstance(value, type) or not isinstance(value, protocol):
                return False
        except RecursionError:  # raised by the attributes of a TorchRL batch of environments that is not open
            return False  # any other error explains a fault in an environment or a policy
        known.add(type(value))
    return True


def is_policy(value: Any) -> TypeGuard[Policy]:
    """Whether a value has all members of a policy."""
    return follows(Policy, value, _POLICIES)
