"""Short rollouts over JAX environments, one after the other: what is prepared once, and what still acts at once."""

import jax
import jax.numpy as jnp
import pytest
import torch

import funcollect as fc
from tests.support.compare import assert_same, fresh
from tests.support.envs.jax_counting import counting
from tests.support.running import entered

MOST = {"jax": 140, "torch": 300}  # Python functions entered in a step; more than twice as many before it stayed open


def pair(kind):
    torch.manual_seed(0)
    env = fc.make_env("gymnax/CartPole-v1", num_envs=3)
    head = fc.heads.categorical
    if kind == "torch":
        return env, fc.torch_policy(torch.nn.Linear(4, 2), head=head)
    return env, fc.jax_policy(lambda params, x: x @ params, jnp.full((4, 2), 0.1), head=head)


@pytest.fixture(scope="module", params=["jax", "torch"])
def open_pair(request):
    env, policy = pair(request.param)
    state = fc.init(env, policy, seed=0)
    for _ in range(3):
        state, _ = fc.step(env, policy, state)
    return request.param, env, policy, state


def test_a_step_enters_few_functions(open_pair):
    kind, env, policy, state = open_pair
    names = entered(fc.step, env, policy, state)
    assert len(names) <= MOST[kind], names


def test_states_are_values_and_pairs_alternate(open_pair):
    kind, env, policy, state = open_pair
    other = pair(kind)[1]
    first = fc.step(env, policy, state)
    others = fc.step(env, other, state)
    rollouts = [fc.rollout(env, policy, state, 4)[1] for _ in range(2)]
    again, alike = fc.step(env, policy, state), fc.step(env, other, state)
    assert_same(first[1], again[1])
    assert_same(others[1], alike[1])
    assert_same(*rollouts)
    assert_same(rollouts[0][:, 0], first[1])
    assert_same(fc.step(env, policy, first[0])[1], rollouts[0][:, 1])


def test_other_parameters_act_at_once(open_pair):
    kind, env, policy, state = open_pair
    before = fc.step(env, policy, state)[1]
    if kind == "torch":
        with torch.no_grad():
            policy.module.weight.mul_(-3.0)
    else:
        policy.params = policy.params.at[:, 0].set(5.0)
    after = fc.step(env, policy, state)[1]
    assert not torch.equal(after["action_log_prob"], before["action_log_prob"])
    assert_same(after, fc.rollout(env, policy, state.replace(step=state.step + 0), 1)[1][:, 0])


def test_a_donated_state_is_refused():
    env, policy = pair("jax")
    state, _ = fc.step(env, policy, fc.init(env, policy, seed=0))
    jax.jit(lambda state: jax.tree.map(lambda leaf: leaf + 0, state), donate_argnums=0)(state)
    with pytest.raises(ValueError, match="donated or deleted"):
        fc.step(env, policy, state)


def test_large_columns_stay_apart():
    env, policy, state = fresh(counting(3))
    whole = fc.rollout(env, policy, state, 3000)[1]
    for t in range(0, 40, 10):
        state, part = fc.rollout(env, policy, state, 10)
        assert_same(part, whole[:, t : t + 10])
    assert whole["count"].untyped_storage().nbytes() < 3000 * 64
