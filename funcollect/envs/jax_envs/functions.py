"""JAX environments from functions: a plain pair, or those of Gymnasium's `FuncEnv`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from funcollect.arguments import check_kind
from funcollect.envs.base import check_pure_functions
from funcollect.envs.jax_envs.checks import check_functions
from funcollect.envs.jax_envs.jax_env import FunctionsEnv, Reset, check_instance, jax_env
from funcollect.protocols import Starts, Transition
from funcollect.specs import Space


def from_functions(
    reset: Reset,
    step: Callable[[Any, Any, Any, Any], Any],
    *,
    observation_space: Space,
    action_space: Space,
    num_envs: int | None = None,
    max_episode_steps: int | None = None,
    one_hot: bool = False,
    info_keys: Sequence[str] = (),
    starts: Starts = "fresh",
    params: Any = None,
    param_keys: Sequence[str] = (),
    name: str = "functions",
) -> FunctionsEnv:
    """A JAX environment from two pure functions of one lane, which the library batches, compiles and resets.

    Args:
        reset: ``(key, params) -> (env_state, observation)``: the start of an episode; `key` is uint32[2], `env_state`
            any pytree.
        step: ``(key, env_state, action, params) -> (env_state, observation, reward, terminated, truncated)``, or with
            a dict `info` as a sixth: one step. The reward is a number [] or [players]; the flags are bool []. It does
            not reset.
        observation_space, action_space: of one environment.
        num_envs: P; None for a single environment without a batch dimension.
        max_episode_steps: steps after which an episode is truncated; None for no limit.
        one_hot: in a batch, discrete actions are one-hot rows, TorchRL's encoding; `step` gets them as in the space.
        info_keys: the keys of `info` that a batch records under ``next.info``.
        starts: ``"cached"`` starts every episode of a lane as its first one: less work, and less variety.
        params: the last argument of both functions, a pytree of arrays, or None. `set_env_params` changes them during
            a run.
        param_keys: the names of parameters that a batch records under ``env_params``, with dots between those of nodes.
        name: its name in messages.

    Raises:
        TypeError: for a `step` that returns something else.
        EnvError: for results that do not fit each other or the spaces.
        ValueError: for an option out of range.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> from gymnasium.spaces import Box
    >>> line = Box(-5, 5, (1,))
    >>> walk = from_functions(
    ...     lambda key, params: (jnp.zeros(1), jnp.zeros(1)),
    ...     lambda key, x, action, params: (x + action, x + action, -abs(x + action)[0], abs(x + action)[0] > 4, False),
    ...     observation_space=line, action_space=Box(-1, 1, (1,)), num_envs=64, max_episode_steps=100, name="walk",
    ... )
    >>> walk
    JaxEnv('walk', num_envs=64)
    """
    check_kind("name", name, str, "pass for example 'walk'")
    check_pure_functions("", reset, step)
    common = (observation_space, action_space, num_envs, one_hot, info_keys, starts)
    facts = {"max_episode_steps": max_episode_steps, "params": params, "param_keys": param_keys}
    env = jax_env(name, reset, step, *common, **facts)
    check_functions(env, env.params)
    return env


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
    """A JAX environment over a `FuncEnv`, whose `terminal` is a termination; it never truncates by itself.

    As in Gymnasium's own wrapper, one key serves all functions of a step.

    Args:
        env: a `FuncEnv` instance, whose functions JAX can trace.
        params: the last argument of its functions; by default their own.
        info_keys: the keys of `transition_info` that a batch records under ``next.info``.
        num_envs, max_episode_steps, one_hot, starts: see `from_functions`.

    Raises:
        TypeError: for something that is no `FuncEnv`; `from_functions` has the errors of its functions.

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
        observation = env.observation(state, key, *last)
        reward = env.reward(env_state, action, state, key, *last)
        info = env.transition_info(env_state, action, state, *last)
        return Transition(state, observation, reward, env.terminal(state, key, *last), False, info)

    common = (env.observation_space, env.action_space, num_envs, one_hot, info_keys, starts)
    made = jax_env(type(env).__name__, reset, step, *common, max_episode_steps=max_episode_steps)
    check_functions(made, made.params)
    return made
