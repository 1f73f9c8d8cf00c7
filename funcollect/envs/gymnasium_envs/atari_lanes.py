"""Atari games under whatever Gymnasium wrappers, which can be brought to the same point again.

ALE's own clone holds the machine and its generator, but not the action that it repeats where actions are sticky. So a
game is copied every hundred steps or so, and the calls since the last copy but one are remembered. To follow it, they
are made again from that copy, once for each action that may have come before, until the machine stands where it should.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import gymnasium

from funcollect.envs.gymnasium_envs.lanes import GymEnv, Lanes
from funcollect.errors import ReplayError
from funcollect.specs import ActionSpec, Leaf

_APART = 128  # calls between two copies: a copy takes as long as one or two steps
_UNLIKELY = 1e-12  # that an action has not been taken up, though it was asked for again and again
_CHANGELESS = frozenset({"env", "ale", "spec", "_cached_spec", "observation_space", "_observation_space"})
_RESET = object()  # stands for a reset without a seed where an action would stand


def is_atari(env: Any) -> bool:
    """Whether a Gymnasium environment is an Atari game, under any wrappers."""
    ale_py = sys.modules.get("ale_py")  # whoever made such an environment has imported it
    return ale_py is not None and isinstance(env.unwrapped, ale_py.AtariEnv)


@dataclass(frozen=True)
class _Copy:
    """Layers from the outermost wrapper to the game, the attributes in which they change, and the machine's state.

    The attributes are copied together, so that what two layers share stays shared.
    """

    layers: tuple[Any, ...]
    attributes: list[dict[str, Any]]
    machine: Any

    @classmethod
    def of(cls, env: GymEnv) -> _Copy:
        layers = _layers(env)
        changing = [{name: vars(layer)[name] for name in vars(layer).keys() - _CHANGELESS} for layer in layers]
        return cls(layers, _copied(changing, layers, layers), layers[-1].ale.cloneState(include_rng=True))

    def put_into(self, env: GymEnv) -> None:
        layers = _layers(env)
        if [type(layer) for layer in layers] != [type(layer) for layer in self.layers]:
            raise ReplayError(f"{env} has other wrappers than {self.layers[0]}: build both in the same way")
        for layer, attributes in zip(layers, _copied(self.attributes, self.layers, layers), strict=True):
            vars(layer).update(attributes)
        layers[-1].ale.restoreState(self.machine)


def _layers(env: Any) -> tuple[Any, ...]:
    layers = [env]
    while isinstance(layers[-1], gymnasium.Wrapper):
        layers.append(layers[-1].env)
    return tuple(layers)


def _copied(attributes: list[dict[str, Any]], old: Sequence[Any], new: Sequence[Any]) -> list[dict[str, Any]]:
    """A deep copy, in which the `new` layers stand for the `old` ones."""
    memo = {id(one): other for one, other in zip(old, new, strict=True)}
    memo[id(old[-1].ale)] = new[-1].ale
    return copy.deepcopy(attributes, memo)


@dataclass(frozen=True)
class _History:
    """A copy, or None for the seeded reset with which all began, the calls since, and where they have led."""

    seed: int | None
    older: _Copy | None
    newer: _Copy | None
    before: list[Any]  # between the two copies
    since: list[Any]
    machine: Any = None


class RememberedGame:
    """A game that remembers how it came to where it is. Its `step` and `reset` are those of a Gymnasium environment."""

    def __init__(self, env: GymEnv) -> None:
        self.env = env
        self.observation_space = env.observation_space
        self.unwrapped = env.unwrapped
        self.render = env.render
        self.close = env.close
        self._step = env.step
        self._unfit: Exception | None = None
        self._begin(_History(None, None, None, [], []))

    def _begin(self, history: _History) -> None:
        self._history = history
        self._calls = history.since

    def reset(self, *, seed: int | None = None) -> Any:
        """Start an episode; with a seed, all over again."""
        if seed is None:
            self._note(_RESET)
        else:
            self._begin(_History(seed, None, None, [], []))
        return self.env.reset(seed=seed)

    def step(self, action: Any) -> Any:
        """One step."""
        self._note(action)
        return self._step(action)

    def _note(self, call: Any) -> None:
        if len(self._calls) >= _APART:
            self._copy()
        self._calls.append(call)

    def _copy(self) -> None:
        old = self._history
        try:
            newer = None if self._unfit else _Copy.of(self.env)
        except Exception as error:  # said by `fork`, if it is asked for
            self._unfit, newer = error, None
        self._begin(_History(old.seed, old.newer, newer, old.since, []))

    def history(self) -> _History:
        """Where it stands, for `follow`."""
        if self._unfit is not None:
            raise ReplayError(
                f"the wrappers of {self.env} hold what cannot be copied ({self._unfit!r}): leave out the wrapper that "
                "does, or go on without a fork: the state is as good as before"
            ) from self._unfit
        machine = self.env.unwrapped.ale.cloneState(include_rng=True)  # type: ignore[attr-defined]
        return replace(self._history, since=list(self._calls), machine=machine)

    def follow(self, history: _History) -> Any:
        """Go to where another game's history leads; gives the answer of the last call.

        Raises:
            ReplayError: where it does not lead there.
        """
        ale = self.env.unwrapped.ale  # type: ignore[attr-defined]
        for begin in self._beginnings(history, ale):
            answer = begin()
            for call in (*history.before, *history.since):
                answer = self.env.reset() if call is _RESET else self._step(call)
            if ale.cloneState(include_rng=True).equals(history.machine):
                self._begin(replace(history, since=list(history.since)))
                return answer
        raise ReplayError(
            f"{self.env} went another way from the same point: let its wrappers draw from np_random, not from a global "
            "generator, or go on without a fork: the state is as good as before"
        )

    def _beginnings(self, history: _History, ale: Any) -> Iterator[Callable[[], Any]]:
        if history.older is None:
            yield partial(self.env.reset, seed=history.seed)
            return
        for action in dict.fromkeys((*ale.getMinimalActionSet(), *ale.getLegalActionSet())):
            _ask_for(ale, action)
            yield partial(history.older.put_into, self.env)


def _ask_for(ale: Any, action: Any) -> None:
    """Make `action` the one that is repeated."""
    repeats = ale.getFloat("repeat_action_probability")
    ale.reset_game()  # a game that is over takes no action
    for _ in range(math.ceil(math.log(_UNLIKELY) / math.log(repeats)) if 0 < repeats < 1 else 1):
        ale.act(action)


class AtariLanes(Lanes):
    """One Atari game per lane."""

    def __init__(
        self, envs: Sequence[GymEnv], leaves: tuple[Leaf, ...], spec: ActionSpec, info_keys: tuple[str, ...]
    ) -> None:
        self._games = [RememberedGame(env) for env in envs]
        super().__init__(self._games, leaves, spec, info_keys)

    def snapshot(self) -> list[_History]:
        """How each lane came to where it is."""
        return [game.history() for game in self._games]

    def restore(self, snapshot: list[_History]) -> None:
        """Bring each lane to where the snapshot was taken."""
        answers = [game.follow(history) for game, history in zip(self._games, snapshot, strict=True)]
        self._rows.write([answer[0] for answer in answers])
