"""Episodes of one life each: after a lost life, the next episode goes on with the same Atari game."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gymnasium
from gymnasium.wrappers import AtariPreprocessing
from typing_extensions import override

GymEnv = gymnasium.Env[Any, Any]


class NextLife(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Goes on with the game where a reset follows the loss of a life, by a step without an action.

    Stable-Baselines3's `EpisodicLifeEnv` does the same. Any other reset, and one with a seed, begins another game.
    """

    def __init__(self, env: GymEnv) -> None:
        """Wrap Gymnasium's `AtariPreprocessing`, which ends an episode with a life but always begins another game."""
        super().__init__(env)
        self._life_lost = False  # whether the last step ended a life, but not the game

    @property
    @override
    def spec(self) -> Any:  # type: ignore[override]
        """That of the game, which is made again from it without this wrapper."""
        return self.env.spec

    @override
    def step(self, action: Any) -> Any:
        answer = self.env.step(action)
        self._life_lost = answer[2] and not (answer[3] or self._over())
        return answer

    @override
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        goes_on, self._life_lost = self._life_lost and seed is None, False
        if goes_on:
            observation, _, _, truncated, info = self.env.step(0)
            if not (truncated or self._over()):
                return observation, info
        return self.env.reset(seed=seed, options=options)

    def _over(self) -> bool:
        return bool(self.env.unwrapped.ale.game_over())  # type: ignore[attr-defined]


def with_next_lives(env: GymEnv) -> GymEnv:
    """An Atari game whose next lives follow its lost ones: `NextLife` is put directly above its preprocessing."""
    if _ends_with_lives(env):
        return NextLife(env)
    for layer in _layers(env):
        if not isinstance(layer, NextLife) and _ends_with_lives(layer.env):
            layer.env = NextLife(layer.env)
    return env


def remove_next_lives(env: GymEnv) -> None:
    """Give a user's own environment back as it was before `with_next_lives`."""
    for layer in _layers(env):
        if isinstance(layer.env, NextLife):
            layer.env = layer.env.env


def check_lives(vector: gymnasium.vector.VectorEnv[Any, Any, Any]) -> None:
    """Raise ValueError for a vector of Atari games that end episodes with lives: it begins other games then."""
    lanes = vector.unwrapped.envs if isinstance(vector.unwrapped, gymnasium.vector.SyncVectorEnv) else ()
    if any(_ends_with_lives(layer) for lane in lanes for layer in _layers(lane)):
        raise ValueError(
            f"{type(vector).__name__} holds Atari games with terminal_on_life_loss=True and restarts them at each lost "
            "life, expected games that go on: pass the list of its functions"
        )


def _layers(env: GymEnv) -> Iterator[Any]:
    """The wrappers of an environment, from the outermost on."""
    layer: Any = env
    while isinstance(layer, gymnasium.Wrapper):
        yield layer
        layer = layer.env


def _ends_with_lives(env: GymEnv) -> bool:
    return isinstance(env, AtariPreprocessing) and env.terminal_on_life_loss
