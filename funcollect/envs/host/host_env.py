"""Environments whose simulators are Python objects, and checks of the simulators' results."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt
from torch import Tensor

from funcollect.arguments import check_kind
from funcollect.envs.base import AdaptedEnv, EnvBase
from funcollect.envs.host.lane_workers.options import LaneWorkers
from funcollect.errors import EnvError
from funcollect.interop.memory import aligned
from funcollect.messages import shown
from funcollect.processes.system import SIGNS
from funcollect.protocols import Column, Env, Forking, HostEnv, Outcome, Seeding, Simulators
from funcollect.specs import ActionSpec
from funcollect.tree import Path

OpenerOf = Callable[[int, int], Callable[["SimulatedEnv"], Simulators]]  # opens the lanes ``first … end - 1``

ONWARD = "correct that, or begin new episodes with funcollect.recover(env, state), as a collector does by itself"


def without_advice(message: str) -> str:
    """The message of an error for a reader who cannot follow `ONWARD`, since the environment lives in a worker."""
    return message.removesuffix(ONWARD).removesuffix(": ").removesuffix("; ")


class Camera(NamedTuple):
    """How to film a lane; `Simulators` that can be filmed have a method ``camera(lane) -> Camera``."""

    mode: str | None  # Gymnasium's render_mode
    fps: float | None  # the frames per second that the environment recommends
    shoot: Callable[[], Any]  # returns the current picture: [H, W, 3] uint8 in the mode "rgb_array"


_NUMBERS = {float, int, np.float64, np.float32}
_FLAGS = {bool, np.bool_}
NOT_RECORDED = (TypeError, ValueError, OverflowError, RuntimeError)  # of values that are no numbers, or too large


def check_outcome(outcome: Outcome, lanes: Sequence[int]) -> None:
    """Raise EnvError for the first lane whose reward is no number, or whose flags are neither bools nor ints."""
    reward, terminated, truncated, _ = outcome
    flags = {*map(type, terminated), *map(type, truncated)}
    plain = flags <= _FLAGS and set(map(type, reward)) <= _NUMBERS
    if not plain and (error := _fault(outcome, lanes)):
        raise error


def bad_outcome(outcome: Outcome, lanes: Sequence[int]) -> EnvError:
    """The error for an outcome that could not be recorded, for one of the reasons in `NOT_RECORDED`."""
    says = f"step returned {shown(outcome, 200)}, expected one reward and two flags per lane: correct that"
    return _fault(outcome, lanes) or EnvError(says)


def _fault(outcome: Outcome, lanes: Sequence[int]) -> EnvError | None:
    flag = "a bool: return (observation, reward, terminated, truncated, info)"
    wanted = (("reward", "biuf", "a number: return a float"), ("terminated", "biu", flag), ("truncated", "biu", flag))
    for (name, kinds, expected), values in zip(wanted, outcome, strict=False):
        for lane, value in zip(lanes, values, strict=False):
            try:
                array = np.asarray(value)
            except (TypeError, ValueError, RuntimeError):
                array = np.empty(0)
            if array.shape or array.dtype.kind not in kinds:
                return EnvError(f"lane {lane}: step returned the {name} {shown(value, 60)}, expected {expected}")
    return None


def bad_info(key: str, values: Column, error: Exception) -> EnvError:
    """The EnvError for an info key whose values, one for each lane, are no arrays of one shape."""
    return EnvError(
        f"the info key {key!r} holds {type(values[0]).__name__} of varying shape or no number ({error}): "
        "name keys that hold numbers or arrays of one shape"
    )


def check_rewards(rewards: npt.NDArray[np.float32]) -> None:
    """Raise EnvError for the first NaN among the rewards [T, P]; NumPy also stores None as NaN."""
    wrong = np.isnan(rewards)
    if wrong.any():
        step, lane = np.argwhere(wrong)[0].tolist()
        raise EnvError(
            f"lane {lane}, step {step} of this batch: the reward is NaN or None, expected a number: assert that in the "
            f"environment's step, to see what it was computed from; {ONWARD}"
        )


class HostEnvBase(EnvBase, ABC):
    """Subclass this with `open`, which makes the simulators (`funcollect.protocols.Simulators`).

    The spaces, `num_envs` and the errors are the same as in `TorchEnvBase`.

    Attributes:
        seeding, forking, running_statistics, primers: see `HostEnv`.
        info_keys: the keys of the infos that `receive` returns, in their order.

    >>> import gymnasium
    >>> import funcollect as fc
    >>> class Counter(fc.envs.HostEnvBase):
    ...     observation_space = gymnasium.spaces.Box(0, 99, (1,))
    ...     action_space = gymnasium.spaces.Discrete(2)
    ...     def open(self):
    ...         return Counters(self)
    >>> class Counters(fc.envs.SimulatorsBase):
    ...     def reset(self, lanes, seeds):
    ...         self.observation[("observation",)][lanes] = 0
    ...     def step(self, lanes, actions):
    ...         self.observation[("observation",)][lanes] += 1
    ...         over = (self.observation[("observation",)][lanes, 0] >= 5).tolist()
    ...         return [1.0] * len(over), over, [False] * len(over), ()
    >>> env = Counter(num_envs=2)
    >>> policy = fc.random_policy(env)
    >>> state, batch = fc.rollout(env, policy, fc.init(env, policy, seed=0), 6)
    >>> batch["observation"][0, :, 0].tolist()
    [0.0, 1.0, 2.0, 3.0, 4.0, 0.0]
    """

    backend: Literal["host"] = "host"
    seeding: Seeding = "episode"
    forking: Forking = "replay"
    info_keys: tuple[str, ...] = ()
    running_statistics: tuple[str, ...] = ()
    primers: Mapping[Path, Tensor] = MappingProxyType({})

    @abstractmethod
    def open(self) -> Simulators:
        """Make live simulators, which are not reset yet."""


def observation_rows(env: Env) -> dict[Path, npt.NDArray[Any]]:
    """New arrays of zeros for the current observations of all lanes: by key, [P, ...], aligned to 64 bytes.

    Raises:
        TypeError: for something that is no environment.

    >>> import funcollect as fc
    >>> {path: rows.shape for path, rows in observation_rows(fc.make_env("CartPole-v1", num_envs=3)).items()}
    {('observation',): (3, 4)}
    """
    check_kind("env", env, get_args(Env), "pass the environment of the simulators")
    return {leaf.path: aligned((env.num_envs or 1, *leaf.shape), leaf.dtype) for leaf in env.observation_leaves}


def call_of(lane: int, function: Callable[..., Any], env: Any, args: tuple[Any, ...]) -> Any:
    """Call a user's function with the environment of a lane; EnvError, which names the lane, if it raises."""
    SIGNS.count[0] += 1
    try:
        return function(env, *args)
    except Exception as error:
        name = getattr(function, "__name__", repr(function))
        raise EnvError(f"lane {lane}: {name} raised {error!r}: {ONWARD}") from error


