"""What the loops ask of policies; ``P`` environments in one batch, ``T`` steps."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, TypeGuard, runtime_checkable

from torch import Tensor

from funcollect.keys import Key, Noise
from funcollect.specs import ActionSpec, ExplorationType
from funcollect.tree import Path

Columns = dict[Path, Tensor]  # each [T, P, ...]

_NO_VALUES: Mapping[str, Any] = {}


class Exploration(NamedTuple):
    """How a policy explores.

    Attributes:
        type: whether it samples, or acts deterministically.
        values: numbers or arrays [] that may change during a run, such as ``epsilon``; a change compiles nothing.
    """

    type: ExplorationType = ExplorationType.RANDOM
    values: Mapping[str, Any] = _NO_VALUES


@dataclass(frozen=True, kw_only=True)
class ActorInputs:
    """Everything that a policy is given for one rollout.

    Attributes:
        observation: what the policy reads at each step: always the same arrays [P, ...], in the space's structure.
        params: prepared parameters.
        policy_state: the state to start from.
        initial_state: the state of a lane at the start of an episode.
        noise: [T, P, ...], or None.
        exploration: how it explores.
        spec: how an action looks.
        single: whether the environment has no batch dimension; P is 1 then.
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
    def stochastic(self) -> bool:
        """Whether a head samples; otherwise it takes the mode."""
        return self.exploration.type is ExplorationType.RANDOM


class Actor(Protocol):
    """A policy at work."""

    def running(self) -> contextlib.AbstractContextManager[Any]:
        """The context in which `act` and `finish` are called."""
        ...

    def act(self, t: int) -> Any:
        """The action [P, ...] for the observation that stands in `ActorInputs.observation` now."""
        ...

    def restart(self, lanes: Sequence[int] | Tensor) -> None:
        """These lanes, listed or a mask [P], begin an episode before the next `act`: forget their recurrent state."""
        ...

    def finish(self) -> tuple[Any, Columns]:
        """The policy's next state, and its outputs of all steps."""
        ...


@runtime_checkable
class Policy(Protocol):
    """A policy: a pure function with parameters as an argument and its recurrent state threaded through.

    `funcollect.PolicyBase` has a default for every member but `backend`, `params` and the call.
    """

    @property
    def backend(self) -> Literal["torch", "jax"]:
        """Whether it reads Torch tensors or arrays for JAX."""
        ...

    @property
    def params(self) -> Any:
        """The policy's own current parameters."""
        ...

    @property
    def nested(self) -> Sequence[Path]:
        """The outputs that a traced loop has under dotted names and a batch nested."""
        ...

    def check(self, spec: ActionSpec, /) -> None:
        """Raise ValueError for an action space that does not suit."""
        ...

    def noise(self, spec: ActionSpec, /) -> Noise | None:
        """What to draw ahead for each lane and step, or None."""
        ...

    def init(self, key: Key, num_envs: int, /) -> Any:
        """The state with which the policy starts: recurrent state, or the generator's."""
        ...

    def prepare(self, params: Any, /) -> Any:
        """Parameters in the form that the call takes: moved, laid out, checked. None means the policy's own."""
        ...

    def remembers(self, policy_state: Any, /) -> bool:
        """Whether a step may depend on those before it, so that the actor has to hear of new episodes."""
        ...

    def actor(self, inputs: ActorInputs, /) -> Actor:
        """The policy bound to one rollout."""
        ...

    def finish(self, columns: Columns, spec: ActionSpec, /) -> Columns:
        """The outputs of a rollout, checked, with the dtypes that a batch has."""
        ...

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
        """One action for each of P environments.

        Args:
            params: what `prepare` returned.
            policy_state: what `init`, or the call before, returned.
            observation: arrays [P, ...] in the structure of the observation space.
            noise: what `noise` asked for, [P, ...], or None.
            spec: how an action looks.
            exploration: how to explore.

        Returns:
            The next policy state and the outputs, ``action`` among them.
        """
        ...


_KNOWN: weakref.WeakSet[type] = weakref.WeakSet()


def is_policy(value: Any) -> TypeGuard[Policy]:
    """Whether it has the members of a policy; looked up once for each class, since the lookup reads them all."""
    if type(value) not in _KNOWN:
        if isinstance(value, type) or not isinstance(value, Policy):
            return False
        _KNOWN.add(type(value))
    return True
