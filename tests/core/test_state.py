"""The state is a value, and the same tree to optree and to JAX; its lanes are reset, also to given states."""

import copy
import functools
import pickle
from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import optree
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict

import funcollect as fc
from funcollect.core import api
from funcollect.core.saving import counts_in, go_on, resume, snapshot
from tests.support.compare import assert_same, fresh
from tests.support.running import in_soak, once

JAX, TORCH = "gymnax/CartPole-v1", "torch/CartPole-v1"
NAMES = ["CartPole-v1", TORCH, JAX]
PATH = ("x",)
CHANGES = {"__setitem__": (PATH, 1), "__delitem__": (PATH,), "update": ({PATH: 1},), "__ior__": ({PATH: 1},)}
CHANGES |= {"pop": (PATH,), "popitem": (), "setdefault": (PATH, 1), "clear": ()}


@pytest.fixture(params=NAMES, scope="module")
def state(request):
    _, _, state = fresh(request.param, num_envs=2, steps=3)
    yield state
    fc.close(state)


def test_the_observation_cannot_be_changed_and_another_one_makes_another_state(state):
    before = dict(state.observation)
    (path,) = before
    for change, arguments in CHANGES.items():
        with pytest.raises(TypeError, match=r"cannot be changed: .* state.replace"):
            getattr(state.observation, change)(*arguments)
    assert dict(state.observation) == before
    other = {path: state.observation[path] + 1}
    for mapping in (dict, OrderedDict, MappingProxyType, lambda each: defaultdict(list, each)):
        replaced = state.replace(observation=mapping(other))
        assert dict(replaced.observation) == other
        with pytest.raises(TypeError, match="cannot be changed"):
            replaced.observation[path] = 1
    kept = state.replace(observation={path: torch.tensor(before[path].tolist())}).observation
    for copied in (copy.copy(kept), copy.deepcopy(kept), pickle.loads(pickle.dumps(kept))):
        assert type(copied) is type(kept)
        assert torch.equal(copied[path], kept[path])


@pytest.mark.parametrize("name", NAMES)
def test_what_is_no_field_and_what_is_no_key_is_refused(name):
    env, policy, state = fresh(name, num_envs=2)
    with pytest.raises(TypeError, match=r"got \['keys'\], expected fields of a CollectorState"):
        state.replace(keys=state.key)
    for key in (3, jax.random.key(0), np.zeros(2, np.int64), np.zeros(3, np.uint32)):
        with pytest.raises(TypeError, match=r"key is .*, expected uint32 \[2\]: pass funcollect.keys.key_from_seed"):
            fc.rollout(env, policy, state.changed(key=key), 3)
    if name == "CartPole-v1":
        with pytest.raises(ValueError, match=r"keep the seeds of theirs, .*: begin another run with funcollect.init"):
            state.replace(key=fc.keys.key_from_seed(5))
        return
    after, _ = fc.rollout(env, policy, state.replace(key=fc.keys.key_from_seed(5)), 3)
    assert after.seed == 5
    fc.close(after)


def test_a_state_and_its_observation_have_the_same_leaves_in_optree_and_in_jax(state):
    for tree in (state, state.observation):
        leaves = optree.tree_leaves(tree, namespace=fc.NAMESPACE)
        assert all(one is two for one, two in zip(leaves, jax.tree.leaves(tree), strict=True))
    doubled = optree.tree_map(lambda leaf: leaf * 2, state.observation, namespace=fc.NAMESPACE)
    assert type(doubled) is type(jax.tree.map(lambda leaf: leaf, state).observation) is type(state.observation)
    later = state.replace(steps=state.steps + state.steps, policy_version=state.policy_version + 1)
    for structure in (jax.tree.structure, lambda tree: optree.tree_structure(tree, namespace=fc.NAMESPACE)):
        assert structure(state) == structure(later)  # no arrays are compared
        assert structure(state) != structure(state.replace(total_lanes=9))


