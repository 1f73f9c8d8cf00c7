"""Functions over dicts by group of agents become those that loops take: of a lane in JAX, of all lanes in Torch."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from funcollect.arguments import check_kind
from funcollect.envs import agents
from funcollect.envs.agents import FLAGS, REWARD, STATE
from funcollect.envs.arrays import ArrayFunctions, arrays_like
from funcollect.envs.base import EnvBase, check_pure_functions, checked_start, fields_of, observer_of
from funcollect.errors import EnvError
from funcollect.messages import dtypes_and_shapes, form
from funcollect.protocols import Backend, Transition
from funcollect.specs import PRESENT, Group, GroupedSpec, Space
from funcollect.tree import there

ByGroup = Mapping[str, Any]  # by group, [..., n, ...]: in Torch [P, n, ...], in JAX [n, ...]
_BOOL, _FLOAT = np.dtype(bool), np.dtype(np.float32)


class AgentsState(NamedTuple):
    """The state of an environment with agents."""

    own: Any  # the environment's state, a pytree
    over: ByGroup  # for groups whose agents come and go, their flags, terminated and truncated: [..., 2, n] bool


class AgentFunctions(NamedTuple):
    """An environment with groups, as loops take it: of one lane in JAX, of all lanes in Torch."""

    reset: Callable[[Any, Any], tuple[Any, Any]]
    step: Callable[[Any, Any, Any, Any], Transition]
    observation_of: Callable[[Any, Any], Any] | None  # None if a state does not determine its observation
    observation_space: Space
    action_spec: GroupedSpec
    info_keys: list[str]  # of the groups' rewards


@dataclass(frozen=True)
class GroupFunctions:
    """Functions that take and return dicts by group.

    `reset` returns the state and observations [..., n, ...]; `step` gets actions [..., n, ...], and returns
    observations, rewards [..., n], both flags, bool [..., n] by group or [...] for all, and infos, those of agents by
    group. An agent's flag stays True until the agent comes back. `order` are the names of all agents, by default group
    after group. The dimensions ... are those of lanes: none in JAX, where functions are of one lane, and [P] in Torch.
    """

    label: str
    groups: Mapping[str, Group]
    reset: Callable[..., Any]
    step: Callable[..., Any]
    observation_of: Callable[[Any, Any], Any] | None = None
    state_space: Space | None = None  # of what all agents see
    order: Sequence[str] = ()
    backend: Backend = "jax"

    @cached_property
    def spec(self) -> GroupedSpec:
        """The encoding of all agents' actions."""
        names = self.order or [*chain.from_iterable(group.names for group in self.groups.values())]
        return agents.action_spec(self.groups, names)

    def for_loops(self) -> AgentFunctions:
        """The environment that loops take; TypeError for values that are no groups."""
        check_kind("groups", self.groups, Mapping, 'pass for example {"ant": funcollect.envs.Group(…)}')
        for group in self.groups.values():
            check_kind("a group", group, Group, "make it with funcollect.envs.Group")
        begun, moved = partial(self._begun), partial(self._moved)
        for function, wrapped in ((begun, self.reset), (moved, self.step)):
            vars(function)["__wrapped__"] = wrapped  # for `inspect.unwrap`
        observed, keys = self.observation_of and self._observed, [f"{name}.{REWARD}" for name in self.groups]
        spec, space = self.spec, agents.observation_space(self.groups, self.state_space)
        return AgentFunctions(begun, moved, observed, space, spec, keys)

    def _begun(self, key: Any, params: Any) -> tuple[Any, Any]:
        own, seen = checked_start(self.label, self.reset(key, params))
        rows, none = self._first(seen, "reset")
        over = {name: flags for name, flags in none.items() if self.groups[name].comes_and_goes}
        return AgentsState(own, over), self._shown(rows, none)

    def _observed(self, state: Any, params: Any) -> Any:
        assert self.observation_of is not None
        if not isinstance(state, AgentsState):  # called by the environment itself, with its own state
            return self.observation_of(state, params)
        rows, none = self._first(self.observation_of(state.own, params), "observation_of")
        return self._shown(rows, {**none, **state.over})

    def _moved(self, key: Any, state: AgentsState, action: Any, params: Any) -> Transition:
        groups, actions = self.groups, {name: self.spec.of_group(name, action) for name in self.groups}
        after = fields_of(self.label, self.step(key, state.own, actions, params))
        source = f"that step of {self.label} returned"
        rows = dict(_by_group(groups, after.observation, f"observation {source}"))
        rewards = _by_group(groups, after.reward, f"reward {source}")
        xp = arrays_like(self.backend, rows)
        flags = [_flags(groups, xp, value, source) for value in (after.terminated, after.truncated)]
        infos = {key: value for key, value in after.info.items() if key not in groups}
        ends, over, total = dict[str, Any](), dict[str, Any](), xp.zeros(xp.lanes, _FLOAT)
        for name, group in groups.items():
            ends[name] = xp.module.stack([flag[name] for flag in flags], -2)
            reward = _of_agents(xp, xp.cast(rewards[name], _FLOAT), group, f"reward of {name!r} {source}")
            if group.comes_and_goes:
                absent = state.over[name].any(-2)
                stays_away = (absent & ends[name].any(-2))[..., None, :]
                ends[name] = over[name] = xp.module.where(stays_away, state.over[name], ends[name])
                rows[name] = there(rows[name], ~absent | ~ends[name].any(-2))
                reward = xp.module.where(absent, 0, reward)
            total = total + reward.sum(-1)
            of_group = {**after.info.get(name, {}), REWARD: reward}
            infos |= {f"{name}.{key}": value for key, value in of_group.items()}
        of_agents = xp.module.concatenate([*ends.values()], -1)  # [..., 2, agents]
        terminated = of_agents[..., 0, :].all(-1)
        truncated = of_agents.any(-2).all(-1) & ~terminated
        return Transition(
            AgentsState(after.env_state, over), self._shown(rows, ends), total, terminated, truncated, infos
        )

    def _first(self, rows: Any, function: str) -> tuple[ByGroup, ByGroup]:
        """The observations that a function returned, and flags of agents of which none has ended."""
        rows = _by_group(self.groups, rows, f"observation that {function} of {self.label} returned")
        xp = arrays_like(self.backend, rows)
        return rows, {name: xp.zeros((*xp.lanes, 2, group.n), _BOOL) for name, group in self.groups.items()}

    def _shown(self, rows: ByGroup, ends: ByGroup) -> dict[str, Any]:
        """The observation of a lane, with flags, and masks of agents that come and go."""
        nodes: dict[str, Any] = {} if self.state_space is None else {STATE: rows.get(STATE)}
        for name, group in self.groups.items():
            flags = {flag: ends[name][..., i, :, None] for i, flag in enumerate(FLAGS)}
            nodes[name] = {"observation": rows[name], **flags}
            if group.comes_and_goes:
                nodes[name][PRESENT] = ~ends[name].any(-2)
        return nodes


