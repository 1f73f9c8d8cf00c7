"""The state is a value: what it holds cannot be changed, and it is the same tree to optree and to JAX."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import jax
import optree
import pytest
import torch

import funcollect as fc

NAMES = ["CartPole-v1", "torch/CartPole-v1", "gymnax/CartPole-v1"]
CHANGES: dict[str, Callable[[Any], Any]] = {
    "set": lambda observation: observation.__setitem__(("x",), 1),
    "replace": lambda observation: observation.__setitem__(next(iter(observation)), 1),
    "delete": lambda observation: observation.__delitem__(next(iter(observation))),
    "update": lambda observation: observation.update({("x",): 1}),
    "|=": lambda observation: observation.__ior__({("x",): 1}),
    "pop": lambda observation: observation.pop(next(iter(observation))),
    "popitem": lambda observation: observation.popitem(),
    "setdefault": lambda observation: observation.setdefault(("x",), 1),
    "clear": lambda observation: observation.clear(),
}


@pytest.fixture(params=NAMES)
def state(request: pytest.FixtureRequest) -> Any:
    env = fc.make_env(request.param, num_envs=2)
    policy = fc.random_policy(env)
    state, _ = fc.rollout(env, policy, fc.init(env, policy, seed=0), 3)
    yield state
    fc.close(state)


@pytest.mark.parametrize("change", CHANGES)
def test_the_observation_cannot_be_changed(state: fc.CollectorState, change: str) -> None:
    before = dict(state.observation)
    with pytest.raises(TypeError, match=r"cannot be changed: .* state.replace"):
        CHANGES[change](state.observation)
    assert dict(state.observation) == before


def test_a_state_with_another_observation_is_another_state(state: fc.CollectorState) -> None:
    (path,) = state.observation
    other = state.replace(observation={**state.observation, path: state.observation[path] + 1})
    assert not bool((state.observation[path] == other.observation[path]).any())
    with pytest.raises(TypeError, match="cannot be changed"):
        other.observation[path] = 1  # type: ignore[index]


def test_optree_and_jax_reach_the_same_leaves(state: fc.CollectorState) -> None:
    leaves = optree.tree_leaves(state.observation, namespace=fc.NAMESPACE)  # type: ignore[arg-type]
    for one, two in zip(leaves, jax.tree.leaves(state.observation), strict=True):
        assert one is two
    doubled = optree.tree_map(lambda leaf: leaf * 2, state.observation, namespace=fc.NAMESPACE)  # type: ignore[arg-type]
    assert type(doubled) is type(state.observation)
    assert type(jax.tree.map(lambda leaf: leaf, state).observation) is type(state.observation)


def test_the_whole_state_has_the_same_leaves_in_optree_and_in_jax(state: fc.CollectorState) -> None:
    leaves = optree.tree_leaves(state, namespace=fc.NAMESPACE)  # type: ignore[arg-type]
    assert all(one is two for one, two in zip(leaves, jax.tree.leaves(state), strict=True))
    later = state.replace(steps=state.steps + state.steps, policy_version=state.policy_version + 1)
    for structure in (jax.tree.structure, lambda tree: optree.tree_structure(tree, namespace=fc.NAMESPACE)):
        assert structure(state) == structure(later)  # no arrays are compared
        assert structure(state) != structure(state.replace(total_lanes=9))


def test_copies_are_read_only_too(state: fc.CollectorState) -> None:
    observation = {path: torch.tensor(value.tolist()) for path, value in state.observation.items()}
    kept = state.replace(observation=observation).observation
    for other in (copy.copy(kept), copy.deepcopy(kept), pickle.loads(pickle.dumps(kept))):
        assert type(other) is type(kept)
        assert {path: value.tolist() for path, value in other.items()} == {
            path: value.tolist() for path, value in kept.items()
        }
