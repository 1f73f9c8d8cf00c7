import copy
import dataclasses

import optree
import pytest
import torch
from tensordict import TensorDict

import funcollect as fc
from funcollect.core.state import CollectorState
from funcollect.tree import NAMESPACE
from tests.support.compare import assert_same


def nested_batch():
    inner = TensorDict({"z": torch.arange(6).reshape(2, 3), "y": torch.ones(2, 3, 4)}, [2, 3])
    return TensorDict({"c": torch.zeros(2, 3, 1), "b": inner, "a": torch.arange(6.0).reshape(2, 3)}, [2, 3])


def test_leaves_come_in_the_order_of_sorted_keys_and_other_namespaces_are_left_alone():
    paths, leaves, _ = optree.tree_flatten_with_path(nested_batch(), namespace=NAMESPACE)
    assert paths == [("a",), ("b", "y"), ("b", "z"), ("c",)]
    assert [leaf.shape[2:] for leaf in leaves] == [(), (4,), (), (1,)]
    one = TensorDict({"a": torch.zeros(2), "b": torch.ones(2)}, [2])
    two = TensorDict({"b": torch.ones(2), "a": torch.zeros(2)}, [2])
    assert optree.tree_structure(one, namespace=NAMESPACE) == optree.tree_structure(two, namespace=NAMESPACE)
    assert optree.tree_leaves(two) == [two]


def test_flatten_and_unflatten_give_back_the_same_and_its_lock():
    structures = []
    for batch in (nested_batch(), nested_batch().lock_()):
        leaves, structure = optree.tree_flatten(batch, namespace=NAMESPACE)
        back = optree.tree_unflatten(structure, leaves)
        assert_same(back, batch)
        assert (back["b"].batch_size, back["b"].is_locked, back.is_locked) == ((2, 3), *[batch.is_locked] * 2)
        assert back["a"].data_ptr() == batch["a"].data_ptr()
        structures.append(structure)
    assert structures[0] != structures[1]
    mapped = optree.tree_map(lambda leaf: leaf + 1, nested_batch().lock_(), namespace=NAMESPACE)
    with pytest.raises(RuntimeError, match="lock"):
        mapped["new"] = torch.zeros(2, 3)


def test_a_map_reaches_batches_in_other_containers_and_may_resize_their_dimensions():
    tree = {"batch": nested_batch(), "rest": (torch.ones(1, 1), None)}
    last = optree.tree_map(lambda leaf: 2 * leaf[:, -1:], tree, namespace=NAMESPACE)
    assert (last["batch"].batch_size, last["batch"]["b"].batch_size) == ((2, 1), (2, 1))
    assert torch.equal(last["batch"]["b", "y"], torch.full((2, 1, 4), 2.0))
    assert last["rest"][1] is None
    swapped = optree.tree_map(lambda leaf: leaf.transpose(0, 1), tree["batch"], namespace=NAMESPACE)
    assert swapped.batch_size == (3, 2)


POLICY = fc.torch_policy(lambda x, h: (x[:, :2] + h, h + 1), head=fc.heads.categorical, initial_state=torch.ones(2))


def test_a_collector_state_is_a_frozen_node_and_comes_back_whole():
    env = fc.make_env("torch/CartPole-v1", num_envs=3)
    state, _ = fc.rollout(env, POLICY, fc.init(env, POLICY, seed=5), 30)
    leaves, structure = optree.tree_flatten(state, namespace=NAMESPACE)
    back = optree.tree_unflatten(structure, leaves)
    assert isinstance(back, CollectorState)
    for field in dataclasses.fields(state):
        own, other = getattr(state, field.name), getattr(back, field.name)
        assert optree.tree_structure(own, namespace=NAMESPACE) == optree.tree_structure(other, namespace=NAMESPACE)
        leaves, others = (optree.tree_leaves(tree, namespace=NAMESPACE) for tree in (own, other))
        assert all(a is b for a, b in zip(leaves, others, strict=True))
    assert (back.steps, back.total_lanes, back.policy_version) == (30, 3, 0)
    copied = optree.tree_map(copy.copy, state, namespace=NAMESPACE)
    assert_same(fc.rollout(env, POLICY, state, 20)[1], fc.rollout(env, POLICY, copied, 20)[1])
    with pytest.raises(dataclasses.FrozenInstanceError):
        state.steps = 3
    assert state.replace(steps=3).steps == 3
    assert state.steps == 30
