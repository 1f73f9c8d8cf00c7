"""Environments over simulators in Python: base classes, rows of observations, and checks of results."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt
from gymnasium.envs.registration import EnvSpec
from torch import Tensor
from typing_extensions import override

from funcollect.arguments import check_kind
from funcollect.envs.base import AdaptedEnv, EnvBase, info_names
from funcollect.envs.host.lane_workers.block import LaneWorkers
from funcollect.envs.plain_spaces import TextBox
from funcollect.errors import EnvError
from funcollect.interop.memory import aligned
from funcollect.messages import form, shown
from funcollect.processes.system import SIGNS
from funcollect.protocols import Column, Env, Forking, HostEnv, Outcome, Seeding, Simulators
from funcollect.specs import ActionSpec, Leaf, Space, disassemble
from funcollect.tree import Path

Array = npt.NDArray[Any]
Opener = Callable[["SimulatedEnv"], Simulators]  # makes the simulators of an adapted environment, once for each state
OpenerOf = Callable[[int, int], Opener]  # the opener of the lanes ``first … end - 1``

MOST_AHEAD = 1024  # rows by which a lane may run ahead of a rollout, if nothing else is said
ONWARD = "correct that, or begin new episodes with funcollect.recover(env, state), as a collector does by itself"


def without_advice(message: str) -> str:
    """An error's message without the advice `ONWARD`, which nobody can follow for environments in workers."""
    return message.removesuffix(ONWARD).removesuffix(": ").removesuffix("; ")


class Camera(NamedTuple):
    """How to film a lane; `Simulators` that can be filmed have a method ``camera(lane) -> Camera``."""

    mode: str | None  # Gymnasium's render_mode
    fps: float | None  # the frames per second that the environment recommends
    shoot: Callable[[], Any]  # returns the current picture: [H, W, 3] uint8 in the mode "rgb_array"


_NUMBERS = {float, int, np.float64, np.float32}
_FLAGS = {bool, np.bool_}
NOT_RECORDED = (TypeError, ValueError, OverflowError, RuntimeError)  # raised by values that no array can hold


def check_outcome(outcome: Outcome, lanes: Sequence[int]) -> None:
    """Raise EnvError for the first lane whose reward is no number, or whose flags are neither bools nor ints."""
    reward, terminated, truncated, _ = outcome
    plain = {*map(type, terminated), *map(type, truncated)} <= _FLAGS and set(map(type, reward)) <= _NUMBERS
    if not plain and (error := _fault(outcome, lanes)):
        raise error


def bad_outcome(outcome: Outcome, lanes: Sequence[int]) -> EnvError:
    """The error for an outcome whose recording raised one of `NOT_RECORDED`; it names the first bad value."""
    says = f"step returned {shown(outcome, 200)}, expected one reward and two flags per lane: correct that"
    return _fault(outcome, lanes) or EnvError(says)


def _fault(outcome: Outcome, lanes: Sequence[int]) -> EnvError | None:
    """The error for the first reward or flag of another type; None if there is none."""
    flag = ("biu", "a bool: return (observation, reward, terminated, truncated, info)")
    wanted = {"reward": ("biuf", "a number: return a float"), "terminated": flag, "truncated": flag}
    for (name, (kinds, expected)), values in zip(wanted.items(), outcome, strict=False):
        for lane, value in zip(lanes, values, strict=False):
            try:
                array = np.asarray(value)
            except (TypeError, ValueError, RuntimeError):
                array = np.empty(0)
            if array.shape or array.dtype.kind not in kinds:
                return EnvError(f"lane {lane}: step returned the {name} {shown(value, 60)}, expected {expected}")
    return None


def bad_info(key: str, values: Column, error: Exception) -> EnvError:
    """The EnvError for an info key whose values, one for each lane, cannot be stacked to an array."""
    if isinstance(values[0], Mapping):
        names = info_names(values[0], f"{key}.")
        return EnvError(f"the info key {key!r} holds a dict, expected numbers or arrays: name its keys, as {names}")
    what = f"the info key {key!r} holds {type(values[0]).__name__} of varying shape or no number ({error})"
    return EnvError(f"{what}: name keys that hold numbers or arrays of one shape")


def check_rewards(rewards: npt.NDArray[np.float32]) -> None:
    """Raise EnvError for the first NaN among the rewards [T, P]; NumPy also stores None as NaN."""
    wrong = np.isnan(rewards)
    if wrong.any():
        step, lane = np.argwhere(wrong)[0].tolist()
        mend = f"assert that in the environment's step, to see what it was computed from; {ONWARD}"
        raise EnvError(f"lane {lane}, step {step} of this batch: the reward is NaN or None, expected a number: {mend}")


