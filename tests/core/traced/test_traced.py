"""The traced functions inside the user's own transformations, and `deliver`."""

import os
import subprocess
import sys
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import funcollect as fc
from funcollect.envs.jax_envs.like_gymnax import from_gymnax
from funcollect.errors import EnvError, PolicyError
from funcollect.interop import words
from tests.support.compare import assert_same, collect, leaves
from tests.support.envs.jax_counting import counting, counting_policy, reset, step
from tests.support.running import ROOT, in_soak

KEY = jnp.array([0, 7], jnp.uint32)  # the key of seed=7
PLAIN, POLICY = counting(3), counting_policy()
LENGTH = 12


def start(env=PLAIN, policy=POLICY, key=KEY, **kwargs):
    return fc.traced.init(env, policy, policy.params, key=key, **kwargs)


@cache
def begun(runs=None):
    """The state of one run, or of several."""
    keys = KEY if runs is None else jax.random.split(KEY, runs)
    return jax.jit(start if runs is None else jax.vmap(start))(key=keys)


@cache
def program(env=PLAIN, length=LENGTH, **options):
    """A rollout from parameters and a key, compiled once for all tests."""
    rolled = partial(fc.traced.rollout, env, POLICY, length=length, **options)
    return jax.jit(lambda params, key: rolled(params, start(env, key=key))[1])


@cache
def plain():
    """The arrays of a rollout."""
    return program()(POLICY.params, KEY)


@pytest.mark.parametrize(
    ("num_envs", "options"),
    [(None, {"max_frames_per_traj": 3}), *in_soak([(None, {}), (3, {}), (3, {"max_frames_per_traj": 3})])],
)
def test_rollout_is_deliver_after_a_traced_rollout(num_envs, options):
    env = counting(num_envs)
    arrays = program(env, **options)(POLICY.params, KEY)
    assert_same(fc.deliver(arrays, env), collect(env, POLICY, LENGTH, seed=7, **options))
    assert fc.deliver(arrays, env).is_locked
    assert arrays["collector"]["episode"].shape == (LENGTH, num_envs or 1)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(arrays["collector"])} == {"int32"}


def test_steps_add_up_to_a_rollout_also_in_delivered_form():
    step = jax.jit(lambda params, state: fc.traced.step(PLAIN, POLICY, params, state))
    state, rows = begun(), []
    for _ in range(LENGTH):
        state, row = step(POLICY.params, state)
        rows.append(row)
    joined = jax.tree.map(lambda *parts: jnp.stack(parts), *rows)
    assert_same(fc.deliver(joined, PLAIN), collect(PLAIN, POLICY, LENGTH, seed=7))
    with pytest.raises(ValueError, match=r"shape \[3\], expected \[T, P\]"):
        fc.deliver(rows[0], PLAIN)


