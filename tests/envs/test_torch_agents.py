"""Agents in Torch: groups beside a raw loop of one lane, one policy for each group, on every route."""

from dataclasses import replace
from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from gymnasium import spaces

import funcollect as fc
from funcollect.envs import Transition, agents
from funcollect.keys import LaneKeys, Purpose, key_from_seed
from tests.envs.jax import test_jax_agents
from tests.envs.test_agents import POLICIES
from tests.support.agents import AGENTS, CLOCK, GROUPS, check_frames
from tests.support.cases import jax_weights, mlp
from tests.support.compare import assert_same, collect
from tests.support.running import in_soak

LENGTHS = (7, 1, 22)


def seen(time, ends):
    rows = time[:, None] + ends / 10
    groups = {"ant": torch.stack([rows[:, :2]] * 2, -1), "bee": torch.stack([rows[:, 2:]] * 3, -1)}
    return groups | {"state": time[:, None].float()}


class Field(fc.envs.TorchEnvBase):
    """Agents leave at times of their own, come back two steps later, and all leave at 12, or by time."""

    groups, state_space = GROUPS, CLOCK

    def reset(self, key, params, /):
        state = torch.zeros(len(key), dtype=torch.int64), 2 + (6 * key.uniform(3)).long()
        return state, self.observation_of(state, params)

    def observation_of(self, state, params, /):
        return seen(*state)

    def step(self, key, state, actions, params, /):
        time, ends = state[0] + 1, state[1]
        noise = key.uniform(1).float()
        rewards = {"ant": actions["ant"] + ends[:, :2] + noise, "bee": actions["bee"] + ends[:, 2:] + noise}
        over = (time[:, None] >= ends) & (time[:, None] < ends + 2) | (time[:, None] >= 12)
        by_time = over & (ends % 2 == 0)
        terminated, truncated = ({"ant": flag[:, :2], "bee": flag[:, 2:]} for flag in (over & ~by_time, by_time))
        info = {"ant": {"hit": actions["ant"] * 2}, "clock": time}
        return Transition((time, ends), seen(time, ends), rewards, terminated, truncated, info)


def keys(purpose, lane, number):
    return LaneKeys.of(key_from_seed(1), purpose, torch.tensor([lane]), torch.tensor([number]))


def by_agent(rows):
    return {name: rows[name[:3]][0, int(name[-1])] for name in AGENTS}


def raw_start(lane, episode):
    state, rows = Field.reset(Field(), keys(Purpose.RESET, lane, episode), None)
    return state, by_agent(rows)


def raw_step(lane, t, state, actions):
    by_group = {"ant": torch.stack([actions["ant_0"], actions["ant_1"]])[None], "bee": actions["bee_0"].view(1, 1)}
    after = Field.step(Field(), keys(Purpose.DYNAMICS, lane, t), state, by_group, None)
    flags = [by_agent(flag) for flag in (after.terminated, after.truncated)]
    ends = {name: tuple(flag[name] for flag in flags) for name in AGENTS}
    return after.env_state, by_agent(after.observation), by_agent(after.reward), ends


@pytest.mark.parametrize("kind", POLICIES)
def test_the_rows_are_those_of_a_raw_loop(kind):
    env = Field(num_envs=3)
    batch = collect(env, POLICIES[kind](env), *LENGTHS)
    ends = check_frames(env, batch, raw_start, raw_step)
    assert sum(ends.values()) > 3
    assert batch["next", "ant", "info", "hit"].equal(2 * batch["ant", "action"])
    assert batch["next", "info", "clock"].equal(batch["collector", "step"] + 1)
    assert batch["state"].equal(batch["collector", "step"][..., None].float())


