"""Gymnasium's functional environments (`gymnasium.experimental.functional.FuncEnv`) written in JAX."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from funcollect.envs.jax_envs.functions import from_functions
from funcollect.envs.jax_envs.jax_env import FunctionsEnv
from funcollect.envs.jax_envs.suite import check_instance
from funcollect.protocols import Starts, Transition


def from_functional(
    env: Any,
    params: Any = None,
    *,
    num_envs: int | None = None,
    max_episode_steps: int | None = None,
    one_hot: bool = False,
    info_keys: Sequence[str] = (),
    starts: Starts = "fresh",
) -> FunctionsEnv:
    """A JAX environment over a `FuncEnv`, whose `terminal` is a termination; it knows no truncation of its own.

    As in Gymnasium's own wrapper, one key serves all functions of a step.

    Args:
        env: a `FuncEnv` instance, whose functions JAX can trace.
        params: the last argument of its functions; left out, so that their own default holds, unless given.
        num_envs: P; None for a single environment without a batch dimension.
        max_episode_steps: steps after which an episode is truncated; None for no limit.
        one_hot: discrete actions as one-hot rows, TorchRL's encoding.
        info_keys: the keys of `transition_info` that a batch records under ``next.info``.
        starts: ``"cached"`` starts every episode of a lane as its first one: less work, and less variety.

    Raises:
        TypeError: for something that is no `FuncEnv`, or whose functions do not fit its spaces.

    >>> from gymnasium.envs.phys2d.cartpole import CartPoleFunctional
    >>> from_functional(CartPoleFunctional(), num_envs=64, max_episode_steps=500)
    JaxEnv('CartPoleFunctional', num_envs=64)
    """
    check_instance("Gymnasium's FuncEnv", env, "initial", "transition", "terminal")
    last = () if params is None else (params,)

    def reset(key: Any, _: Any) -> tuple[Any, Any]:
        state = env.initial(key, *last)
        return state, env.observation(state, key, *last)

    def step(key: Any, env_state: Any, action: Any, _: Any) -> Transition:
        state = env.transition(env_state, action, key, *last)
        return Transition(
            env_state=state,
            observation=env.observation(state, key, *last),
            reward=env.reward(env_state, action, state, key, *last),
            terminated=env.terminal(state, key, *last),
            truncated=False,
            info=env.transition_info(env_state, action, state, *last),
        )

    return from_functions(
        reset,
        step,
        observation_space=env.observation_space,
        action_space=env.action_space,
        num_envs=num_envs,
        max_episode_steps=max_episode_steps,
        one_hot=one_hot,
        info_keys=info_keys,
        starts=starts,
        name=type(env).__name__,
    )
