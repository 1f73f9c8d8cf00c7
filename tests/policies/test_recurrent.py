"""Recurrent policies under Torch and JAX alike: their state follows the lanes and is a value."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import funcollect as fc
from tests.support.compare import collect
from tests.support.running import once

HIDDEN = 5
WEIGHTS = np.random.default_rng(0).normal(size=(4 + HIDDEN, HIDDEN)).astype(np.float32)
INITIAL = {"hidden": np.full(HIDDEN, 0.3, np.float32), "count": np.array(10, np.int32)}


def in_torch(step, initial):
    return fc.torch_policy(lambda x, h: step(torch, x, h), initial_state=initial)


def in_jax(step, initial):
    return fc.jax_policy(lambda _, x, h: step(jnp, x, h), {}, initial_state=initial)


KINDS = {  # its arrays, a policy of a function (xp, observation, state) and an initial state, and such a state
    "torch": SimpleNamespace(xp=torch, make=in_torch, initial={name: torch.tensor(x) for name, x in INITIAL.items()}),
    "jax": SimpleNamespace(xp=jnp, make=in_jax, initial=INITIAL),
}


@pytest.fixture(params=KINDS)
def kind(request):
    return KINDS[request.param]


ENVS = ["CartPole-v1", "torch/CartPole-v1", "gymnax/CartPole-v1"]


@pytest.fixture(params=ENVS)
def env(request):
    if request.param == "CartPole-v1":
        return fc.make_env("CartPole-v1", num_envs=3, max_episode_steps=7)
    env = fc.make_env(request.param, num_envs=3)
    if request.param.startswith("gymnax"):
        return replace(env, max_episode_steps=7)
    env.max_episode_steps = 7
    return env


def cell(xp, x, state):
    weights = torch.from_numpy(WEIGHTS) if xp is torch else jnp.asarray(WEIGHTS)
    hidden = xp.tanh(x @ weights[:4] + state["hidden"] @ weights[4:])
    state = {"hidden": hidden, "count": state["count"] + 1}
    return {"action": push(x), **state}, state


def push(x):
    return (x[:, 2] > 0) * 1


def last_observation(xp, x, state):
    return {"action": push(x), "last": state}, x


def assert_follows(batch):
    """What `cell` recorded is what a hand-written loop over the recorded observations gives."""
    step, hidden = batch["collector", "step"], torch.empty(3, HIDDEN)
    assert torch.equal(batch["count"], (step + 11).int())
    initial, weights = torch.from_numpy(INITIAL["hidden"]), torch.from_numpy(WEIGHTS)
    for t in range(step.shape[1]):
        hidden = torch.where((step[:, t] == 0)[:, None], initial, hidden)
        hidden = torch.tanh(batch["observation"][:, t] @ weights[:4] + hidden @ weights[4:])
        torch.testing.assert_close(batch["hidden"][:, t], hidden, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("env", "kind"), once(ENVS, [*KINDS][::-1]), indirect=True)
def test_recurrent_state_is_reset_with_its_lane(env, kind):
    policy = kind.make(cell, kind.initial)
    state, first = fc.rollout(env, policy, fc.init(env, policy, seed=1), 17)
    state = fc.reset(env, state, torch.tensor([False, True, False]))
    fork = fc.fork(env, state)
    _, second = fc.rollout(env, policy, state, 17)
    _, cut = fc.rollout(env, policy, fork, 17, max_frames_per_traj=4)
    for later, begun in ((second, [5, 6, 5]), (cut, [7, 8, 7])):
        batch = torch.cat([first, later], -1)
        step = batch["collector", "step"]
        assert step[:, 17].tolist() == [3, 0, 3]
        assert (step == 0).sum(-1).tolist() == begun
        assert_follows(batch)


each_env_and_kind = pytest.mark.parametrize(("env", "kind"), once(ENVS, KINDS), indirect=True)


@each_env_and_kind
def test_a_finished_lane_that_stays_finished_is_not_restarted(env, kind):
    policy = kind.make(cell, kind.initial)
    with fc.SyncDataCollector(env, policy, frames_per_batch=30, reset_when_done=False, seed=1) as collector:
        counts = next(collector)["count"]
    assert torch.equal(counts, torch.arange(11, 21, dtype=torch.int32).expand(3, -1))


@each_env_and_kind
def test_the_last_observation_may_be_the_state(env, kind):
    policy = kind.make(last_observation, kind.xp.full((4,), 9.0))
    batch = collect(env, policy, 9, 9, 9)
    last = torch.cat([torch.full((3, 1, 4), 9.0), batch["observation"][:, :-1]], 1)
    assert torch.equal(batch["last"], torch.where(batch["collector", "step"][..., None] == 0, 9.0, last))


def test_jax_keeps_one_program_for_first_and_later_states():
    traces = []

    def apply(_, x, state):
        traces.append(jax.tree.map(lambda leaf: leaf.aval, state))
        return {"action": push(x), "count": state}, state + 1

    env = fc.make_env("torch/CartPole-v1", num_envs=2)
    policy = fc.jax_policy(apply, {}, initial_state=0.0)
    state, _ = fc.rollout(env, policy, fc.init(env, policy, seed=1), 30)
    count = len(traces)
    for _ in range(5):
        state, _ = fc.rollout(env, policy, fc.reset(env, state), 30)
    assert len(traces) == count
    assert count <= 2
