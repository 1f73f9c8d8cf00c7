"""Environments written in JAX, pure functions of one lane that loops batch and compile, and checks of these."""

from __future__ import annotations

import inspect
import itertools
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from gymnasium import spaces

from funcollect.arguments import check_choice, check_keys, check_kind, check_num_envs, check_optional_positive
from funcollect.envs import base
from funcollect.envs.base import AdaptedEnv, returned
from funcollect.envs.by_agents import GroupFunctions, PureEnvBase
from funcollect.envs.plain_spaces import map_parts
from funcollect.errors import EnvError
from funcollect.interop.jax_setup import import_jax, tracing
from funcollect.interop.memo import Variable, memo_of, set_since_use, variables_of
from funcollect.messages import dtypes_and_shapes, shown
from funcollect.protocols import JaxEnv, Renderer, Starts, Transition
from funcollect.specs import ActionSpec, Group, Space, observation_leaves

Reset = Callable[[Any, Any], tuple[Any, Any]]  # (uint32[2] key, params) -> (env_state, observation)
Step = Callable[[Any, Any, Any, Any], Transition]  # (uint32[2] key, env_state, action, params) -> Transition
Open = Callable[[], AbstractContextManager[Renderer]]


class JaxEnvBase(PureEnvBase):
    """Subclass this with `reset` and `step`, both pure functions of one lane that JAX can trace.

    The attributes, `num_envs` and the errors are the same as in `TorchEnvBase`; `params` is a pytree of JAX arrays, and
    ``starts="cached"`` starts every episode of a lane as its first one. An optional function
    ``observation_of(env_state, params)``, the observation of a state, lets `funcollect.reset` take states alone.
    Instead of spaces, it may have `groups` of agents and a `state_space`, as `from_functions` takes them.

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
    starts: Starts = "fresh"
    param_keys: Sequence[str] = ()

    def __init__(self, num_envs: int | None = None) -> None:
        super().__init__(num_envs)
        if self.groups:
            self.observation_space = as_delivered(self.observation_space)

    @property
    def default_params(self) -> Any:
        """The `params` that the environment was made with."""
        return self.params

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
    default_params: Any = None  # a pytree, which the functions use in place of None; None without parameters
    param_keys: tuple[str, ...] = ()  # the parameters that batches record under ``env_params``
    renderer: Open | None = None  # None if it cannot be filmed
    observation_of: Callable[[Any, Any], Any] | None = None  # None if a state does not determine its observation
    backend: Literal["jax"] = "jax"


class JaxEnvState(NamedTuple):
    """The state of all lanes, with the start of each lane's next episode; once one is missing, all are made."""

    current: Any  # the environment's own state, a pytree [P, ...]
    next_start: tuple[Any, Any]  # state and observation [P, ...] at the start of each lane's next episode
    next_start_used: Any  # [P] bool: the next start has been used

    def with_used_starts(self) -> JaxEnvState:
        """The same state, in which all lanes need new starts."""
        return self._replace(next_start_used=self.next_start_used | True)


