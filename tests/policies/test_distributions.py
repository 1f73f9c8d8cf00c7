"""Heads made of distributions of Torch, and of others with the interface of distrax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import distributions

import funcollect as fc
from funcollect.errors import PolicyError
from tests.support import cases
from tests.support.compare import collect
from tests.support.envs.light_envs import Sampling

BETA = fc.heads.from_distribution(distributions.Beta)


def beta(x):
    return 1 + x[..., :1].abs(), 1 + x[..., 1:2].abs()


@pytest.mark.parametrize("name", ["Pendulum-v1", "gymnax/Pendulum-v1"])
def test_a_distribution_of_torch(name):
    assert BETA.names == ("concentration1", "concentration0")
    env, policy = fc.make_env(name, num_envs=3), fc.torch_policy(beta, head=BETA)
    state, batch = fc.rollout(env, policy, fc.init(env, policy, seed=0), 20)
    wanted = distributions.Beta(*beta(batch["observation"]))
    torch.testing.assert_close(batch["action_log_prob"], wanted.log_prob(batch["action"])[..., 0])
    now = fc.evaluate_actions(policy, None, batch)
    torch.testing.assert_close(now["action_log_prob"], batch["action_log_prob"])
    torch.testing.assert_close(now["entropy"], wanted.entropy()[..., 0])
    again = fc.rollout(env, policy, fc.init(env, policy, seed=0), 20)[1]
    assert torch.equal(again["action"], batch["action"])
    _, mode = fc.rollout(env, policy, state, 5, exploration_type=fc.ExplorationType.DETERMINISTIC)
    torch.testing.assert_close(mode["action"], distributions.Beta(*beta(mode["observation"])).mode)


def test_discrete_actions_and_events_of_several_components():
    env = fc.make_env("CartPole-v1", num_envs=3)
    net = cases.mlp(4, 2)
    head = fc.heads.from_distribution(distributions.Categorical, "logits")
    policy = fc.torch_policy(lambda x: {"logits": net(x), "value": x[..., 0]}, head=head)
    _, batch = fc.rollout(env, policy, fc.init(env, policy, seed=0), 20)
    wanted = distributions.Categorical(logits=batch["logits"])
    torch.testing.assert_close(batch["action_log_prob"], wanted.log_prob(batch["action"]))
    env = fc.make_env("HalfCheetah-v5", num_envs=2)
    net = cases.mlp(17, 6)
    for head in (
        fc.heads.from_distribution(distributions.Normal, "loc", "scale"),
        fc.heads.from_distribution(lambda loc, scale: distributions.Independent(distributions.Normal(loc, scale), 1)),
    ):
        policy = fc.torch_policy(lambda x: (net(x), 0.5 + 0 * net(x)), head=head)
        _, batch = fc.rollout(env, policy, fc.init(env, policy, seed=0), 5)
        now = fc.evaluate_actions(policy, None, batch)
        assert batch["action_log_prob"].shape == now["entropy"].shape == (2, 5)
        torch.testing.assert_close(now["action_log_prob"], batch["action_log_prob"])


class Least:
    """A logistic distribution with no more than the documented members."""

    def __init__(self, loc, scale):
        self.loc, self.scale = loc, scale

    def sample(self, *, seed):
        return self.loc + self.scale * jax.random.logistic(seed, self.loc.shape)

    def mode(self):
        return self.loc

    def log_prob(self, value):
        return jax.scipy.stats.logistic.logpdf(value, self.loc, self.scale)

    def entropy(self):
        return jnp.log(self.scale) + 2


class Logistic(Least):
    """As distrax has it."""

    event_shape = ()

    @property
    def batch_shape(self):
        return tuple(self.loc.shape)


KINDS = [("Pendulum-v1", Logistic), ("gymnax/Pendulum-v1", Logistic), ("Pendulum-v1", Least)]


@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_an_object_like_those_of_distrax(name, kind):
    head = fc.heads.from_distribution(kind, "loc", "scale")
    policy = fc.jax_policy(lambda p, x: (x[..., :1] * p, 0.2 + x[..., 1:2] ** 2), jnp.float32(2.0), head=head)
    env = fc.make_env(name, num_envs=3)
    state, batch = fc.rollout(env, policy, fc.init(env, policy, seed=0), 20)
    now = fc.evaluate_actions(policy, None, fc.interop.to_jax(batch))
    np.testing.assert_allclose(now["action_log_prob"], batch["action_log_prob"], rtol=1e-5, atol=1e-5)
    wanted = np.log(0.2 + batch["observation"][..., 1].numpy() ** 2) + 2
    np.testing.assert_allclose(now["entropy"], wanted, rtol=1e-5)
    alone, more = (collect(fc.make_env(name, num_envs=lanes), policy, 4)["action"] for lanes in (3, 8))
    torch.testing.assert_close(alone, more[:3])  # the noise of a lane does not depend on how many there are
    _, mode = fc.rollout(env, policy, state, 5, exploration_type=fc.ExplorationType.DETERMINISTIC)
    torch.testing.assert_close(mode["action"], mode["observation"][..., :1] * 2)


@pytest.mark.parametrize("kind", ["bits", "one-hot"])
def test_distributions_of_torch_that_return_floats_for_choices(kind):
    space = spaces.MultiBinary(3) if kind == "bits" else spaces.Discrete(3)
    made = distributions.Bernoulli if kind == "bits" else distributions.OneHotCategorical
    env = fc.make_env([lambda: Sampling(spaces.Box(-1, 1, (3,)), space)] * 2, one_hot=kind == "one-hot")
    policy = fc.torch_policy(lambda x: x * 2, head=fc.heads.from_distribution(made, "logits"))
    state, batch = fc.rollout(env, policy, fc.init(env, policy, seed=0), 40)
    assert not batch["action"].is_floating_point()
    score = made(logits=batch["observation"] * 2).log_prob(batch["action"].float())
    wanted = score.sum(-1) if kind == "bits" else score
    torch.testing.assert_close(batch["action_log_prob"], wanted)
    now = fc.evaluate_actions(policy, None, batch)
    torch.testing.assert_close(now["action_log_prob"], wanted)
    assert now["entropy"].shape == batch.batch_size
    fc.rollout(env, policy, state, 2, exploration_type=fc.ExplorationType.DETERMINISTIC)


def test_a_distribution_with_neither_mode_nor_mean_cannot_act_deterministically():
    def skewed(loc, scale):
        sigmoid = distributions.transforms.SigmoidTransform()
        return distributions.TransformedDistribution(distributions.Normal(loc, scale), [sigmoid])

    head = fc.heads.from_distribution(skewed)
    policy = fc.torch_policy(lambda x: (x[..., :1], 1 + x[..., :1] ** 2), head=head)
    env = fc.make_env("Pendulum-v1", num_envs=2)
    state = fc.init(env, policy, seed=0)
    with pytest.raises(PolicyError, match=r"neither a mode nor a mean.*ExplorationType.RANDOM"):
        fc.rollout(env, policy, state, 2, exploration_type=fc.ExplorationType.DETERMINISTIC)


def test_choices_outside_the_space_are_refused():
    env = fc.make_env("torch/CartPole-v1", num_envs=4)
    head = fc.heads.from_distribution(distributions.Categorical, "logits")
    policy = fc.torch_policy(lambda x: torch.zeros(len(x), 5), head=head)
    with pytest.raises(PolicyError, match=r"the action is outside its space, expected Discrete\(2\)"):
        fc.rollout(env, policy, fc.init(env, policy, seed=0), 50)


def test_misuse():
    with pytest.raises(TypeError, match=r"'logits'\)"):
        fc.heads.from_distribution(distributions.Categorical)
    env = fc.make_env("Pendulum-v1", num_envs=2)
    for answer, message in (
        (lambda x: x[:, :1], r"wants \['concentration1', 'concentration0'\], an array each"),
        (lambda x: (x[:, :1], 3), "an array each: return these"),
    ):
        policy = fc.torch_policy(answer, head=BETA)
        with pytest.raises(PolicyError, match=message):
            fc.rollout(env, policy, fc.init(env, policy, seed=0), 2)
    other = fc.torch_policy(lambda x: (x[:, :1], x[:, :1]), head=fc.heads.from_distribution(Logistic, "loc", "scale"))
    with pytest.raises(PolicyError, match=r"expected a torch.distributions.Distribution"):
        fc.rollout(env, other, fc.init(env, other, seed=0), 2)