class HostEnvBase(EnvBase, ABC):
    """Subclass this with `open`, which makes the simulators (`funcollect.protocols.Simulators`).

    The spaces, `num_envs` and the errors are the same as in `TorchEnvBase`, the other attributes as in `HostEnv`;
    `info_keys` are the keys of the infos that `receive` returns, in their order.

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
        """Make live simulators, without a reset."""


def observation_rows(env: Env) -> dict[Path, npt.NDArray[Any]]:
    """New arrays of zeros for the current observations of all lanes: by key, [P, ...], aligned to 64 bytes.

    Raises TypeError for something that is no environment.

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

    Both methods write into `observation`: the current observations by key, each [P, ...], zeros at first.
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

    opener: Opener
    info_keys: tuple[str, ...] = ()
    seeding: Seeding = "episode"
    forking: Forking = "replay"
    running_statistics: tuple[str, ...] = ()
    primers: Mapping[Path, Tensor] = field(default_factory=dict)
    backend: Literal["host"] = "host"
    workers: LaneWorkers | None = None  # the processes that the simulators live in; None for this process
    open_group: OpenerOf | None = None  # with workers: returns the opener of a worker's lanes
    first_lane: int = 0  # in a worker: the number of its first lane among all lanes
    memory: Mapping[Path, Array] | None = None  # in a worker: where observations are written, [P, ...] by path
    own_spaces: tuple[Space, Space] | None = None  # of observations and actions, before `plain_spaces` changed them
    spec: EnvSpec | None = None  # from which Gymnasium made each lane

    def open(self) -> Simulators:
        """Make live simulators, without a reset."""
        return self.opener(self)


def takes_options(simulators: Any) -> bool:
    """Whether `reset` takes a third argument: Gymnasium's options, or None, for each lane."""
    return bool(getattr(simulators, "takes_options", False))


def seeding_of(env: Env) -> Seeding:
    """Whether each episode can be seeded, each lane once, or only the whole run."""
    return env.seeding if env.backend in ("host", "device") else "episode"


def statistics_of(env: Env) -> str:
    """A clause that names the wrappers of `env` with running statistics, for a message; empty if there are none."""
    names = env.running_statistics if isinstance(env, HostEnv) else ()
    verb = "normalises" if len(names) == 1 else "normalise"
    return f"{' and '.join(names)} {verb} by statistics updated over episodes" if names else ""


def batch_decoder(spec: ActionSpec) -> Callable[[Any], Array]:
    """A function that copies a batch's action [P, ...], of Torch or NumPy, to an array in the action space's dtype."""
    dtype = np.dtype(spec.space.dtype)
    if spec.one_hot:
        return lambda action: spec.from_one_hot(np.asarray(action), np).astype(dtype, copy=False)
    return lambda action: np.asarray(action).astype(dtype)


def of_everyone(action: Any, lanes: Sequence[int], num_envs: int) -> Any:
    """Extend the actions [k, ...] of some lanes to [P, ...], for simulators that only step all lanes together."""
    everyone = action[[0] * num_envs]  # the other lanes get any valid action
    everyone[list(lanes)] = action
    return everyone


class LeafRows:
    """The current rows of one leaf, in `array` [P, *shape], which is aligned: Torch's results depend on alignment.

    Its methods raise EnvError for other shapes and dtypes, where NumPy's assignment would broadcast and truncate.
    """

    def __init__(self, leaf: Leaf, array: Array, first_lane: int) -> None:
        self.leaf, self.array, self._first_lane, self._shape = leaf, array, first_lane, leaf.shape
        self.rows = [array[lane, ...] for lane in range(len(array))]  # views, which are faster to write into
        casting: Literal["same_kind", "safe"] = "same_kind" if leaf.dtype.kind == "f" else "safe"
        dtypes = [np.dtype(code) for code in "?bhilqBHILQefd"]
        self.dtypes = {dtype for dtype in dtypes if np.can_cast(dtype, leaf.dtype, casting)}  # accepted as is

    def write_batch(self, values: Any, lanes: Sequence[int] | Array | None = None, *, of_all: bool = False) -> None:
        """Write `values` [P, *shape], or those of k lanes: [k, *shape], or their rows of [P, *shape] with `of_all`."""
        wanted = self.array.shape if lanes is None or of_all else (len(lanes), *self.leaf.shape)
        values = self._as_array("the vector environment", values, wanted)
        if lanes is not None and of_all:
            lanes = None if len(lanes) == len(values) else np.array(lanes)
            values = values if lanes is None else values[lanes]
        if values.dtype in self.dtypes:
            self.array[... if lanes is None else lanes] = values
        else:
            for lane, value in zip(range(len(values)) if lanes is None else lanes, values, strict=True):
                self.write_lane(lane, value)

    def write_lane(self, lane: int, value: Any) -> None:
        """Write one lane's row. Any number is cast to a floating dtype; integers have to keep their values."""
        if getattr(value, "dtype", None) in self.dtypes and value.shape == self._shape:
            self.rows[lane][...] = value
            return
        row = self._as_array(f"lane {self._first_lane + lane}", value, self.leaf.shape)
        dtype = self.leaf.dtype
        integers = {row.dtype.kind, dtype.kind} <= set("iub")
        if row.dtype not in self.dtypes and not (integers and (row.astype(dtype) == row).all()):
            what = f"lane {self._first_lane + lane}: observation {self.leaf.name!r} has dtype {row.dtype}"
            raise EnvError(f"{what}, its space wants {dtype}: correct the space's dtype or cast the observation")
        self.array[lane] = row

    def _as_array(self, where: str, value: Any, shape: tuple[int, ...]) -> Array:
        """The value as an array; EnvError that begins with `where` if it has another shape."""
        try:
            array = np.asarray(value)
        except (TypeError, ValueError, RuntimeError) as error:
            what = f"{where}: observation {self.leaf.name!r} is {type(value).__name__} and no array ({error})"
            wanted = f"{self.leaf.dtype} {self.leaf.shape}"
            raise EnvError(f"{what}, its space wants {wanted}: correct the space or the observation") from error
        if array.shape != shape:
            what = f"{where}: observation {self.leaf.name!r} has shape {array.shape}, its space wants {shape}"
            raise EnvError(f"{what}: correct the space or the observation")
        return array