class PureEnvBase(EnvBase, ABC):
    """Base class of `TorchEnvBase` and `JaxEnvBase`: two pure functions, of groups of agents if there are any."""

    backend: Backend
    max_episode_steps: int | None = None
    params: Any = None
    groups: Mapping[str, Group] = MappingProxyType({})
    state_space: Space | None = None
    reset: Callable[..., Any]
    step: Callable[..., Any]

    def __init__(self, num_envs: int | None = None) -> None:
        name, observe = type(self).__name__, observer_of(self)
        check_pure_functions(f"{name}.", self.reset, self.step, observe)
        if self.groups:
            options: Any = {"backend": self.backend, "observation_of": observe, "state_space": self.state_space}
            own = GroupFunctions(name, self.groups, self.reset, self.step, **options).for_loops()
            members = own._asdict() | {"action_space": own.action_spec.space}
            del members["info_keys"]
            vars(self).update((key, value) for key, value in members.items() if value is not None)
        super().__init__(num_envs)


def _by_group(groups: Mapping[str, Group], value: Any, what: str) -> ByGroup:
    """The value; EnvError unless it is a dict with all groups."""
    if not isinstance(value, Mapping) or not groups.keys() <= value.keys():
        got = [*value] if isinstance(value, Mapping) else form(value)
        wanted = f"a dict with the groups {[*groups]}: return an array [n, ...] for each"
        raise EnvError(f"the {what} is {got}, expected {wanted}")
    return value


def _of_agents(xp: ArrayFunctions, value: Any, group: Group, what: str) -> Any:
    """Numbers [..., n] of agents, from these or from one [...] for all; EnvError for another shape."""
    if value.shape not in (xp.lanes, (*xp.lanes, group.n)):
        wanted = f"{[*xp.lanes, group.n]}, a number for each agent, or {[*xp.lanes]}"
        raise EnvError(f"the {what} is {dtypes_and_shapes(value)}, expected {wanted}: return that")
    value = value if value.ndim > len(xp.lanes) else value[..., None]
    return xp.module.broadcast_to(value, (*xp.lanes, group.n))


def _flags(groups: Mapping[str, Group], xp: ArrayFunctions, value: Any, source: str) -> ByGroup:
    """One kind of flags by group, [..., n] bool each, from flags by group, or from one flag [...] for all agents."""
    rows = value if isinstance(value, Mapping) else dict.fromkeys(groups, value)
    rows, flags = _by_group(groups, rows, f"flag {source}"), {}
    for name, group in groups.items():
        flag, what = xp.asarray(rows[name]), f"flag of {name!r} {source}"
        if not str(flag.dtype).endswith("bool"):
            wanted = "bool: compare, as in x > 2; reward comes before the two flags"
            raise EnvError(f"the {what} is {dtypes_and_shapes(flag)}, expected {wanted}")
        flags[name] = _of_agents(xp, flag, group, what)
    return flags