def from_functions(
    reset: Reset,
    step: Callable[[Any, Any, Any, Any], Any],
    *,
    observation_space: Space | None = None,
    action_space: Space | None = None,
    groups: Mapping[str, Group] | None = None,
    state_space: Space | None = None,
    num_envs: int | None = None,
    max_episode_steps: int | None = None,
    one_hot: bool = False,
    info_keys: Sequence[str] = (),
    starts: Starts = "fresh",
    params: Any = None,
    param_keys: Sequence[str] = (),
    observation_of: Callable[[Any, Any], Any] | None = None,
    name: str = "functions",
) -> FunctionsEnv:
    """A JAX environment from two pure functions of one lane, which the library batches, compiles and resets.

    Args:
        reset: ``(key, params) -> (env_state, observation)``: the start of an episode; `key` is uint32[2], `env_state`
            any pytree.
        step: ``(key, env_state, action, params) -> (env_state, observation, reward, terminated, truncated)``, or with
            a dict `info` as a sixth: one step. The reward is a number [] or [players]; the flags are bool []. It does
            not reset.
        observation_space, action_space: of one environment with one agent.
        groups: instead of these, the groups of agents by name. `reset` then returns a dict by group of observations
            [n, ...], and `step` gets such a dict of actions, and returns one of observations and one of rewards [n].
            Flags are dicts of bool [n], or bool [] for all agents; in groups whose agents come and go, one that has
            left stays flagged until it is back. A lane ends once all have left. `info` may have dicts by group.
        state_space: of what all agents see, under ``"state"`` beside the groups; None for none.
        num_envs: P; None for a single environment without a batch dimension.
        max_episode_steps: steps after which an episode is truncated; None for no limit.
        one_hot: in a batch, discrete actions are one-hot rows, TorchRL's encoding; `step` gets them as in the space.
        info_keys: the keys of `info` that a batch records under ``next.info``.
        starts: ``"cached"`` starts every episode of a lane as its first one: less work, and less variety.
        params: the last argument of both functions, a pytree of arrays, or None; `set_env_params` changes them.
        param_keys: the names of parameters that a batch records under ``env_params``, with dots between those of nodes.
        observation_of: ``(env_state, params) -> observation``, for `funcollect.reset` to states alone; None for none.
        name: its name in messages.

    Raises TypeError for a `step` that returns something else, EnvError for results that do not fit each other or the
    spaces, and ValueError for an option out of range.

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
    base.check_pure_functions("", reset, step, observation_of)
    actions: Space | ActionSpec | None = action_space
    if state_space is not None:
        check_kind("state_space", state_space, spaces.Space, "pass a space of gymnasium.spaces")
        if groups is None:
            raise ValueError(f"state_space is {state_space} without groups, expected both: leave it out")
    if groups is not None:
        if one_hot or observation_space is not None or action_space is not None:
            what = "groups were given with one_hot=True, observation_space or action_space"
            raise ValueError(f"{what}, expected groups alone, which have spaces: leave the others out")
        own = GroupFunctions(name, groups, reset, step, observation_of, state_space).for_loops()
        reset, step, observation_of, observation_space, actions, keys = own
        info_keys = [*keys, *info_keys]
    common = (observation_space, actions, num_envs, one_hot, info_keys, starts)
    limits = {"max_episode_steps": max_episode_steps, "params": params, "param_keys": param_keys}
    env = jax_env(name, reset, step, *common, **limits, observation_of=observation_of)
    check_functions(env, env.params)
    return env


def jax_env(
    label: str,
    reset: Reset,
    step: Callable[..., Any],
    observation_space: Space | None,
    action_space: Space | ActionSpec | None,
    num_envs: int | None,
    one_hot: bool = False,
    info_keys: Sequence[str] = (),
    starts: Starts = "fresh",
    **fields: Any,
) -> FunctionsEnv:
    """Make the environment of two functions of one lane; `step` returns a Transition, or a tuple of its fields."""
    observations: Any = observation_space
    actions: Any = action_space.space if isinstance(action_space, ActionSpec) else action_space
    for what, space in (("observation_space", observations), ("action_space", actions)):
        check_kind(what, space, spaces.Space, "pass a space of gymnasium.spaces")
    check_num_envs(num_envs)
    check_keys("info_keys", info_keys, "discount")
    check_choice("starts", starts, get_args(Starts))
    observed = as_delivered(observations)
    env = FunctionsEnv(
        label=label,
        num_envs=num_envs,
        observation_space=observed,
        action_spec=action_space if isinstance(action_space, ActionSpec) else ActionSpec(actions, one_hot),
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


def as_delivered(space: Space) -> Space:
    """The same space with the integer dtypes that JAX returns: 32 bits, unless 64 are enabled."""
    return map_parts(_as_delivered, space)


def _as_delivered(space: Space) -> Space:
    declared = np.dtype(space.dtype or np.float32)
    dtype = np.dtype(import_jax().dtypes.canonicalize_dtype(declared))
    if declared.kind not in "iu" or dtype == declared:
        return space
    match space:
        case spaces.Discrete():
            return spaces.Discrete(int(space.n), start=int(space.start), dtype=dtype.type)
        case spaces.MultiDiscrete():
            return spaces.MultiDiscrete(space.nvec, dtype.type, start=space.start)
        case spaces.Box():
            return base.box(space.shape, dtype, space.low, space.high)
    return space


def default_params(env: Any) -> Any:
    """The parameters of a JAX environment that `set_env_params` changes; None if there are none."""
    default = env.default_params if isinstance(env, FunctionsEnv | JaxEnvBase) else None
    return env.params if default is None else default


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
            raise ValueError(f"param_keys has {name!r}, which {shown(params, 200)} lacks: correct the name") from error
    return node


def _with_infos(label: str, step: Callable[..., Any], info_keys: tuple[str, ...]) -> Step:
    """Wrap `step`, which returns a Transition or its fields, so that `info` has the recorded keys only."""

    def recorded(key: Any, env_state: Any, action: Any, params: Any) -> Transition:
        transition = base.fields_of(label, step(key, env_state, action, params))
        places = {key: base.info_place(transition.info, key) for key in info_keys}
        if missing := [key for key, (holder, name) in places.items() if name not in holder]:
            known = base.info_names(transition.info)
            raise ValueError(f"{label} has no info {missing}, expected some of {known}: correct info_keys")
        return transition._replace(info={key: holder[name] for key, (holder, name) in places.items()})

    recorded.__wrapped__ = step  # type: ignore[attr-defined]  # for `inspect.unwrap`
    return recorded


def reset_lane(env: JaxEnv, key: Any, params: Any) -> tuple[Any, Any]:
    """Call the environment's `reset` within a JAX trace; EnvError unless it returns a state and an observation."""
    with tracing(f"reset of {env!r}"):
        answer = env.reset(key, params)
    return base.checked_start(env, answer)