class SimulatorsBase(ABC):
    """Subclass this with `reset` and `step` for simulators that work in this process; `HostEnvBase` shows one.

    Attributes:
        observation: the current observations by key, each [P, ...], zeros at first: both methods write into it.
    """

    observation: Mapping[Path, npt.NDArray[Any]]
    _sent: tuple[Sequence[int], Any] = ((), None)

    def __init__(self, env: HostEnv) -> None:
        self.observation = observation_rows(env)

    @abstractmethod
    def reset(self, lanes: Sequence[int], seeds: Sequence[int | None], /) -> None:
        """Start an episode in each of these k lanes, from its seed if it is not None."""

    @abstractmethod
    def step(self, lanes: Sequence[int], action: Any, /) -> Outcome:
        """Step these k lanes with the actions [k, ...]; return their reward, terminated, truncated and infos."""

    def send(self, lanes: Sequence[int], action: Any, /) -> None:
        """Keep the actions for `receive`, which steps the lanes."""
        self._sent = lanes, action

    def receive(self) -> tuple[Sequence[int], Outcome]:
        """Step the lanes of the last `send`, and return them with the outcome."""
        lanes, action = self._sent
        return lanes, self.step(lanes, action)

    def close(self) -> None:  # noqa: B027  (there may be nothing to free)
        """Free the simulators."""


