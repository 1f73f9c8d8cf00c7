"""Heads made of distributions of Torch, and of others with the interface of distrax."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import distributions

import funcollect as fc
from funcollect.errors import PolicyError
from tests.support import cases

BETA = fc.heads.from_distribution(distributions.Beta)


def beta(x: torch.Tensor) -> Any:
    return 1 + x[..., :1].abs(), 1 + x[..., 1:2].abs()


@pytest.mark.parametrize("name", ["Pendulum-v1", "gymnax/Pendulum-v1"])
def test_a_distribution_of_torch(name: str) -> None:
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


def test_discrete_actions_and_events_of_several_components() -> None:
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


@dataclass
class Logistic:
    """As distrax has it."""

    loc: Any
    scale: Any
    event_shape: tuple[int, ...] = ()

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return tuple(self.loc.shape)

    def sample(self, *, seed: Any) -> Any:
        return self.loc + self.scale * jax.random.logistic(seed, self.loc.shape)

    def mode(self) -> Any:
        return self.loc

    def log_prob(self, value: Any) -> Any:
        return jax.scipy.stats.logistic.logpdf(value, self.loc, self.scale)

    def entropy(self) -> Any:
        return jnp.log(self.scale) + 2


@pytest.mark.parametrize("name", ["Pendulum-v1", "gymnax/Pendulum-v1"])
def test_an_object_like_those_of_distrax(name: str) -> None:
    policy = fc.jax_policy(
        lambda p, x: (x[..., :1] * p, 0.2 + x[..., 1:2] ** 2), jnp.float32(2.0),
        head=fc.heads.from_distribution(Logistic, "loc", "scale"),
    )  # fmt: skip
    env = fc.make_env(name, num_envs=3)
    state, batch = fc.rollout(env, policy, fc.init(env, policy, seed=0), 20)
    now = fc.evaluate_actions(policy, None, fc.interop.to_jax(batch))
    np.testing.assert_allclose(now["action_log_prob"], batch["action_log_prob"], rtol=1e-5, atol=1e-5)
    wanted = np.log(0.2 + batch["observation"][..., 1].numpy() ** 2) + 2
    np.testing.assert_allclose(now["entropy"], wanted, rtol=1e-5)
    one, eight = (fc.make_env(name, num_envs=count) for count in (3, 8))
    alone = fc.rollout(one, policy, fc.init(one, policy, seed=1), 4)[1]["action"]
    more = fc.rollout(eight, policy, fc.init(eight, policy, seed=1), 4)[1]["action"][:3]
    torch.testing.assert_close(alone, more)  # the noise of a lane does not depend on how many there are
    _, mode = fc.rollout(env, policy, state, 5, exploration_type=fc.ExplorationType.DETERMINISTIC)
    torch.testing.assert_close(mode["action"], mode["observation"][..., :1] * 2)


def test_misuse() -> None:
    with pytest.raises(TypeError, match="distribution is 3, expected a class or a function"):
        fc.heads.from_distribution(3)  # type: ignore[arg-type]
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
