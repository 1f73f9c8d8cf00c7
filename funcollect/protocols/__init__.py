"""The protocols of environments, and those of policies: the loops accept any class with these members.

``P`` is the number of environments in one batch.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple, Protocol, TypeGuard, TypeVar, runtime_checkable

import numpy.typing as npt
import torch
from torch import Tensor

from funcollect.keys import LaneKeys
from funcollect.protocols.policies import *  # noqa: F403
from funcollect.protocols.policies import follows
from funcollect.specs import ActionSpec, Leaf, Space
from funcollect.tree import Path

Backend = Literal["host", "torch", "jax", "device"]
Seeding = Literal["episode", "lane", "run"]
Forking = Literal["replay", "snapshot", "none"]
Starts = Literal["fresh", "cached"]
_Backend = TypeVar("_Backend", bound=Backend, covariant=True)

# The outcome of one step of k lanes, without the observations: reward [k], terminated [k] bool, truncated [k] bool and,
# for each info key, [k, ...]. It is a plain tuple for speed, since one is made at every step.
Column = Sequence[Any] | npt.NDArray[Any]
Outcome = tuple[Column, Column, Column, Sequence[Column]]

_NO_INFO: Mapping[str, Any] = {}


class Transition(NamedTuple):
    """The result of one step, before any reset: of one lane in JAX, of all P lanes in Torch (each field [P, ...]).

    >>> import torch
    >>> states, over = torch.zeros(4, 2), torch.zeros(4, dtype=torch.bool)  # of four lanes
    >>> Transition(states, states, torch.ones(4), terminated=over, truncated=over).reward.sum()
    tensor(4.)
    """

    env_state: Any  # a pytree
    observation: Any  # in the structure of the observation space
    reward: Any  # [] float32, or [players]
    terminated: Any  # [] bool
    truncated: Any  # [] bool
    info: Mapping[str, Any] = _NO_INFO  # arrays, recorded under ``next.info``


class EnvDescription(Protocol[_Backend]):
    """The members that all environments have."""

    @property
    def backend(self) -> _Backend:
        """The kind of environment."""

    @property
    def num_envs(self) -> int | None:
        """P, or None for a single environment without a batch dimension."""

    @property
    def observation_space(self) -> Space:
        """The observation space of one environment."""

    @property
    def action_space(self) -> Space:
        """The action space of one environment."""

    @property
    def observation_leaves(self) -> tuple[Leaf, ...]:
        """The leaves of an observation in a batch (`funcollect.envs.observation_leaves`)."""

    @property
    def action_spec(self) -> ActionSpec:
        """How an action looks in a batch."""


@runtime_checkable
class HostEnv(EnvDescription[Literal["host"]], Protocol):
    """The description of an environment whose simulators are Python objects, which `open` makes."""

    @property
    def seeding(self) -> Seeding:
        """Whether each episode can be seeded, each lane once, or only the whole run."""

    @property
    def forking(self) -> Forking:
        """How `fork` copies a state: by replaying episodes from their seeds, by a full snapshot, or not at all."""

    @property
    def info_keys(self) -> tuple[str, ...]:
        """The keys of `info` that a batch records under ``next.info``."""

    @property
    def running_statistics(self) -> tuple[str, ...]:
        """The wrappers that normalise by their own running statistics; with any, `evaluate` and `fork` raise."""

    @property
    def primers(self) -> Mapping[Path, Tensor]:
        """Initial recurrent states for policies, by key, of one lane; usually empty. They are not observations."""

    def open(self) -> Simulators:
        """Make live simulators, which are not reset yet."""


class Simulators(Protocol):
    """P live simulators. They are mutable and belong to one collector state."""

    @property
    def observation(self) -> Mapping[Path, npt.NDArray[Any]]:
        """The current observations [P, ...] by key, always the same arrays (`funcollect.envs.observation_rows`)."""

    def reset(self, lanes: Sequence[int], seeds: Sequence[int | None], /) -> None:
        """Start an episode in each of these k lanes, from its seed if it is not None."""

    def send(self, lanes: Sequence[int], action: Any, /) -> None:
        """Begin a step of these k lanes with the actions [k, ...], a Torch tensor or a NumPy array."""

    def receive(self) -> tuple[Sequence[int], Outcome]:
        """Return the lanes of the oldest `send` that has not been received yet, and the outcome of their step."""

    def close(self) -> None:
        """Free the simulators."""


@runtime_checkable
class PacedSimulators(Simulators, Protocol):
    """Simulators that can step some lanes while others are still under way."""

    @property
    def least_ready(self) -> int:
        """The number of lanes to wait for; 0 to step all lanes together by `send` and `receive`."""

    @property
    def most_ahead(self) -> int:
        """The most rows that a lane may run ahead of a rollout, if lanes cannot wait at its end; 0 if they wait."""

    @property
    def busy(self) -> Set[int]:
        """The lanes that are under way, or whose reset comes with a later answer."""

    def send_some(self, lanes: Sequence[int], action: Any, /) -> None:
        """Begin a step of these k lanes with the actions [k, ...]. None of them may be under way."""

    def receive_some(self, least: int, /) -> tuple[Sequence[int], Outcome]:
        """Wait until at least `least` lanes have answered; return all that have, and their outcome, as `receive`."""


@runtime_checkable
class SimulatorsOfLanes(Simulators, Protocol):
    """Simulators with an object for each lane, for `funcollect.apply`."""

    def apply(self, lanes: Sequence[int], function: Callable[..., Any], args: tuple[Any, ...], /) -> list[Any]:
        """Call a function with the object of each of these k lanes and `args`; return the k results."""


@runtime_checkable
class SnapshotSimulators(Simulators, Protocol):
    """Simulators whose full state, random generators included, can be saved and restored."""

    def snapshot(self) -> Any:
        """Return everything that the next steps depend on; later steps do not change the result."""

    def restore(self, snapshot: Any, /) -> None:
        """Restore a snapshot of these or of equal simulators, observations included."""


@runtime_checkable
class SavableSnapshots(SnapshotSimulators, Protocol):
    """Simulators whose snapshots hold more than the plain data (numbers, strings, arrays, nested) that `save` needs."""

    def snapshot_data(self, snapshot: Any, /) -> Any:
        """Return a snapshot as plain data; TypeError, with the reason, if that is impossible."""

    def snapshot_from(self, data: Any, /) -> Any:
        """Return the snapshot that `snapshot_data` turned into `data`, for these simulators."""


class FunctionalEnv(EnvDescription[_Backend], Protocol[_Backend]):
    """The members of environments that are pure functions, written in Torch or in JAX."""

    @property
    def params(self) -> Any:
        """The parameters at the start of a run: a pytree, or None."""

    @property
    def max_episode_steps(self) -> int | None:
        """The number of steps after which the loop truncates an episode; None for no limit."""


@runtime_checkable
class TorchEnv(FunctionalEnv[Literal["torch"]], Protocol):
    """An environment written in Torch: pure functions over all P lanes at once."""

    @property
    def device(self) -> torch.device:
        """The device of its tensors."""

    def reset(self, key: LaneKeys, params: Any, /) -> tuple[Any, Any]:
        """Begin an episode in each lane; return the state and the observation [P, ...]."""

    def step(self, key: LaneKeys, env_state: Any, action: Tensor, params: Any, /) -> Transition:
        """Make one step in each lane with the action [P, ...], without resets and without writing in place."""


@runtime_checkable
class JaxEnv(FunctionalEnv[Literal["jax"]], Protocol):
    """An environment written in JAX: pure functions of one lane, which the loop batches and compiles."""

    @property
    def starts(self) -> Starts:
        """``"fresh"``, or ``"cached"`` if every episode of a lane starts as its first one did."""

    def reset(self, key: Any, params: Any, /) -> tuple[Any, Any]:
        """Begin an episode; return the state and the observation. `key` is uint32[2]."""

    def step(self, key: Any, env_state: Any, action: Any, params: Any, /) -> Transition:
        """Make one step without a reset. Discrete actions are elements of the space, never one-hot rows."""


class Renderer(NamedTuple):
    """Draws the states of a JAX environment, for `funcollect.record`.

    >>> import numpy as np
    >>> renderer = Renderer(fps=50, draw=lambda env_state, params: np.zeros((64, 64, 3), np.uint8))
    >>> renderer.draw(None, None).shape
    (64, 64, 3)
    """

    fps: float | None  # the frames per second of a film in real time; None for 30
    draw: Callable[[Any, Any], Any]  # (env_state, params) of one lane -> a picture [H, W, 3] uint8


@runtime_checkable
class RenderedEnv(Protocol):
    """A JAX environment that `funcollect.record` can film."""

    def renderer(self) -> AbstractContextManager[Renderer]:
        """Open a renderer, which is freed when the context ends. Its `params` are None unless the state has some."""


@runtime_checkable
class DeviceEnv(EnvDescription[Literal["device"]], Protocol):
    """The description of simulators that hold all P lanes as tensors on one device."""

    @property
    def device(self) -> torch.device:
        """The device of its tensors."""

    @property
    def seeding(self) -> Literal["run"]:
        """They are seeded once, together."""

    @property
    def forking(self) -> Literal["none"]:
        """They cannot be copied."""

    @property
    def resets_lanes(self) -> bool:
        """Whether the simulators have `restart`, so that limits and masks may end an episode."""

    def open(self) -> DeviceSimulators:
        """Make live simulators, which are not reset yet."""


class DeviceSimulators(Protocol):
    """P live simulators, whose observations, rewards and flags are tensors [P, ...] on one device."""

    def reset(self, seed: int | None, /) -> Any:
        """Begin an episode in each lane, and return the observations, in the structure of the space."""

    def step(self, action: Tensor, /) -> tuple[Transition, Any]:
        """Step all lanes, and begin an episode where one ends; return the transition, and the current observations.

        The transition, as of `TorchEnv.step`, has the last observations of episodes that ended.
        """

    def restart(self, lanes: Tensor, /) -> Any:
        """Begin an episode in the lanes of a mask [P] bool; return observations, whose other rows are not read.

        The mask may be empty. It is only called if the environment has `resets_lanes`.
        """

    def check(self) -> None:
        """Raise EnvError for a failure since the last call; it may wait for the device."""

    def close(self) -> None:
        """Free the simulators."""


Env = HostEnv | TorchEnv | JaxEnv | DeviceEnv
_ENVS: weakref.WeakSet[type] = weakref.WeakSet()


def is_env(value: Any) -> TypeGuard[Env]:
    """Whether a value has all members of an environment."""
    return follows(Env, value, _ENVS)
