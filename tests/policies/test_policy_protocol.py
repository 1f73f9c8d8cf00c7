"""Every shipped policy can be called as `fc.Policy` says, and one of a user's own needs little."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from tensordict.nn import TensorDictModule

import funcollect as fc
from funcollect.keys import draw_ahead
from funcollect.specs import assemble

LANES = 3


def linear(outputs=2):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return torch.nn.Linear(4, outputs)


def in_jax(head):
    return fc.jax_policy(lambda params, x: x @ params, jnp.eye(4)[:, :2], head=head)


def tensordict(env):
    return fc.tensordict_policy(TensorDictModule(lambda x: (x[:, 2] > 0).long(), ["observation"], ["action"]))


SHIPPED = {
    "random": fc.random_policy,
    "torch": lambda env: fc.torch_policy(lambda x: (x[:, 2] > 0).long()),
    "tensordict": tensordict,
    "mlp": lambda env: fc.make_policy("mlp", env),
    **{f"torch, {head.name}": lambda env, head=head: fc.torch_policy(linear(), head=head)
       for head in (fc.heads.categorical, fc.heads.greedy, fc.heads.epsilon_greedy(0.5))},
    **{f"jax, {head.name}": lambda env, head=head: in_jax(head)
       for head in (fc.heads.categorical, fc.heads.greedy, fc.heads.epsilon_greedy(0.5))},
}  # fmt: skip


@pytest.mark.parametrize("way", [fc.ExplorationType.RANDOM, fc.ExplorationType.DETERMINISTIC])
@pytest.mark.parametrize("name", SHIPPED)
def test_a_call_answers_as_a_step_does(name, way):
    env = fc.make_env("CartPole-v1", num_envs=LANES)
    policy = SHIPPED[name](env)
    state = fc.init(env, policy, seed=4)
    wanted = policy.noise(env.action_spec)
    noise = None if wanted is None else draw_ahead(wanted, state.key, np.arange(LANES), 0, 1)[0]
    observation = assemble(env.observation_space, state.observation)
    if policy.backend == "jax":
        observation, noise = observation.numpy(), None if noise is None else noise.numpy()
    before = state.policy_state
    _, outputs = policy(policy.prepare(None), before, observation, noise, env.action_spec, fc.Exploration(way))
    _, batch = fc.step(env, policy, state, exploration_type=way)
    assert set(outputs) <= set(batch.keys())
    np.testing.assert_array_equal(np.asarray(outputs["action"]), batch["action"])
    if "action_log_prob" in outputs:
        np.testing.assert_allclose(np.asarray(outputs["action_log_prob"]), batch["action_log_prob"], rtol=1e-5)


class Lean(fc.PolicyBase):
    backend = "torch"
    params = None

    def __call__(self, params, state, observation, noise, spec, exploration, /):
        return state, {"action": (observation[:, 2] > 0).long()}


@pytest.mark.parametrize("name", ["CartPole-v1", "torch/CartPole-v1", "gymnax/CartPole-v1"])
def test_a_policy_of_ones_own_needs_a_call_alone(name):
    env = fc.make_env(name, num_envs=LANES)
    assert isinstance(Lean(), fc.Policy)
    _, batch = fc.rollout(env, Lean(), fc.init(env, Lean(), seed=0), 10)
    assert torch.equal(batch["action"], (batch["observation"][..., 2] > 0).long())


class Noisy(fc.PolicyBase):
    """Takes its noise, and its observation, for arrays of JAX, and records the noise."""

    backend = "jax"
    params = None

    def __init__(self, noise):
        self.wanted = noise

    def noise(self, spec, /):
        return self.wanted

    def __call__(self, params, state, observation, noise, spec, exploration, /):
        lanes = len(observation)
        if self.wanted.kind == "key":
            assert (noise.shape, noise.dtype) == ((2,), jnp.uint32)
            drawn = jax.random.normal(noise, (lanes, 2))
        else:
            assert (noise.shape, noise.dtype) == ((lanes, *self.wanted.shape), jnp.float32)
            drawn = jnp.sin(noise)
        action = (jnp.tanh(observation[:, 2]) + drawn.sum(-1) > 0).astype(jnp.int32)
        return state, {"action": action, "drawn": drawn}


@pytest.mark.parametrize("noise", [fc.Noise(kind="normal", shape=(2,)), fc.Noise(kind="key")], ids=["normal", "key"])
@pytest.mark.parametrize("name", ["CartPole-v1", "torch/CartPole-v1", "gymnax/CartPole-v1"])
def test_a_jax_policy_of_ones_own_gets_its_noise_as_arrays_of_jax(name, noise):
    env = fc.make_env(name, num_envs=LANES)
    policy = Noisy(noise)
    _, batch = fc.rollout(env, policy, fc.init(env, policy, seed=0), 10)
    assert batch["drawn"].shape == (LANES, 10, 2)
    assert len(batch["drawn"].unique()) == 60  # another draw for each lane and step


class Bare:
    """What was a policy before there was a base class."""

    backend = "torch"
    params = None
    noise = init = prepare = lambda self, *_: None
    __call__ = Lean.__call__


def test_what_a_policy_lacks_is_named():
    env = fc.make_env("CartPole-v1")
    with pytest.raises(
        TypeError, match=r"lacks .'exploration', .*'actor', 'finish'.: derive from funcollect.PolicyBase"
    ):
        fc.init(env, Bare(), seed=0)
    with pytest.raises(TypeError, match="the class Lean, expected a Policy: wrap a module with"):
        fc.init(env, Lean, seed=0)
