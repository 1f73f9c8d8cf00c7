"""PettingZoo's environments of several agents, wrapped as Gymnasium's."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import gymnasium
import numpy as np
from typing_extensions import override

from funcollect.arguments import check_choice, check_flags, check_keys, check_kind
from funcollect.envs import agents
from funcollect.envs.agents import REWARD, STATE
from funcollect.envs.gymnasium_envs.adapter import from_gymnasium
from funcollect.envs.gymnasium_envs.lanes import no_info_key
from funcollect.envs.host.host_env import SimulatedEnv
from funcollect.specs import PLAYER, PRESENT, Group, Space, TurnSpec

_PACKAGES = {"mpe": "mpe2"}  # of families that have moved


def from_pettingzoo(
    env: Any,
    *,
    groups: Mapping[str, Sequence[str]] | None = None,
    done: str = "all",
    state: bool = False,
    info_keys: Sequence[str] = (),
    num_envs: int | None = None,
    env_kwargs: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> SimulatedEnv:
    """A host environment over PettingZoo's: parallel ones, and those in which one agent moves at a time (AEC).

    In a parallel environment, every agent that is there acts at each step. Agents of a group are rows of its columns:
    ``(group, "observation")`` ``[*B, T, n, ...]``, ``(group, "action")``, and in ``next`` ``(group, "reward")``
    ``[*B, T, n, 1]`` and the flags. ``(group, "mask")`` ``[*B, T, n]`` bool says who is there; rows of the others are
    zeros, and their actions are not used. ``("next", "reward")`` is the sum over agents.

    In turns, a batch has what the agent whose turn it is observes, at the root, with ``current_player`` ``[*B, T]``
    int64, its number among all agents. Their rewards after each move are ``("next", "reward")`` ``[*B, T, players]``,
    and infos are ``[*B, T, players]``. See `funcollect.by_player` and `player_trajectories`.

    Args:
        env: an id such as ``"mpe/simple_spread_v3"`` (in turns only if there is no parallel environment, such as for
            ``"classic/connect_four_v3"``), or a function that returns an environment.
        groups: the names of the agents of each group; none in turns. By default agents whose names differ in a number
            at the end, such as ``adversary_0``, make a group if their spaces are equal.
        done: a lane's episode ends once ``"all"`` agents have left, or ``"any"``.
        state: whether the shared state is observed, too, under ``"state"``; not in turns.
        info_keys: keys of the agents' infos, recorded as ``("next", group, "info", key)``.
        env_kwargs: for the function, or the id's `parallel_env` or `env`.
        **kwargs: see `from_gymnasium`, `num_workers` for example.

    Raises ValueError for an unknown id, groups that do not hold every agent once, or that mix spaces, and agents in
    turns with different spaces.

    >>> env = from_pettingzoo("mpe/simple_tag_v3", num_envs=2)
    >>> {name: group.names for name, group in env.groups.items()}
    {'adversary': ('adversary_0', 'adversary_1', 'adversary_2'), 'agent': ('agent_0',)}
    """
    check_choice("done", done, ("all", "any"))
    check_flags(state=state)
    check_keys("info_keys", info_keys, "x")
    for name, value in {"groups": groups, "env_kwargs": env_kwargs}.items():
        if value is not None:
            check_kind(name, value, Mapping, "pass a dict")
    build = partial(_built, env, dict(env_kwargs or {}))
    first = build()
    label = f"pettingzoo/{env}" if isinstance(env, str) else str(first)
    spaces_of = {name: (first.observation_space(name), first.action_space(name)) for name in first.possible_agents}
    first.close()
    if hasattr(type(first), "last"):  # a method of environments in turns
        if groups is not None or state:
            raise ValueError(f"{label} is in turns, which take neither groups nor state: leave them out")
        keys = [f"{agents.TURNS}.{key}" for key in (REWARD, *info_keys)]
        make: Any = partial(TurnLane, build, agents.turn_space(spaces_of), done == "any", tuple(info_keys))
        made = from_gymnasium(make, num_envs=num_envs, info_keys=keys, **kwargs)
        spec = made.action_spec
        return replace(made, label=label, action_spec=TurnSpec(spec.space, spec.one_hot, tuple(spaces_of)))
    found = agents.grouped(spaces_of, groups, comes_and_goes=True)
    keys = [f"{name}.{key}" for name in found for key in (REWARD, *info_keys)]
    make = partial(Lane, build, found, done == "any", state, tuple(info_keys))
    made = from_gymnasium(make, num_envs=num_envs, info_keys=keys, **kwargs)
    return replace(made, label=label, action_spec=agents.action_spec(found, [*spaces_of]))


def _built(env: Any, kwargs: dict[str, Any]) -> Any:
    """Make one of PettingZoo's environments by a function or an id; ValueError for an unknown id."""
    if not isinstance(env, str):
        return env(**kwargs)
    family, _, name = env.partition("/")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of PettingZoo's modules with a version
            module = importlib.import_module(f"{_PACKAGES.get(family, f'pettingzoo.{family}')}.{name}")
    except ModuleNotFoundError as error:
        mend = "look the name up on its page, and install its family: pip install 'pettingzoo[…]', or mpe2"
        raise ValueError(f"PettingZoo has no {env!r} here ({error}), expected family/name: {mend}") from error
    return (module.parallel_env if hasattr(module, "parallel_env") else module.env)(**kwargs)


