"""`check_env` and `check_collector` pass what is good, and each check catches the faults that it claims to catch."""

from dataclasses import replace

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import funcollect as fc
from funcollect.core import api
from funcollect.core.simulators import SimulatorHandle
from funcollect.testing import ENV_CHECKS, check_env
from funcollect.testing.trials import Trial
from tests.envs.jax.test_jax_agents import made as field
from tests.envs.test_agents import Leaving
from tests.envs.test_agents import made as leaving
from tests.support.cases import mlp
from tests.support.check_collector import (
    COLLECTOR_CHECKS,
    check_collector,
    expect_counters,
    expect_flags,
    expect_layout,
)
from tests.support.envs.jax_suites import functions_suite
from tests.support.envs.own_envs import ForgetsInAFile, HostWalk
from tests.support.faulty import faulty_envs as faulty
from tests.support.faulty.faulty_envs import TorchWalk, Walk, over, through
from tests.support.running import in_soak, scaled

NAMES = [check.__name__ for check in ENV_CHECKS]


class Structured(Walk):
    observation_space = spaces.Dict(
        {
            "place": faulty.BOX,
            "clock": spaces.Tuple((spaces.Discrete(20, start=-1), spaces.MultiBinary(2))),
            "far": spaces.MultiDiscrete([3, 2], start=[1, 0]),
        }
    )
    action_space = spaces.Box(-1, 1, (2,), np.float64)

    def seen(self):
        far = abs(self.place) > 0.5
        return {"place": super().seen(), "clock": (self.time - 1, far.astype(np.int8)), "far": far + np.array([1, 0])}


class Stays(Leaving):
    def step(self, actions):
        answer = super().step(actions)
        self.agents = list(self.possible_agents)
        return answer


def vector():
    return SyncVectorEnv([Walk] * 3, autoreset_mode=AutoresetMode.DISABLED)


NO_OBJECTS = {"own_resets"}  # for each lane
TRACED = NO_OBJECTS | {"policy_memory"}  # it looks into the policy's steps

ATARI = {"num_envs": 2, "steps": 12, "frame_skip": 2, "noop_max": 3}

# One row per adapter and kind of source; a new adapter adds its own. What to check, and which checks need not apply.
GOOD = {
    "gymnasium single": (lambda: "CartPole-v1", {}, {"reset_mask", "lanes_alone"}),
    "gymnasium batch": (lambda: "CartPole-v1", {"num_envs": 3}, set()),
    "gymnasium list": (lambda: [Walk, Walk], {}, {"lanes_alone"}),
    "gymnasium instance": (lambda: gymnasium.make("CartPole-v1"), {}, {"reset_mask", "lanes_alone"}),
    "gymnasium VectorEnv": (vector, {}, NO_OBJECTS | {"lanes_alone"}),
    "gymnasium Dict space": (over(Structured), {}, {"lanes_alone"}),
    "gymnasium same starts": (lambda: "FrozenLake-v1", {"num_envs": 2}, {"another_seed"}),
    "mujoco": (lambda: "HalfCheetah-v5", {"num_envs": 2, "max_episode_steps": 20}, set()),
    "box2d": (lambda: "LunarLander-v3", {"num_envs": 2, "max_episode_steps": 20}, set()),
    "torch": (lambda: "torch/CartPole-v1", {"num_envs": 3}, NO_OBJECTS),
    "torch without ends": (lambda: "torch/Pendulum-v1", {"num_envs": 2}, NO_OBJECTS | {"terminal"}),
    "torch single": (lambda: TorchWalk(), {}, NO_OBJECTS | {"reset_mask", "lanes_alone"}),
    "envpool": (lambda: "envpool/CartPole-v1", {"num_envs": 3}, NO_OBJECTS | {"fork", "save", "lanes_alone"}),
    "atari": (lambda: "ale/Breakout", ATARI, {"another_seed", "lanes_alone", "terminal"}),
    "jax": (lambda: "gymnax/CartPole-v1", {"num_envs": 2}, TRACED),
    "jax single": (lambda: "gymnax/Catch-bsuite", {}, TRACED | {"reset_mask", "lanes_alone"}),
    "jax, cached resets": (lambda: "gymnax/Catch-bsuite", {"num_envs": 3, "starts": "cached"}, TRACED),
    "jax game of two": (lambda: "pgx/tic_tac_toe", {"num_envs": 2}, TRACED | {"another_seed"}),
    "jax functions": (lambda: functions_suite().env, {}, TRACED | {"lanes_alone"}),
    "processes": (lambda: "CartPole-v1", {"num_envs": 2, "num_workers": 1}, set()),
    "seeded by lane": (lambda: replace(over(Walk)(), seeding="lane"), {}, {"lanes_alone", "fork", "save"}),
    "seeded by run": (lambda: replace(over(Walk)(), seeding="run"), {}, {"lanes_alone", "fork", "save"}),
    "agents": (lambda: leaving(), {}, NO_OBJECTS | {"lanes_alone"}),
    "agents in JAX": (lambda: field(), {}, TRACED | {"lanes_alone"}),
    "not to be forked": (lambda: replace(over(Walk)(), forking="none"), {}, {"lanes_alone", "fork", "save"}),
}