def step_lane(env: JaxEnv, key: Any, env_state: Any, action: Any, params: Any) -> Transition:
    """Call `step` within a JAX trace, with a batch's action; cast reward to float32, flags to bool."""
    jnp = import_jax().numpy
    if env.action_spec.one_hot:
        action = env.action_spec.from_one_hot(action, jnp).astype(jnp.int32)
    with tracing(f"step of {env!r}"):
        answer = env.step(key, env_state, action, params)
    transition, converted = base.checked_transition(env, answer), {}
    for name in ("reward", "terminated", "truncated"):
        dtype, kind = (np.float32, np.floating) if name == "reward" else (bool, np.bool_)
        value = getattr(transition, name)
        try:
            array = jnp.asarray(value)
        except (TypeError, ValueError) as error:
            what = f"the {name} that step of {env!r} returned is {returned(value)}, expected an array"
            raise EnvError(f"{what}: return a number") from error
        if not (jnp.issubdtype(array.dtype, jnp.integer) or jnp.issubdtype(array.dtype, kind)):
            wanted = "bool: compare, as in x > 2" if dtype is bool else "a number: reward comes before the two flags"
            raise EnvError(f"the {name} that step of {env!r} returned is {array.dtype}, expected {wanted}")
        converted[name] = array.astype(dtype)
    return transition._replace(**converted)


