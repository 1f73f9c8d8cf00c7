"""Policies that read the environment's own state, in every loop over a JAX environment, and refused elsewhere."""

import jax
import jax.numpy as jnp
import pytest
from gymnasium import spaces

import funcollect as fc
from funcollect.core.loops import over_jax
from tests.support.compare import assert_close


class Wanting(fc.envs.JaxEnvBase):
    """The reward is 1 for the action that the state wants, of which observations show nothing."""

    observation_space, action_space = spaces.Box(0.0, 1.0, (1,)), spaces.Discrete(5)

    def reset(self, key, params):
        return {"wanted": jax.random.randint(key, (), 0, 5), "time": jnp.int32(0)}, jnp.zeros(1)

    def step(self, key, env_state, action, params):
        time = env_state["time"] + 1
        after = {"wanted": (env_state["wanted"] * 3 + 1) % 5, "time": time}
        reward = (action == env_state["wanted"]).astype(jnp.float32)
        return fc.envs.Transition(after, jnp.zeros(1), reward, time >= 4, False)


ENV = Wanting(num_envs=4)


def plan(params, observation, env_state, *rest):
    """The action with the largest reward, one step ahead."""
    assert observation.shape == (len(observation), 1)

    def reward(lane, action):
        return ENV.step(jnp.zeros(2, jnp.uint32), lane, action, None).reward

    rewards = jax.vmap(lambda lane: jax.vmap(lambda action: reward(lane, action))(jnp.arange(5)))(env_state)
    logits = jnp.where(rewards > 0, 0.0, -jnp.inf) + 0 * params
    return (logits, rest[0] + 1) if rest else logits


def planner(**own):
    return fc.jax_policy(plan, jnp.zeros(()), head=fc.heads.categorical, reads_env_state=True, **own)


POLICIES = {
    "plain": planner,
    "recurrent": lambda: planner(initial_state=jnp.zeros(())),
    "population": lambda: fc.population(planner(), jnp.zeros(2)),
    "normalized": lambda: fc.normalized(planner(), fc.running_statistics.init(ENV.observation_space, backend="jax")),
}


@pytest.mark.parametrize("kind", POLICIES)
def test_a_one_step_planner_earns_every_reward(kind):
    policy = POLICIES[kind]()
    _, batch = fc.rollout(ENV, policy, fc.init(ENV, policy, seed=0), 20)
    assert batch["next", "done"].sum() == 4 * 5
    assert (batch["next", "reward"] == 1).all()


def test_each_loop_passes_the_state_of_its_step(monkeypatch):
    policy = planner()
    state = fc.init(ENV, policy, seed=0)
    _, wanted = fc.rollout(ENV, policy, state, 20)
    traced = jax.jit(lambda params, state: fc.traced.rollout(ENV, policy, params, state, 20)[1])
    assert_close(fc.deliver(traced(policy.params, state), ENV), wanted)
    assert fc.evaluate(ENV, policy, episodes=5, seed=0).returns.tolist() == [4.0] * 5
    monkeypatch.setattr(over_jax, "waits_for_host", lambda place: True)  # as on a GPU, in blocks
    assert_close(fc.rollout(ENV, policy, fc.init(ENV, policy, seed=0), 20)[1], wanted)


@pytest.mark.parametrize("name", ["CartPole-v1", "torch/CartPole-v1"])
def test_other_environments_are_refused(name):
    env = fc.make_env(name, num_envs=2)
    with pytest.raises(TypeError, match=r"reads the environment's state .* expected an environment written in JAX"):
        fc.init(env, planner(), seed=0)
    state = fc.init(env, fc.random_policy(env), seed=0)
    with pytest.raises(TypeError, match="expected an environment written in JAX"):
        fc.rollout(env, planner(), state, 2)


def test_what_has_no_states_is_refused():
    _, batch = fc.rollout(ENV, planner(), fc.init(ENV, planner(), seed=0), 4)
    with pytest.raises(TypeError, match="which a batch does not hold"):
        fc.evaluate_actions(planner(), None, fc.interop.to_jax(batch), env=ENV)
    with pytest.raises(TypeError, match=r"a function \(params, observation, env_state\) -> answer"):
        fc.jax_policy(lambda params, observation: observation, None, reads_env_state=True)
