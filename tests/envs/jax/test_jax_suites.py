"""Each JAX suite's rollouts against a plain loop over its own functions; cuts, forks, compilations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import funcollect as fc
from funcollect.keys import Purpose
from funcollect.specs import disassemble
from tests.support.compare import assert_same, joined
from tests.support.envs.jax_counting import folded
from tests.support.envs.jax_suites import LANES, SUITES, suite_and_policy
from tests.support.running import SCALE, in_soak, scaled

# In CI of two buckets only: a suite compiles for many seconds, once for each.
CUTS = (1, 2, 7, 64, 200) if SCALE > 1 else (1, 2, 61, 64)


def assert_close(delivered, expected, what):
    """Integers and flags equal, floats to 1e-5."""
    delivered, expected = np.asarray(delivered), np.asarray(expected)
    assert delivered.shape == expected.shape, what
    if delivered.dtype.kind == "f":
        np.testing.assert_allclose(delivered, expected, rtol=1e-5, atol=1e-5, err_msg=str(what))
    else:
        np.testing.assert_array_equal(delivered, expected, err_msg=str(what))


class RawLane:
    """One lane of the raw suite, reset by hand, with the keys that the library promises."""

    def __init__(self, suite, start, step, key, lane):
        self.suite, self.start, self.step, self.key, self.lane = suite, start, step, key, lane
        self.episode, self.elapsed = -1, 0
        self.begin()

    def begin(self):
        self.episode, self.elapsed = self.episode + 1, 0
        key = folded(self.key, 0, Purpose.RESET, 0, self.lane, 0, self.episode)
        self.state, self.observation = self.start(key)

    def move(self, t, action):
        key = folded(self.key, 0, Purpose.DYNAMICS, 0, self.lane, 0, t)
        self.elapsed += 1
        self.state, self.observation, reward, terminated, truncated = self.step(key, self.state, action)
        return reward, bool(terminated), bool(truncated) or self.elapsed == self.suite.limit

    def synchronise(self, states):
        """From the library's state, so that rounding does not add up."""
        own = jax.tree.map(lambda leaf: leaf[self.lane], states)
        assert jax.tree.structure(own) == jax.tree.structure(self.state)
        self.state = own


def check_observation(env, batch, raw, *prefix):
    for leaf, part in zip(env.observation_leaves, disassemble(env.observation_space, raw.observation), strict=True):
        assert_close(batch[(*prefix, *leaf.path)][raw.lane], part, (*prefix, *leaf.path))
        assert part.dtype == leaf.dtype


# Those left out share the adapter of another one.
SHARED = ("old_gymnax", "pgx_one_player", "playground")
FEW = [name for name in SUITES if name not in SHARED]


@pytest.mark.parametrize("name", FEW + in_soak(SHARED))
def test_a_rollout_is_the_raw_suites_own(name):
    suite, policy = suite_and_policy(name)
    start, step = (jax.jit(each) for each in (suite.start, suite.step))
    state = fc.init(suite.env, policy, seed=7)
    raws = [RawLane(suite, start, step, jnp.asarray(state.key), lane) for lane in range(LANES)]
    seen = {"terminated": 0, "truncated": 0}
    for t in range(scaled(80)):
        states = state.env_state.current
        state, batch = fc.step(suite.env, policy, state)
        for raw in raws:
            check_observation(suite.env, batch, raw)
            raw.synchronise(states)
            reward, terminated, truncated = raw.move(t, jnp.asarray(batch["action"][raw.lane].numpy()))
            check_observation(suite.env, batch, raw, "next")
            assert_close(batch["next", "reward"][raw.lane].squeeze(), reward, "reward")
            flags = {"terminated": terminated, "truncated": truncated, "done": terminated or truncated}
            assert {key: batch["next", key][raw.lane].item() for key in flags} == flags
            assert batch["collector", "step"][raw.lane] == raw.elapsed - 1
            for kind in seen:
                seen[kind] += flags[kind]
            if flags["done"]:
                raw.begin()
    assert min(seen[kind] for kind in suite.ends) >= 1
    assert sum(seen.values()) >= 3


def run(suite, policy, lengths, seed):
    state, batches = fc.init(suite.env, policy, seed=seed), []
    for length in lengths:
        state, batch = fc.rollout(suite.env, policy, state, length)
        batches.append(batch)
    return state, joined(batches)


SLOW = ("playground", "brax", "jumanji", "navix")  # to compile for the lengths of two buckets


@pytest.mark.parametrize("name", [name for name in FEW if name not in SLOW] + in_soak(SLOW))
def test_cuts_change_nothing_and_nothing_compiles_twice(name):
    suite, policy = suite_and_policy(name)
    state, batch = run(suite, policy, CUTS, seed=1)
    assert batch["next", "done"].sum() >= 3
    traces = len(suite.traces)
    last, again = run(suite, policy, CUTS[::-1], seed=1)
    assert_same(batch, again)
    _, other = run(suite, policy, CUTS, seed=2)
    assert (other["action"] != batch["action"]).any()
    assert len(suite.traces) == traces
    for one, two in zip(jax.tree.leaves(state), jax.tree.leaves(last), strict=True):
        np.testing.assert_array_equal(one, two)

    twin = fc.fork(suite.env, state)
    batches = [fc.rollout(suite.env, policy, each, CUTS[-1])[1] for each in (state, twin, state)]
    assert_same(batches[0], batches[1])
    assert_same(batches[0], batches[2])
