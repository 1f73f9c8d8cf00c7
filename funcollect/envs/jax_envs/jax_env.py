"""Environments written in JAX: pure functions of one lane, which the loops batch and compile.

Here are their base class, what adapters return, and what adapters of suites share.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from gymnasium import spaces

from funcollect.arguments import check_choice, check_keys, check_kind, check_num_envs, check_optional_positive
from funcollect.envs.base import AdaptedEnv, EnvBase, check_pure_functions, checked_start, checked_transition, returned
from funcollect.envs.recognise import import_extra
from funcollect.envs.spaces import as_delivered
from funcollect.errors import EnvError
from funcollect.interop.jax_setup import import_jax, own_generator, tracing
from funcollect.messages import shown
from funcollect.protocols import JaxEnv, Renderer, Starts, Transition
from funcollect.specs import ActionSpec, Space, observation_leaves

Reset = Callable[[Any, Any], tuple[Any, Any]]  # (uint32[2] key, params) -> (env_state, observation)
Open = Callable[[], AbstractContextManager[Renderer]]
Step = Callable[[Any, Any, Any, Any], Transition]  # (uint32[2] key, env_state, action, params) -> Transition


class JaxEnvBase(EnvBase, ABC):
    """Subclass this with `reset` and `step`, both pure functions of one lane that JAX can trace.

    The attributes, `num_envs` and the errors are the same as in `TorchEnvBase`; `params` is a pytree of JAX arrays.

    Attributes:
        starts: ``"cached"`` starts every episode of a lane as its first one.

    >>> import gymnasium, jax, jax.numpy as jnp
    >>> import funcollect as fc
    >>> class Walk(fc.envs.JaxEnvBase):
    ...     observation_space = gymnasium.spaces.Box(-9, 9, (1,))
    ...     action_space = gymnasium.spaces.Discrete(2)
    ...     def reset(self, key, params):
    ...         position = jax.random.uniform(key, (1,))
    ...         return position, position
    ...     def step(self, key, position, action, params):
    ...         moved = position + 2.0 * action - 1.0
    ...         return fc.envs.Transition(moved, moved, moved[0], abs(moved[0]) > 8, False)
    >>> Walk(num_envs=3)
    Walk(num_envs=3)
    """

    backend: Literal["jax"] = "jax"
    max_episode_steps: int | None = None
    starts: Starts = "fresh"
    params: Any = None
    default_params: Any = None
    param_keys: Sequence[str] = ()

    def __init__(self, num_envs: int | None = None) -> None:
        super().__init__(num_envs)
        check_pure_functions(f"{type(self).__name__}.", self.reset, self.step)

    @abstractmethod
    def reset(self, key: Any, params: Any, /) -> tuple[Any, Any]:
        """The state, any pytree, and the observation at the start of an episode; `key` is uint32[2]."""

    @abstractmethod
    def step(self, key: Any, env_state: Any, action: Any, params: Any, /) -> Transition:
        """One step, which does not reset."""


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class FunctionsEnv(AdaptedEnv):
    """The JAX environment that every adapter returns: two functions of one lane."""

    reset: Reset
    step: Step
    starts: Starts = "fresh"
    max_episode_steps: int | None = None
    params: Any = None
    default_params: Any = None  # used where the functions get None: a pytree, or None if there are none
    param_keys: tuple[str, ...] = ()  # those that batches record under ``env_params``
    renderer: Open | None = None  # None if it cannot be filmed
    backend: Literal["jax"] = "jax"


class JaxEnvState(NamedTuple):
    """The state of all lanes of a JAX environment.

    A reset can cost as much as many steps, so each lane keeps the start of its next episode. Starts are made for all
    lanes at once, when a lane ends whose next start has been used.
    """

    current: Any  # the environment's own state, a pytree [P, ...]
    next_start: tuple[Any, Any]  # state and observation [P, ...] at the start of each lane's next episode
    next_start_used: Any  # [P] bool: the next start has been used

    def with_used_starts(self) -> JaxEnvState:
        """The state in which all lanes need new starts."""
        return self._replace(next_start_used=self.next_start_used | True)


def jax_env(
    label: str,
    reset: Reset,
    step: Callable[..., Any],
    observation_space: Space,
    action_space: Space,
    num_envs: int | None,
    one_hot: bool = False,
    info_keys: Sequence[str] = (),
    starts: Starts = "fresh",
    **fields: Any,
) -> FunctionsEnv:
    """Make the environment of two functions of one lane; `from_functions` documents the arguments.

    `step` returns a Transition, or a tuple of its fields. Observation spaces get the integer dtypes that JAX has. The
    `fields` are further ones of a `FunctionsEnv`.
    """
    check_kind("observation_space", observation_space, spaces.Space, "pass a space of gymnasium.spaces")
    check_kind("action_space", action_space, spaces.Space, "pass a space of gymnasium.spaces")
    check_num_envs(num_envs)
    check_keys("info_keys", info_keys, "discount")
    check_choice("starts", starts, get_args(Starts))
    observed = as_delivered(observation_space)
    env = FunctionsEnv(
        label=label,
        num_envs=num_envs,
        observation_space=observed,
        action_spec=ActionSpec(action_space, one_hot),
        observation_leaves=observation_leaves(observed),
        reset=reset,
        step=_with_infos(label, step, tuple(info_keys)),
        starts=starts,
        **fields,
    )
    check_optional_positive("max_episode_steps", env.max_episode_steps)
    check_keys("param_keys", env.param_keys, "gravity")
    env = replace(env, default_params=default_params(env), param_keys=tuple(env.param_keys))
    for name in env.param_keys:
        param_of(env.default_params, name)
    return env


@dataclass(frozen=True)
class Suite:
    """A package of JAX environments."""

    name: str  # of the suite, in ids, in the name of its adapter and for pip
    module: str  # imported on first use
    find: Callable[[Any], tuple[Iterable[str], Callable[..., Any]]]  # from the module: the ids, and the constructor
    members: tuple[str, ...]  # attributes that every environment of the suite has

    def make(self, env: Any, kwargs: Mapping[str, Any]) -> tuple[str, Any]:
        """The label and the suite's own environment, from an id with keyword arguments, or from an instance."""
        import_jax()
        if isinstance(env, str):
            with own_generator():  # some draw as they are made
                names, make = self.find(import_extra(self.module, self.name, "jax-envs"))
                check_known(self.name, env, names)
                return f"{self.name}/{env}", make(env, **kwargs)
        if kwargs:
            raise TypeError(
                f"from_{self.name} has no argument {', '.join(kwargs)} for an environment that is made already: pass "
                f"its id, for which from_{self.name} has more arguments, or check the spelling"
            )
        check_instance(self.name, env, *self.members)
        return f"{self.name}/{type(env).__name__}", env


