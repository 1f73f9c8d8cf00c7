"""Environments of several agents, in groups or in turns: the spaces of a lane, and the keys of a batch.

To a loop, such an environment is like any other: its observation is a dict by group, its action is one array, and each
agent's reward is an info. Afterwards, a batch shows the loop's columns under the keys of groups, as views.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
import optree
from gymnasium import spaces
from gymnasium.vector.utils import batch_space
from tensordict import TensorDict

from funcollect.envs.base import box
from funcollect.envs.plain_spaces import AgentsActions, plain_actions
from funcollect.specs import PLAYER, PRESENT, Group, GroupedSpec, Space, TurnSpec
from funcollect.tree import NAMESPACE, Path, flatten, there, to_batch

REWARD = "reward"  # the info of each group, [n] float32
FLAGS = ("terminated", "truncated")  # of each agent, in the observation: [n, 1] bool
STATE = "state"  # a shared observation, at the root
TURNS = "turns"  # the infos of an environment in turns, each [players]


def grouped(agents: Mapping[str, tuple[Space, Space]], given: Any, *, comes_and_goes: bool) -> dict[str, Group]:
    """The groups of `agents`, whose observation and action spaces are given by name.

    `given` has lists of names by group; for None, agents whose names differ in a number at the end make a group if
    their spaces are equal, and all others are alone. Raises the ValueErrors of `from_pettingzoo` for wrong groups.
    """
    if given is None:
        given = {}
        for name in agents:
            given.setdefault(re.sub(r"_?\d+$", "", name) or name, []).append(name)
        alike = {key: all(agents[name] == agents[names[0]] for name in names) for key, names in given.items()}
        given = {key: names for key, names in given.items() if alike[key]} | {
            name: [name] for key, names in given.items() if not alike[key] for name in names
        }
    listed = [name for names in given.values() for name in names]
    if sorted(listed) != sorted(agents):
        raise ValueError(f"groups are {given}, expected every agent of {[*agents]} once: correct the names")
    for key, names in given.items():
        for name in names:
            if agents[name] != agents[names[0]]:
                what = f"the group {key!r} holds {name} with the spaces {agents[name]} and {names[0]} with"
                raise ValueError(f"{what} {agents[names[0]]}, expected equal spaces: put them into groups of their own")
    return {key: Group(tuple(names), *agents[names[0]], comes_and_goes) for key, names in given.items()}


def observation_space(groups: Mapping[str, Group], state: Space | None = None) -> spaces.Dict:
    """The observation space of a lane: by group, its agents' rows and flags and, if they come and go, a mask."""
    if state is not None and STATE in groups:
        what = f"a group is named {STATE!r}, as the shared observation is, expected another name"
        raise ValueError(f"{what}: pass other names as groups=, or leave the shared observation out")
    by_name: dict[str, Space] = {}
    for name, group in groups.items():
        rows: dict[str, Space] = {"observation": batch_space(group.observation_space, group.n)}
        rows |= {flag: box((group.n, 1), bool) for flag in FLAGS}
        if group.comes_and_goes:
            rows[PRESENT] = box((group.n,), bool)
        by_name[name] = spaces.Dict(rows)
    return spaces.Dict(by_name | ({} if state is None else {STATE: state}))


def action_space(groups: Mapping[str, Group]) -> AgentsActions:
    """The action space of a lane: by group, the actions of its agents [n, ...]."""
    return AgentsActions(OrderedDict((name, group.joint_space) for name, group in groups.items()))  # which sorts a dict


def stacked(space: Space, rows: Sequence[Any]) -> Any:
    """Stack the observations of n agents to [n, ...], with zeros for None."""
    if isinstance(space, spaces.Dict):
        children = space.spaces.items()
        return {key: stacked(child, [None if row is None else row[key] for row in rows]) for key, child in children}
    if any(row is None for row in rows):
        empty = np.zeros(space.shape or (), space.dtype)
        rows = [empty if row is None else row for row in rows]
    return np.array(rows, space.dtype)


