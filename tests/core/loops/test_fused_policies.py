"""Policies in the fused loop: heads, keys, recurrence, extras, random actions, and what is wrong with an answer."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from gymnasium import spaces

import funcollect as fc
from funcollect.errors import EnvError, PolicyError
from funcollect.specs import ActionSpec
from tests.support.compare import assert_same, collect
from tests.support.envs.jax_counting import counting, step
from tests.support.running import in_soak

HEADS = fc.heads
BOX = spaces.Box(-1.0, 2.0, (2,), np.float32)
DISCRETE = spaces.Discrete(3, start=4)
MULTI = spaces.MultiDiscrete([2, 3])


def ignoring(space, num_envs=3, one_hot=False, **changes):
    """Counting under any action space: the action does not matter."""
    spec = ActionSpec(space, one_hot)
    return counting(
        num_envs, action_spec=spec, step=lambda key, place, _, params: step(key, place, 0, params), **changes
    )


@functools.cache
def easy():
    """One environment, and random actions in it, for tests that differ by their policies alone."""
    env = ignoring(DISCRETE)
    return env, fc.random_policy(env)


def features(observation, count):
    parts = jnp.stack([observation["count"], observation["start"][:, 0] % 7, observation["start"][:, 1] % 5], -1)
    return jnp.sin(parts.astype(jnp.float32) @ jnp.arange(3.0 * count).reshape(3, count))


def head_policy(head, outputs):
    return fc.jax_policy(lambda params, x: params * features(x, outputs), jnp.float32(0.5), head=head)


CASES = {
    "categorical": (DISCRETE, HEADS.categorical, 3, {}),
    "categorical one-hot": (DISCRETE, HEADS.categorical, 3, {"one_hot": True}),
    "categorical several": (MULTI, HEADS.categorical, 5, {}),
    "greedy": (DISCRETE, HEADS.greedy, 3, {}),
    "epsilon_greedy": (DISCRETE, HEADS.epsilon_greedy(0.4), 3, {}),
    "normal": (BOX, HEADS.normal, 4, {}),
    "tanh_normal": (BOX, HEADS.tanh_normal, 4, {}),
}


FEW_HEADS = ("categorical several", "epsilon_greedy", "tanh_normal")


@pytest.mark.parametrize("case", [*FEW_HEADS, *in_soak(case for case in CASES if case not in FEW_HEADS)])
def test_heads(case):
    space, head, outputs, kwargs = CASES[case]
    env, policy = ignoring(space, **kwargs), head_policy(head, outputs)
    batch = collect(env, policy, 7, 7, seed=0)
    assert_same(batch, collect(env, policy, 7, 7, seed=0))
    spec = env.action_spec
    assert batch["action"].dtype == spec.dtype
    assert batch["action"].shape == (3, 14, *spec.shape)
    if not spec.one_hot and head is not HEADS.normal:
        assert all(space.contains(action) for action in batch["action"].flatten(0, 1).numpy())
    names = {"action_log_prob"} if case != "greedy" else set()
    names |= {"action_unsquashed"} if head is HEADS.tanh_normal else set()
    assert set(batch.keys()) == {
        "action", "start", "count", "done", "terminated", "truncated", "next", "collector"
    } | names  # fmt: skip
    mode = fc.ExplorationType.DETERMINISTIC
    modes = collect(env, policy, 7, seed=0, exploration_type=mode)
    if case != "greedy":
        assert not torch.equal(modes["action"], batch["action"][:, :7])


def test_a_categorical_log_probability_is_the_logits_own():
    policy = head_policy(HEADS.categorical, 3)
    batch = collect(ignoring(spaces.Discrete(3)), policy, 20, seed=0)
    x = {name: jnp.asarray(batch[name].flatten(0, 1).numpy().astype(np.int32)) for name in ("start", "count")}
    logits = torch.from_numpy(np.array(policy.apply(policy.params, x)))
    wanted = logits.log_softmax(-1).gather(1, batch["action"].reshape(-1, 1))[:, 0]
    torch.testing.assert_close(batch["action_log_prob"].flatten(), wanted)
    assert batch["action"].unique().tolist() == [0, 1, 2]


def test_a_function_with_a_key_gets_a_fresh_one_at_every_step():
    def apply(params, x, key):
        return {"action": x["count"] * 0 + 4, "drawn": jax.random.uniform(key, (3,)), "key": jnp.tile(key, (3, 1))}

    env = ignoring(DISCRETE)
    batch = collect(env, fc.jax_policy(apply, 0.0), 2, 7, seed=0)
    assert len(batch["drawn"].unique()) == 27
    assert len(batch["key"][0].to(torch.int64).unique(dim=0)) == 9
    assert_same(batch, collect(env, fc.jax_policy(apply, 0.0), 7, 2, seed=0))


@pytest.mark.parametrize("num_envs", [None, 3])
def test_recurrent_state_is_reset_with_its_lane(num_envs):
    """The state counts the steps since the episode's start, and answers with them."""

    def apply(params, x, state):
        return {"action": x["count"] % 3 + 4, "seen": state["seen"]}, {"seen": state["seen"] + 1}

    env = ignoring(DISCRETE, num_envs)
    policy = fc.jax_policy(apply, 0.0, initial_state={"seen": jnp.int32(0)})
    batch = collect(env, policy, 7, 2, 7, seed=0)
    assert torch.equal(batch["seen"].long(), batch["collector", "step"])
    assert batch["next", "done"].sum() > 2
    state, _ = fc.rollout(env, policy, fc.init(env, policy, seed=0), 1)
    _, after = fc.rollout(env, policy, fc.reset(env, state), 1)
    assert (after["seen"] == 0).all()