def check_known(suite: str, name: str, known: Iterable[str]) -> None:
    """Raise ValueError unless `name` is among a suite's `known` environments; the message names similar ones."""
    known = sorted(known)
    if name in known:
        return
    by_case = {other.casefold(): other for other in known}
    near = [by_case[other] for other in get_close_matches(name.casefold(), by_case, n=3, cutoff=0.5)]
    guess = f": did you mean {' or '.join(map(repr, near))}?" if near else ": choose one of these"
    raise ValueError(f"{suite} has no environment {name!r}, expected one of {known}{guess}")


def check_instance(suite: str, env: object, *members: str) -> None:
    """Raise TypeError unless `env` is an instance, not a class, and has these members of a suite's environments."""
    made = f"the class {env.__name__}: make an instance" if isinstance(env, type) else type(env).__name__
    if isinstance(env, type) or not all(hasattr(env, name) for name in members):
        raise TypeError(f"env is {made}, expected an environment of {suite}, with {', '.join(members)}")


def first_observation(reset: Callable[[Any, Any], tuple[Any, Any]]) -> Any:
    """The shapes and dtypes of the observation that `reset` returns, a pytree."""
    jax = import_jax()
    with own_generator():
        return jax.eval_shape(lambda key: reset(key, None)[1], jax.numpy.zeros(2, "uint32"))