def by_group(groups: Mapping[str, Group], values: Mapping[str, Any], stack: Callable[[Any], Any]) -> dict[str, Any]:
    """Stack values by agent, arrays or dicts of arrays, for each group."""
    rows = {name: [values[agent] for agent in group.names] for name, group in groups.items()}
    return {name: optree.tree_map(lambda *leaf: stack(leaf), *own, namespace=NAMESPACE) for name, own in rows.items()}


def by_agent(groups: Mapping[str, Group], rows: Mapping[str, Any]) -> dict[str, Any]:
    """The rows [n, ...] of each group by the names of its agents."""
    return {agent: row for name, group in groups.items() for agent, row in zip(group.names, rows[name], strict=True)}


def action_spec(groups: Mapping[str, Group], order: Sequence[str]) -> GroupedSpec:
    """The encoding of all groups' actions as one array; TypeError for integers that it would not hold exactly."""
    return GroupedSpec(plain_actions(action_space(groups)), groups=groups, order=tuple(order))


def by_groups(columns: Mapping[Path, Any], spec: GroupedSpec) -> dict[Path, Any]:
    """A loop's columns [..., *shape], those of agents under the keys of their groups, with ``done`` for each group."""
    moved: dict[Path, Any] = {}
    for path, column in columns.items():
        name, _, key = path[-1].partition(".")
        of_group = bool(key) and name in spec.groups
        if path == ("action",):
            moved |= {(group, "action"): spec.of_group(group, column) for group in spec.groups}
        elif of_group and path[:2] == ("next", "info") and key == REWARD:
            moved["next", name, key] = column[..., None]
        elif of_group and path[:2] == ("next", "info"):
            moved["next", name, "info", key] = column
        elif of_group and len(path) == 1:  # an output of a policy in a traced loop
            moved[name, key] = column
        else:
            moved[path] = column
    for name, lead in product(spec.groups, ((), ("next",))):
        node = (*lead, name)
        if (*node, FLAGS[0]) in moved and (*node, "done") not in moved:
            moved[*node, "done"] = moved[*node, FLAGS[0]] | moved[*node, FLAGS[1]]
    return moved


def turn_space(agents: Mapping[str, tuple[Space, Space]]) -> spaces.Dict:
    """The space of what the agent that moves observes, with its number; ValueError if agents have different spaces."""
    (first, own), *others = agents.items()
    for name, theirs in others:
        if theirs != own:
            what = f"{name} has the spaces {theirs} and {first} has {own}, expected equal spaces of agents that move"
            raise ValueError(f"{what} in turns: wrap the environment so that they are, by padding for example")
    children = dict(own[0].spaces) if isinstance(own[0], spaces.Dict) else {"observation": own[0]}
    return spaces.Dict(OrderedDict(children | {PLAYER: spaces.Discrete(len(agents))}))


def presented(batch: TensorDict, spec: GroupedSpec | TurnSpec) -> TensorDict:
    """A rollout's batch [*B, T] with the values of agents under their own keys, as views."""
    if isinstance(spec, TurnSpec):
        batch.unlock_()
        for name, value in batch["next"].pop("info").items():
            _, _, key = name.partition(f"{TURNS}.")
            batch["next", *((key,) if key == REWARD else ("info", key or name))] = value
        return batch.lock_()
    leaves = by_groups(flatten(batch), spec)
    gone = [name for name, group in spec.groups.items() if group.comes_and_goes and not leaves[name, PRESENT].all()]
    return to_batch(without_absent(leaves, gone), (*batch.batch_size,), with_time=batch._has_names(), locked=True)


def without_absent(leaves: dict[Path, Any], groups: Iterable[str]) -> dict[Path, Any]:
    """The columns, with zeros for the observations of absent agents in these groups.

    What an agent that leaves observes last is its next observation, and no root.
    """
    shown = dict(leaves)
    for name in groups:
        mask, following = leaves[name, PRESENT], leaves.get(("next", name, PRESENT))
        for path, leaf in leaves.items():
            if path[:2] == (name, "observation"):
                shown[path] = there(leaf, mask)
            elif path[:3] == ("next", name, "observation") and following is not None:
                shown[path] = there(leaf, mask | following)
    return shown