class _Around(gymnasium.Env[Any, Any]):
    """One of PettingZoo's environments, `inner`, as one of Gymnasium's."""

    def __init__(self, inner: Any, names: Sequence[str], any_ends: bool, keys: Sequence[str]) -> None:
        self.inner, self._names, self._any_ends, self._keys = inner, names, any_ends, keys
        self.render_mode, self.metadata = getattr(inner, "render_mode", None), inner.metadata

    @override
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._over = np.zeros((2, len(self._names)), bool)  # terminated, truncated; agents in the order of `names`
        self._present: set[str] = set()  # the agents that act in the next step
        begun = self.inner.reset(seed=seed, options=options)
        self._agents = [*self.inner.agents]  # after the last step
        self._took_part = self._there()
        return self._observed(begun and begun[0]), {}

    def _observed(self, observation: Any = None) -> dict[str, Any]:
        """The lane's observation, from those by agent or, in turns, from that of the agent that moves."""
        raise NotImplementedError

    def _there(self) -> Any:
        """Which agents are there, [agents] bool."""
        return np.array([name in self._agents for name in self._names])

    def _ends(self, terminations: Mapping[str, bool], truncations: Mapping[str, bool]) -> tuple[bool, bool]:
        """Record which agents have left; return whether the lane terminates, and whether it is truncated.

        An agent that leaves without a flag is truncated. One that comes back has not ended any more, and agents that
        have not been there yet in this episode do not count.
        """
        before, self._agents = self._agents, [*self.inner.agents]
        if before == self._agents and self._agents and not any(terminations.values()) and not any(truncations.values()):
            return False, False
        flags = [[flags.get(name, False) for name in self._names] for flags in (terminations, truncations)]
        left, there = np.array(flags, bool), self._there()
        self._took_part |= there
        self._over = (self._over & ~(there & ~left.any(0))) | left
        self._over[1] |= self._took_part & ~there & ~self._over.any(0)
        over, enough = self._over[:, self._took_part], cast(Any, np.any if self._any_ends else np.all)
        ended = bool(enough(over.any(0))) or not (self._any_ends or self._agents)
        terminates = ended and bool(enough(over[0]))
        return terminates, ended and not terminates

    @override
    def render(self) -> Any:
        return self.inner.render()

    @override
    def close(self) -> None:
        self.inner.close()


class Lane(_Around):
    """A parallel environment as one of Gymnasium's: observations and actions are dicts by group."""

    def __init__(
        self, build: Callable[[], Any], groups: Mapping[str, Group], any_ends: bool, state: bool, keys: Sequence[str]
    ) -> None:
        super().__init__(build(), [name for group in groups.values() for name in group.names], any_ends, keys)
        self._groups, self._state = groups, state
        self.observation_space = agents.observation_space(groups, self.inner.state_space if state else None)
        self.action_space = agents.action_space(groups)

    @override
    def _observed(self, observation: Any = None) -> dict[str, Any]:
        acted, self._present = self._present, set(self._agents)
        shown, first, nodes = acted | self._present, 0, {}
        for name, group in self._groups.items():
            seen = [observation.get(agent) if agent in shown else None for agent in group.names]
            rows = agents.stacked(group.observation_space, seen)
            mask = np.array([agent in self._present for agent in group.names])
            terminated, truncated = self._over[:, first : first + group.n, None]
            nodes[name] = {"observation": rows, "terminated": terminated, "truncated": truncated, PRESENT: mask}
            first += group.n
        return nodes | ({STATE: self.inner.state()} if self._state else {})

    @override
    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        rows = agents.by_agent(self._groups, action)
        actions = {agent: row for agent, row in rows.items() if agent in self._present}
        observation, reward, terminated, truncated, info = self.inner.step(actions)
        infos: dict[str, Any] = {}
        for name, group in self._groups.items():
            infos[name] = {REWARD: np.array([reward.get(agent, 0.0) for agent in group.names], np.float32)}
            for key in self._keys:
                infos[name][key] = _of_agents(key, group.names, info)
        ends = self._ends(terminated, truncated)
        return self._observed(observation), sum(reward.values()), *ends, infos


class TurnLane(_Around):
    """An environment in turns as one of Gymnasium's: the observation is that of the agent whose turn it is."""

    def __init__(self, build: Callable[[], Any], space: Space, any_ends: bool, keys: Sequence[str]) -> None:
        super().__init__(inner := build(), inner.possible_agents, any_ends, keys)
        self.observation_space, self.action_space = space, inner.action_space(self._names[0])

    @override
    def _observed(self, observation: Any = None) -> dict[str, Any]:
        mover = self.inner.agent_selection
        seen = self.inner.observe(mover)
        values = dict(seen) if isinstance(seen, Mapping) else {"observation": seen}
        return values | {PLAYER: np.int64(self._names.index(mover))}

    @override
    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        inner, names = self.inner, self._names
        inner.step(action)
        infos = {key: _of_agents(key, names, inner.infos) for key in self._keys}
        infos[REWARD] = reward = np.array([inner.rewards.get(agent, 0.0) for agent in names], np.float32)
        ends = self._ends(inner.terminations, inner.truncations)
        over: Any = self._over.any(0)
        while not any(ends) and over[names.index(inner.agent_selection)]:
            inner.step(None)  # removes an agent that has ended
        return self._observed(), float(reward.sum()), *ends, {agents.TURNS: infos}


def _of_agents(key: str, names: Sequence[str], infos: Mapping[str, Mapping[str, Any]]) -> Any:
    """An info of these agents as one array, with zeros for those that lack it; EnvError if nobody has it."""
    known = [info[key] for info in infos.values() if key in info]
    if not known:
        raise no_info_key(0, key, next(iter(infos.values()), {}))
    return np.array([infos.get(name, {}).get(key, np.zeros_like(known[0])) for name in names])