class TextRows(LeafRows):
    """The rows of a text in `TextBox`."""

    @override
    def write_batch(self, values: Any, lanes: Sequence[int] | Array | None = None, *, of_all: bool = False) -> None:
        """Write the texts of P lanes, or of k lanes; `of_all` as in `LeafRows`."""
        for index, lane in enumerate(range(len(self.array)) if lanes is None else lanes):
            self.write_lane(lane, values[lane if of_all else index])

    @override
    def write_lane(self, lane: int, value: Any) -> None:
        """Write the bytes of a text, padded with zeros; EnvError for a text that is too long."""
        if not isinstance(value, str):
            what = f"lane {self._first_lane + lane}: observation {self.leaf.name!r} is {form(value)}"
            raise EnvError(f"{what}, its space wants a str: correct the space or the observation")
        text, row = np.frombuffer(value.encode(), np.uint8), self.array[lane]
        if len(text) > len(row):
            what = f"lane {self._first_lane + lane}: the text of observation {self.leaf.name!r} has {len(text)} bytes"
            raise EnvError(f"{what}, expected at most {len(row)}: pass text={len(text)} or more")
        row[: len(text)], row[len(text) :] = text, 0


class Rows:
    """The current observations of all lanes of an environment, for all leaves of its space."""

    def __init__(self, env: SimulatedEnv) -> None:
        self.space, leaves = env.observation_space, env.observation_leaves
        self._first_lane = env.first_lane
        arrays = env.memory or observation_rows(env)
        parts = disassemble(self.space, self.space)  # a Dict or Tuple space is indexed like its observations
        kinds = [TextRows if isinstance(part, TextBox) else LeafRows for part in parts]
        pairs = zip(kinds, leaves, strict=True)
        self.leaves = tuple(kind(leaf, arrays[leaf.path], env.first_lane) for kind, leaf in pairs)
        self.arrays = {rows.leaf.path: rows.array for rows in self.leaves}  # [P, ...] each: always the same memory
        plain = len(self.leaves) == 1 and leaves[0].path == ("observation",)  # not a Dict or a Tuple
        self.write_lane: Callable[[int, Any], None] = self.leaves[0].write_lane if plain else self._write_lane
        # For plain spaces: a view of each lane's row, and the dtypes and the shape of arrays that need no conversion.
        self.plain: tuple[list[Array], set[np.dtype[Any]], tuple[int, ...]] = ([], set(), ())
        if plain:
            (only,) = self.leaves
            self.plain = only.rows, only.dtypes, only.leaf.shape

    def _write_lane(self, lane: int, observation: Any) -> None:
        for rows, value in zip(self.leaves, self._parts(lane, observation), strict=True):
            rows.write_lane(lane, value)

    def write_batch(self, observations: Any, lanes: Sequence[int] | Array | None = None, of_all: bool = False) -> None:
        """Write a vector environment's observation; see `LeafRows.write_batch` for its leaves."""
        for rows, values in zip(self.leaves, self._parts(None, observations), strict=True):
            rows.write_batch(values, lanes, of_all=of_all)

    def _parts(self, lane: int | None, observation: Any) -> list[Any]:
        """The leaves of one lane's observation, or of all lanes' (None), in order; EnvError for another structure."""
        try:
            return disassemble(self.space, observation)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            where = "the vector environment" if lane is None else f"lane {self._first_lane + lane}"
            found, wanted = map(_structure, (observation, getattr(self.space, "spaces", None)))
            what = f"{where}: the observation is {found} and lacks the structure of its space, {wanted} ({error!r})"
            raise EnvError(f"{what}: return every one of these") from error


def _structure(observation: Any) -> str:
    return f"a tuple of {len(observation)}" if isinstance(observation, (tuple, list)) else form(observation)
