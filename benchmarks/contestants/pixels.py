"""Pixels [84, 84, 4] that roll as the steps go by, in JAX and on the host: next to no work besides the network's."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt

ACTIONS = 2
SHAPE = (84, 84, 4)
LENGTH = 500  # of an episode, less where actions of 1 move on faster
_SPACE = gymnasium.spaces.Box(0, 255, SHAPE, np.uint8)


def jax_pixels(num_envs: int) -> Any:
    import jax
    import jax.numpy as jnp

    import funcollect as fc

    def shown(scene: Any) -> Any:
        frame, count = scene
        return jnp.roll(frame, count, 0)

    def reset(key: Any, _: Any = None) -> Any:
        scene = jax.random.randint(key, SHAPE, 0, 256, jnp.int32).astype(jnp.uint8), jnp.int32(0)
        return scene, shown(scene)

    def step(key: Any, scene: Any, action: Any, _: Any = None) -> Any:
        moved = scene[0], scene[1] + 1 + action
        return moved, shown(moved), jnp.float32(1), jnp.array(False), moved[1] > LENGTH

    return fc.envs.from_functions(
        reset,
        step,
        observation_space=_SPACE,
        action_space=gymnasium.spaces.Discrete(ACTIONS),
        num_envs=num_envs,
    )


class HostPixels(gymnasium.Env[npt.NDArray[np.uint8], int]):
    """The same as a Gymnasium environment."""

    observation_space = _SPACE
    action_space = gymnasium.spaces.Discrete(ACTIONS)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[npt.NDArray[np.uint8], dict[str, Any]]:
        super().reset(seed=seed)
        self._frame = self.np_random.integers(0, 256, SHAPE, np.uint8)
        self._count = 0
        return self._frame, {}

    def step(self, action: int) -> tuple[npt.NDArray[np.uint8], float, bool, bool, dict[str, Any]]:
        self._count += 1 + int(action)
        return np.roll(self._frame, self._count, 0), 1.0, False, self._count > LENGTH, {}
