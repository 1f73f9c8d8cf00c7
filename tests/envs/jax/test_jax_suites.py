"""Each JAX suite's rollouts against a plain loop over its own functions, for which nothing is compiled twice."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jumanji import wrappers
from jumanji.environments import CVRP, Cleaner, GraphColoring, JobShop, Knapsack, LevelBasedForaging, Snake
from jumanji.environments.logic.graph_coloring.generator import RandomGenerator as Graphs
from jumanji.environments.packing.job_shop.generator import RandomGenerator as Jobs
from jumanji.environments.packing.knapsack.generator import RandomGenerator as Items
from jumanji.environments.routing.cvrp.generator import UniformGenerator as Cities

import funcollect as fc
from funcollect.keys import Purpose
from funcollect.specs import disassemble
from tests.support.envs.jax_counting import folded
from tests.support.envs.jax_suites import LANES, SUITES, suite_and_policy
from tests.support.running import in_soak, scaled


def assert_close(delivered, expected, what):
    """Integers and flags equal, floats to 1e-5."""
    delivered, expected = np.asarray(delivered), np.asarray(expected)
    assert delivered.shape == expected.shape, what
    if delivered.dtype.kind == "f":
        np.testing.assert_allclose(delivered, expected, rtol=1e-5, atol=1e-5, err_msg=str(what))
    else:
        np.testing.assert_array_equal(delivered, expected, err_msg=str(what))


@jax.jit
def of_lane(states, lane):
    return jax.tree.map(lambda leaf: leaf[lane], states)


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
        own = of_lane(states, self.lane)
        assert jax.tree.structure(own) == jax.tree.structure(self.state)
        self.state = own


def check_observation(env, batch, raw, *prefix):
    for leaf, part in zip(env.observation_leaves, disassemble(env.observation_space, raw.observation), strict=True):
        assert_close(batch[(*prefix, *leaf.path)][raw.lane], part, (*prefix, *leaf.path))
        assert part.dtype == leaf.dtype


SHARED = ("old_gymnax", "pgx_one_player", "playground", "brax_pendulum", "functions")  # another one has the adapter
LONG = [pytest.param("craftax", marks=[pytest.mark.needs("craftax"), pytest.mark.evening])]  # to compile
FEW = [name for name in SUITES if name not in (*SHARED, "craftax")]


@pytest.mark.parametrize("name", FEW + in_soak(SHARED) + LONG)
def test_a_rollout_is_the_raw_suites_own(name):
    suite, policy = suite_and_policy(name)
    start, step = (jax.jit(each) for each in (suite.start, suite.step))
    state = fc.init(suite.env, policy, seed=7)
    raws = [RawLane(suite, start, step, jnp.asarray(state.key), lane) for lane in range(LANES)]
    seen = {"terminated": 0, "truncated": 0}
    for t in range(scaled(80)):
        states, traces = state.env_state.current, len(suite.traces)
        state, batch = fc.step(suite.env, policy, state)
        assert t < 2 or len(suite.traces) == traces
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


# Numbers of jumanji's environments as parameters: what environments made with other numbers do, bit for bit.
def knapsack(total_budget=3.0):
    return Knapsack(Items(num_items=8, total_budget=total_budget))


def cvrp(max_capacity=12, max_demand=4):
    return CVRP(Cities(num_nodes=6, max_capacity=max_capacity, max_demand=max_demand))


def job_shop(max_op_duration=4):
    return JobShop(Jobs(num_jobs=3, num_machines=2, max_num_ops=3, max_op_duration=max_op_duration))


def graph(edge_probability=0.8):
    return GraphColoring(Graphs(num_nodes=6, edge_probability=edge_probability))


def snake(time_limit=400):
    return Snake(5, 5, time_limit=time_limit)


CASES = [(knapsack, {"total_budget": 1.5}), *in_soak([(snake, {"time_limit": 1})])]
CASES += in_soak([(cvrp, {"max_capacity": 8, "max_demand": 7}), (job_shop, {"max_op_duration": 9})])
CASES += in_soak([(graph, {"edge_probability": 0.3}), (lambda **own: Cleaner(**own), {"penalty_per_timestep": 0.25})])


@pytest.mark.parametrize(("make", "other"), CASES)
def test_it_is_jumanji_with_another_generator(make, other):
    env, by_hand = fc.envs.from_jumanji(make(), params=[*other]), make(**other)
    assert env.default_params.keys() == other.keys()
    params = {name: jnp.asarray(value) for name, value in other.items()}
    step, their_step = jax.jit(env.step), jax.jit(by_hand.step)
    key, draw = jnp.array([3, 4], jnp.uint32), np.random.default_rng(0)
    state, observation = jax.jit(env.reset)(key, params)
    wanted, timestep = jax.jit(by_hand.reset)(key)
    usual, differs = jax.jit(make().reset)(key)[0], False
    for _ in range(6):
        jax.tree.map(np.testing.assert_array_equal, state, wanted)
        for name, value in observation.items():
            np.testing.assert_array_equal(value, getattr(timestep.observation, name))
        action = legal(timestep.observation.action_mask, draw).reshape(env.action_spec.shape)
        moved = step(key, state, action, params)
        wanted, timestep = their_step(wanted, action)
        otherwise = step(key, usual, action, env.default_params)
        usual, state, observation = otherwise.env_state, moved.env_state, moved.observation
        np.testing.assert_array_equal(moved.reward, timestep.reward)
        assert bool(moved.terminated | moved.truncated) == bool(timestep.last())
        alike = map(np.array_equal, *map(jax.tree.leaves, ((usual, otherwise.reward), (wanted, timestep.reward))))
        differs |= bool(timestep.last()) or not all(alike)
    assert differs  # so that the numbers matter


def legal(mask, draw):
    """A legal action for each row of a mask, at random; 0 if there is none."""
    rows = np.atleast_2d(np.asarray(mask))
    return np.array([draw.choice(np.flatnonzero(row)) if row.any() else 0 for row in rows], np.int32)


def test_a_shorter_time_limit_under_a_wrapper():
    env, key = fc.envs.from_jumanji(wrappers.Wrapper(Snake(5, 5)), params=["time_limit"]), jnp.array([3, 4], jnp.uint32)
    params, ends = {"time_limit": jnp.int32(2)}, []
    (state, observation), step = jax.jit(env.reset)(key, params), jax.jit(env.step)
    for _ in range(2):
        moved = step(key, state, observation["action_mask"].argmax(), params)
        state, observation = moved.env_state, moved.observation
        ends.append(bool(moved.terminated | moved.truncated))
    assert ends == [False, True]


@pytest.mark.parametrize(("env", "name", "message"), [
    (Snake(5, 5), "num_rows", "params has 'num_rows', which cannot change during a run of Snake.*for each value"),
    (knapsack(), "num_items", "params has 'num_items', which cannot change"),
    (knapsack(), "total_bugdet", r"params has 'total_bugdet', expected .* such as \['num_items', 'total_bu"),
    (LevelBasedForaging(), "fov", r"params has 'fov', which cannot .* \(neither reset nor step reads it\)"),
    (knapsack(), "generator", "params has 'generator', expected numbers"),
])  # fmt: skip
def test_numbers_that_cannot_change(env, name, message):
    with pytest.raises(ValueError, match=message):
        fc.envs.from_jumanji(env, params=[name])


def test_numbers_that_differ_between_environment_and_generator():
    env = knapsack()
    assert fc.envs.from_jumanji(env).default_params is None
    env.total_budget = 5.0
    with pytest.raises(ValueError, match=r"which is 5.0 in Knapsack.*, but 3.0 in its generator"):
        fc.envs.from_jumanji(env, params=["total_budget"])