@pytest.mark.evening
def test_actions_are_those_of_the_same_field_in_jax():
    """Noise is a function of lane, agent and step, whatever the environment is written in."""
    kinds = (Field, test_jax_agents.Field, test_jax_agents.made)
    batches = [collect(make(num_envs=3), fc.random_policy(make(num_envs=3)), *LENGTHS) for make in kinds]
    for name in GROUPS:
        assert torch.equal(batches[0][name, "action"], batches[1][name, "action"])
    assert_same(*batches[1:])


KINDS = ["recurrent", *in_soak(["torch", "jax", "mixed", "together"])]
ONE, WORKERS = fc.SyncDataCollector, fc.MultiSyncDataCollector


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("collector", [ONE, pytest.param(WORKERS, marks=pytest.mark.evening)])
def test_every_route_has_the_same_frames(kind, collector):
    env = Field(num_envs=3)
    policy = POLICIES[kind](env)
    whole = collect(env, policy, 20)
    assert_same(whole, collect(env, policy, 7, 13))
    state, rows = fc.init(env, policy, seed=1), []
    for _ in range(20):
        state, row = fc.step(env, policy, state)
        rows.append(row)
    assert_same(torch.stack([row.clone() for row in rows], 1), whole)
    make, options = partial(Field, num_envs=3), {"frames_per_batch": 30, "total_frames": 60, "seed": 1}
    make, options = (make, options) if collector is ONE else ([make], options | {"cat_results": "stack"})
    with collector(make, policy, **options) as run:
        got = torch.cat([each.clone() for each in run], -1)
    assert_same(got.reshape(3, 20), whole)


def test_resets_to_given_states():
    """Copies, and resets of some lanes, are among the checks of an environment, which pass below."""
    env = Field(num_envs=3)
    policy = POLICIES["torch"](env)
    state, _ = fc.rollout(env, policy, fc.init(env, policy, seed=1), 9)
    mask = torch.tensor([True, False, True])
    to = state.env_state._replace(own=(state.env_state.own[0] * 0 + 1, state.env_state.own[1]))
    _, batch = fc.rollout(env, policy, fc.reset(env, state, mask, to=to), 5)
    assert (batch["state"][:, 0, 0] == 1)[mask].all()
    gone = torch.cat([to.over[name].any(-2) for name in GROUPS], -1)
    assert torch.equal(torch.cat([batch[name, "mask"][:, 0] for name in GROUPS], -1)[mask], ~gone[mask])


def test_evaluations_single_lanes_and_every_check():
    env, policy = Field(num_envs=3), POLICIES["together"](Field())
    whole = fc.evaluate(env, policy, episodes=5, seed=0)
    assert len(whole) == 5
    assert whole.lengths.le(12).all()
    stays = [fc.evaluate(env, policy, episodes=5, seed=0, group=group) for group in GROUPS]
    assert len(stays[1]) > 5  # the bee comes back
    torch.testing.assert_close(sum(each.returns.sum() for each in stays), whole.returns.sum())
    batch = collect(Field(), POLICIES["mixed"](Field()), 5)
    assert batch["ant", "action"].shape == batch["ant", "action_log_prob"].shape == (5, 2)
    report = fc.testing.check_env(Field, num_envs=3, steps=60)
    assert {"groups", "reset_mask", "old_states", "fork", "save", "policy_memory"} <= {*report.passed}


def test_observations_of_states_in_jax():
    def observed(state, params):
        return test_jax_agents.seen(*state)

    env = test_jax_agents.made(observation_of=observed)
    policy = fc.random_policy(env)
    state, _ = fc.rollout(env, policy, fc.init(env, policy, seed=1), 15)
    to = state.env_state.current
    to = to._replace(own=(jnp.full_like(to.own[0], 3), to.own[1]))
    placed = fc.reset(env, state, torch.tensor([True, False, True]), to=to)
    _, batch = fc.rollout(env, policy, placed, 15)
    assert (batch["state"][:, 0, 0] == 3).tolist()[::2] == [True, True]


TOGETHER = {key: fc.envs.Group(one.names, one.observation_space, one.action_space) for key, one in GROUPS.items()}


