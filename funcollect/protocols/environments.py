"""What the loops ask of environments; ``P`` is their number in one batch."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeGuard, runtime_checkable

import numpy.typing as npt
import torch
from torch import Tensor

from funcollect.keys import LaneKeys
from funcollect.specs import ActionSpec, Leaf, Space
from funcollect.tree import Path

Backend = Literal["host", "torch", "jax"]
Seeding = Literal["episode", "lane", "run"]
Forking = Literal["replay", "snapshot", "none"]
Starts = Literal["fresh", "cached"]

# One step of k lanes, without the observations: reward [k], terminated [k] bool, truncated [k] bool and, for each info
# key, [k, ...]. A plain tuple, since one is made at every step.
Column = Sequence[Any] | npt.NDArray[Any]
Outcome = tuple[Column, Column, Column, Sequence[Column]]

_NO_INFO: Mapping[str, Any] = {}


class Transition(NamedTuple):
    """The result of one step, before any reset: of one lane in JAX, of all P lanes in Torch (then each [P, ...])."""

    env_state: Any  # a pytree
    observation: Any  # in the structure of the observation space
    reward: Any  # [] float32, or [players]
    terminated: Any  # [] bool
    truncated: Any  # [] bool
    info: Mapping[str, Any] = _NO_INFO  # arrays, recorded under ``next.info``


class EnvDescription(Protocol):
    """What every environment says about itself."""

    @property
    def num_envs(self) -> int | None:
        """P, or None for a single environment without a batch dimension."""
        ...

    @property
    def observation_space(self) -> Space:
        """The observation space of one environment."""
        ...

    @property
    def action_space(self) -> Space:
        """The action space of one environment."""
        ...

    @property
    def observation_leaves(self) -> tuple[Leaf, ...]:
        """The leaves of an observation in a batch (`funcollect.envs.observation_leaves`)."""
        ...

    @property
    def action_spec(self) -> ActionSpec:
        """How an action looks in a batch."""
        ...


@runtime_checkable
class HostEnv(EnvDescription, Protocol):
    """An environment whose simulators are Python objects: a description from which they are made."""

    @property
    def backend(self) -> Literal["host"]:
        """Which kind of environment this is."""
        ...

    @property
    def seeding(self) -> Seeding:
        """Whether each episode can be seeded, each lane once, or only the whole run."""
        ...

    @property
    def forking(self) -> Forking:
        """How `fork` copies it: by replaying episodes from their seeds, by a full snapshot, or not at all."""
        ...

    @property
    def info_keys(self) -> tuple[str, ...]:
        """The keys of `info` that a batch records under ``next.info``."""
        ...

    @property
    def running_statistics(self) -> tuple[str, ...]:
        """The wrappers that normalise by statistics of their own, updated over episodes.

        New simulators lack these statistics, so `evaluate` and `fork` refuse such an environment.
        """
        ...

    def open(self) -> Simulators:
        """Live simulators, not reset yet."""
        ...


class Simulators(Protocol):
    """P live simulators. They are mutable, and belong to one collector state."""

    @property
    def observation(self) -> Mapping[Path, npt.NDArray[Any]]:
        """The current observations by key, each [P, ...]: always the same memory, into which all methods write.

        `funcollect.envs.observation_rows` makes such arrays, aligned as Torch's results depend on it.
        """
        ...

    def reset(self, lanes: Sequence[int], seeds: Sequence[int | None], /) -> None:
        """Start an episode in each of these k lanes, from its seed if it is not None."""
        ...

    def send(self, lanes: Sequence[int], action: Any, /) -> None:
        """Begin a step of these k lanes with the actions [k, ...], a Torch tensor or a NumPy array."""
        ...

    def receive(self) -> tuple[Sequence[int], Outcome]:
        """The lanes of the oldest `send` that was not received yet, and the outcome of their step."""
        ...

    def close(self) -> None:
        """Free the simulators."""
        ...


class SnapshotSimulators(Simulators, Protocol):
    """Simulators of which a snapshot can be taken, generators included, and put into others like them."""

    def snapshot(self) -> Any:
        """All that the next steps depend on; later steps do not change it."""
        ...

    def restore(self, snapshot: Any, /) -> None:
        """Go to where `snapshot` was taken, observations included, on these or on other simulators."""
        ...


@runtime_checkable
class TorchEnv(EnvDescription, Protocol):
    """An environment written in Torch: pure functions over all P lanes at once."""

    @property
    def backend(self) -> Literal["torch"]:
        """Which kind of environment this is."""
        ...

    @property
    def device(self) -> torch.device:
        """Where its tensors lie."""
        ...

    @property
    def params(self) -> Any:
        """The parameters with which a run begins: a pytree, or None."""
        ...

    @property
    def max_episode_steps(self) -> int | None:
        """The loop truncates an episode after this many steps; None for no limit."""
        ...

    def reset(self, key: LaneKeys, params: Any, /) -> tuple[Any, Any]:
        """The state and the observation [P, ...] at the start of an episode of each lane."""
        ...

    def step(self, key: LaneKeys, env_state: Any, action: Tensor, params: Any, /) -> Transition:
        """One step of each lane, with the action [P, ...]. It resets no lane and writes nothing in place."""
        ...


@runtime_checkable
class JaxEnv(EnvDescription, Protocol):
    """An environment written in JAX: pure functions of one lane, which the loop batches and compiles."""

    @property
    def backend(self) -> Literal["jax"]:
        """Which kind of environment this is."""
        ...

    @property
    def params(self) -> Any:
        """The parameters with which a run begins: a pytree, or None."""
        ...

    @property
    def max_episode_steps(self) -> int | None:
        """The loop truncates an episode after this many steps; None for no limit."""
        ...

    @property
    def starts(self) -> Starts:
        """``"fresh"``, or ``"cached"``: every episode of a lane starts as its first one did."""
        ...

    def reset(self, key: Any, params: Any, /) -> tuple[Any, Any]:
        """The state and the observation at the start of an episode; `key` is uint32[2]."""
        ...

    def step(self, key: Any, env_state: Any, action: Any, params: Any, /) -> Transition:
        """One step, which does not reset. Discrete actions come as the space has them, never as one-hot rows."""
        ...


Env = HostEnv | TorchEnv | JaxEnv
_KNOWN: weakref.WeakSet[type] = weakref.WeakSet()


def is_env(value: Any) -> TypeGuard[Env]:
    """Whether it has the members of an environment; looked up once for each class, since the lookup reads them all."""
    if type(value) not in _KNOWN:
        if isinstance(value, type) or not isinstance(value, Env):
            return False
        _KNOWN.add(type(value))
    return True
