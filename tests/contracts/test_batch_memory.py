"""A batch is the caller's own: whatever is written into it, nothing else changes."""

import gymnasium
import numpy as np
import optree
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import funcollect as fc
from funcollect.tree import NAMESPACE
from tests.support.cases import ENVS, POLICIES, Recurrent, make_env, pair, pairs
from tests.support.compare import assert_same, leaves
from tests.support.envs.counting import make_counting
from tests.support.envs.torch_parts import InParts


def third_batch(env, policy, value, advance):
    """The third of three batches, the first two filled with `value` (None: left alone) as soon as they came."""
    state = fc.init(env, policy, seed=0)
    for _ in range(2):
        state, batch = advance(env, policy, state)
        for leaf in leaves(batch).values() if value is not None else ():
            leaf.fill_(value)
    _, batch = advance(env, policy, state)
    fc.close(state)
    return batch


def rollout(env, policy, state):
    return fc.rollout(env, policy, state, 20)


@pytest.mark.parametrize(("kind", "num_envs"), pairs(None, 3))
@pytest.mark.parametrize("name", ENVS)
def test_nothing_written_into_a_batch_shows_in_the_next(name, kind, num_envs):
    for advance in (rollout, fc.step):
        runs = [third_batch(*pair(name, kind, num_envs), value, advance) for value in (None, 0, 1)]
        assert_same(runs[0], runs[1])
        assert_same(runs[0], runs[2])


def memories(tree):
    """Where the memory of every tensor begins."""
    tensors = optree.tree_leaves(tree, namespace=NAMESPACE)
    return {leaf.untyped_storage().data_ptr() for leaf in tensors if isinstance(leaf, torch.Tensor)}


@pytest.mark.parametrize(("kind", "num_envs"), pairs(None, 3))
@pytest.mark.parametrize("name", ENVS)
def test_no_leaf_shares_memory_with_a_state_or_another_batch(name, kind, num_envs):
    env, policy = pair(name, kind, num_envs)
    states = [fc.init(env, policy, seed=0)]
    batches = []
    for length in (1, 5, 1):
        state, batch = fc.rollout(env, policy, states[-1], length)
        states.append(state)
        batches.append(batch)
    simulation = getattr(states[-1].env_state, "simulation", None)
    held = memories([vars(state) for state in states])
    if simulation is not None:
        held |= {array.ctypes.data for array in simulation.simulators.observation.values()}
    for batch in batches:
        assert not held & memories(batch)
        held |= memories(batch)


@pytest.mark.parametrize("name", ENVS[:1] + ENVS[2:3])
@pytest.mark.parametrize("kind", ["torch_recurrent", "random", "tensordict_module"])
def test_a_collectors_batches_too(name, kind):
    runs = []
    for value in (None, 0, 1):
        collector = fc.SyncDataCollector(*pair(name, kind, 3), frames_per_batch=60, total_frames=240, seed=0)
        for batch in collector:
            last = batch.clone()
            if value is not None:
                batch.apply_(lambda leaf, value=value: leaf.fill_(value))
        runs.append(last)
    assert_same(runs[0], runs[1])
    assert_same(runs[0], runs[2])