DTYPES = ["bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "float16", "bfloat16", "float32", "complex64"]


def test_extras_of_every_dtype_are_recorded_as_they_are():
    def apply(params, x):
        wide = x["count"][:, None] * jnp.arange(6)
        return {"action": x["count"] * 0 + 4, **{name: wide.reshape(-1, 2, 3).astype(name) for name in DTYPES}}

    batch = collect(easy()[0], fc.jax_policy(apply, 0.0), 9, seed=0)
    wide = (batch["count"][..., None] * torch.arange(6)).reshape(3, 9, 2, 3)
    for name in DTYPES:
        assert batch[name].dtype == getattr(torch, name)
        assert torch.equal(batch[name], wide.to(getattr(torch, name))), name


class Alternating(fc.PolicyBase):
    """A policy by the protocol alone: it answers with the parity of its own count."""

    backend, params = "jax", jnp.int32(4)

    def init(self, key, num_envs, /):
        return jnp.zeros(num_envs, jnp.int32)

    def __call__(self, params, count, observation, noise, spec, exploration, /):
        mode = jnp.full(count.shape, exploration.type is fc.ExplorationType.MODE)
        return count + 1, {"action": params + count % 2, "mode": mode}


def test_a_policy_by_the_protocol():
    env, policy = easy()[0], Alternating()
    batch = collect(env, policy, 9, seed=0)
    assert torch.equal(batch["action"], 4 + batch["collector", "step"] % 2)
    assert not batch["mode"].any()
    other = collect(env, policy, 9, seed=0, params=jnp.int32(5), exploration_type=fc.ExplorationType.MODE)
    assert torch.equal(other["action"], batch["action"] + 1)
    assert other["mode"].all()


SPACES = {
    "discrete": (DISCRETE, {}),
    "one-hot": (DISCRETE, {"one_hot": True}),
    "multi-discrete": (MULTI, {}),
    "multi-binary": (spaces.MultiBinary(3), {}),
    "box": (BOX, {}),
    "integer box": (spaces.Box(-2, 1, (2,), np.int32), {}),
    "one-sided box": (spaces.Box(np.array([0, -np.inf], np.float32), np.array([np.inf, 1], np.float32)), {}),
    "unbounded box": (spaces.Box(-np.inf, np.inf, (2,), np.float32), {}),
}


FEW = ("one-hot", "integer box", "one-sided box")


@pytest.mark.parametrize("kind", [*FEW, *in_soak(kind for kind in SPACES if kind not in FEW)])
def test_random_actions_fill_their_space(kind):
    space, kwargs = SPACES[kind]
    env = ignoring(space, 8, **kwargs)
    batch = collect(env, fc.random_policy(env), 208, seed=0)
    actions = batch["action"].flatten(0, 1)
    assert actions.dtype == env.action_spec.dtype
    assert "action_log_prob" not in batch
    if kwargs:
        assert (actions.sum(-1) == 1).all()
        actions = actions.argmax(-1) + 4
    assert all(space.contains(action) for action in actions.numpy())
    if actions.is_floating_point():
        assert len(actions.unique(dim=0)) == len(actions)
    else:
        low, high = (int(bound.min()) for bound in ActionSpec(space).bounds)
        assert actions.min() == low
        assert actions[..., 0].max() >= high if actions.ndim > 1 else actions.max() == high


def poisoned(head=None, outputs=3, value=jnp.nan):
    """NaN in lane 1 from the third step of an episode on."""

    def apply(params, x):
        bad = (jnp.arange(3) == 1) & (x["count"] == 1)
        return jnp.where(bad[:, None], value, 0.5) * jnp.ones((1, outputs))

    return fc.jax_policy(apply, 0.0, head=head)


@pytest.mark.parametrize(
    ("space", "policy", "says"),
    [
        (DISCRETE, poisoned(HEADS.categorical), "action_log_prob is NaN"),
        (DISCRETE, poisoned(HEADS.greedy), "what the head reads is NaN"),
        (BOX, poisoned(HEADS.normal, 4), "action is NaN"),
        (BOX, poisoned(None, 2), "action is NaN"),
        (BOX, poisoned(None, 2, jnp.inf), "action is infinite"),
        (DISCRETE, fc.jax_policy(lambda _, x: x["count"] + 4, 0.0), "action is outside its space"),
    ],
)
def test_bad_numbers_are_named_by_lane_and_step(space, policy, says):
    env = easy()[0] if space is DISCRETE else ignoring(space)
    state = fc.init(env, policy, seed=0)
    with pytest.raises(PolicyError, match=rf"lane \d, step \d of this batch: .*{says}"):
        fc.rollout(env, policy, state, 7)


def test_parameters_may_hold_typed_keys_and_numbers():
    params = {"w": jnp.ones((4, 2)), "key": jax.random.key(0), "scale": 2.0}
    policy = fc.jax_policy(lambda params, x: x @ params["w"] * params["scale"], params, head=fc.heads.categorical)
    env = fc.make_env("gymnax/CartPole-v1", num_envs=2)
    assert collect(env, policy, 3).batch_size == (2, 3)


def test_typed_keys_are_no_output():
    def apply(params, x, key):
        keys = jax.random.split(jax.random.wrap_key_data(key), len(x))
        return {"action": jnp.zeros(len(x), jnp.int32), "key": keys}

    env = fc.make_env("gymnax/CartPole-v1", num_envs=2)
    with pytest.raises(PolicyError, match="output 'key' is typed PRNG keys, expected numbers"):
        collect(env, fc.jax_policy(apply, None), 3)


def test_parameters_that_are_no_arrays_or_gone_are_named():
    params = {"w": jnp.ones((4, 2))}
    policy = fc.jax_policy(lambda params, x: x @ params["w"], params, head=fc.heads.categorical)
    with pytest.raises(
        TypeError, match=r"parameter\['act'\] is PjitFunction, expected an array or a number.*equinox.partition"
    ):
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


WRONG = {
    "a dimension too many": (lambda _, x: rows(x)[:, None], r"shape \(3, 1\).*wants \(3,\)"),
    "a float": (lambda _, x: rows(x) / 2, "dtype float32.*cast it"),
    "a scalar extra": (lambda _, x: {"action": rows(x), "v": 0.0}, r"'v' is float, expected an array"),
    "a short extra": (lambda _, x: {"action": rows(x), "v": rows(x)[:1]}, r"'v' is of shape \(1,\)"),
    "a nested extra": (lambda _, x: {"action": rows(x), "v": {"w": rows(x)}}, "'v' is dict"),
    "an observation's name": (lambda _, x: {"action": rows(x), "count": rows(x)}, "'count' collides"),
    "a key of the batch": (lambda _, x: {"action": rows(x), "next": rows(x)}, "a batch uses itself"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_answer_is_named_when_it_is_traced(what):
    apply, says = WRONG[what]
    env, random = easy()
    policy = fc.jax_policy(apply, 0.0)
    state = fc.init(env, policy, seed=0)
    with pytest.raises(PolicyError, match=says):
        fc.rollout(env, policy, state, 7)
    fc.rollout(env, random, state, 7)


def test_a_recurrent_state_that_changes_or_is_anothers():
    env, _ = easy()
    changing = fc.jax_policy(lambda _, x, s: (rows(x), s + 0.5), 0.0, initial_state=jnp.int32(0))
    with pytest.raises(PolicyError, match=r"int32 \[3\] first, then float32 \[3\].*cast it"):
        collect(env, changing, 7)
    plain = fc.jax_policy(lambda _, x: rows(x), 0.0)
    state = fc.init(env, plain, seed=0)
    recurrent = fc.jax_policy(lambda _, x, s: (rows(x), s), 0.0, initial_state=jnp.int32(0))
    with pytest.raises(ValueError, match="of another policy"):
        fc.rollout(env, recurrent, state, 7)