@pytest.mark.parametrize(("name", "lanes"), once(NAMES, [(0, 2), (4, 6), (6, 4), (9, 4)]))
def test_trajectory_ids_are_those_of_the_next_batch(name, lanes):
    first_lane, total_lanes = lanes
    env = fc.make_env(name, num_envs=2)
    policy = fc.random_policy(env)
    state = api.init_lanes(env, policy, seed=0, first_lane=first_lane, total_lanes=total_lanes)
    for episode in (0, 7, 2**30, 2**31 - 2):
        state = go_on(env, policy, state, steps=0, episode=episode)
        ids = state.traj_ids
        state, batch = fc.rollout(env, policy, state, 2)
        assert str(ids.dtype).removeprefix("torch.") == "int64"
        lanes = np.array([first_lane, first_lane + 1])
        wanted = (lanes // total_lanes << 40) + lanes % total_lanes + (episode + 1) * total_lanes
        assert ids.tolist() == batch["collector", "traj_ids"][:, 0].tolist() == wanted.tolist()
    if env.backend == "jax":
        with pytest.raises(TypeError, match="traced array"):
            jax.jit(lambda state: state.traj_ids)(state)
        own = state.traj_ids[1]  # a closed-over state holds arrays, not tracers
        assert jax.jit(lambda number: number + (state.traj_ids[1] - own))(1) == 1
    fc.close(state)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Counted:
    """A node that only JAX knows, like those of flax."""

    count: Any


@dataclass
class Unknown:
    """A node that no registry knows."""

    place: Any


class WrappedWalk(fc.envs.TorchEnvBase):
    observation_space, action_space = spaces.Box(-99.0, 99.0, (1,)), spaces.Discrete(2)
    max_episode_steps = 3

    def __init__(self, wrap, unwrap):
        super().__init__(num_envs=2)
        self.wrap, self.unwrap = wrap, unwrap

    def reset(self, key, params):
        place = key.uniform(1).float()
        return self.wrap(place), place

    def step(self, key, env_state, action, params):
        place = self.unwrap(env_state) + 1.0
        no = torch.zeros(len(place), dtype=torch.bool)
        return fc.envs.Transition(self.wrap(place), place, place[:, 0], no, no)


def counter(initial):
    """A policy whose recurrent state is `Counted`: the number of steps of the episode."""

    def apply(params, observation, state):
        return jnp.zeros(len(observation), int), Counted(state.count + 1)

    return fc.jax_policy(apply, (), initial_state=Counted(initial))


@pytest.mark.parametrize(("name", "initial"), once(NAMES, [0.0, np.float32(0), jnp.float32(0)]))
def test_a_policy_state_of_nodes_that_only_jax_knows(name, initial):
    env, policy, state = fresh(fc.make_env(name, num_envs=2), counter(initial))
    for _ in range(2):
        leaves = optree.tree_leaves(state, namespace=fc.NAMESPACE)
        assert all(one is two for one, two in zip(leaves, jax.tree.leaves(state), strict=True))
        same = optree.tree_map(lambda leaf: leaf, state, namespace=fc.NAMESPACE)
        assert same.policy_state == state.policy_state
        state, _ = fc.rollout(env, policy, state, 3)
    again = resume(env, fc.rollout(env, policy, state, 3)[0], counts_in(snapshot(state, None), copies=True))
    assert type(again.policy_state) is Counted
    assert (again.policy_state.count.tolist(), again.steps_made) == ([6.0, 6.0], 6)
    _, batch = fc.rollout(env, policy, again, 3)
    fc.close(again)
    assert batch["collector", "step"].tolist() == [[0, 1, 2]] * 2


@pytest.mark.parametrize(("wrap", "unwrap"), [
    (lambda place: TensorDict(place=place, batch_size=[len(place)]), lambda state: state["place"]),
    (lambda place: deque([place]), lambda state: state[0]),
    (lambda place: {"a": (place, None), "b": []}, lambda state: state["a"][0]),
])  # fmt: skip
def test_a_torch_environment_with_nodes_of_optree(wrap, unwrap):
    env, policy, state = fresh(WrappedWalk(wrap, unwrap))
    state, batch = fc.rollout(env, policy, state, 8)
    plain = WrappedWalk(lambda place: place, lambda state: state)
    _, known = fc.rollout(plain, policy, fc.init(plain, policy, seed=0), 8)
    assert torch.equal(batch["next", "observation"], known["next", "observation"])
    leaves = optree.tree_leaves(state.env_state, namespace=fc.NAMESPACE)
    assert [leaf.shape for leaf in leaves] == [(2, 1)]
    assert torch.equal(unwrap(fc.reset(env, state).env_state), fc.reset(env, state).observation["observation",])


@pytest.mark.parametrize(("wrap", "got"), [
    (Unknown, r"Unknown\("),
    (Counted, r"Counted\("),
    (lambda place: (place, 3), "3"),
    (lambda place: (place, torch.tensor(3)), r"\(\)"),
    (lambda place: (place, torch.zeros(5, 2)), r"\(5, 2\)"),
    (lambda place: (place, np.zeros(2)), r"array\("),
])  # fmt: skip
def test_a_torch_environment_with_leaves_that_cannot_be_selected_by_lane(wrap, got):
    env = WrappedWalk(wrap, lambda state: state)
    with pytest.raises(fc.EnvError, match=rf"env_state that reset of .* holds {got}.*, expected tensors \[2, ...\] in"):
        fc.init(env, fc.random_policy(env), seed=0)


@pytest.mark.parametrize("name", ["torch/CartPole-v1", "gymnax/CartPole-v1"])
def test_the_state_of_an_environment_is_replaced_with_its_observation(name):
    env, policy, first, _ = two_states(name)
    later, batch = fc.rollout(env, policy, first, 5)
    with pytest.raises(ValueError, match=r"env_state without observation, expected both: .* pass observation"):
        later.replace(env_state=first.env_state)
    assert later.replace(env_state=later.env_state).env_state is later.env_state
    back = later.replace(env_state=first.env_state, observation=first.observation)
    _, again = fc.rollout(env, policy, back, 5)
    assert torch.equal(again["observation"][:, 0], batch["observation"][:, 0])


@pytest.mark.parametrize("name", NAMES)
def test_another_observation_is_like_the_first(name):
    env, _, state, _ = two_states(name)
    (path, seen), one = *state.observation.items(), env.observation_leaves[0].dtype
    others = [{path: seen[:1]}, {path: seen[0]}, {}, {path: seen.astype(int) if name == JAX else seen.long()}]
    for other in (*others, *[{path: seen.numpy()} for _ in range(name != JAX)]):
        with pytest.raises(ValueError, match=rf"the observation .*expected one like its own, .*{one} \[3, 4\]"):
            state.replace(observation=other)


def test_the_next_starts_are_those_of_what_was_replaced():
    env, policy, early, late = two_states(JAX)
    early, late = fc.reset(env, early, MASK), fc.reset(env, late)  # the early lane 1 holds its next start
    back = late.replace(env_state=early.env_state, observation=early.observation)
    other = early.replace(key=fc.keys.key_from_seed(9))
    for one, two in ((back, late), (other, fc.init(env, policy, seed=9))):
        roots = (np.asarray(*fc.reset(env, state, ~MASK).observation.values())[1] for state in (one, two))
        assert np.array_equal(*roots)


MASK = torch.tensor([True, False, True])


@functools.cache
def two_states(name, num_envs=3):
    """An environment and a policy, a state, and the state of the same run some steps later."""
    env, policy, state = fresh(name, num_envs=num_envs)
    return env, policy, state, fc.rollout(env, policy, state, 5)[0]


def given(state, *, pair):
    """The argument `to` with which a reset continues from a state."""
    env_state = getattr(state.env_state, "current", state.env_state)
    return (env_state, state.observation) if pair else env_state


@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("name", [JAX, TORCH])
def test_masked_lanes_continue_from_given_states_under_new_ids(name, pair):
    env, policy, early, late = two_states(name)
    plain = fc.reset(env, late, MASK)
    there = fc.reset(env, late, MASK, to=given(early, pair=pair))
    assert np.asarray(there.step).tolist() == [0, late.step[1], 0]
    assert there.traj_ids.tolist() == plain.traj_ids.tolist()
    for path, row in there.observation.items():
        wanted = np.where(MASK[:, None], np.asarray(early.observation[path]), np.asarray(late.observation[path]))
        assert np.array_equal(np.asarray(row), wanted)
    one, two = (fc.rollout(env, policy, state, 4)[1] for state in (there, plain))
    assert torch.equal(one["observation"][1], two["observation"][1])  # the other lane continues
    assert not torch.equal(one["observation"][0], two["observation"][0])


def test_traced_resets_take_states_too():
    env, _, early, late = two_states(JAX)
    mask = MASK.numpy()
    traced = jax.jit(lambda state, to: fc.traced.reset(env, state, mask, to=to))(late, early.env_state)
    eager = fc.reset(env, late, MASK, to=early.env_state)
    assert jax.tree.all(jax.tree.map(np.array_equal, traced, eager))


def test_states_that_do_not_show_their_observation_come_with_it():
    env, _, early, late = two_states("gymnax/MemoryChain-bsuite")  # whose `get_obs` returns something else
    with pytest.raises(TypeError, match="computes no observation, expected a pair"):
        fc.reset(env, late, MASK, to=early.env_state)
    there = fc.reset(env, late, MASK, to=(early.env_state, early.observation["observation",]))
    assert np.array_equal(there.observation["observation",][0], early.observation["observation",][0])


@pytest.mark.parametrize(
    "name", ["torch/Pendulum-v1", "brax/fast", "pgx/tic_tac_toe", *in_soak(["gymnax/Pendulum-v1"])]
)
def test_states_show_the_observations_of_their_steps(name):
    env, _, _, late = two_states(name, num_envs=2)
    again = fc.reset(env, late, to=late.env_state)
    for path, row in late.observation.items():
        assert np.allclose(np.asarray(row), np.asarray(again.observation[path]), atol=1e-6)


@pytest.mark.parametrize("name", [JAX, TORCH])
def test_other_states_are_refused(name):
    env, _, early, late = two_states(name)
    for wrong in ({"x": np.zeros(3)}, (given(early, pair=False), early.observation["observation",][:, :2])):
        with pytest.raises(ValueError, match=r"to has other (environment states|observations) than .*, expected "):
            fc.reset(env, late, MASK, to=wrong)


class BeginsAt(gymnasium.Env):
    """Begins at the place in the options, or at a random one."""

    observation_space, action_space = spaces.Box(-99.0, 99.0, (1,)), spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = self.np_random.random() if options is None else options["place"]
        options and options.clear()
        return np.array([self.place], np.float32), {}

    def step(self, action):
        self.place += action
        return np.array([self.place], np.float32), 1.0, False, False, {}


@pytest.mark.parametrize("workers", [{}, {"num_workers": 2}])
def test_options_act_in_one_reset_of_the_chosen_lanes_and_in_copies_of_it(workers, tmp_path):
    env, policy, state = fresh(BeginsAt, num_envs=3, max_episode_steps=6, **workers, steps=2)
    options = {"place": np.array(50.0)}
    state = fc.reset(env, state, MASK, options=options)
    options["place"] += 1
    assert (state.observation["observation",][:, 0] == 50).tolist() == MASK.tolist()
    state, _ = fc.rollout(env, policy, state, 3)
    with pytest.raises(fc.ReplayError, match="reset with options, which are not saved"):
        fc.save(tmp_path / "run", state)
    (_, one), (state, two) = (fc.rollout(env, policy, each, 12) for each in (fc.fork(env, state), state))
    assert_same(one, two)
    assert (two["observation"][:, -1] < 10).all()  # later episodes begin without options
    fc.save(tmp_path / "run", state)


VECTOR = gymnasium.vector.SyncVectorEnv([BeginsAt] * 2, autoreset_mode=gymnasium.vector.AutoresetMode.DISABLED)
REFUSALS = [
    ("CartPole-v1", {"to": np.zeros((2, 4))}, "\\['to'\\] is not for HostEnv.*, expected options"),
    (JAX, {"options": {}}, "\\['options'\\] is not for JaxEnv.*, expected to"),
    (VECTOR, {"options": {}}, "resets of .* take none"),
]


@pytest.mark.parametrize(("name", "given", "message"), REFUSALS)
def test_what_an_environment_does_not_take_is_refused(name, given, message):
    env, _, state = fresh(name, num_envs=None if name is VECTOR else 2)
    with pytest.raises(TypeError, match=message):
        fc.reset(env, state, **given)
    fc.reset(env, state)
