"""JAX environments of several agents: functions over dicts by group become the functions of a lane that loops take."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from funcollect.arguments import check_kind
from funcollect.envs import agents
from funcollect.envs.agents import FLAGS, REWARD, STATE
from funcollect.envs.base import checked_start, fields_of
from funcollect.errors import EnvError
from funcollect.interop.jax_setup import import_jax
from funcollect.messages import dtypes_and_shapes, form
from funcollect.protocols import Transition
from funcollect.specs import PRESENT, Group, GroupedSpec, Space
from funcollect.tree import there

ByGroup = Mapping[str, Any]  # by group, [n, ...]


class AgentsState(NamedTuple):
    """The state of a lane with agents."""

    own: Any  # the environment's state, a pytree
    over: ByGroup  # for groups whose agents come and go, their flags, terminated and truncated: [2, n] bool


class AgentFunctions(NamedTuple):
    """One lane of an environment with groups, as loops take it."""

    reset: Callable[[Any, Any], tuple[Any, Any]]
    step: Callable[[Any, Any, Any, Any], Transition]
    observation_space: Space
    action_spec: GroupedSpec
    info_keys: list[str]  # of the groups' rewards


def lane_of(
    label: str,
    groups: Mapping[str, Group],
    reset: Callable[..., Any],
    step: Callable[..., Any],
    *,
    state_space: Space | None = None,
    order: Sequence[str] | None = None,
) -> AgentFunctions:
    """Make one lane of an environment whose functions take and return dicts by group.

    `reset` returns the state and observations [n, ...]; `step` gets actions [n, ...], and returns observations, rewards
    [n], both flags, bool [n] by group or [] for all, and infos, those of agents by group. An agent's flag stays True
    until the agent comes back. `order` are the names of all agents, by default group after group.

    Raises TypeError for values that are no groups, or groups with different kinds of actions.
    """
    check_kind("groups", groups, Mapping, 'pass for example {"ant": funcollect.envs.Group(…)}')
    for group in groups.values():
        check_kind("a group", group, Group, "make it with funcollect.envs.Group")
    names = order or [*chain.from_iterable(group.names for group in groups.values())]
    spec, jnp = agents.action_spec(groups, names), import_jax().numpy

    def observed(rows: Any, ends: ByGroup, function: str) -> dict[str, Any]:
        rows = _by_group(groups, rows, f"observation that {function} of {label} returned")
        nodes: dict[str, Any] = {} if state_space is None else {STATE: rows.get(STATE)}
        for name, group in groups.items():
            nodes[name] = {"observation": rows[name]} | {flag: ends[name][i, :, None] for i, flag in enumerate(FLAGS)}
            if group.comes_and_goes:
                nodes[name][PRESENT] = ~ends[name].any(0)
        return nodes

    def begun(key: Any, params: Any) -> tuple[Any, Any]:
        own, rows = checked_start(label, reset(key, params))
        none = {name: jnp.zeros((2, group.n), bool) for name, group in groups.items()}
        over = {name: flags for name, flags in none.items() if groups[name].comes_and_goes}
        return AgentsState(own, over), observed(rows, none, "reset")

    def moved(key: Any, state: AgentsState, action: Any, params: Any) -> Transition:
        actions = {name: spec.of_group(name, action) for name in groups}
        after = fields_of(label, step(key, state.own, actions, params))
        rows = dict(_by_group(groups, after.observation, f"observation that step of {label} returned"))
        rewards = _by_group(groups, after.reward, f"reward that step of {label} returned")
        flags = [_flags(label, groups, value) for value in (after.terminated, after.truncated)]
        infos = {key: value for key, value in after.info.items() if key not in groups}
        ends, over, total = {}, {}, jnp.zeros((), jnp.float32)
        for name, group in groups.items():
            ends[name] = jnp.stack([flag[name] for flag in flags])
            reward = jnp.broadcast_to(rewards[name], group.n).astype(jnp.float32)
            if group.comes_and_goes:
                absent = state.over[name].any(0)
                ends[name] = over[name] = jnp.where(absent & ends[name].any(0), state.over[name], ends[name])
                rows[name] = there(rows[name], ~absent | ~ends[name].any(0))
                reward = jnp.where(absent, 0, reward)
            total += reward.sum()
            of_group = {**after.info.get(name, {}), REWARD: reward}
            infos |= {f"{name}.{key}": value for key, value in of_group.items()}
        of_agents = jnp.concatenate([*ends.values()], -1)  # [2, agents]
        terminated = of_agents[0].all()
        truncated = of_agents.any(0).all() & ~terminated
        seen = observed(rows, ends, "step")
        return Transition(AgentsState(after.env_state, over), seen, total, terminated, truncated, infos)

    for function, wrapped in ((begun, reset), (moved, step)):
        vars(function)["__wrapped__"] = wrapped  # for `inspect.unwrap`
    info_keys = [f"{name}.{REWARD}" for name in groups]
    return AgentFunctions(begun, moved, agents.observation_space(groups, state_space), spec, info_keys)


def _by_group(groups: Mapping[str, Group], value: Any, what: str) -> ByGroup:
    """The value; EnvError unless it is a dict with all groups."""
    if not isinstance(value, Mapping) or not groups.keys() <= value.keys():
        got = [*value] if isinstance(value, Mapping) else form(value)
        wanted = f"a dict with the groups {[*groups]}: return an array [n, ...] for each"
        raise EnvError(f"the {what} is {got}, expected {wanted}")
    return value


def _flags(label: str, groups: Mapping[str, Group], value: Any) -> ByGroup:
    """One kind of flags by group, [n] bool each, from flags by group, or from one flag for all agents."""
    jnp, flags = import_jax().numpy, {}
    rows = value if isinstance(value, Mapping) else dict.fromkeys(groups, value)
    rows = _by_group(groups, rows, f"flag that step of {label} returned")
    for name, group in groups.items():
        flag = jnp.asarray(rows[name])
        if flag.dtype != bool or flag.shape not in ((), (group.n,)):
            wanted = f"bool [] or [{group.n}]: compare, as in x > 2; reward comes before the two flags"
            what = f"the flag of {name!r} that step of {label} returned is {dtypes_and_shapes(flag)}"
            raise EnvError(f"{what}, expected {wanted}")
        flags[name] = jnp.broadcast_to(flag, group.n)
    return flags
