"""A batch is the caller's own: whatever is written into it, nothing else changes."""

import numpy as np
import optree
import pytest
import torch
from gymnasium import spaces

import funcollect as fc
from tests.support.cases import POLICIES
from tests.support.compare import assert_same, leaves
from tests.support.envs.counting import make_counting
from tests.support.envs.own_envs import InParts
from tests.support.running import once, pairwise


def third_batch(env, policy, value):
    """The third of three batches, the first two filled with `value` (None: left alone) as soon as they came."""
    state = fc.init(env, policy, seed=0)
    for _ in range(2):
        state, batch = fc.rollout(env, policy, state, 20)
        for leaf in leaves(batch).values() if value is not None else ():
            leaf.fill_(value)
    _, batch = fc.rollout(env, policy, state, 20)
    fc.close(state)
    return batch


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
    untouched = third_batch(env, policy, None)
    assert torch.equal(untouched["x"], untouched["observation"])
    assert torch.equal(untouched["bias"], bias.expand_as(untouched["bias"]))
    assert_same(untouched, third_batch(env, policy, 0))
    assert torch.equal(module.bias, bias)
    assert torch.equal(module.weight, weight)


class Delayed(InParts):
    """Moves by the action before, which it keeps as it got it. `test_plain_loop` has such a simulator."""

    observation_space = action_space = spaces.Box(-100, 100, (2,), np.float32)
    draws = 2

    def start(self, uniforms):
        return torch.zeros_like(uniforms).float(), torch.zeros_like(uniforms).float()

    def observe(self, place):
        return place[0]

    def move(self, place, action):
        place, before = place
        return (place * 0.5 + before, action), torch.zeros(len(action)), torch.zeros(len(action), dtype=torch.bool)


@pytest.mark.parametrize(("kind", "num_envs"), once(["random", "torch_mlp", "jax_mlp", "tensordict_actor"], (None, 2)))
def test_an_environment_that_keeps_its_actions(kind, num_envs):
    env = Delayed(num_envs)
    policy = POLICIES[kind](env)
    untouched = third_batch(env, policy, None)
    moved = untouched["next", "observation"] - untouched["observation"] * 0.5
    assert torch.allclose(moved[..., 1:, :], untouched["action"][..., :-1, :], atol=1e-4)
    assert_same(untouched, third_batch(env, policy, 0))


class Shared(torch.nn.Module):
    """Its next state is its input's memory (`observation`), its state written in place, or a buffer of its own."""

    def __init__(self, way):
        super().__init__()
        self.way, self.own = way, {}

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


@pytest.mark.parametrize(
    ("way", "num_envs", "name"),
    pairwise(["observation", "in place", "own memory"], [None, 1, 3], ["CartPole-v1", "torch/CartPole-v1"]),
)
def test_recurrent_state_in_memory_that_is_written_again(way, num_envs, name):
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
    step = batch["collector", "step"][..., None]
    assert (step == 0).sum() > (num_envs or 1)
    wanted = batch["observation"] if way == "observation" else (step + 1.0).expand_as(batch["after"])
    assert torch.equal(batch["after"], wanted)
    begun = step[..., 1:, :] == 0
    assert torch.equal(batch["before"][..., 1:, :], torch.where(begun, 0.0, wanted[..., :-1, :]))


@pytest.mark.parametrize("backend", ["host", "torch"])
def test_state_written_in_place_is_recorded_after_an_end_at_the_first_row(backend):
    env = make_counting(backend, {"lengths": (4, 9)}, batched=False)
    policy = fc.torch_policy(Shared("in place"), initial_state=torch.zeros(4))
    state, _ = fc.rollout(env, policy, fc.init(env, policy, seed=0), 3)
    _, batch = fc.rollout(env, policy, state, 6)
    assert batch["after"][:, 0].tolist() == [4, 1, 2, 3, 4, 5]
