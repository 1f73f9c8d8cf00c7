"""Atari games under any Gymnasium wrappers, with snapshots.

ALE can save the emulated machine (its RAM and its random generator), but not the last action, which a sticky frame
repeats. So a game is copied every `_APART` steps, and all calls since the older of the last two copies are recorded. A
snapshot is restored from that copy, by the same calls after each action that may have come before it, until the machine
is equal to the saved one. Functions that change a game are not repeated: a copy of the changed game is recorded among
the calls. Where episodes have one life each, the next goes on with the same game.
"""

from __future__ import annotations

import copy
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import gymnasium
from gymnasium.utils import RecordConstructorArgs
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from typing_extensions import override

from funcollect.envs.base import ends_with_lives
from funcollect.envs.gymnasium_envs.lanes import GymEnv, Lanes
from funcollect.envs.host.host_env import SimulatedEnv, call_of
from funcollect.errors import ReplayError
from funcollect.files import from_data, to_data

_APART = 128  # calls between two copies: a copy takes as long as one or two steps
_CODE = (FunctionType, BuiltinFunctionType, MethodType, type, gymnasium.Space)
_UNLIKELY = 1e-12  # the accepted probability that ALE still repeats an action from before those that were sent
_RESET = None  # in a list of calls, which are actions otherwise: a reset without a seed
# Attributes of wrappers and games that are not copied, and all that are not saved: a new game has the same ones.
_CONSTANT = {"env", "ale", "spec", "_cached_spec", "observation_space", "_observation_space"}
_ACTIONS = {"action_space", "_action_space", "_action_set"}
_SAME = _CONSTANT | _ACTIONS | {"_saved_kwargs", "_ezpickle_args", "_ezpickle_kwargs"}


def is_atari(env: Any) -> bool:
    """Whether a Gymnasium environment is an Atari game, under any wrappers."""
    ale_py = sys.modules.get("ale_py")  # it has been imported if there is such an environment
    return ale_py is not None and isinstance(getattr(env, "unwrapped", None), ale_py.AtariEnv)


def _layers(env: Any) -> tuple[Any, ...]:
    """The wrappers of an environment, the outermost first, and at the end the environment without wrappers."""
    return (env, *_layers(env.env)) if isinstance(env, gymnasium.Wrapper) else (env,)


