"""Gymnasium environments: an id, a factory, an instance, a list of these, or a `VectorEnv`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import gymnasium
import numpy.typing as npt
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, VectorEnv

from funcollect.envs.gymnasium_lanes import GymEnv, Lanes
from funcollect.envs.host_env import HostEnv, Simulators
from funcollect.envs.vector_lanes import VectorLanes, check_autoreset
from funcollect.specs import ActionSpec, observation_leaves

Source = str | EnvSpec | GymEnv | Callable[..., GymEnv]
Factory = Callable[[], Any]


def from_gymnasium(
    env: Source | VectorEnv[Any, Any, Any] | Sequence[Source],
    *,
    num_envs: int | None = None,
    info_keys: Sequence[str] = (),
    dtype: npt.DTypeLike | None = None,
    one_hot: bool = False,
    **kwargs: Any,
) -> HostEnv:
    """A host environment over Gymnasium's.

    Args:
        env: a registered id, an `EnvSpec`, a factory, an instance, a list of these (one per lane), or a `VectorEnv`
            built with ``autoreset_mode=AutoresetMode.DISABLED``. An instance backs one state; another state over it is
            rebuilt from its spec.
        num_envs: P, made from one id, spec or factory; None for a single environment without a batch dimension.
        info_keys: keys of `info` to be recorded under ``next.info``, present at every step (`RecordEpisodeStatistics`
            gives its ``episode`` at ends only: use `funcollect.episode_stats`).
        dtype: the dtype of floating observations in a batch; float32 unless given.
        one_hot: discrete actions as one-hot int64 rows, TorchRL's encoding, instead of integers.
        **kwargs: for `gymnasium.make`, or for the factory.

    Raises:
        ValueError: for an unknown id, a count that does not fit, an instance given twice, spaces that differ between
            lanes, a vector environment that resets itself, or keys that collide with a batch's own.
        TypeError: for anything else as `env`, and for spaces without arrays of fixed size.

    >>> from_gymnasium("CartPole-v1", num_envs=8)
    HostEnv('CartPole-v1', num_envs=8)
    """
    _check_info_keys(info_keys)
    if isinstance(env, VectorEnv):
        _refuse("a VectorEnv", num_envs=num_envs, **kwargs)
        return _vector(env, tuple(info_keys), dtype, one_hot)
    factories = _factories(env, num_envs, kwargs)
    made = factories[0] if isinstance(factories[0], _Made) else _Made(factories[0](), factories[0])
    factories[0], first = made, made.env
    for lane, factory in enumerate(factories):
        if isinstance(factory, _Made):
            _check_lane(lane, factory.env, first)
    leaves = observation_leaves(first.observation_space, dtype)
    spec = ActionSpec(first.action_space, one_hot)
    if info_keys and any(leaf.path[0] == "info" for leaf in leaves):
        raise ValueError("the observation key 'info' collides with info_keys: rename it, or leave info_keys out")

    def opener() -> Simulators:
        return Lanes(_open(factories, first), leaves, spec, tuple(info_keys))

    single = num_envs is None and (isinstance(env, str) or not isinstance(env, Sequence))
    return HostEnv(
        label=_label(first),
        num_envs=None if single else len(factories),
        observation_space=first.observation_space,
        action_spec=spec,
        observation_leaves=leaves,
        opener=opener,
        info_keys=tuple(info_keys),
    )


def _vector(
    env: VectorEnv[Any, Any, Any], info_keys: tuple[str, ...], dtype: npt.DTypeLike | None, one_hot: bool
) -> HostEnv:
    check_autoreset(env)
    leaves = observation_leaves(env.single_observation_space, dtype)
    spec = ActionSpec(env.single_action_space, one_hot)
    rebuild = partial(_rebuild_vector, env)
    made = _Made(env, rebuild)
    return HostEnv(
        label=f"{type(env).__name__} of {env.spec.id}" if env.spec else type(env).__name__,
        num_envs=env.num_envs,
        observation_space=env.single_observation_space,
        action_spec=spec,
        observation_leaves=leaves,
        opener=lambda: VectorLanes(_taken(made()), leaves, spec, info_keys, rebuild),
        info_keys=info_keys,
    )


_TAKEN: WeakValueDictionary[int, Any] = WeakValueDictionary()  # by id: what backs a state, or did before it was closed


class _Made:
    """Gives an environment that exists already, unless it is taken, and builds others after that."""

    def __init__(self, env: Any, build: Factory) -> None:
        self.env = env
        self._build = build

    def __call__(self) -> Any:
        return self._build() if id(self.env) in _TAKEN else self.env


def _taken(env: Any) -> Any:
    _TAKEN[id(env)] = env
    return env


def _open(factories: Sequence[Factory], first: GymEnv) -> list[GymEnv]:
    """One environment per lane; if that fails, those that were made are given back or closed."""
    envs: list[GymEnv] = []
    try:
        for lane, factory in enumerate(factories):
            env = factory()
            _check_lane(lane, env, first)
            if id(env) in _TAKEN:
                raise ValueError(
                    f"lane {lane}: the factory returned an environment that backs a lane already: build a new one at "
                    "each call"
                )
            envs.append(_taken(env))
    except BaseException:
        for factory, env in zip(factories, envs, strict=False):
            del _TAKEN[id(env)]
            if not isinstance(factory, _Made) or factory.env is not env:
                env.close()
        raise
    return envs


def _factories(env: Source | Sequence[Source], num_envs: int | None, kwargs: dict[str, Any]) -> list[Factory]:
    if isinstance(env, Sequence) and not isinstance(env, str):
        if not env:
            raise ValueError("the list of environments is empty: pass at least one")
        if num_envs not in (None, len(env)):
            raise ValueError(f"num_envs is {num_envs}, but the list holds {len(env)} environments: leave num_envs out")
        instances = [id(one) for one in env if isinstance(one, gymnasium.Env)]
        if len(set(instances)) < len(instances):
            raise ValueError("the same environment instance stands twice in the list: pass one instance per lane")
        return [_factory(one, kwargs) for one in env]
    if num_envs is None:
        return [_factory(env, kwargs)]
    if isinstance(num_envs, bool) or not isinstance(num_envs, int) or num_envs < 1:
        raise ValueError(f"num_envs is {num_envs!r}, expected a positive int, or None for no batch dimension")
    if isinstance(env, gymnasium.Env) and num_envs > 1:
        raise ValueError(
            f"num_envs is {num_envs}, but one environment instance was given: pass its id or a factory, or a list"
        )
    return [_factory(env, kwargs)] * num_envs


def _factory(env: Source, kwargs: dict[str, Any]) -> Factory:
    if isinstance(env, gymnasium.Env):
        _refuse("an environment instance", **kwargs)
        return _Made(env, lambda: _rebuild(env))
    if isinstance(env, (str, EnvSpec)):
        return lambda: _make(env, kwargs)
    if callable(env):
        return lambda: env(**kwargs)
    raise TypeError(
        f"env is {type(env).__name__}, expected a Gymnasium id, an EnvSpec, a factory, a gymnasium.Env "
        "or a list: pass one of these"
    )


def _make(spec: str | EnvSpec, kwargs: dict[str, Any]) -> GymEnv:
    name = spec if isinstance(spec, str) else spec.id
    try:
        return gymnasium.make(spec, disable_env_checker=True, **kwargs)
    except TypeError as error:
        if not kwargs:
            raise
        raise TypeError(
            f"Gymnasium cannot make {name!r}: {error}; leave out what its constructor does not take"
        ) from error
    except (gymnasium.error.Error, ModuleNotFoundError) as error:
        raise ValueError(
            f"Gymnasium cannot make {name!r}: {error}; look the id up in gymnasium.registry, "
            "and import the package that registers it first"
        ) from error


def _rebuild(env: GymEnv) -> GymEnv:
    try:
        if env.spec is not None:
            return gymnasium.make(env.spec, disable_env_checker=True)
        reason = "it has no spec"
    except Exception as error:
        reason = repr(error)
    raise ValueError(
        f"{env} backs a state already and cannot be rebuilt ({reason}): pass an id or a factory instead of an instance"
    )


def _rebuild_vector(env: VectorEnv[Any, Any, Any]) -> VectorEnv[Any, Any, Any]:
    try:
        rebuilt: VectorEnv[Any, Any, Any] = type(env)(env.env_fns, autoreset_mode=AutoresetMode.DISABLED)  # type: ignore
    except Exception as error:
        raise ValueError(
            f"{env} backs a state already and cannot be rebuilt from its env_fns ({error!r}): build another, or pass a "
            "list of factories"
        ) from error
    return rebuilt


def _check_info_keys(info_keys: Sequence[str]) -> None:
    if isinstance(info_keys, str) or not all(isinstance(key, str) for key in info_keys):
        raise TypeError(f"info_keys is {info_keys!r}, expected a list of strings, such as ['x_position']")
    if len(set(info_keys)) < len(info_keys):
        raise ValueError(f"info_keys is {list(info_keys)}, expected each key once: leave the others out")


def _check_lane(lane: int, env: Any, first: GymEnv) -> None:
    if not isinstance(env, gymnasium.Env):
        raise TypeError(
            f"lane {lane}: the factory returned {type(env).__name__}, expected a gymnasium.Env: return the environment"
        )
    for name in ("observation_space", "action_space"):
        own, wanted = getattr(env, name), getattr(first, name)
        if own != wanted:
            raise ValueError(f"lane {lane} has the {name} {own}, lane 0 has {wanted}: use equal spaces in one batch")


def _label(env: GymEnv) -> str:
    return env.spec.id if env.spec is not None else type(env.unwrapped).__name__


def _refuse(what: str, **arguments: Any) -> None:
    given = [name for name, value in arguments.items() if value is not None]
    if given:
        raise ValueError(f"{', '.join(given)} cannot be given with {what}, which is built already: leave it out")
