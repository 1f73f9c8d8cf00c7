"""JaxMARL's environments of several agents (https://github.com/FLAIROx/JaxMARL), as functions of one lane."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from funcollect.arguments import check_flags, check_keys, check_kind
from funcollect.envs import agents
from funcollect.envs.agents import STATE
from funcollect.envs.by_agents import lane_of
from funcollect.envs.jax_envs.jax_env import FunctionsEnv, jax_env
from funcollect.envs.jax_envs.like_gymnax import gymnax_space
from funcollect.envs.jax_envs.suites import of_suite, space_like
from funcollect.interop.jax_setup import import_jax, own_generator
from funcollect.protocols import Starts, Transition
from funcollect.specs import Space

_ALL = "__all__"  # the key of the flag of a whole lane
_WORLD = "world_state"  # an observation that all agents of SMAX share
_LIMIT = "max_steps"
_LEGAL = ("get_avail_actions", "get_legal_moves")


def from_jaxmarl(
    env: Any,
    *,
    groups: Mapping[str, Sequence[str]] | None = None,
    state: bool = False,
    num_envs: int | None = None,
    info_keys: Sequence[str] = (),
    starts: Starts = "fresh",
    **kwargs: Any,
) -> FunctionsEnv:
    """A JAX environment over JaxMARL's, with groups of agents, without its autoreset; `max_steps` truncates.

    An agent that is done before its lane ends has left: its rows are zeros, and its actions are not used, until it is
    back. A lane ends with JaxMARL's ``"__all__"``, or once no agent is left. Where the environment knows which actions
    are legal, as SMAX and Hanabi do, an agent's observation is a dict of ``observation`` and ``action_mask``. In Hanabi
    all agents act at each step, and for all but the one whose turn it is only the last action is legal, which does
    nothing.

    Args:
        env: an id such as ``"MPE_simple_spread_v3"``, with `kwargs` for `jaxmarl.make`, or an instance.
        groups: the names of the agents of each group. By default agents whose names differ in a number at the end, such
            as ``adversary_0``, make a group if their spaces are equal.
        state: whether what all agents see (``"world_state"``) is observed, too, under ``"state"``.
        info_keys: keys of the infos: of those by agent, recorded as ``("next", group, "info", key)``, and of others.

    See `from_gymnax` for the other arguments and the errors; ValueError for `state` without any, and for groups that do
    not hold every agent once, or that mix spaces.

    >>> env = from_jaxmarl("MPE_simple_tag_v3", num_envs=64)
    >>> {name: group.n for name, group in env.groups.items()}
    {'adversary': 3, 'agent': 1}
    """
    label, raw = of_suite("jaxmarl", env, kwargs)
    check_flags(state=state)
    check_keys("info_keys", info_keys, "shaped_reward")
    if groups is not None:
        check_kind("groups", groups, Mapping, "pass a dict")
    names, endless, legal = [*raw.agents], _without_limit(raw), _legal_actions(raw)

    def observed(seen: Any, env_state: Any) -> dict[str, Any]:
        """The observation of each agent and, if it is asked for, the shared state, by name."""
        masks = legal(env_state) if legal else {}
        rows = {
            name: {"observation": seen[name], "action_mask": masks[name].astype(bool)} if legal else seen[name]
            for name in names
        }
        return rows | ({STATE: seen.get(_WORLD)} if state else {})

    def rows_by_group(values: Mapping[str, Any]) -> dict[str, Any]:
        shared = {STATE: values[STATE]} if STATE in values else {}
        return agents.by_group(found, values, import_jax().numpy.stack) | shared

    def reset(key: Any, _: Any) -> tuple[Any, Any]:
        seen, env_state = raw.reset(key)
        return env_state, rows_by_group(observed(seen, env_state))

    def step(key: Any, env_state: Any, actions: Mapping[str, Any], _: Any) -> Transition:
        own = agents.by_agent(found, actions)
        seen, after, reward, done, info = raw.step_env(key, env_state, own)
        # The same step is also traced without the limit, and the compiler merges the two.
        ends = done if endless is None else endless.step_env(key, env_state, own)[3]
        terminated = rows_by_group({name: ends[name] | ends[_ALL] for name in names})
        over = rows_by_group({name: done[name] | done[_ALL] for name in names})
        truncated = {name: flags & ~terminated[name] for name, flags in over.items()}
        infos = {name: {} for name in found} | {key: info[key] for key in info_keys if key not in of_agents}
        for key in of_agents:
            for name, values in rows_by_group(info[key]).items():
                infos[name][key] = values
        rows = rows_by_group(observed(seen, after))
        return Transition(after, rows, rows_by_group(reward), terminated, truncated, infos)

    actions = {name: gymnax_space(raw.action_space(name)) for name in names}
    seen, infos = _shapes(raw, actions, observed)
    if state and seen[STATE] is None:
        raise ValueError(f"state=True was given for {label}, whose agents share no {_WORLD!r}: leave it out")
    known = {name: (space_like(seen[name]), actions[name]) for name in names}
    found = agents.grouped(known, groups, comes_and_goes=True)
    of_agents = [key for key in info_keys if isinstance(infos.get(key), Mapping) and {*names} <= infos[key].keys()]
    shared = space_like(seen[STATE]) if state else None
    lane = lane_of(label, found, reset, step, state_space=shared, order=names)
    recorded = [f"{name}.{key}" for name in found for key in of_agents]
    recorded += [key for key in info_keys if key not in of_agents]
    common = (lane.observation_space, lane.action_spec, num_envs, False, [*lane.info_keys, *recorded], starts)
    return jax_env(label, lane.reset, lane.step, *common, truncates=endless is not None)


def _legal_actions(raw: Any) -> Callable[[Any], Mapping[str, Any]] | None:
    """The function from a state to the masks of legal actions by agent; None if it has none."""
    for name in _LEGAL:
        if (function := getattr(raw, name, None)) is None:
            continue
        with contextlib.suppress(NotImplementedError), own_generator():
            key = import_jax().numpy.zeros(2, np.uint32)
            masks = import_jax().eval_shape(lambda key, legal=function: legal(raw.reset(key)[1]), key)
            if all(masks[agent].shape == (getattr(raw.action_space(agent), "n", None),) for agent in raw.agents):
                return function  # type: ignore[no-any-return]
    return None


def _shapes(raw: Any, actions: Mapping[str, Space], observed: Callable[[Any, Any], Any]) -> tuple[Any, Any]:
    """The shapes and dtypes of a first observation, as `observed` returns it, and of a step's infos."""
    zeros = {name: np.zeros(space.shape or (), space.dtype) for name, space in actions.items()}

    def first(key: Any) -> tuple[Any, Any]:
        seen, env_state = raw.reset(key)
        return observed(seen, env_state), raw.step_env(key, env_state, zeros)[4]

    with own_generator():
        found: tuple[Any, Any] = import_jax().eval_shape(first, import_jax().numpy.zeros(2, np.uint32))
    return found


def _without_limit(raw: Any) -> Any:
    """A copy of an environment that does not end by time; None if it has no limit that can be changed."""
    if not {_LIMIT, "_env"} & vars(raw).keys():
        return None
    copied = object.__new__(type(raw))  # in a wrapper, `copy.copy` would look up missing attributes without an end
    vars(copied).update(vars(raw))
    if _LIMIT in vars(raw):
        setattr(copied, _LIMIT, np.iinfo(np.int32).max)
    if "_env" in vars(raw):  # a wrapper, in which fixed rules play some of the agents
        copied._env = _without_limit(raw._env)
    return copied
