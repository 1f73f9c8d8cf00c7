"""Errors that name the way: what is called where something else is meant."""

from functools import cache, partial

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import funcollect as fc
from funcollect.messages import clipped, shown
from tests.support.misuse import refused, table

CARTPOLE = "CartPole-v1"


def gym():
    return gymnasium.make(CARTPOLE)


def dummy():
    from stable_baselines3.common.vec_env import DummyVecEnv

    return DummyVecEnv([gym])


LANES = "funcollect.make_env([make_one] * 4)"


@table(
    ("one of SB3", dummy, TypeError, ("Stable-Baselines3's DummyVecEnv", LANES)),
    ("a list of SB3's", lambda: [dummy()], TypeError, ("Stable-Baselines3's DummyVecEnv", LANES)),
    ("a factory of SB3's", lambda: dummy, TypeError, ("Stable-Baselines3's DummyVecEnv", LANES)),
)
def test_environments_that_reset_themselves(misuse):
    with refused(misuse.error, misuse.says):
        fc.make_env(misuse.do())


@pytest.mark.parametrize("name", ["ALE/Pong-v5", "PongNoFrameskip-v4"])
def test_an_atari_game_that_is_not_registered(name, monkeypatch):
    monkeypatch.delitem(gymnasium.registry, name, raising=False)  # elsewhere the tests may have registered it
    with pytest.raises(ValueError, match="write 'ale/Pong', which has the usual preprocessing"):
        fc.make_env(name)


@cache
def pair(name):
    env = fc.make_env(name, num_envs=2)
    return env, fc.jax_policy(lambda params, x: x @ params, jnp.ones((4, 2)), head=fc.heads.categorical)


def begun(name):
    env, policy = pair(name)
    return env, policy, fc.init(env, policy, seed=0)


def loss(env, state, params, *, own):
    policy = fc.jax_policy(lambda params, x: x @ params, params, head=fc.heads.categorical)
    _, batch = fc.rollout(env, policy, state, 2, params=None if own else params)
    return batch["next", "reward"].sum()


CALLS = {
    "rollout": lambda env, policy, state: fc.rollout(env, policy, state, 2),
    "step": lambda env, policy, state: fc.step(env, policy, state),
    "reset": lambda env, policy, state: fc.reset(env, state),
    "init": lambda env, policy, state: fc.init(env, policy, seed=0),
    "evaluate": lambda env, policy, state: fc.evaluate(env, policy, episodes=1, seed=0),
}


def inside(name):
    """The state is the argument of the transformation."""
    return lambda env, policy, state: jax.jit(partial(CALLS[name], env, policy))(state)


def closed_over(name):
    """It is none: JAX traces nothing that the function is given."""
    return lambda *given: jax.jit(lambda x: (CALLS[name](*given), x)[1])(1.0)


TRACED = {
    **{each: inside(each) for each in ("rollout", "step", "reset")},
    **{f"closed {each}": closed_over(each) for each in CALLS},
    "a mask": lambda env, policy, state: jax.jit(lambda mask: fc.reset(env, state, mask))(np.ones(2, bool)),
    "init": lambda env, policy, state: jax.jit(lambda seed: fc.init(env, policy, seed=seed))(3),
    "params": lambda env, policy, state: jax.grad(lambda params: loss(env, state, params, own=False))(policy.params),
    "a policy": lambda env, policy, state: jax.grad(lambda params: loss(env, state, params, own=True))(policy.params),
}
ON_HOST = ("rollout", "a mask", "params", "closed rollout")


@pytest.mark.parametrize(
    ("where", "case"), [("gymnax/CartPole-v1", case) for case in TRACED] + [(CARTPOLE, case) for case in ON_HOST]
)
def test_inside_a_transformation_of_jax(where, case):
    env, policy, state = begun(where)
    name = case.removeprefix("closed ").replace("evaluate", "init") if case.startswith("closed") else ""
    wanted = rf"{name} got values that JAX traces.*funcollect\.traced\.{name}"
    if (where, case) == (CARTPOLE, "rollout"):
        wanted = "SimulatorHandle"  # JAX's own error: a simulator is no array
    with pytest.raises(TypeError, match=wanted):
        TRACED[case](env, policy, state)
    state, _ = fc.rollout(env, policy, state, 2)
    fc.close(state)


def test_a_torch_policy_inside_traced_and_a_batch_given_to_jax():
    env = fc.make_env("gymnax/CartPole-v1", num_envs=2)
    policy = fc.torch_policy(torch.nn.Linear(4, 2), head=fc.heads.categorical)
    with refused(TypeError, ("TorchPolicy is a torch policy", "funcollect.lower_policy(policy, env)")):
        fc.traced.init(env, policy, None, key=jax.random.PRNGKey(0))
    env, policy, state = begun(CARTPOLE)
    state, batch = fc.rollout(env, policy, state, 2)
    with refused(fc.BridgeError, ("JAX got a TensorDict", "expected arrays", "funcollect.interop.to_jax(batch)")):
        jax.jit(lambda batch: batch["next"]["reward"].sum())(batch)
    jax.vmap(lambda batch: batch["next"]["reward"].sum())(fc.interop.to_jax(batch))
    fc.close(state)


def test_long_values_are_cut_between_words():
    value = np.linspace(1.5830, 2, 40)
    text = shown(value)
    assert len(text) <= 82
    assert text.endswith(", …")
    assert text.removesuffix(", …").split(", ") == " ".join(repr(value).split()).split(", ")[: text.count(", ")]
    assert clipped("1" * 100, 10) == "1111111111 …"
    assert clipped("a  short\n text") == "a short text"