def check_functions(env: JaxEnv, params: Any) -> tuple[int, ...]:
    """Raise EnvError unless `reset` and `step` fit each other and the spaces; return the shape of a reward."""
    jax = import_jax()
    key = jax.ShapeDtypeStruct((2,), np.uint32)
    dtype = jax.dtypes.canonicalize_dtype(np.int64 if env.action_spec.one_hot else env.action_space.dtype)
    begun = jax.eval_shape(partial(reset_lane, env), key, params)
    action = jax.ShapeDtypeStruct(env.action_spec.shape, dtype)
    moved = jax.eval_shape(partial(step_lane, env), key, begun[0], action, params)
    if difference := differing(begun[0], moved.env_state):
        wanted = "a compiled loop wants the same structure, shapes and dtypes at every step: cast or pad it"
        raise EnvError(f"the state of {env!r} changes between reset and step: {difference}; {wanted}")
    for function, observation in (("reset", begun[1]), ("step", moved.observation)):
        source = f"that {function} of {env!r} returned"
        for leaf, value in base.leaves_of(env, observation, f"the observation {source}"):
            wanted = f"{leaf.dtype} {list(leaf.shape)}, as its space has it"
            _check_leaf(f"observation {leaf.name!r} {source}", value, wanted, leaf.shape, leaf.dtype)
    reward: tuple[int, ...] = tuple(moved.reward.shape)
    flag, number = ("bool []", (), np.dtype(bool)), ("a number [] or [players]", reward[:1], np.dtype(np.float64))
    for name, expected in (("terminated", flag), ("truncated", flag), ("reward", number)):
        _check_leaf(f"{name} that step of {env!r} returned", getattr(moved, name), *expected)
    return reward


def _check_leaf(what: str, value: Any, expected: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    """Raise EnvError unless an array has this shape, and may be cast: between floats, or without changing values."""
    jnp, given = import_jax().numpy, getattr(value, "dtype", None)
    fits = given is not None and tuple(value.shape) == shape
    if fits and not (dtype.kind == "f" and jnp.issubdtype(given, jnp.floating)):
        fits = jnp.promote_types(given, dtype) == dtype
    if not fits:
        mend = "both functions are for one lane, without a batch dimension; correct the function or the space"
        raise EnvError(f"the {what} is {dtypes_and_shapes(value)}, expected {expected}: {mend}")


def differing(one: Any, other: Any) -> str:
    """The first difference of two pytrees of arrays in structure, shape or dtype, in words; empty if there is none."""
    tree, keystr = import_jax().tree, import_jax().tree_util.keystr
    ones, others = (
        {keystr(path): dtypes_and_shapes(leaf) for path, leaf in tree.leaves_with_path(node)} for node in (one, other)
    )
    for path in sorted(ones.keys() | others.keys()):
        if ones.get(path) != others.get(path):
            return f"{path or 'it'} is {ones.get(path, 'not there')} first, then {others.get(path, 'not there')}"
    first, then = tree.structure(one), tree.structure(other)
    return "" if first == then else f"they are {first} first, then {then}"


def check_unchanged(env: JaxEnv) -> None:
    """Raise EnvError if a variable that the environment's functions read was set after they had been compiled."""
    memo = memo_of(env)
    if "read" not in memo:
        functions = inspect.unwrap(env.reset), inspect.unwrap(env.step)
        memo["read"] = [*_attributes_of(env), *itertools.chain.from_iterable(map(variables_of, functions))]
    if names := set_since_use(env, memo["read"]):
        mend = "pass changing values in params (funcollect.set_env_params), or make another environment"
        raise EnvError(f"{env!r} reads {', '.join(names)}, set since it was compiled, which has no effect: {mend}")


def _attributes_of(env: JaxEnv) -> list[Variable]:
    """The attributes of a user's `JaxEnvBase`, without `params`, and without those that are None, possibly caches."""
    if not isinstance(env, JaxEnvBase):
        return []
    classes = itertools.takewhile(lambda kind: kind is not JaxEnvBase, type(env).__mro__)
    members = itertools.chain.from_iterable(vars(kind).items() for kind in classes)
    plain = [name for name, value in members if not (callable(value) or hasattr(value, "__get__") or name[:2] == "__")]
    names = {*vars(env), *plain} - {"params", "_memo"}
    return [(name, env) for name in sorted(names) if getattr(env, name, None) is not None]
