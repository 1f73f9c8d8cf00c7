"""Simulators over Gymnasium's environments, one for each lane."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode
from typing_extensions import override

from funcollect.envs.base import info_names, info_place
from funcollect.envs.host import host_env
from funcollect.envs.host.host_env import ONWARD, Camera, Rows, SimulatedEnv, SimulatorsBase, batch_decoder
from funcollect.envs.plain_spaces import STRUCTURED, lane_structures
from funcollect.errors import EnvError, InUseError
from funcollect.messages import shown
from funcollect.processes.system import SIGNS
from funcollect.protocols import Outcome
from funcollect.specs import ActionSpec, Space

GymEnv = gymnasium.Env[Any, Any]

# By id: the environments that back a state, or did until it was closed.
TAKEN: WeakValueDictionary[int, Any] = WeakValueDictionary()
# Types of immutable numbers and flags, which need no copy.
_FIXED = frozenset({bool, int, float, *(np.dtype(code).type for code in "?bhilqBHILQefd")})
_NO_OPTIONS = itertools.repeat(None)
API = "use Gymnasium's step API"
_FIVE_VALUES = f"expected the five values (observation, reward, terminated, truncated, info): {API}"


@dataclass(frozen=True)
class Made:
    """A factory that returns an existing environment first."""

    env: Any  # None in a copy
    build: Callable[[], Any]  # makes a new one

    def __call__(self) -> Any:
        """That environment, or a new one if there is none or it backs a state already."""
        return self.build() if self.env is None or id(self.env) in TAKEN else self.env

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy only `build`, for another process; but an instance that the user has made is copied while it is new."""
        given = isinstance(self.build, partial) and self.build.func is rebuild
        return Made, (self.env if given and id(self.env) not in TAKEN else None, self.build)


def rebuild(env: Any, mode: str | None = None) -> Any:
    """Build another instance of `env` from its spec or, for a vector with this mode, its functions; else InUseError."""
    try:
        if mode is not None:
            return type(env)(env.env_fns, autoreset_mode=AutoresetMode[mode])
        if env.spec is not None:
            return gymnasium.make(env.spec, disable_env_checker=True)
        reason = "it has no spec"
    except Exception as error:
        reason = repr(error)
    mend = "pass an id or a factory, or a list of factories, instead of an instance"
    raise InUseError(f"{env} backs a state already and cannot be rebuilt ({reason}): {mend}")


def make_lane(lane: int, factory: Callable[[], Any]) -> Any:
    """Call the factory of a lane; EnvError with a fix if its library allows one environment in a process."""
    try:
        return factory()
    except RuntimeError as error:
        if "per process" not in str(error):
            raise
        mend = "give each lane a process of its own by num_workers=, as many as num_envs, and close other states first"
        raise EnvError(f"lane {lane}: its library runs one environment in each process ({error}): {mend}") from error


class _Numbers(dict[int, Any]):
    """A cache of NumPy's scalars of one type by value: a lookup takes half as long as to make one."""

    def __init__(self, kind: Callable[[int], Any]) -> None:
        self._kind = kind

    def __missing__(self, value: int) -> Any:
        number = self._kind(value)
        return self.setdefault(value, number) if len(self) < 1024 else number


def own_spaces(env: Any) -> tuple[Space, Space]:
    """The simulators' own spaces of observations and actions: see `SimulatedEnv.own_spaces`."""
    return getattr(env, "own_spaces", None) or (env.observation_space, env.action_space)


def _decoder(spec: ActionSpec, own: Space, num_lanes: int) -> Callable[[Any], Sequence[Any]]:
    """A function from a batch's action [P, ...] to P actions of the types that `sample` returns, copied each time."""
    batch: Callable[[Any], Any] = batch_decoder(spec)
    if isinstance(own, STRUCTURED):
        return lane_structures(own, batch)
    if spec.space.shape:
        return batch
    if not spec.categories:
        return lambda action: [np.asarray(value) for value in batch(action)]
    number = _Numbers(np.dtype(spec.space.dtype).type).__getitem__
    if spec.one_hot:
        return lambda action: [*map(number, batch(action).tolist())]
    if num_lanes == 1:
        return lambda action: [number(action.item())]
    return lambda action: [*map(number, action.tolist())]


