"""VMAS's scenarios (https://github.com/proroklab/VectorizedMultiAgentSimulator): all lanes as tensors, in groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from funcollect.arguments import check_keys, check_optional_positive, check_positive, checked_device
from funcollect.envs import agents
from funcollect.envs.base import box, import_extra
from funcollect.envs.by_agents import AgentsState, GroupFunctions
from funcollect.envs.plain_spaces import to_gymnasium
from funcollect.envs.torch_vector_env import DeviceVectorEnv, from_torch_vector_env
from funcollect.protocols import Transition
from funcollect.specs import Space


def from_vmas(
    scenario: Any,
    *,
    num_envs: int = 32,
    device: torch.device | str | None = None,
    max_episode_steps: int | None = None,
    groups: Mapping[str, Sequence[str]] | None = None,
    info_keys: Sequence[str] = (),
    **kwargs: Any,
) -> DeviceVectorEnv:
    """An environment over simulators of VMAS, which hold all lanes as tensors on one device.

    A batch has the keys of groups, as that of `from_pettingzoo`, without masks: an episode ends for all agents at once.
    The simulators are seeded once, and can neither be forked nor saved in mid-episode.

    Args:
        scenario: a name such as ``"navigation"``, or an instance of VMAS's `BaseScenario`, for one state.
        max_episode_steps: steps after which an episode is truncated; None for no limit.
        groups: see `from_pettingzoo`.
        info_keys: keys of the agents' infos, recorded as ``("next", group, "info", key)``.
        **kwargs: for `vmas.make_env`, such as ``continuous_actions=False``, and for the scenario, such as `n_agents`.

    Raises ImportError if VMAS is not installed, and ValueError for groups that do not hold every agent once, or that
    mix spaces.

    >>> env = from_vmas("navigation", num_envs=4, n_agents=3, max_episode_steps=50)
    >>> {name: group.n for name, group in env.groups.items()}
    {'agent': 3}
    """
    check_positive("num_envs", num_envs)
    check_optional_positive("max_episode_steps", max_episode_steps)
    check_keys("info_keys", info_keys, "pos_rew")
    place = checked_device(device) or torch.device("cpu")
    make = import_extra("vmas", "vmas", "agents").make_env
    build = partial(make, scenario, num_envs, place, seed=0, **kwargs)
    lanes: Callable[[], _Lanes] = partial(_Lanes, build, max_episode_steps, groups, tuple(info_keys))
    spec = lanes().lane.action_spec
    keys = [f"{name}.{key}" for name in spec.groups for key in (agents.REWARD, *info_keys)]
    made = from_torch_vector_env(lanes, info_keys=keys)
    label = f"vmas/{scenario if isinstance(scenario, str) else type(scenario).__name__}"
    return replace(made, label=label, action_spec=spec, own_actions=spec.space)


class _Lanes:
    """A simulator of VMAS behind Gymnasium's vector interface, with actions and observations as of `GroupFunctions`."""

    metadata = {"autoreset_mode": "DISABLED"}  # noqa: RUF012

    def __init__(self, build: Callable[[], Any], limit: int | None, groups: Any, keys: Sequence[str]) -> None:
        self._shared = import_extra("vmas.simulator.environment", "vmas", "agents").Environment.vmas_random_state
        self._own: list[Any] = self._shared[:]
        with self._drawing():
            self._inner = inner = build()
            seen = inner.reset()
        self._limit, self._keys, self.num_envs, self.device = limit, keys, inner.num_envs, inner.device
        self._names = [agent.name for agent in inner.agents]
        pairs = zip(map(_space_of, seen), map(to_gymnasium, inner.action_space), strict=True)
        of_agents = dict(zip(self._names, pairs, strict=True))
        self._groups = found = agents.grouped(of_agents, groups, comes_and_goes=False)
        options: Any = {"backend": "torch", "order": sorted(self._names)}
        self.lane = lane = GroupFunctions("vmas", found, self._begin, self._move, **options).for_loops()
        self.single_action_space, self.single_observation_space = lane.action_spec.space, lane.observation_space

    @contextmanager
    def _drawing(self) -> Iterator[None]:
        """Let VMAS draw from this simulator's own generator states, not from those that all its environments share."""
        before, self._shared[:] = self._shared[:], self._own
        try:
            yield
        finally:
            self._own, self._shared[:] = self._shared[:], before

    def _by_group(self, rows: Sequence[Any]) -> dict[str, Any]:
        """Stack values by agent, [P, ...] or dicts of these, by group: [P, n, ...]."""
        return agents.by_group(self._groups, dict(zip(self._names, rows, strict=True)), partial(torch.stack, dim=1))

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return self.lane.reset(seed, options)[1], {}

    def step(self, action: Tensor) -> tuple[Any, ...]:
        return self.lane.step(None, AgentsState(None, {}), action, None)[1:]

    def _begin(self, seed: int | None, options: Mapping[str, Any] | None) -> tuple[Any, dict[str, Any]]:
        inner = self._inner
        with self._drawing():
            if options is None:
                return None, self._by_group(inner.reset(seed=seed))
            for lane in options["reset_mask"].nonzero()[:, 0].tolist():
                inner.reset_at(lane, return_observations=False)
            return None, self._by_group(inner.get_from_scenario(True, False, False, False)[0])

    def _move(self, _: Any, state: Any, action: Mapping[str, Tensor], params: Any) -> Transition:
        inner = self._inner
        actions = agents.by_agent(self._groups, {name: rows.unbind(1) for name, rows in action.items()})
        with self._drawing():
            seen, rewards, terminated, infos = inner.step([actions[name].clone() for name in self._names])
        truncated = terminated & False if self._limit is None else (inner.steps >= self._limit) & ~terminated
        by_key = {key: self._by_group([info[key] for info in infos]) for key in self._keys}
        by_group = {name: {key: rows[name] for key, rows in by_key.items()} for name in self._groups}
        rows = self._by_group(seen), self._by_group([reward.flatten() for reward in rewards])  # some are [P, 1]
        return Transition(state, *rows, terminated, truncated, by_group)


def _space_of(seen: Any) -> Space:
    """The space of an agent's observations [P, ...]."""
    if isinstance(seen, Mapping):
        return spaces.Dict({key: _space_of(rows) for key, rows in seen.items()})
    return box(tuple(seen.shape[1:]), np.float32)