def copy_with(env: Any, wrapped: str, change: Callable[[Any], None]) -> Any:
    """A copy of a suite's environment, changed under its wrappers, which hold it as `wrapped`: for one trace."""
    copied = copy.copy(env)
    if wrapped in vars(env):
        setattr(copied, wrapped, copy_with(getattr(env, wrapped), wrapped, change))
    else:
        change(copied)
    return copied


def default_params(env: Any) -> Any:
    """The parameters of a JAX environment that `set_env_params` changes; None without any."""
    own = env.default_params if isinstance(env, FunctionsEnv | JaxEnvBase) else None
    return env.params if own is None else own


def param_keys(env: JaxEnv) -> Sequence[str]:
    """The names of the parameters that batches record."""
    return env.param_keys if isinstance(env, FunctionsEnv | JaxEnvBase) else ()


def param_of(params: Any, name: str) -> Any:
    """A parameter by its name, with dots between the names of nodes; ValueError if there is none."""
    node = params
    for part in name.split("."):
        try:
            node = node[part] if isinstance(node, Mapping) else getattr(node, part)
        except (KeyError, AttributeError) as error:
            raise ValueError(
                f"param_keys has {name!r}, which the parameters {shown(params, 200)} lack: correct the name"
            ) from error
    return node


def _with_infos(label: str, step: Callable[..., Any], info_keys: tuple[str, ...]) -> Step:
    """Wrap `step`, which returns a Transition or its fields, so that `info` has the recorded keys only."""

    def recorded(key: Any, env_state: Any, action: Any, params: Any) -> Transition:
        answer = step(key, env_state, action, params)
        if not isinstance(answer, tuple) or len(answer) not in (5, 6):
            raise TypeError(
                f"{label}: step returned {returned(answer)}, expected (env_state, observation, reward, terminated, "
                "truncated), and info if there is any: return these"
            )
        transition = Transition(*answer)
        if missing := [name for name in info_keys if name not in transition.info]:
            raise ValueError(
                f"{label} has no info {missing}, expected some of {sorted(transition.info)}: correct info_keys"
            )
        return transition._replace(info={name: transition.info[name] for name in info_keys})

    recorded.__wrapped__ = step  # type: ignore[attr-defined]  # for `inspect.unwrap`
    return recorded


_OUTCOME = (("reward", np.float32, np.floating), ("terminated", bool, np.bool_), ("truncated", bool, np.bool_))


def reset_lane(env: JaxEnv, key: Any, params: Any) -> tuple[Any, Any]:
    """Call the environment's `reset` within a JAX trace; EnvError unless it returns a state and an observation."""
    with tracing(f"reset of {env!r}"):
        answer = env.reset(key, params)
    return checked_start(env, answer)


def step_lane(env: JaxEnv, key: Any, env_state: Any, action: Any, params: Any) -> Transition:
    """Call the environment's `step` within a JAX trace, with an action as in a batch; reward float32, flags bool."""
    jnp = import_jax().numpy
    if env.action_spec.one_hot:
        action = env.action_spec.from_one_hot(action, jnp).astype(jnp.int32)
    with tracing(f"step of {env!r}"):
        answer = env.step(key, env_state, action, params)
    transition = checked_transition(env, answer)
    converted = {}
    for name, dtype, kind in _OUTCOME:
        value = getattr(transition, name)
        try:
            array = jnp.asarray(value)
        except (TypeError, ValueError) as error:
            raise EnvError(
                f"the {name} that step of {env!r} returned is {returned(value)}, expected an array: return a number"
            ) from error
        if not (jnp.issubdtype(array.dtype, jnp.integer) or jnp.issubdtype(array.dtype, kind)):
            wanted = "bool: compare, as in x > 2" if dtype is bool else "a number: reward comes before the two flags"
            raise EnvError(f"the {name} that step of {env!r} returned is {array.dtype}, expected {wanted}")
        converted[name] = array.astype(dtype)
    return transition._replace(**converted)