class Lanes(SimulatorsBase):
    """One Gymnasium environment per lane, stepped one after the other."""

    def __init__(self, lanes: Sequence[GymEnv], env: SimulatedEnv) -> None:
        self._envs = lanes
        self._steps: list[Callable[[Any], Any]] = [lane.step for lane in lanes]
        self._resets: list[Callable[..., Any]] = [lane.reset for lane in lanes]
        self._alone = self._steps[0] if len(lanes) == 1 else None  # the `step` of the only lane
        self._space = own_spaces(env)[1]
        self._decode = _decoder(env.action_spec, self._space, len(lanes))
        self._info_keys = env.info_keys
        self._dotted = any("." in key for key in env.info_keys)
        self._first_lane = env.first_lane
        self._rows = Rows(env)
        self.observation = self._rows.arrays

    takes_options = True  # see `host_env.takes_options`

    @override
    def reset(self, lanes: Sequence[int], seeds: Sequence[int | None], options: Sequence[Any] | None = None, /) -> None:
        resets, write, signs = self._resets, self._rows.write_lane, SIGNS.count
        for lane, seed, given in zip(lanes, seeds, options or _NO_OPTIONS):  # noqa: B905  (these have no end)
            try:
                answer = resets[lane](seed=seed) if given is None else resets[lane](seed=seed, options=given)
            except Exception as error:
                old = isinstance(error, TypeError) and "'seed'" in str(error)
                mend = "use Gymnasium's reset API, reset(*, seed=None, options=None)" if old else ONWARD
                raise EnvError(f"lane {self._first_lane + lane}: reset({seed=}) raised {error!r}: {mend}") from error
            if not isinstance(answer, tuple) or len(answer) != 2:
                raise bad_reset(f"lane {self._first_lane + lane}", answer)
            write(lane, answer[0])
            signs[0] += 1

    @override
    def receive(self) -> tuple[Sequence[int], Outcome]:
        """Step the lanes of the last `send`. A single lane is stepped here, with fewer Python calls than in `step`."""
        lanes, action = self._sent
        if self._alone is None:
            return lanes, self.step(lanes, action)
        (only,) = self._decode(action)
        try:
            answer = self._alone(only)
        except Exception as error:
            raise self._raised(error, 0, only) from error
        try:
            observation, reward, terminated, truncated, info = answer
        except (TypeError, ValueError) as error:
            raise self._not_five(0, answer) from error
        self._rows.write_lane(0, observation)
        picked = [(value,) for value in self._pick(0, info)] if self._info_keys else ()
        return lanes, ((reward,), (terminated,), (truncated,), picked)

    @override
    def step(self, lanes: Sequence[int], action: Any, /) -> Outcome:
        """Step the lanes in turn; copy each lane's results at once, since the next step may write over them."""
        info_keys, signs, array = self._info_keys, SIGNS.count, np.ndarray
        views, dtypes, shape = self._rows.plain
        outcomes: list[tuple[Any, ...]] = []
        picked: list[Any] = []
        for lane, lane_action in zip(lanes, self._decode(action), strict=True):
            signs[1] = lane
            try:
                answer = self._steps[lane](lane_action)
            except Exception as error:
                raise self._raised(error, lane, lane_action) from error
            try:
                observation, reward, terminated, truncated, info = answer
            except (TypeError, ValueError) as error:
                raise self._not_five(lane, answer) from error
            if observation.__class__ is array and observation.dtype in dtypes and observation.shape == shape:
                views[lane][...] = observation  # as `write_lane` does, without the call
            else:
                self._rows.write_lane(lane, observation)
            if reward.__class__ in _FIXED and terminated.__class__ in _FIXED and truncated.__class__ in _FIXED:
                outcomes.append((reward, terminated, truncated))
            else:
                outcomes.append((_copied(reward), _copied(terminated), _copied(truncated)))
            if info_keys:
                picked.append(self._pick(lane, info))
        reward, terminated, truncated = zip(*outcomes, strict=True)
        return reward, terminated, truncated, [*zip(*picked, strict=True)] if picked else ()

    def _pick(self, lane: int, info: Any) -> list[Any]:
        """Copies of a lane's values for the recorded info keys; EnvError for an info that lacks one."""
        try:
            if self._dotted:
                return [_copied(holder[name]) for holder, name in (info_place(info, key) for key in self._info_keys)]
            return [_copied(info[key]) for key in self._info_keys]
        except (KeyError, TypeError) as error:
            for key in self._info_keys:
                if not isinstance(info, Mapping) or (place := info_place(info, key))[1] not in place[0]:
                    raise no_info_key(self._first_lane + lane, key, info) from error
            raise

    def _not_five(self, lane: int, answer: Any) -> EnvError:
        return EnvError(f"lane {self._first_lane + lane}: step returned {shown(answer)}, {_FIVE_VALUES}")

    def _raised(self, error: Exception, lane: int, action: Any) -> EnvError:
        where = f"lane {self._first_lane + lane}"
        if "values to unpack (expected 5" in str(error):  # by a wrapper, such as that of `max_episode_steps`
            return EnvError(f"{where}: step, within a wrapper: {error}, {_FIVE_VALUES}")
        outside = "" if self._space.contains(action) else f" (the action is not in {self._space}: look at the policy)"
        return EnvError(f"{where}: step({action!r}) raised {error!r}{outside}: {ONWARD}")

    def apply(self, lanes: Sequence[int], function: Callable[..., Any], args: tuple[Any, ...], /) -> list[Any]:
        """Call a function with the environments of these lanes."""
        return [host_env.call_of(self._first_lane + lane, function, self._envs[lane], args) for lane in lanes]

    def camera(self, lane: int) -> Camera:
        """The camera of one lane, for `funcollect.record`."""
        env = self._envs[lane]
        return Camera(env.unwrapped.render_mode, (env.unwrapped.metadata or {}).get("render_fps"), env.render)

    @override
    def close(self) -> None:
        """Close every environment, then raise EnvError for the first one that could not be."""
        failed: dict[int, Exception] = {}
        for lane, env in enumerate(self._envs, self._first_lane):
            try:
                env.close()
            except Exception as error:
                failed[lane] = error
            SIGNS.count[0] += 1
        for lane, reason in failed.items():
            raise EnvError(f"lane {lane}: close raised {reason!r}: correct that; the others are closed") from reason


def _copied(value: Any) -> Any:
    """A copy of a value that may change later; the value itself if it cannot be copied, and so is no number anyway."""
    if value.__class__ in _FIXED:
        return value
    if value.__class__ is np.ndarray and not value.dtype.hasobject:
        return value.copy()
    try:
        return deepcopy(value)
    except Exception:
        return value


def bad_reset(where: str, answer: Any) -> EnvError:
    """The EnvError for a reset that returned anything else than two values."""
    says = "expected the two values (observation, info): use Gymnasium's reset API"
    return EnvError(f"{where}: reset returned {shown(answer)}, {says}")


def no_info_key(lane: int, key: str, info: Any) -> EnvError:
    """The EnvError for a lane whose step returned no info of this name."""
    if not isinstance(info, Mapping):
        return EnvError(f"lane {lane}: step returned the info {shown(info)}, expected a dict: return one")
    mend = f"there are {info_names(info)}; name one that every step returns, or add it in a gymnasium.Wrapper"
    return EnvError(f"lane {lane}: step returned no info key {key!r}, which info_keys names: {mend}")