def test_deliver_without_an_environment():
    arrays = plain()
    batch = fc.deliver(arrays)
    exact = fc.deliver(arrays, PLAIN)
    assert batch.batch_size == (3, LENGTH)
    assert (batch["action"].dtype, batch["count"].dtype) == (torch.int64, torch.int32)
    for path, leaf in leaves(batch).items():
        assert torch.equal(leaves(exact)[path].to(leaf.dtype), leaf)
    ids = fc.deliver(arrays, total_lanes=2)["collector", "traj_ids"]
    lane, episode = batch["collector", "lane"], (batch["collector", "traj_ids"] - batch["collector", "lane"]) // 3
    assert torch.equal(ids, ((lane // 2) << 40) + episode * 2 + lane % 2)


def test_deliver_compiles_once_for_batches_alike_and_their_memory_is_their_own(monkeypatch):
    traces, ids = [], words.trajectory_ids
    monkeypatch.setattr(words, "trajectory_ids", lambda *args: traces.append(args) or ids(*args))
    arrays = plain()
    before = jax.tree.map(np.array, arrays)
    for _ in range(3):
        batch = fc.deliver(arrays, PLAIN, total_lanes=17)
    assert len(traces) == 1
    for leaf in leaves(batch).values():
        leaf.zero_()
    jax.tree.map(np.testing.assert_array_equal, arrays, before)


def test_options_mean_what_they_mean_to_collectors():
    host = fc.SyncDataCollector(PLAIN, POLICY, frames_per_batch=30, init_random_frames=12, seed=7)
    arrays = program(length=10, random_steps=10)(POLICY.params, KEY)
    assert_same(fc.deliver(arrays, PLAIN), next(host))
    kept = fc.SyncDataCollector(PLAIN, POLICY, frames_per_batch=30, reset_when_done=False, seed=7)
    arrays = program(length=10, reset_when_done=False)(POLICY.params, KEY)
    assert_same(fc.deliver(arrays, PLAIN), next(kept))
    assert arrays["done"][-1].all()
    with pytest.raises(ValueError, match="give one of them"):
        program(reset_when_done=False, max_frames_per_traj=3)(POLICY.params, KEY)


def test_a_state_that_was_not_compiled_can_be_donated():
    state = start()
    donating = jax.jit(lambda params, state: fc.traced.rollout(PLAIN, POLICY, params, state, 5), donate_argnums=1)
    state, _ = donating(POLICY.params, state)
    after, _ = donating(POLICY.params, state)
    assert not KEY.is_deleted()
    assert int(after.steps[0]) == 10
    for call in (lambda: fc.rollout(PLAIN, POLICY, state, 5), lambda: fc.reset(PLAIN, state)):
        with pytest.raises(ValueError, match="the state was donated or deleted"):
            call()


def test_reset_inside_jit():
    @jax.jit
    def again(params, mask):
        state, _ = fc.traced.step(PLAIN, POLICY, params, start())
        return fc.traced.reset(PLAIN, state, mask), fc.traced.reset(PLAIN, state)

    some, every = again(POLICY.params, jnp.array([True, False, False]))
    assert some.step.tolist() == [0, 1, 1]
    assert some.episode.tolist() == [1, 0, 0]
    assert every.step.tolist() == [0, 0, 0]


def cartpole(num_envs=4):
    env = from_gymnax("CartPole-v1", num_envs=num_envs)
    weights = jax.random.normal(jax.random.PRNGKey(3), (4, 2)) * 0.3
    return env, fc.jax_policy(lambda params, x: x @ params, weights, head=fc.heads.categorical)


def test_vmap_over_seeds_and_over_a_population_of_parameters_gives_each_its_own_run():
    keys, biases = jnp.stack([KEY, KEY.at[1].set(8)]), jnp.arange(3, dtype=jnp.int32)
    batch = fc.deliver(jax.vmap(program(), (None, 0))(POLICY.params, keys), PLAIN)
    assert batch.batch_size == (2, 3, LENGTH)
    for part, seed in zip(batch, (7, 8), strict=True):
        assert_same(part, collect(PLAIN, POLICY, LENGTH, seed=seed))
    many = jax.vmap(program(), (0, None))(biases, KEY)
    for part, bias in zip(fc.deliver(many, PLAIN), biases, strict=True):
        assert_same(part, collect(PLAIN, POLICY, LENGTH, seed=7, params=bias))


def test_a_scan_over_updates_of_the_parameters():
    """A whole training loop in one compiled call: later rollouts act with later parameters."""
    env, policy = cartpole()

    @jax.jit
    def train(params, state):
        def update(carry, _):
            params, state = carry
            state, batch = fc.traced.rollout(env, policy, params, state, 8)
            return (params + 0.1, state), batch["action_log_prob"]

        return jax.lax.scan(update, (params, state), None, length=5)

    (_, after), log_probs = train(policy.params, jax.jit(partial(start, env, policy))())
    assert log_probs.shape == (5, 8, 4)
    assert after.frames == 160
    state, params = fc.init(env, policy, seed=7), policy.params
    for t in range(5):
        state, batch = fc.rollout(env, policy, state, 8, params=params)
        np.testing.assert_allclose(log_probs[t].T, batch["action_log_prob"], atol=1e-5)
        params = params + 0.1


def test_parts_of_a_run_continue_where_lanes_say():
    whole = plain()
    begin = jax.jit(lambda first: start(first_lane=first, total_lanes=6))
    rolled = jax.jit(lambda state: fc.traced.rollout(PLAIN, POLICY, POLICY.params, state, LENGTH)[1])
    halves = [rolled(begin(first)) for first in (0, 3)]
    np.testing.assert_array_equal(halves[0]["start"], whole["start"])
    assert not (halves[1]["start"][0] == whole["start"][0]).all(-1).any()
    both = jax.tree.map(lambda *parts: jnp.concatenate(parts, 1), *halves)
    ids = fc.deliver(both, PLAIN)["collector", "traj_ids"]
    assert ids[:, 0].tolist() == [0, 1, 2, 3, 4, 5]


def changed(name, change):
    """The counting environment with one part of what `step` returns changed."""

    def move(*arguments):
        moved = step(*arguments)
        return moved._replace(**{name: change(getattr(moved, name))})

    return {"step": move}


FLAT = {"step": lambda key, place, action, params: (place, 0.0)}
SHORT = {"reset": lambda key, params: (reset(key, params)[0], jnp.zeros(3))}
ALONE = {"reset": lambda key, params: jnp.zeros(3)}
WRONG = [
    (changed("env_state", lambda x: (x[0], x[1] * 1.0)), r"\[1\] is int32 \[\] first, then float32 \[\].*cast or pad"),
    (changed("env_state", lambda x: (*x, jnp.zeros(2))), r"\[2\] is not there first, then float32 \[2\]"),
    (changed("observation", lambda x: x | {"start": x["start"][:1]}), r"'start' .* is int32 \[1\], expected int32 \[2"),
    (changed("observation", lambda x: x | {"count": x["count"] / 2}), r"'count' .* is float32 \[\], expected int64 \["),
    (changed("observation", lambda x: {"start": x["start"]}), r"lacks the structure of its space .*'count'"),
    (
        changed("terminated", lambda _: 0.7),
        "the terminated that step of .* returned is float32, expected bool: compare",
    ),
    (changed("reward", lambda _: jnp.array(True)), "the reward that step of .* returned is bool, expected a number"),
    (changed("reward", lambda _: 1j), "the reward that step of .* returned is complex64, expected a number"),
    (changed("terminated", lambda flag: flag[None]), r"terminated that step of .* is bool \[1\], expected bool \[\]"),
    (changed("reward", lambda _: jnp.ones((2, 2))), r"reward .* float32 \[2, 2\], expected a number \[\] or \[players"),
    (FLAT, "returned 2 values, expected a Transition"),
    (SHORT, "reset of .* lacks the structure"),
    (ALONE, r"reset of .* returned an array of shape \(3,\), expected the pair \(env_state, observation\)"),
]


@pytest.mark.parametrize(("changes", "says"), WRONG, ids=[says for _, says in WRONG])
def test_an_environment_that_disagrees_with_itself_is_named_at_init(changes, says):
    env = counting(3, **changes)
    for begin in (lambda: jax.jit(lambda key: start(env, POLICY, key))(KEY), lambda: fc.init(env, POLICY, seed=0)):
        with pytest.raises(EnvError, match=says):
            begin()


TORCH = fc.torch_policy(torch.nn.Linear(4, 2), head=fc.heads.categorical)
ROWS = fc.jax_policy(lambda params, x: x["start"], 1)
LANE = r"first_lane is .*, expected an int or an integer array \[\]"


@pytest.mark.parametrize(("call", "error", "says"), [
    (lambda: start(fc.make_env("CartPole-v1")), TypeError, "expected JaxEnv"),
    (lambda: start(key=jnp.zeros(4, jnp.uint32)), TypeError, r"uint32 \[4\], expected"),
    *((lambda lane=lane: start(first_lane=lane), TypeError, LANE) for lane in (1.5, jnp.arange(4), jnp.float32(1))),
    (lambda: start(first_lane=-1), ValueError, "first_lane is -1, expected at least 0"),
    (lambda: fc.traced.rollout(PLAIN, POLICY, None, begun(), 5), TypeError, "params is None"),
    (lambda: fc.traced.step(PLAIN, TORCH, None, begun()), TypeError, "a torch policy, expected one that JAX can"),
    (lambda: fc.traced.step(PLAIN, POLICY, 1, begun(2)), ValueError, r"the state is of \[2\] runs, expected one"),
    (lambda: fc.traced.step(PLAIN, ROWS, 1, begun()), PolicyError, r"shape \(3, 2\)"),
    (lambda: fc.traced.reset(PLAIN, begun(), [True, False]), ValueError, r"mask is bool \[2\], expected bool \[3\]"),
    (lambda: fc.traced.reset(PLAIN, begun(), jnp.ones(3, jnp.int32)), ValueError, r"mask is int32 \[3\], expected"),
    (lambda: fc.rollout(PLAIN, POLICY, begun(2), 5), ValueError, r"the state is of \[2\] runs, expected one"),
    (lambda: fc.deliver({"action": jnp.zeros(3)}), ValueError, r"lack \['next.reward'.*pass the whole result"),
])  # fmt: skip
def test_misuse_is_named(call, error, says):
    with pytest.raises(error, match=says):
        call()


@pytest.mark.evening
def test_lanes_over_a_mesh_equal_the_same_lanes_on_one_device():
    """Runs in a process of its own, because the number of devices is fixed before JAX starts."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-W", "error", "-m", "tests.support.programs.mesh_run"]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["equal"]