@pytest.mark.parametrize("num_envs", [None, 2])
def test_parameters_that_a_policy_answers_with_are_copied(num_envs):
    module = torch.nn.Linear(4, 2)
    bias, weight = module.bias.detach().clone(), module.weight.detach().clone()

    class Showing(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = module

        def forward(self, x):
            return {"action": self.inner(x).argmax(-1), "bias": self.inner.bias.expand(len(x), 2), "x": x}

    env = fc.make_env("CartPole-v1", num_envs=num_envs)
    policy = fc.torch_policy(Showing())
    untouched = third_batch(env, policy, None, rollout)
    assert torch.equal(untouched["x"], untouched["observation"])
    assert torch.equal(untouched["bias"], bias.expand_as(untouched["bias"]))
    assert_same(untouched, third_batch(env, policy, 0, rollout))
    assert torch.equal(module.bias, bias)
    assert torch.equal(module.weight, weight)


BOX = spaces.Box(-100, 100, (2,), np.float32)


class Delayed(gymnasium.Env):
    """Moves by the action before, which it keeps as it got it."""

    observation_space = action_space = BOX

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place, self.before = np.zeros(2, np.float32), np.zeros(2, np.float32)
        return self.place, {}

    def step(self, action):
        self.place = self.place * np.float32(0.5) + self.before
        self.before = action
        return self.place, 0.0, False, False, {}


class TorchDelayed(InParts):
    observation_space = action_space = BOX
    draws = 2

    def start(self, uniforms):
        return torch.zeros_like(uniforms).float(), torch.zeros_like(uniforms).float()

    def observe(self, place):
        return place[0]

    def move(self, place, action):
        place, before = place
        return (place * 0.5 + before, action), torch.zeros(len(action)), torch.zeros(len(action), dtype=torch.bool)


@pytest.mark.parametrize("num_envs", [None, 2])
@pytest.mark.parametrize("kind", ["random", "torch_mlp", "jax_mlp", "tensordict_actor"])
@pytest.mark.parametrize("backend", ["host", "vector", "torch"])
def test_an_environment_that_keeps_its_actions(backend, kind, num_envs):
    if backend == "torch":
        env = TorchDelayed(num_envs)
    elif backend == "vector":
        env = fc.make_env(SyncVectorEnv([Delayed] * (num_envs or 1), autoreset_mode=AutoresetMode.DISABLED))
    else:
        env = fc.make_env(Delayed, num_envs=num_envs)
    policy = POLICIES[kind](env)
    untouched = third_batch(env, policy, None, rollout)
    moved = untouched["next", "observation"] - untouched["observation"] * 0.5
    assert torch.allclose(moved[..., 1:, :], untouched["action"][..., :-1, :], atol=1e-4)
    assert_same(untouched, third_batch(env, policy, 0, rollout))


def recurrent_answer(module, observation, hidden):
    answer, after = module(observation, hidden)
    return {"logits": answer, "hidden": after}, after


class Shared(torch.nn.Module):
    """Its next state is its input's memory (`observation`), its state written in place, or a buffer of its own."""

    def __init__(self, way):
        super().__init__()
        self.way = way
        self.own = {}

    def forward(self, x, hidden):
        before = hidden.clone()
        match self.way:
            case "observation":
                after = x
            case "in place":
                after = hidden.add_(1)
            case "own memory":
                after = self.own.setdefault(len(x), torch.zeros(len(x), 4))
                after.copy_(hidden + 1)
        return {"action": torch.zeros(len(x), dtype=torch.int64), "before": before, "after": after}, after


@pytest.mark.parametrize("num_envs", [None, 1, 3])
@pytest.mark.parametrize("way", ["observation", "in place", "own memory"])
@pytest.mark.parametrize("name", ["CartPole-v1", "torch/CartPole-v1"])
def test_recurrent_state_in_memory_that_is_written_again(name, way, num_envs):
    env = fc.make_env(name, num_envs=num_envs)
    policy = fc.torch_policy(Shared(way), initial_state=torch.zeros(4))
    state = fc.init(env, policy, seed=0)
    batches = []
    for length in [1] * 12 + [3, 30]:  # among them, batches whose first row ends an episode
        if length == 30:  # and lanes that begin again between two batches
            state = fc.reset(env, state, torch.arange(num_envs or 1) % 2 == 0)
        before = optree.tree_map(torch.clone, state.policy_state.recurrent)
        old, (state, batch) = state, fc.rollout(env, policy, state, length)
        assert torch.equal(old.policy_state.recurrent, before)
        batches.append(batch)
    batch = torch.cat([each.clone() for each in batches], -1)
    assert (batch["collector", "step"] == 0).sum() > (num_envs or 1)
    if way == "observation":
        wanted = batch["observation"]
    else:
        wanted = (batch["collector", "step"][..., None] + 1.0).expand_as(batch["after"])
    assert torch.equal(batch["after"], wanted)
    begun = batch["collector", "step"][..., 1:, None] == 0
    assert torch.equal(batch["before"][..., 1:, :], torch.where(begun, 0.0, wanted[..., :-1, :]))


@pytest.mark.parametrize("backend", ["host", "torch"])
def test_state_written_in_place_is_recorded_after_an_end_at_the_first_row(backend):
    """Memory that was new at the first two steps is written again at the later ones."""
    env = make_counting(backend, {"lengths": (4, 9)}, batched=False)
    policy = fc.torch_policy(Shared("in place"), initial_state=torch.zeros(4))
    state, _ = fc.rollout(env, policy, fc.init(env, policy, seed=0), 3)
    _, batch = fc.rollout(env, policy, state, 6)
    assert batch["after"][:, 0].tolist() == [4, 1, 2, 3, 4, 5]


def test_a_recurrent_state_may_be_recorded_beside_the_heads_inputs():
    env = make_env("CartPole-v1", 3)
    module = Recurrent(4, 2)
    policy = fc.torch_policy(
        lambda x, hidden: recurrent_answer(module, x, hidden), head=fc.heads.categorical, initial_state=torch.zeros(5)
    )
    untouched = third_batch(env, policy, None, rollout)
    assert_same(untouched, third_batch(env, policy, 0, rollout))