class OneFlag(Field):
    """Agents that share their flags, and those of a group their reward."""

    groups = TOGETHER

    def step(self, key, state, actions, params, /):
        after = super().step(key, state, actions, params)
        over = after.env_state[0] >= 5
        reward = after.reward | {"ant": after.env_state[0]}
        return after._replace(reward=reward, terminated=over, truncated=over & False)


def test_flags_and_rewards_of_all_agents():
    env = OneFlag(num_envs=3)
    batch = collect(env, fc.random_policy(env), 12)
    assert "mask" not in batch["ant"]
    time = batch["collector", "step"] + 1
    assert batch["next", "ant", "reward"].equal(time[..., None, None].expand(3, 12, 2, 1).float())
    for name, group in GROUPS.items():
        assert batch["next", name, "terminated"].equal((time == 5)[..., None, None].expand(3, 12, group.n, 1))
        assert not batch[name, "terminated"].any()
    assert batch["next", "done"].equal((time == 5)[..., None])


def broken(**changes):
    def step(self, key, state, actions, params, /):
        after = Field.step(self, key, state, actions, params)
        return after._replace(**{name: change(getattr(after, name)) for name, change in changes.items()})

    return lambda: collect(type("Broken", (Field,), {"step": step})(num_envs=3), fc.random_policy(Field()), 3)


class NoKey(Field):
    def step(self, state, actions):
        return None


@pytest.mark.parametrize(("do", "error", "says"), [
    (lambda: type("Wrong", (Field,), {"groups": {"ant": 3}})(), TypeError, "a group is 3"),
    (lambda: NoKey(), TypeError, "step .* a function of a key"),
    (lambda: collect(type("Wrong", (Field,), {"state_space": spaces.Box(0, 9, (2,))})(), fc.random_policy(Field()), 3),
     fc.EnvError, r"'state' .* expected torch.float32 \(1, 2\)"),
    (broken(observation=lambda rows: {"ant": rows["ant"]}), fc.EnvError, r"step of Broken .*'ant'\], expected a dict"),
    (broken(observation=lambda rows: rows | {"ant": rows["ant"].numpy()}), fc.EnvError, "holds an array .* tensors"),
    (broken(reward=lambda rows: rows["ant"]), fc.EnvError, "reward that step of Broken .* expected a dict"),
    (broken(reward=lambda rows: rows | {"ant": rows["bee"]}), fc.EnvError,
     r"reward of 'ant' that step of Broken returned is float32 \[3, 1\], expected \[3, 2\], a number for each"),
    (broken(terminated=lambda flags: flags | {"bee": flags["bee"] + 0.0}), fc.EnvError, "flag of 'bee' .* bool"),
    (broken(truncated=lambda flags: False), fc.EnvError, r"flag of 'ant' .* is bool \[\], expected \[3, 2\]"),
    (lambda: fc.init(TwoKinds(), fc.torch_policy(mlp(3, 2), head=fc.heads.normal), seed=0), ValueError,
     r"kinds.*by_group"),
])  # fmt: skip
def test_errors(do, error, says):
    with pytest.raises(error, match=says):
        do()


def test_gradients_pass_through_the_rewards_of_agents():
    env = Field(num_envs=2)
    state = fc.init(env, fc.random_policy(env), seed=1)
    action = torch.zeros(2, 3, dtype=torch.int64)
    key = LaneKeys.of(key_from_seed(1), Purpose.DYNAMICS, torch.arange(2), 0)
    weight = torch.ones((), requires_grad=True)

    class Weighted(Field):
        def step(self, *args):
            after = super().step(*args)
            return after._replace(reward={name: rows * weight for name, rows in after.reward.items()})

    Weighted(num_envs=2).step(key, state.env_state, action, None).reward.sum().backward()
    assert weight.grad > 0