# "jax" and the page "Your own environment" are JAX environments, too; others differ from one here by what they hold.
SLOW = ("atari", "jax single", "jax functions", "jax game of two", "jax, cached resets", "agents in JAX")
SLOW += ("box2d", "gymnasium list", "gymnasium instance", "gymnasium same starts", "torch without ends")


@pytest.mark.parametrize("name", [name for name in GOOD if name not in SLOW] + in_soak(SLOW))
def test_a_good_environment_passes_every_check_that_applies(name, monkeypatch):
    good = api.rollout

    def rollout(*args, **kwargs):
        state, batch = good(*args, **kwargs)
        rows = batch.unsqueeze(0) if batch.ndim == 1 else batch
        expect_layout(batch)
        expect_flags(rows)
        expect_counters(rows)
        return state, batch

    monkeypatch.setattr(api, "rollout", rollout)
    make, kwargs, idle = GOOD[name]
    report = check_env(make(), **({"steps": scaled(60)} | kwargs))
    assert [result.name for result in report.results] == NAMES
    idle |= set() if "agents" in name else {"groups"}
    assert {*NAMES} - {*report.passed} <= idle, str(report)


# check, environment, and words of the message
FAULTS = [
    ("describes", lambda: replace(over(Walk)(), seeding="sometimes"), r"seeding: .*'episode'.*got 'sometimes'"),
    ("describes", lambda: replace(over(Walk)(), forking="copied"), r"forking: .*'replay'.*got 'copied'"),
    ("describes", lambda: replace(functions_suite().env, starts="Fresh"), r"starts: .*'fresh'.*got 'Fresh'"),
    ("describes", lambda: replace(over(Walk)(), observation_leaves=()), r"observation_leaves: .*\(2,\).*got \[\]"),
    ("runs", lambda: faulty.BranchesInJax(3), r"(?s)TracerBoolConversionError: .*; step of .* write jax.numpy.where"),
    ("observations", over(faulty.LeavesItsSpace), r"lane \d, step \d+, next.observation: expected a value in Box"),
    ("observations", over(faulty.SeesNothing), r"next.observation: expected a value in Box.*nan"),
    ("rewards", over(faulty.PaysInfinitely), r"lane \d, step 5, next.reward: expected a finite number, got \[inf\]"),
    ("groups", lambda: fc.envs.from_pettingzoo(Stays, num_envs=2), r"lane \d, step \d+, (next.)?ant.mask: .*is back"),
    ("chained", through(faulty.WritesOtherRows), r"lane \d, step \d+, observation: .*next observation of the row"),
    ("generators", over(faulty.DrawsFromNumPy), r"NumPy's global generator: .*moved by rollout.*self.np_random"),
    ("generators", over(faulty.DrawsFromPython), r"Python's global generator: .*moved by init"),
    ("same_seed", over(faulty.SeedsItself), r"the second run, lane 0, step 0, next.observation.*seed=0"),
    ("another_seed", over(faulty.IgnoresItsSeed), r"seed=1 than with seed=0.*differ from episode to episode"),
    ("cuts", through(faulty.ReplacesItsRows), r"the run cut into \[1, 20, 1, 20\], lane 0, step 1, next.observation"),
    ("own_resets", over(faulty.HidesItsEnds), r"lane 0, step 5, reset: expected no call of reset .*max_episode_steps"),
    ("own_resets", lambda: fc.make_env(faulty.HidesItsEnds, num_envs=3, num_workers=2), "lane 0, step 5"),
    ("own_resets", lambda: fc.make_env(faulty.HidesItsEnds, num_envs=3, max_episode_steps=9), "lane 0, step 5"),
    ("resets", over(faulty.RemembersEpisodes), r"where episode 0 begins: .*begun directly.*reset\(seed="),
    ("resets", through(faulty.ForgetsToWrite, seeding="lane"), r"the root after an end: .*the terminal one still"),
    ("terminal", over(faulty.ResetsItself), r"next where an episode is \w+ated: .*without its own autoreset"),
    ("terminal", over(faulty.ResetsItselfAnywhere), r"at \d+ of \d+ such ends one like those that episodes begin with"),
    ("reset_mask", through(faulty.ResetsASlice), r"lane 1, step 20, observation after a reset of lanes \[0, 2\]"),
    ("reset_mask", through(faulty.DisturbsAnother), r"after a reset of lanes \[0, 2\], lane 1, .*no lane's step"),
    ("lanes_alone", lambda: faulty.MixesItsLanes(3), r"lane 0 of the batch.*by itself.*depend on that lane only"),
    ("policy_memory", through(faulty.WritesItsAction), r"lane \d, step \d+, action: .*copy the action"),
    ("policy_memory", through(faulty.LivesInItsRows), r"writes zeros over each observation, lane 0, step 0"),
    ("batch_memory", through(faulty.KeepsItsAction, seeding="run"), r"whose batches were zeroed, lane \d"),
    ("old_states", lambda: faulty.MovesInPlace(3), r"the second rollout from one state.*write nothing in place"),
    ("fork", over(faulty.WearsOut), r"ReplayError: lane \d.*another observation"),
    ("fork", over(faulty.KeepsItsClock), r"the fork, lane \d, step \d+, .*reset sets back all that a step changes"),
    ("save", lambda: HostWalk(ForgetsInAFile), r"ReplayError: lane \d.*another observation"),
    ("close", over(faulty.CannotClose), r"lane 0: close raised OSError"),
]


