"""Numbers of jumanji's environments as parameters: what environments made with other numbers do, bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jumanji import wrappers
from jumanji.environments import CVRP, Cleaner, GraphColoring, JobShop, Knapsack, LevelBasedForaging, Snake
from jumanji.environments.logic.graph_coloring.generator import RandomGenerator as Graphs
from jumanji.environments.packing.job_shop.generator import RandomGenerator as Jobs
from jumanji.environments.packing.knapsack.generator import RandomGenerator as Items
from jumanji.environments.routing.cvrp.generator import UniformGenerator as Cities

import funcollect as fc
from tests.support.running import in_soak


def knapsack(total_budget=3.0):
    return Knapsack(Items(num_items=8, total_budget=total_budget))


def cvrp(max_capacity=12, max_demand=4):
    return CVRP(Cities(num_nodes=6, max_capacity=max_capacity, max_demand=max_demand))


def job_shop(max_op_duration=4):
    return JobShop(Jobs(num_jobs=3, num_machines=2, max_num_ops=3, max_op_duration=max_op_duration))


def graph(edge_probability=0.8):
    return GraphColoring(Graphs(num_nodes=6, edge_probability=edge_probability))


CASES = [
    (knapsack, {"total_budget": 1.5}),
    (lambda time_limit=400: Snake(5, 5, time_limit=time_limit), {"time_limit": 1}),
]
CASES += in_soak(
    [
        (cvrp, {"max_capacity": 8, "max_demand": 7}),
        (job_shop, {"max_op_duration": 9}),
        (graph, {"edge_probability": 0.3}),
        (lambda **own: Cleaner(**own), {"penalty_per_timestep": 0.25}),
    ]
)


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
        usual = step(key, usual, action, env.default_params).env_state
        state, observation = moved.env_state, moved.observation
        np.testing.assert_array_equal(moved.reward, timestep.reward)
        assert bool(moved.terminated | moved.truncated) == bool(timestep.last())
        differs |= bool(timestep.last()) or not all(map(np.array_equal, *map(jax.tree.leaves, (usual, wanted))))
    assert differs  # so that the numbers matter


def legal(mask, draw):
    """A legal action for each row of a mask, at random; 0 if there is none."""
    rows = np.atleast_2d(np.asarray(mask))
    return np.array([draw.choice(np.flatnonzero(row)) if row.any() else 0 for row in rows], np.int32)


def test_lanes_have_budgets_of_their_own():
    budgets = [1.0, 2.5]
    env = fc.envs.from_jumanji(knapsack(), num_envs=2, params=["total_budget"], param_keys=["total_budget"])
    policy = fc.random_policy(env)
    state = fc.set_env_params(env, fc.init(env, policy, seed=0), {"total_budget": jnp.array(budgets)})
    _, batch = fc.rollout(env, policy, fc.reset(env, state), 12)
    assert batch["env_params", "total_budget"][:, 0].tolist() == budgets
    for lane, budget in enumerate(budgets):
        alone = fc.envs.from_jumanji(knapsack(budget), num_envs=2)
        _, wanted = fc.rollout(alone, policy, fc.reset(alone, fc.init(alone, policy, seed=0)), 12)
        for name in ("weights", "packed_items", "action_mask", ("next", "reward"), ("next", "done"), "action"):
            assert torch.equal(batch[name][lane], wanted[name][lane]), name


def test_a_shorter_time_limit_under_a_wrapper():
    env = fc.envs.from_jumanji(wrappers.Wrapper(Snake(5, 5)), num_envs=2, params=["time_limit"])
    policy = fc.random_policy(env)
    state = fc.set_env_params(env, fc.init(env, policy, seed=0), {"time_limit": 2}, at_once=True)
    _, batch = fc.rollout(env, policy, state, 8)
    assert batch["collector", "step"].max() == 1


@pytest.mark.parametrize(
    ("env", "name", "message"),
    [
        (Snake(5, 5), "num_rows", "params has 'num_rows', which cannot change during a run of Snake.*for each value"),
        (knapsack(), "num_items", "params has 'num_items', which cannot change"),
        (knapsack(), "total_bugdet", r"params has 'total_bugdet', expected .* such as \['num_items', 'total_bu"),
        (LevelBasedForaging(), "fov", r"params has 'fov', which cannot .* \(neither reset nor step reads it\)"),
        (knapsack(), "generator", "params has 'generator', expected numbers"),
    ],
)
def test_numbers_that_cannot_change(env, name, message):
    with pytest.raises(ValueError, match=message):
        fc.envs.from_jumanji(env, params=[name])


def test_numbers_that_differ_between_environment_and_generator():
    env = knapsack()
    env.total_budget = 5.0
    with pytest.raises(ValueError, match=r"which is 5.0 in Knapsack.*, but 3.0 in its generator"):
        fc.envs.from_jumanji(env, params=["total_budget"])


def test_environments_without_params_have_none():
    assert fc.envs.from_jumanji(knapsack()).default_params is None
