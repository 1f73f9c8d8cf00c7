"""Policies in the fused loop: actions of every head and space, wrong outputs, policies that read the environment."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces

import funcollect as fc
from funcollect.core.loops import over_jax
from funcollect.errors import EnvError, PolicyError
from funcollect.specs import ActionSpec
from tests.support.compare import assert_close, collect
from tests.support.envs.jax_counting import counting, step
from tests.support.running import in_soak

HEADS = fc.heads
BOX = spaces.Box(-1.0, 2.0, (2,), np.float32)
DISCRETE = spaces.Discrete(3, start=4)


@functools.cache
def easy(box=False):
    """Counting whatever the actions are, and random ones, for tests that differ only by their policies."""
    spec = ActionSpec(BOX if box else DISCRETE, False)
    env = counting(3, action_spec=spec, step=lambda key, place, _, params: step(key, place, 0, params))
    return env, fc.random_policy(env)


class Walk(fc.envs.JaxEnvBase):
    """Adds arrays of equal rank and dtype only, as strict promotion demands of all code."""

    observation_space = spaces.Box(-9, 9, (2,))

    def __init__(self, action_space):
        self.action_space = action_space
        super().__init__(3)

    def reset(self, key, params):
        place = jax.random.uniform(key, (2,), jnp.float32)
        return place, place

    def step(self, key, place, action, params):
        moved = place + jnp.float32(0.5)
        lost = moved.sum() > 4
        return fc.envs.Transition(moved, moved, moved[0], lost, jnp.zeros_like(lost))


def answering(space):
    count = {spaces.Discrete: 3, spaces.MultiDiscrete: 5}.get(type(space))

    def answer(params, observation):
        if count:
            return jnp.tile(observation[:, :1], count)
        loc = jnp.broadcast_to(observation.sum(-1)[:, None, None] - 1, (len(observation), *space.shape))
        return loc, jnp.exp(loc)

    return answer


CHOICES, SEVERAL, WIDE = spaces.Discrete(3, start=2), spaces.MultiDiscrete([2, 3]), spaces.Box(-1, 1, (2, 3))
INTEGERS, UNBOUNDED = spaces.Box(-5, 5, (2,), np.int32), spaces.Box(-np.inf, 1, (2,))
DRAWN = [(WIDE, fc.heads.tanh_normal)]
DRAWN += in_soak([(SEVERAL, fc.heads.categorical), (CHOICES, fc.heads.epsilon_greedy(0.3))])
DRAWN += in_soak([(WIDE, fc.heads.normal), (CHOICES, fc.heads.categorical)])
DRAWN += in_soak([(space, None) for space in (CHOICES, SEVERAL, WIDE, INTEGERS, UNBOUNDED, spaces.MultiBinary(3))])


def all_of(space, head):
    """What the loops, the traced functions, statistics and buffers give."""
    env, key = Walk(space), jnp.array([0, 7], jnp.uint32)
    policy = fc.random_policy(env) if head is None else fc.jax_policy(answering(space), None, head=head)
    _, eager = fc.rollout(env, policy, fc.init(env, policy, seed=7), 20, max_frames_per_traj=4)
    assert eager["action"].dtype == env.action_spec.dtype
    assert head is fc.heads.normal or all(map(space.contains, eager["action"].flatten(0, 1).numpy()))

    @jax.jit
    def traced(key):
        _, batch = fc.traced.rollout(env, policy, None, fc.traced.init(env, policy, None, key=key), 20)
        results = [batch, fc.traced.episode_stats(batch), fc.traced.evaluate(env, policy, None, key, 4)]
        if head is not None:
            results.append(fc.evaluate_actions(policy, None, batch))
        stats = fc.running_statistics.init(env.observation_space, backend="jax")
        stats = fc.running_statistics.update(fc.running_statistics.update(stats, batch), batch)
        ring = fc.jax_ring.extend(fc.jax_ring.init(batch, steps=30), batch)
        scaled = fc.running_statistics.normalize(stats, batch["observation"])
        results += [stats, fc.running_statistics.denormalize(stats, scaled), fc.jax_ring.sample(ring, key, 4)]
        return [*results, fc.jax_ring.sample_slices(ring, key, num_slices=4, slice_len=3)]

    return jax.tree.map(np.asarray, [eager.to_dict(), traced(key)])


@pytest.mark.parametrize(("space", "head"), DRAWN)
def test_actions_lie_in_their_space_also_under_strict_promotion(space, head):
    wanted = all_of(space, head)
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        jax.tree.map(np.testing.assert_array_equal, all_of(space, head), wanted)


def test_parameters_may_hold_typed_keys_and_numbers():
    params = {"w": jnp.ones((4, 2)), "key": jax.random.key(0), "scale": 2.0}
    policy = fc.jax_policy(lambda params, x: x @ params["w"] * params["scale"], params, head=fc.heads.categorical)
    env = fc.make_env("gymnax/CartPole-v1", num_envs=2)
    assert collect(env, policy, 3).batch_size == (2, 3)


def test_parameters_that_are_no_arrays_or_gone_are_named():
    params = {"w": jnp.ones((4, 2))}
    policy = fc.jax_policy(lambda params, x: x @ params["w"], params, head=fc.heads.categorical)
    says = r"parameter\['act'\] is PjitFunction, expected an array or a number.*equinox.partition"
    with pytest.raises(TypeError, match=says):
        fc.jax_policy(policy.apply, params | {"act": jnp.tanh}).prepare(None)
    update = jax.jit(lambda params: {"w": params["w"] - 1}, donate_argnums=0)
    other = {"w": jnp.zeros((4, 2))}
    for given, own in ((other, False), (params, True)):
        policy.prepare(None if own else given)
        after = update(given)
        with pytest.raises(ValueError, match=r"parameter\['w'\] was donated or deleted, expected a live array"):
            policy.prepare(None if own else given)
    policy.params = after
    assert policy.prepare(None)["w"].tolist() == [[0.0, 0.0]] * 4


def test_a_reward_that_is_nan_is_named():
    def move(key, place, action, params):
        moved = step(key, place, action, params)
        return moved._replace(reward=jnp.where(place[1] == 1, jnp.nan, moved.reward))

    env = counting(3, step=move)
    with pytest.raises(EnvError, match=r"lane 0, step 1 of this batch: the reward is NaN"):
        collect(env, fc.random_policy(env), 7)


def rows(observation):
    return observation["count"] * 0 + 4


def poisoned(outputs, value=jnp.nan):
    """`value` in lane 1 at the second step of each episode."""

    def apply(_, x):
        bad = (jnp.arange(3) == 1) & (x["count"] == 1)
        return jnp.where(bad[:, None], value, 0.5) * jnp.ones((1, outputs))

    return apply


def typed(_, x, key):
    return {"action": rows(x), "key": jax.random.split(jax.random.wrap_key_data(key), len(x["count"]))}


AT = r"lane \d, step \d of this batch: .*"
REFUSED = {  # of a Box or a Discrete space, by a head or none
    "NaN logits": (False, HEADS.categorical, poisoned(3), f"{AT}action_log_prob is NaN"),
    "NaN values": (False, HEADS.greedy, poisoned(3), f"{AT}what the head reads is NaN"),
    "a NaN pair": (True, HEADS.normal, poisoned(4), f"{AT}action is NaN"),
    "a NaN action": (True, None, poisoned(2), f"{AT}action is NaN"),
    "an infinite action": (True, None, poisoned(2, jnp.inf), f"{AT}action is infinite"),
    "an action outside": (False, None, lambda _, x: x["count"] + 4, f"{AT}action is outside its space"),
    "a dimension too many": (False, None, lambda _, x: rows(x)[:, None], r"shape \(3, 1\).*wants \(3,\)"),
    "a float": (False, None, lambda _, x: rows(x) / 2, "dtype float32.*cast it"),
    "a scalar extra": (False, None, lambda _, x: {"action": rows(x), "v": 0.0}, r"'v' is float, expected an array"),
    "a short extra": (False, None, lambda _, x: {"action": rows(x), "v": rows(x)[:1]}, r"'v' is of shape \(1,\)"),
    "a nested extra": (False, None, lambda _, x: {"action": rows(x), "v": {"w": rows(x)}}, "'v' is dict"),
    "an observation's name": (False, None, lambda _, x: {"action": rows(x), "count": rows(x)}, "'count' collides"),
    "a key of the batch": (False, None, lambda _, x: {"action": rows(x), "next": rows(x)}, "a batch uses itself"),
    "typed keys": (False, None, typed, "output 'key' is typed PRNG keys, expected numbers"),
}


@pytest.mark.parametrize("what", [what for what in REFUSED if what != "a NaN pair"] + in_soak(["a NaN pair"]))
def test_a_wrong_answer_is_named_and_the_state_stays_good(what):
    box, head, apply, says = REFUSED[what]
    (env, random), policy = easy(box), fc.jax_policy(apply, 0.0, head=head)
    state = fc.init(env, policy, seed=0)
    with pytest.raises(PolicyError, match=says):
        fc.rollout(env, policy, state, 7)
    fc.rollout(env, random, state, 7)


def test_a_recurrent_state_that_changes_its_dtype():
    changing = fc.jax_policy(lambda _, x, s: (rows(x), s + 0.5), 0.0, initial_state=jnp.int32(0))
    with pytest.raises(PolicyError, match=r"int32 \[3\] first, then float32 \[3\].*cast it"):
        collect(easy()[0], changing, 7)


class Wanting(fc.envs.JaxEnvBase):
    """The reward is 1 for the action that the state asks for, which observations do not show."""

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


PLANNER = planner()
POLICIES = {
    "plain": lambda: PLANNER,
    "recurrent": lambda: planner(initial_state=jnp.zeros(())),
    "population": lambda: fc.population(planner(), jnp.zeros(2)),
    "normalized": lambda: fc.normalized(planner(), fc.running_statistics.init(ENV.observation_space, backend="jax")),
}


@pytest.mark.parametrize("kind", POLICIES)
def test_a_one_step_planner_earns_every_reward(kind):
    policy = POLICIES[kind]()
    _, batch = fc.rollout(ENV, policy, fc.init(ENV, policy, seed=0), 16)
    assert batch["next", "done"].sum() == 4 * 4
    assert (batch["next", "reward"] == 1).all()


def test_each_loop_passes_the_state_of_its_step(monkeypatch):
    policy, state = PLANNER, fc.init(ENV, PLANNER, seed=0)
    _, wanted = fc.rollout(ENV, policy, state, 16)
    traced = jax.jit(lambda params, state: fc.traced.rollout(ENV, policy, params, state, 16)[1])
    assert_close(fc.deliver(traced(policy.params, state), ENV), wanted)
    monkeypatch.setattr(over_jax, "waits_for_host", lambda place: True)  # as on a GPU, in blocks
    assert_close(fc.rollout(ENV, policy, fc.init(ENV, policy, seed=0), 16)[1], wanted)


@pytest.mark.parametrize("name", ["CartPole-v1", "torch/CartPole-v1"])
def test_other_environments_are_refused(name):
    env = fc.make_env(name, num_envs=2)
    with pytest.raises(TypeError, match=r"reads the environment's state .* expected an environment written in JAX"):
        fc.init(env, planner(), seed=0)
    state = fc.init(env, fc.random_policy(env), seed=0)
    with pytest.raises(TypeError, match="expected a rollout in an environment written in JAX"):
        fc.rollout(env, planner(), state, 2)


def test_what_has_no_states_is_refused():
    _, batch = fc.rollout(ENV, PLANNER, fc.init(ENV, PLANNER, seed=0), 16)
    with pytest.raises(TypeError, match="which a batch does not hold"):
        fc.evaluate_actions(planner(), None, fc.interop.to_jax(batch), env=ENV)
    with pytest.raises(TypeError, match=r"a function \(params, observation, env_state\) -> answer"):
        fc.jax_policy(lambda params, observation: observation, None, reads_env_state=True)