@pytest.mark.parametrize(("check", "make", "words"), FAULTS, ids=[f"{check} {words:.20}" for check, _, words in FAULTS])
def test_a_planted_fault_is_caught_by_its_check(check, make, words):
    seed = int(check == "reset_mask")  # with 0, lanes 0 and 2 end an episode at once
    with pytest.raises(fc.CheckError, match=words) as caught:
        check_env(make(), steps=60, seed=seed)
    assert caught.value.check == check, str(caught.value)
    report = caught.value.report
    assert isinstance(report, fc.testing.Report)
    assert [result.name for result in report.results] == NAMES[: NAMES.index(check)]
    assert str(caught.value).count(repr(check)) == 1


def test_simulators_that_can_be_used_twice_from_one_state(monkeypatch):
    monkeypatch.setattr(SimulatorHandle, "check", lambda self, *, stale=False: None)
    with pytest.raises(fc.CheckError, match="a state used twice: expected StaleStateError") as caught:
        check_env(over(Walk)(), steps=60)
    assert caught.value.check == "old_states"


def test_every_check_has_a_planted_fault():
    assert {check for check, *_ in FAULTS} == {*NAMES}


def test_the_report_reads_as_a_table():
    report = check_env(TorchWalk(), steps=20)
    lines = str(report).splitlines()
    assert lines[0] == "TorchWalk()"
    assert len(lines) == len(NAMES) + 1
    seeds = "  passed  same_seed           The same seed gives the same bits twice"
    assert any(line.startswith(seeds) for line in lines)
    assert "  n/a     reset_mask          there is one lane: pass num_envs=3" in lines