def test_the_actions_of_groups_are_in_their_order():
    wolves = fc.envs.Group(("one", "two"), CLOCK, spaces.Discrete(5))
    spec = agents.action_spec({"wolf": wolves, "hare": GROUPS["bee"]}, ("one", "two", "bee_0"))
    assert spec.categories == (5, 5, 3)


TWO_KINDS = {
    "ant": GROUPS["ant"],
    "bee": fc.envs.Group(("bee_0",), spaces.Box(-9, 99, (3,)), spaces.Box(-2, 2, (1,)), comes_and_goes=True),
}


class TwoKinds(Field):
    groups = TWO_KINDS

    def step(self, key, state, actions, params, /):
        assert actions["ant"].dtype == torch.int64
        return super().step(key, state, actions | {"bee": actions["bee"][..., 0]}, params)


def in_jax_of_two_kinds():
    def step(key, state, actions, params):
        assert jnp.issubdtype(actions["ant"].dtype, jnp.integer)
        return test_jax_agents.step(key, state, actions | {"bee": actions["bee"][..., 0]}, params)

    kwargs = {"groups": TWO_KINDS, "state_space": CLOCK, "info_keys": ["ant.hit", "clock"]}
    return fc.envs.from_functions(test_jax_agents.reset, step, num_envs=3, name="field", **kwargs)


def two_policies(env, kind):
    bees = fc.torch_policy(mlp(3, 2), head=fc.heads.tanh_normal)
    if kind == "jax":
        bees = fc.jax_policy(lambda params, x: x @ params, jax_weights(3, 2, 0), head=fc.heads.tanh_normal)
    return fc.by_group({"ant": POLICIES[kind](env).policies["ant"], "bee": bees})


IN_TORCH = partial(TwoKinds, num_envs=3)
CASES = [(IN_TORCH, "random"), (IN_TORCH, "torch"), (in_jax_of_two_kinds, "torch")]
CASES += in_soak([(IN_TORCH, "jax"), (in_jax_of_two_kinds, "random"), (in_jax_of_two_kinds, "jax")])


@pytest.mark.parametrize(("make", "kind"), CASES)
def test_groups_of_discrete_and_of_floating_actions(make, kind):
    env = make()
    policy = fc.random_policy(env) if kind == "random" else two_policies(env, kind)
    batch = collect(env, policy, 15, 15, random_steps=4)
    ants, bees = batch["ant", "action"], batch["bee", "action"]
    assert (ants.dtype, bees.dtype) == (torch.int64, torch.float32)
    assert (ants.shape, bees.shape) == ((3, 30, 2), (3, 30, 1, 1))
    assert batch["next", "ant", "info", "hit"].equal((2 * ants).to(batch["next", "ant", "info", "hit"].dtype))
    assert {*ants.unique().tolist()} == {0, 1, 2}
    assert bees.abs().max() <= 2
    assert len(bees.unique()) > bees.numel() // 2
    for name, part in policy.policies.items() if kind == "torch" else ():
        rows = fc.agents_as_rows(batch[:, 4:], name)
        again, there = fc.evaluate_actions(part, None, rows)["action_log_prob"], rows["mask"]
        torch.testing.assert_close(again[there], rows["action_log_prob"][there], rtol=1e-4, atol=1e-5)
    if kind != "random":
        assert (batch["bee", "action_log_prob"][:, :4] == -np.log(4).astype(np.float32)).all()
    if make is IN_TORCH:
        assert "groups" in fc.testing.check_env(make(), steps=30).passed


def test_a_check_finds_agents_that_end_before_their_lane_without_a_mask():
    early = {name: replace(group, comes_and_goes=False) for name, group in GROUPS.items()}
    made = type("Early", (Field,), {"groups": early})
    with pytest.raises(fc.CheckError, match=r"fails 'groups'.*False before the lane's end, as comes_and_goes is False"):
        fc.testing.check_env(made, num_envs=3, steps=30)
