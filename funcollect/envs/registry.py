"""`make_env` makes an environment from an id, an instance or a factory of any library."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from inspect import signature
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import VectorEnv

from funcollect import envs
from funcollect.envs import base
from funcollect.envs.around import KEYWORDS, around
from funcollect.envs.gymnasium_envs.lanes import Made
from funcollect.envs.host.lane_workers.block import REMOVED
from funcollect.envs.torch_env import TORCH_ENVS
from funcollect.protocols import Env, is_env, is_policy


def make_env(env: Any, **kwargs: Any) -> Env:
    """Make an environment from an id, an instance, a factory or a list of these.

    `env` is an `Env`, which is returned unchanged; anything that `funcollect.envs.from_gymnasium` or `from_torchrl`
    takes; a class of your own (`funcollect.envs.JaxEnvBase` and its like), which is called with the keywords; a
    callable that returns one of these; or an id in a namespace: ``"torch/CartPole-v1"``, ``"envpool/CartPole-v1"``,
    ``"ale/Pong"``, ``"gymnax/CartPole-v1"``, ``"brax/ant"``, ``"jumanji/Snake-v1"``, ``"navix/Navix-Empty-8x8-v0"``,
    ``"pgx/go_9x9"``, ``"playground/CartpoleBalance"``, ``"craftax/Craftax-Symbolic-v1"``,
    ``"xminigrid/XLand-MiniGrid-R1-9x9"``, ``"pettingzoo/mpe/simple_tag_v3"``, ``"jaxmarl/MPE_simple_spread_v3"``,
    ``"vmas/navigation"``. Instances of JAX suites and of Gymnasium's `FuncEnv` go to their adapters too, and so do
    pairs ``(env, params)``, as gymnax and XLand-MiniGrid make them. The keywords are for the adapter: `num_envs` and,
    for Gymnasium, `num_workers` (lanes over processes), the others of `funcollect.envs.from_gymnasium`, and those of
    `gymnasium.make`.
    Three are for any environment, one that is made already included:

    - `clip_actions`: True gives the environment actions clipped to the bounds of its Box, which remain those of the
      action space. Batches have what the policy returned; see `funcollect.heads.clipped_normal`.
    - `clip_rewards`: True gives the signs of one agent's rewards, -1, 0 or 1, as is usual for Atari. Those of the
      environment are recorded ``[*B, T]`` float32 as the info ``"reward"``. `episode_stats`, `track` and `evaluate`
      count clipped ones: for scores, evaluate in an environment without the keyword.
    - `inputs`: what a policy reads besides the observation, in the batch under these names, as keys of a dict with
      ``"observation"``: ``"prev_action"`` ``[*B, T, ...]``, the action that was executed in the step before;
      ``"prev_reward"`` ``[*B, T, 1]`` float32, as in the batch; ``"is_first"`` ``[*B, T, 1]`` bool, True at an
      episode's start, where both others are zeros.

    Raises ValueError for an unknown id, ImportError for an id of a suite that is not installed, and TypeError for
    anything that describes no environment.

    >>> make_env("torch/Pendulum-v1", num_envs=4)
    Pendulum(num_envs=4)
    """
    if changes := {name: kwargs.pop(name) for name in KEYWORDS if name in kwargs}:
        return around(make_env(env, **kwargs), **changes)
    if base.is_torchrl(env):  # first, since a ParallelEnv asks its processes for attributes that the checks below read
        return envs.from_torchrl(env, **kwargs)
    if base.is_of("envpool", env):
        return envs.from_envpool(env, **kwargs)
    if is_policy(env):
        raise TypeError(f"env is the policy {type(env).__name__}, expected an environment: it comes before the policy")
    if is_env(env):
        if kwargs:
            names = ", ".join(kwargs)
            raise ValueError(f"{names} cannot be given with {env!r}, which is made already: pass it when you make that")
        return env
    namespace, _, name = env.partition("/") if isinstance(env, str) and "/" in env else ("", "", "")
    if namespace in _NAMESPACES:
        keywords = "it takes num_envs, device and max_episode_steps"
        known = keywords if namespace == "torch" else f"see funcollect.envs.from_{namespace}"
        make = partial(_NAMESPACES[namespace], name)
        return make(**kwargs) if namespace == "envpool" else limited(make, kwargs, f"'{env}'", f"leave it out; {known}")
    pair = isinstance(env, tuple) and len(env) == 2 and not {"reset_env", "initial", "reset"} & {*dir(env[1])}
    instance, *params = env if pair and base.suite_of(env[0]) in _IN_PAIRS else (env,)
    if suite := base.suite_of(instance):
        adapter: Callable[..., Env] = partial(getattr(envs, f"from_{suite}"), instance, *params)
        mend = f"leave it out; see funcollect.envs.from_{suite}"
        return limited(adapter, kwargs, type(instance).__name__, mend)  # type: ignore[no-any-return]
    if callable(env) and not isinstance(env, gymnasium.Env):
        return _from_callable(env, kwargs)
    return envs.from_gymnasium(env, **kwargs)


def limited(make: Callable[..., Any], kwargs: dict[str, Any], name: str, mend: str) -> Any:
    """Call `make`, and set a time limit if it takes none; TypeError, with the fix `mend`, for an unknown keyword."""
    factory, kwargs = base.with_time_limit(make, kwargs, by_name=True)
    try:
        return factory(**kwargs)
    except TypeError as error:
        if "unexpected keyword argument" not in str(error):
            raise
        raise TypeError(f"{name}: {error}: {mend}") from error


def _torch_env(name: str, **kwargs: Any) -> Env:
    if name not in TORCH_ENVS:
        mend = "leave 'torch/' out for Gymnasium's, or pass an instance of your own TorchEnvBase"
        raise ValueError(f"there is no Torch environment {name!r}, expected one of {sorted(TORCH_ENVS)}: {mend}")
    return TORCH_ENVS[name](**kwargs)


_IN_PAIRS = ("craftax", "functional", "gymnax", "xminigrid")  # suites that take pairs (env, params)
_SUITES = {*base.SUITES, "ale", "envpool", "pettingzoo", "vmas"} - {"functional"}  # which has no ids
_NAMESPACES: dict[str, Callable[..., Env]] = {name: getattr(envs, f"from_{name}") for name in _SUITES}
_NAMESPACES["torch"] = _torch_env
WORKER_ARGUMENTS = ("num_workers", "parallel", "timeout", "wait", "min_ready", *REMOVED)
_ADAPTER_ARGUMENTS = {*signature(envs.from_gymnasium).parameters, *REMOVED} - {"env", "kwargs"}


def _from_callable(factory: Any, kwargs: dict[str, Any]) -> Env:
    """Adapt a factory, whose environment made here serves the first `init`; it gets the keywords no adapter takes."""
    if isinstance(factory, type) and issubclass(factory, base.EnvBase):
        return make_env(limited(factory, kwargs, factory.__name__, "leave it out, or take it in its __init__"))
    factory, kwargs = base.with_time_limit(factory, kwargs)
    options = {name: value for name, value in kwargs.items() if name in _ADAPTER_ARGUMENTS}
    arguments = {name: value for name, value in kwargs.items() if name not in options}
    made = base.built(factory, arguments)
    if base.is_torchrl(made) or isinstance(made, gymnasium.Env):
        adapter = envs.from_torchrl if base.is_torchrl(made) else envs.from_gymnasium
        if kwargs.get("parallel") or kwargs.get("num_workers"):
            with contextlib.suppress(RuntimeError):  # TorchRL's cannot be closed before their first reset
                made.close()
            return adapter(factory, **kwargs)
        return adapter(partial(base.first_then_new, [made], partial(factory, **arguments)), **options)
    if base.is_of("pettingzoo", made):
        made.close()
        return envs.from_pettingzoo(partial(factory, **arguments), **options)
    base.refuse_foreign(made)
    if not isinstance(made, (Env, str, EnvSpec, VectorEnv, Sequence)) and base.suite_of(made) is None:
        known = "an Env, a gymnasium.Env or anything else that make_env takes: return the environment"
        raise TypeError(f"the environment's factory returned {type(made).__name__}, expected {known}")
    if isinstance(made, VectorEnv):
        return envs.from_gymnasium(Made(made, partial(factory, **arguments)), **options)
    return make_env(made, **options)