@dataclass(frozen=True, kw_only=True, repr=False)
class SimulatedEnv(AdaptedEnv):
    """The host environment that every adapter returns."""

    opener: Callable[[SimulatedEnv], Simulators]  # makes the simulators of this environment
    info_keys: tuple[str, ...] = ()
    seeding: Seeding = "episode"
    forking: Forking = "replay"
    running_statistics: tuple[str, ...] = ()
    primers: Mapping[Path, Tensor] = field(default_factory=dict)
    backend: Literal["host"] = "host"
    workers: LaneWorkers | None = None  # the processes that the simulators live in; None for this process
    open_group: OpenerOf | None = None  # what opens the simulators of some lanes in a worker
    first_lane: int = 0  # in a worker: what messages call the first lane
    memory: Mapping[Path, npt.NDArray[Any]] | None = None  # in a worker: where observations are written

    def open(self) -> Simulators:
        """Make live simulators, which are not reset yet."""
        return self.opener(self)


def seeding_of(env: Env) -> Seeding:
    """Whether each episode can be seeded, each lane once, or only the whole run."""
    return env.seeding if env.backend in ("host", "device") else "episode"


def statistics_of(env: Env) -> str:
    """A clause that names the wrappers of `env` with running statistics, for a message; empty if there are none."""
    names = env.running_statistics if isinstance(env, HostEnv) else ()
    verb = "normalises" if len(names) == 1 else "normalise"
    return f"{' and '.join(names)} {verb} by statistics updated over episodes" if names else ""


def batch_decoder(spec: ActionSpec) -> Callable[[Any], npt.NDArray[Any]]:
    """A function that copies a batch's action [P, ...], of Torch or NumPy, to an array in the action space's dtype."""
    dtype = np.dtype(spec.space.dtype)
    if spec.one_hot:
        return lambda action: spec.from_one_hot(np.asarray(action), np).astype(dtype, copy=False)
    return lambda action: np.asarray(action).astype(dtype)


def of_everyone(action: Any, lanes: Sequence[int], num_envs: int) -> Any:
    """Actions [P, ...] of all lanes, from [k, ...] of these: for simulators that only step all lanes together."""
    everyone = action[[0] * num_envs]
    everyone[list(lanes)] = action
    return everyone


class _Numbers(dict[int, Any]):
    """NumPy's numbers of a type by their values: it takes half as long to look one up as to make it."""

    def __init__(self, kind: Callable[[int], Any]) -> None:
        self._kind = kind

    def __missing__(self, value: int) -> Any:
        made = self._kind(value)
        return self.setdefault(value, made) if len(self) < 1024 else made


def decoder(spec: ActionSpec) -> Callable[[Any], Sequence[Any]]:
    """A function from a batch's action [P, ...], of Torch or NumPy, to P actions as `sample` of the space returns them.

    An environment may keep or write to the arrays among them.
    """
    batch: Callable[[Any], Any] = batch_decoder(spec)
    if spec.space.shape:
        return batch
    if not spec.categories:
        return lambda action: [np.asarray(value) for value in batch(action)]
    number = _Numbers(np.dtype(spec.space.dtype).type).__getitem__
    if spec.one_hot:
        return lambda action: [*map(number, batch(action).tolist())]
    return lambda action: [*map(number, action.tolist())]