class _Lives(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Continues the game at a reset after a lost life, by a step without an action, as Stable-Baselines3 does."""

    _life_lost = False  # whether the last step ended a life, but not the game

    @override
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        continues, self._life_lost = self._life_lost and seed is None, False
        if continues:
            observation, _, _, truncated, info = self.env.step(0)
            if not (truncated or self._over()):
                return observation, info
        return self.env.reset(seed=seed, options=options)

    def _over(self) -> bool:
        return bool(self.env.unwrapped.ale.game_over())  # type: ignore[attr-defined]


class NextLife(_Lives):
    """Lies directly above a preprocessing that ends episodes, and the frames of a step, when a life is lost."""

    @property
    @override
    def spec(self) -> Any:  # type: ignore[override]
        """The game's spec: a game that is made from it has no such wrapper yet."""
        return self.env.spec

    @override
    def step(self, action: Any) -> Any:
        answer = self.env.step(action)
        self._life_lost = answer[2] and not (answer[3] or self._over())
        return answer


class EpisodicLife(RecordConstructorArgs, _Lives):
    """Ends episodes with lives, after all frames of a step, as Stable-Baselines3's `EpisodicLifeEnv`."""

    def __init__(self, env: GymEnv) -> None:
        RecordConstructorArgs.__init__(self)
        _Lives.__init__(self, env)
        self._lives = 0

    @override
    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = self.env.step(action)
        before, self._lives = self._lives, self.env.unwrapped.ale.lives()  # type: ignore[attr-defined]
        lost = 0 < self._lives < before  # some games show no life for a few frames before they are over
        self._life_lost = lost and not (terminated or truncated)
        return observation, reward, terminated or lost, truncated, info

    @override
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        answer = super().reset(seed=seed, options=options)
        self._lives = self.env.unwrapped.ale.lives()  # type: ignore[attr-defined]
        return answer


class FireReset(RecordConstructorArgs, gymnasium.Wrapper[Any, Any, Any, Any]):
    """Presses FIRE, and then takes action 2, after each reset of a game that has FIRE, as `FireResetEnv` does."""

    def __init__(self, env: GymEnv) -> None:
        RecordConstructorArgs.__init__(self)
        gymnasium.Wrapper.__init__(self, env)
        fires = "FIRE" in env.unwrapped.get_action_meanings()  # type: ignore[attr-defined]
        self._first_actions = (1, 2) if fires else ()

    @override
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        answer = self.env.reset(seed=seed, options=options)
        for action in self._first_actions:
            observation, _, terminated, truncated, info = self.env.step(action)
            answer = self.env.reset(options=options) if terminated or truncated else (observation, info)
        return answer


def _with_next_lives(env: GymEnv) -> GymEnv:
    """Put `NextLife` directly above a game's preprocessing, if that ends episodes with lives."""
    if ends_with_lives(env):
        return NextLife(env)
    for layer in _layers(env)[:-1]:
        if not isinstance(layer, NextLife) and ends_with_lives(layer.env):
            layer.env = NextLife(layer.env)
    return env


def check_lives(vector: Any) -> None:
    """Raise ValueError for a vector of Atari games that end episodes with lives, since it begins new games then."""
    name, inner = "terminal_on_life_loss", vector.unwrapped
    if "ale_py" not in sys.modules or not isinstance(inner, SyncVectorEnv | AsyncVectorEnv):
        return
    if all(inner.call("has_wrapper_attr", name)) and any(inner.get_attr(name)):
        what = f"{type(vector).__name__} holds Atari games with {name}=True"
        raise ValueError(f"{what} and restarts them at each lost life, expected none: pass the list of its functions")


@dataclass(frozen=True)
class _Copy:
    """A copy of a game and its wrappers; objects that two layers share stay shared."""

    layers: tuple[Any, ...]  # see `_layers`; these are not copied
    attributes: list[dict[str, Any]]  # a copy of each layer's attributes that may change
    machine: Any  # ALE's state

    @classmethod
    def of(cls, env: GymEnv) -> _Copy:
        layers = _layers(env)
        changing = [{name: vars(layer)[name] for name in vars(layer).keys() - _CONSTANT} for layer in layers]
        return cls(layers, _copied(changing, layers, layers), layers[-1].ale.cloneState(include_rng=True))

    def put_into(self, env: GymEnv) -> None:
        """Bring another game to the state of the copy; ReplayError if its wrappers differ."""
        layers = _layers(env)
        if [*map(type, layers)] != [*map(type, self.layers)]:
            raise ReplayError(f"{env} has other wrappers than {self.layers[0]}: build both in the same way")
        for layer, attributes in zip(layers, _copied(self.attributes, self.layers, layers), strict=True):
            vars(layer).update(attributes)
        layers[-1].ale.restoreState(self.machine)

    def data(self) -> dict[str, Any]:
        """The copy as plain data; TypeError if the wrappers hold other mutable objects."""
        changing = [
            {name: value for name, value in attributes.items() if name not in _SAME and not isinstance(value, _CODE)}
            for attributes in self.attributes
        ]
        attributes = to_data(changing, (*self.layers, self.layers[-1].ale))
        names = [type(layer).__name__ for layer in self.layers]
        return {"layers": names, "attributes": attributes, "machine": self.machine.__getstate__()}

    @classmethod
    def from_data(cls, data: Mapping[str, Any], env: GymEnv) -> _Copy:
        """The inverse of `data`, for a game with the same wrappers; ReplayError if its wrappers differ."""
        layers, saved = _layers(env), data["layers"]
        if (names := [type(layer).__name__ for layer in layers]) != saved:
            raise ReplayError(f"{env} has the wrappers {names}, the saved game {saved}: build it with the same")
        structure, arrays = data["attributes"]
        attributes = from_data(structure, arrays, (*layers, layers[-1].ale))
        return cls(layers, attributes, sys.modules["ale_py"].ALEState(data["machine"]))


def _copied(attributes: list[dict[str, Any]], old: Sequence[Any], new: Sequence[Any]) -> list[dict[str, Any]]:
    """A deep copy of the layers' attributes, in which references to `old` layers become references to `new` ones."""
    memo = {id(layer): other for layer, other in zip((*old, old[-1].ale), (*new, new[-1].ale), strict=True)}
    return copy.deepcopy(attributes, memo)


@dataclass(frozen=True)
class _History:
    """Two copies of a game, and the calls after each of them: actions, and `_RESET`."""

    seed: int | None = None  # of the last seeded reset
    older: _Copy | None = None  # None: the calls began with that reset
    newer: _Copy | None = None
    before: Sequence[Any] = ()  # the calls between the copies, and copies after a function has changed the game
    since: Sequence[Any] = ()  # the calls after the newer copy
    machine: Any = None  # ALE's state after all calls

    def data(self) -> dict[str, Any]:
        copies = {name: taken and taken.data() for name, taken in (("older", self.older), ("newer", self.newer))}
        return {**vars(self), **copies, "machine": self.machine.__getstate__()}

    @classmethod
    def from_data(cls, data: Mapping[str, Any], env: GymEnv) -> _History:
        copies = {name: data[name] and _Copy.from_data(data[name], env) for name in ("older", "newer")}
        return cls(**{**data, **copies, "machine": sys.modules["ale_py"].ALEState(data["machine"])})


class RememberedGame(gymnasium.Wrapper[Any, Any, Any, Any]):
    """A game that records its recent calls, so that `follow` can bring another game to the same state."""

    def __init__(self, env: GymEnv) -> None:
        super().__init__(env)
        self._step = env.step
        self._unfit: Exception | None = None  # the error of the copy that failed, if the wrappers cannot be copied
        self._begin(_History())

    def _begin(self, history: _History) -> None:
        self._history, self._calls = history, [*history.since]

    @override
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        if seed is None:
            self._record(_RESET)
        else:
            self._begin(_History(seed))
        return self.env.reset(seed=seed)

    @override
    def step(self, action: Any) -> Any:
        self._record(action)
        return self._step(action)

    def _record(self, call: Any) -> None:
        """Add a call, an action or `_RESET`, to the history; before that, copy the game if the last copy is old."""
        if len(self._calls) >= _APART:
            old = self._history  # its older copy is dropped, with the calls after that
            self._begin(_History(old.seed, old.newer, self._copy(), self._calls))
        self._calls.append(call)

    def _copy(self) -> _Copy | None:
        try:
            return None if self._unfit else _Copy.of(self.env)
        except Exception as error:  # `fork` raises it, if it is called
            self._unfit = error
            return None

    def changed(self) -> None:
        """Record a copy of the game after a function was called with it, in place of such a copy right before."""
        if self._calls and isinstance(self._calls[-1], _Copy):
            self._calls.pop()
        self._record(self._copy())

    def history(self) -> _History:
        """The history up to now, for `follow`."""
        if self._unfit is not None:
            what = f"the wrappers of {self.env} hold an object that cannot be copied ({self._unfit!r})"
            mend = "leave out the wrapper, or continue without a fork: the state has not changed"
            raise ReplayError(f"{what}: {mend}") from self._unfit
        machine = self.env.unwrapped.ale.cloneState(include_rng=True)  # type: ignore[attr-defined]
        return replace(self._history, since=[*self._calls], machine=machine)

    def follow(self, history: _History) -> Any:
        """Repeat another game's history, and return the result of its last call; ReplayError if the machine differs."""
        ale = self.env.unwrapped.ale  # type: ignore[attr-defined]
        for begin in self._beginnings(history, ale):
            answer = begin()
            for call in (*history.before, *history.since):
                if isinstance(call, _Copy):
                    call.put_into(self.env)
                else:
                    answer = self.env.reset() if call is _RESET else self._step(call)
            if ale.cloneState(include_rng=True).equals(history.machine):
                self._begin(history)
                return answer
        what = f"{self.env} reached another state by the same calls, and its own has not changed"
        mend = "let wrappers draw from np_random, apply functions between episodes, or continue without a fork"
        raise ReplayError(f"{what}: {mend}")

    def _beginnings(self, history: _History, ale: Any) -> Iterator[Callable[[], Any]]:
        """Yield functions that restore a history's beginning, one for each action that ALE may repeat there."""
        if history.older is None:
            yield partial(self.env.reset, seed=history.seed)
            return
        repeats = ale.getFloat("repeat_action_probability")
        times = math.ceil(math.log(_UNLIKELY) / math.log(repeats)) if 0 < repeats < 1 else 1
        for action in dict.fromkeys((*ale.getMinimalActionSet(), *ale.getLegalActionSet())):
            ale.reset_game()  # a game that is over takes no action
            for _ in range(times):
                ale.act(action)  # until a frame has almost surely taken it, so that the next one may repeat it
            yield partial(history.older.put_into, self.env)


class AtariLanes(Lanes):
    """One Atari game per lane."""

    takes_options = False  # a game's history has none

    def __init__(self, lanes: Sequence[GymEnv], env: SimulatedEnv) -> None:
        self._games = [RememberedGame(_with_next_lives(lane)) for lane in lanes]
        super().__init__(self._games, env)

    @override
    def close(self) -> None:
        """Close the games, and remove `NextLife` from them, since they may be a user's own instances."""
        super().close()
        for layer in itertools.chain.from_iterable(map(_layers, self._games)):
            if isinstance(layer, gymnasium.Wrapper) and isinstance(layer.env, NextLife):
                layer.env = layer.env.env

    @override
    def apply(self, lanes: Sequence[int], function: Callable[..., Any], args: tuple[Any, ...], /) -> list[Any]:
        results = []
        for lane in lanes:
            results.append(call_of(self._first_lane + lane, function, self._games[lane].env, args))
            self._games[lane].changed()
        return results

    def snapshot(self) -> list[_History]:
        """The history of each game."""
        return [game.history() for game in self._games]

    def restore(self, snapshot: list[_History]) -> None:
        """Bring each game, and its observation, to the point of its history."""
        for lane, (game, history) in enumerate(zip(self._games, snapshot, strict=True)):
            self._rows.write_lane(lane, game.follow(history)[0])

    def snapshot_data(self, snapshot: list[_History]) -> list[dict[str, Any]]:
        """The histories as plain data; TypeError for wrappers that hold other objects."""
        return [history.data() for history in snapshot]

    def snapshot_from(self, data: list[dict[str, Any]]) -> list[_History]:
        """The histories from `snapshot_data`, for games with the same wrappers."""
        return [_History.from_data(saved, game.env) for saved, game in zip(data, self._games, strict=True)]