THRICE = "3 in each step, one for each player: if there is one player, sum them"
SIX = "9 of 9 terminations come after 6 steps, none later: if that is a limit, return truncated"


def test_a_time_limit_that_is_called_a_termination_and_a_reward_of_several_numbers_are_remarked_on():
    for make, name, remark in (
        (over(faulty.TerminatesAtItsLimit), "runs", SIX),
        (over(Walk), "runs", ""),
        (lambda: faulty.PaysThrice(2), "rewards", THRICE),
    ):
        env = make()
        policy, steps = fc.random_policy(env), 20 if remark else 60
        check = next(check for check in ENV_CHECKS if check.__name__ == name)
        assert (check(Trial(env=env, policy=policy, steps=steps, seed=0)) or "") == remark


def test_bad_arguments_and_the_fewest_steps_without_a_trace_in_the_global_generators():
    with pytest.raises(TypeError, match=r"cannot be copied: pass its class .*, check_env\(Walk, num_envs=3\)"):
        check_env(Walk(), steps=10)
    with pytest.raises(ValueError, match="steps is 5, expected at least 6"):
        check_env("CartPole-v1", steps=5)
    before = torch.get_rng_state()
    assert check_env("CartPole-v1", steps=6, num_envs=2).passed
    assert torch.equal(torch.get_rng_state(), before)


def test_the_lanes_compared_may_be_given():
    report = check_env(over(Walk)(), steps=30, single=fc.envs.from_gymnasium(Walk, num_envs=1))
    assert "lanes_alone" in report.passed
    with pytest.raises(fc.CheckError, match="lane 0 of the batch"):
        check_env(over(Walk)(), steps=30, single=fc.envs.from_gymnasium(faulty.WearsOut, num_envs=1))


def policy():
    return fc.torch_policy(mlp(2, 3), head=fc.heads.categorical)


# `check_collector` on the collector of this process; `tests/collectors/workers` does so for the others. One per layout.
COLLECTORS = {
    "single": {"create_env_fn": Walk},
    "batch": {"create_env_fn": Walk, "create_env_kwargs": {"num_envs": 3}},
    "torch": {"create_env_fn": "torch/CartPole-v1", "frames_per_batch": 30},
    "a limit and random frames": {"create_env_fn": Walk, "max_frames_per_traj": 5, "init_random_frames": 10},
}


@pytest.mark.parametrize("name", COLLECTORS)
def test_a_good_collector_passes_every_check(name):
    kwargs = {"frames_per_batch": 40, **COLLECTORS[name]}
    if kwargs["create_env_fn"] is Walk:
        kwargs["policy"] = policy()
    report = check_collector(fc.SyncDataCollector, batches=scaled(3), **kwargs)
    assert report.passed == tuple(check.__name__ for check in COLLECTOR_CHECKS)


class NumbersNoTrajectories(fc.SyncDataCollector):
    def __next__(self):
        batch = super().__next__()
        batch["collector", "traj_ids"].zero_()
        return batch


def test_a_fault_of_a_collector_is_caught():
    with pytest.raises(fc.CheckError, match="fails 'trajectories'"):
        check_collector(NumbersNoTrajectories, create_env_fn=Walk, policy=policy(), frames_per_batch=40)
