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
from tests.support.running import in_soak

BETA = fc.heads.from_distribution(distributions.Beta)
MODE = fc.ExplorationType.DETERMINISTIC


def beta(x):
    return 1 + x[..., :1].abs(), 1 + x[..., 1:2].abs()


def scored(env, policy, distribution, steps):
    """A batch whose log-probabilities and entropies are those of the distribution of its observations."""
    batch = collect(env, policy, steps)
    made, now = distribution(batch["observation"]), fc.evaluate_actions(policy, None, batch)
    log_prob, entropy = made.log_prob(batch["action"].float()), made.entropy()
    for got, wanted in (
        (batch["action_log_prob"], log_prob),
        (now["action_log_prob"], log_prob),
        (now["entropy"], entropy),
    ):
        torch.testing.assert_close(got, wanted.reshape(*batch.shape, -1).sum(-1))
    return batch


@pytest.mark.parametrize("name", ["Pendulum-v1", "gymnax/Pendulum-v1"])
def test_a_distribution_of_torch(name):
    assert BETA.names == ("concentration1", "concentration0")
    env, policy = fc.make_env(name, num_envs=3), fc.torch_policy(beta, head=BETA)
    batch = scored(env, policy, lambda x: distributions.Beta(*beta(x)), 20)
    assert torch.equal(collect(env, policy, 20)["action"], batch["action"])
    mode = collect(env, policy, 5, exploration_type=MODE)
    torch.testing.assert_close(mode["action"], distributions.Beta(*beta(mode["observation"])).mode)


def test_discrete_actions_and_events_of_several_components():
    def independent(loc, scale):
        return distributions.Independent(distributions.Normal(loc, scale), 1)

    net, wide = cases.mlp(4, 2), cases.mlp(17, 6)
    head = fc.heads.from_distribution(distributions.Categorical, "logits")
    policy = fc.torch_policy(lambda x: {"logits": net(x), "value": x[..., 0]}, head=head)
    scored(fc.make_env("CartPole-v1", num_envs=3), policy, lambda x: distributions.Categorical(logits=net(x)), 20)
    env = fc.make_env("HalfCheetah-v5", num_envs=2)
    for made in (distributions.Normal, independent):
        head = fc.heads.from_distribution(made, "loc", "scale")
        policy = fc.torch_policy(lambda x: (wide(x), 0.5 + 0 * wide(x)), head=head)
        scored(env, policy, lambda x: independent(wide(x), 0.5 + 0 * wide(x)), 5)


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
    event_shape = ()

    @property
    def batch_shape(self):
        return tuple(self.loc.shape)


KINDS = [("Pendulum-v1", Logistic), *in_soak([("gymnax/Pendulum-v1", Logistic)]), ("Pendulum-v1", Least)]


@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_an_object_like_those_of_distrax(name, kind):
    head = fc.heads.from_distribution(kind, "loc", "scale")
    policy = fc.jax_policy(lambda p, x: (x[..., :1] * p, 0.2 + x[..., 1:2] ** 2), jnp.float32(2.0), head=head)
    env = fc.make_env(name, num_envs=3)
    batch = collect(env, policy, 20)
    now = fc.evaluate_actions(policy, None, fc.interop.to_jax(batch))
    np.testing.assert_allclose(now["action_log_prob"], batch["action_log_prob"], rtol=1e-5, atol=1e-5)
    wanted = np.log(0.2 + batch["observation"][..., 1].numpy() ** 2) + 2
    np.testing.assert_allclose(now["entropy"], wanted, rtol=1e-5)
    alone, more = (collect(fc.make_env(name, num_envs=lanes), policy, 4)["action"] for lanes in (3, 8))
    torch.testing.assert_close(alone, more[:3])  # the noise of a lane does not depend on how many there are
    mode = collect(env, policy, 5, exploration_type=MODE)
    torch.testing.assert_close(mode["action"], mode["observation"][..., :1] * 2)


@pytest.mark.parametrize("kind", ["bits", "one-hot"])
def test_distributions_of_torch_that_return_floats_for_choices(kind):
    space = spaces.MultiBinary(3) if kind == "bits" else spaces.Discrete(3)
    made = distributions.Bernoulli if kind == "bits" else distributions.OneHotCategorical
    env = fc.make_env([lambda: Sampling(spaces.Box(-1, 1, (3,)), space)] * 2, one_hot=kind == "one-hot")
    policy = fc.torch_policy(lambda x: x * 2, head=fc.heads.from_distribution(made, "logits"))
    batch = scored(env, policy, lambda x: made(logits=x * 2), 40)
    assert not batch["action"].is_floating_point()
    collect(env, policy, 2, exploration_type=MODE)


def test_a_distribution_with_neither_mode_nor_mean_cannot_act_deterministically():
    def skewed(loc, scale):
        sigmoid = distributions.transforms.SigmoidTransform()
        return distributions.TransformedDistribution(distributions.Normal(loc, scale), [sigmoid])

    head = fc.heads.from_distribution(skewed)
    policy = fc.torch_policy(lambda x: (x[..., :1], 1 + x[..., :1] ** 2), head=head)
    with pytest.raises(PolicyError, match=r"neither a mode nor a mean.*ExplorationType.RANDOM"):
        collect(fc.make_env("Pendulum-v1", num_envs=2), policy, 2, exploration_type=MODE)


def test_misuse():
    with pytest.raises(TypeError, match=r"'logits'\)"):
        fc.heads.from_distribution(distributions.Categorical)
    logistic = fc.heads.from_distribution(Logistic, "loc", "scale")
    for answer, head, message in (
        (lambda x: x[:, :1], BETA, r"wants \['concentration1', 'concentration0'\], an array each"),
        (lambda x: (x[:, :1], 3), BETA, "an array each: return them"),
        (lambda x: (x[:, :1], x[:, :1]), logistic, r"expected a torch.distributions.Distribution"),
    ):
        with pytest.raises(PolicyError, match=message):
            collect(fc.make_env("Pendulum-v1", num_envs=2), fc.torch_policy(answer, head=head), 2)
