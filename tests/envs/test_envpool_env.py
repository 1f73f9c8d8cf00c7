"""EnvPool against a plain loop over it: the same seeds and actions, lanes that are done reset by their indices."""

import random
import sys
from functools import partial

import envpool
import jax
import numpy as np
import pytest
import torch

import funcollect as fc
from funcollect.envs.base import import_extra
from tests.support.compare import assert_same, collect, fresh, joined
from tests.support.misuse import refused, runs, table
from tests.support.plain import check_lanes
from tests.support.running import SCALE, in_soak, scaled

CASES = {  # a limit on episodes, the length of a run
    "CartPole-v1": (25, 120), "Pong-v5": (20, 50), "HalfCheetah-v4": (30, 70), "CheetahRun-v1": (30, 70),
    "FrozenLake-v1": (5, 60),
}  # fmt: skip
INFOS = ("elapsed_step", "lives")


def make(name, num_envs=3, **kwargs):
    return fc.make_env(f"envpool/{name}", num_envs=num_envs, max_episode_steps=CASES[name][0], **kwargs)


class OneLane:
    """A pool of one lane, as an environment, which is seeded once."""

    def __init__(self, name):
        self.name = name

    def reset(self, seed):
        if seed is not None:
            limits = {"num_threads": 1, "max_episode_steps": CASES[self.name][0]}
            self.pool = envpool.make_gymnasium(self.name, num_envs=1, seed=[seed % 2**31], **limits)
        return self.first(self.pool.reset()[0]), {}

    def first(self, rows):
        rows = jax.tree.map(lambda leaf: leaf[0].astype(np.int64) if leaf.dtype == np.int32 else leaf[0], rows)
        return jax.tree.map(np.copy, rows)

    def step(self, action):
        observation, *outcome, info = self.pool.step(np.asarray(action)[None])
        return (
            self.first(observation),
            *(each[0] for each in outcome),
            {key: info[key][0] for key in INFOS if key in info},
        )

    def close(self):
        self.pool.close()


@pytest.mark.filterwarnings("ignore:.*Box.*precision:UserWarning")
@pytest.mark.parametrize("seed", range(scaled(1)))
@pytest.mark.parametrize("name", [name for name in CASES if SCALE > 1 or name != "Pong-v5"])  # test_lives.py has Atari
def test_every_leaf_equals_the_plain_loop(name, seed):
    infos = INFOS if name == "Pong-v5" else INFOS[:1]
    env = make(name, info_keys=infos, num_threads=2)  # beside lanes by themselves, of one thread
    batch = collect(env, fc.random_policy(env), CASES[name][1], seed=seed)
    check_lanes(batch, partial(OneLane, name), seed, info_keys=infos, reseed=False)
    assert batch["next", "truncated"].any()
    assert name not in ("CartPole-v1", "FrozenLake-v1") or batch["next", "terminated"].any()
    step = batch["next", "info", "elapsed_step"]
    assert torch.equal(step.long(), batch["collector", "step"] + 1)


@pytest.mark.parametrize(("name", "leaf"), [("LunarLander-v3", None), ("CheetahRun-v1", "velocity")])
def test_what_has_no_bounds_is_unbounded(name, leaf):
    env = fc.make_env(f"envpool/{name}", num_envs=2)
    box = env.observation_space[leaf] if leaf else env.observation_space
    assert np.isneginf(box.low).all()
    assert np.isposinf(box.high).all()
    if not leaf or SCALE > 1:
        fc.testing.check_env(env, steps=30)


def test_observations_in_float64():
    envs = [make("HalfCheetah-v4", **dtype) for dtype in ({"dtype": np.float64}, {})]
    batch, usual = (collect(env, fc.random_policy(env), 10, seed=0) for env in envs)
    assert batch["observation"].dtype == torch.float64
    assert torch.equal(usual["observation"], batch["observation"].float())


def test_one_hot_actions():
    batches = []
    for one_hot, act in ((False, lambda x: x % 4), (True, lambda x: torch.nn.functional.one_hot(x % 4, 4))):
        env = make("FrozenLake-v1", one_hot=one_hot)
        batches.append(collect(env, fc.torch_policy(act), 40, seed=0))
    assert batches[1]["action"].shape == (3, 40, 4)
    assert torch.equal(batches[0]["next", "observation"], batches[1]["next", "observation"])


@pytest.mark.parametrize("frames", [60, 180])
def test_finished_lanes_are_not_stepped(frames):
    """Their rows repeat the terminal observation; the others go on as if these were not there."""
    env = make("CartPole-v1", info_keys=["elapsed_step"])
    push = fc.torch_policy(lambda observation: torch.zeros(len(observation), dtype=torch.int64))
    with fc.SyncDataCollector(env, push, frames_per_batch=frames, reset_when_done=False, seed=1) as collector:
        batch = joined([next(collector), next(collector)])
    free = collect(env, push, 40, seed=1)
    first = free["next", "done"][..., 0].int().argmax(-1)
    assert len(first.unique()) > 1
    for lane, end in enumerate(first.tolist()):
        for path in ("observation", ("next", "observation"), ("next", "reward"), ("next", "info", "elapsed_step")):
            assert torch.equal(batch[path][lane, : end + 1], free[path][lane, : end + 1])
        assert batch["observation"][lane, end + 1 :].eq(free["next", "observation"][lane, end]).all()
        assert batch["next", "done"][lane, end:].all()
        assert batch["next", "reward"][lane, end + 1 :].eq(0).all()
        assert batch["next", "info", "elapsed_step"][lane, end:].eq(end + 1).all()


@pytest.mark.parametrize("name", ["envpool/CartPole-v1", *in_soak(["ale/Pong"])])
def test_each_key_seeds_the_lanes_again(name):
    """Where they are not seeded with each episode. An old seed begins other episodes than before, under other ids."""
    env = fc.make_env(name, num_envs=3, max_episode_steps=12)
    with fc.SyncDataCollector(env, frames_per_batch=60, seed=5) as collector:
        collector.set_seed(6)
        first = next(collector)
        saved, resumed = collector.state_dict(), []
        for _ in range(2):
            collector.load_state_dict(saved)
            resumed.append(next(collector))
        collector.set_seed(6)
        resumed.append(next(collector))
    assert_same(resumed[0], resumed[1])
    with fc.SyncDataCollector(env, frames_per_batch=60, seed=6) as collector:
        assert_same(next(collector), first)
    ids = {*first["collector", "traj_ids"].flatten().tolist()}
    for again in resumed:
        assert not torch.equal(again["observation"], first["observation"])
        assert not ids & {*again["collector", "traj_ids"].flatten().tolist()}


def test_after_an_exception_the_run_is_seeded_again(monkeypatch):
    """The pool may hold an answer that nobody takes; so another one is built, from seeds that follow from the key."""
    after = []
    for _ in range(2):
        env, policy, state = fresh(make("CartPole-v1"))
        state, first = fc.rollout(env, policy, state, 5)
        pool = state.env_state.simulation.simulators._pool
        with monkeypatch.context() as patch:
            patch.setattr(pool, "recv", lambda **_: 1 / 0)
            with refused(fc.EnvError, ("EnvPool's step raised ZeroDivisionError", "funcollect.recover(env, state)")):
                fc.rollout(env, policy, state, 3)
        after.append(fc.rollout(env, policy, fc.recover(env, state), 20)[1])
    assert_same(after[0], after[1])
    assert after[0]["collector", "step"][:, 0].eq(0).all()
    assert not torch.equal(after[0]["observation"][:, 0], first["observation"][:, 0])


def test_a_fork_is_refused_and_leaves_the_state_good():
    env, policy, state = fresh(make("CartPole-v1"))
    plan = fc.explain(env, policy)
    assert plan.seeding.startswith("run: all lanes are seeded together")
    assert plan.forking.startswith("impossible")
    with refused(fc.ReplayError, ("seeded by run", "cannot be forked", "begin a second run with funcollect.init")):
        fc.fork(env, state)
    runs(env, state=state)


def test_an_evaluation_has_a_pool_of_its_own():
    env, policy, state = fresh(make("CartPole-v1"), steps=20)
    stats = [fc.evaluate(env, policy, episodes=5, seed=1) for _ in range(2)]
    assert torch.equal(stats[0].returns, stats[1].returns)
    whole = collect(env, policy, 40, seed=0)
    assert torch.equal(fc.rollout(env, policy, state, 20)[1]["observation"], whole["observation"][:, 20:])


def given(task="CartPole-v1", **kwargs):
    return lambda: fc.make_env(f"envpool/{task}", **kwargs)


def built(take):
    return lambda: take(envpool.make_gymnasium("CartPole-v1", num_envs=2))


TAKEN = "task_id is CartPoleGymnasiumEnvPool … expected its name … make_env('envpool/CartPole-v1')"
LIST = "expected one of envpool.list_all_envs() … 'CartPole-v1'"


@table(
    ("an unknown task", given("CartPole-v99"), ValueError, f"'CartPole-v99' … {LIST}"),
    ("no name", given(""), ValueError, f"no task '' … {LIST}"),
    ("a built pool", built(fc.make_env), TypeError, TAKEN),
    ("a built pool for the adapter", built(fc.envs.from_envpool), TypeError, TAKEN),
    ("processes", given(num_workers=2), ValueError, "num_workers cannot … parallel itself: num_threads= … leave"),
    ("a seed", given(seed=3), ValueError, "seed cannot be given … funcollect.init … leave it out"),
    ("another's", given(frame_skip=3), TypeError, "'CartPole-v1' … 'frame_skip' … takes … 'max_episode_steps'"),
    ("an info", given(info_keys=["lives"]), ValueError, "no info key 'lives' … of ['elapsed_step', … name one"),
)
def test_an_environment_given_wrongly(misuse):
    with refused(misuse.error, misuse.says):
        misuse.do()


@pytest.mark.parametrize(("package", "name"), [("envpool", "envpool/CartPole-v1"), ("ale-py", "ale/Pong")])
def test_a_package_that_is_missing_is_named_with_its_extra(monkeypatch, package, name):
    monkeypatch.setitem(sys.modules, package.replace("-", "_"), None)
    with refused(ImportError, (f"{package} is not installed", "pip install 'funcollect[envs]'")):
        fc.make_env(name)


def test_an_import_leaves_the_global_generators_alone(tmp_path, monkeypatch):
    """Whatever the module draws, as EnvPool's does."""
    draws = "DRAWN = random.random(), numpy.random.rand(), torch.rand(3)"
    (tmp_path / "drawing.py").write_text(f"import random, numpy, torch\n{draws}")
    monkeypatch.syspath_prepend(tmp_path)
    before = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()
    assert len(import_extra("drawing", "drawing", None).DRAWN) == 3
    assert random.getstate() == before[0]
    assert np.array_equal(np.random.get_state()[1], before[1])
    assert torch.equal(torch.get_rng_state(), before[2])


@pytest.mark.parametrize(
    ("name", "lives"), [("CartPole-v1", {}), *in_soak([("Breakout-v5", {"episodic_life": True, "noop_max": 3})])]
)
def test_an_asynchronous_pool_has_the_data_of_a_synchronous_one(name, lives):
    """Whichever lanes answer first; those ahead of a rollout open the next one."""
    batches = []
    for apart in ({}, {"batch_size": 2, "num_threads": 2}):
        env = fc.make_env(f"envpool/{name}", num_envs=6, info_keys=["elapsed_step"], **lives, **apart)
        batches.append(collect(env, fc.random_policy(env), 40, 1, 33, 70, seed=2, max_frames_per_traj=30))
    assert_same(*batches)
    assert batches[0]["next", "terminated"].any()


def test_a_reset_of_lanes_that_are_ahead_leaves_the_others_alone():
    runs_of = [fresh("envpool/CartPole-v1", num_envs=6, **apart) for apart in ({}, {"batch_size": 2, "num_threads": 2})]
    (env, policy, state), (whole_env, _, whole) = runs_of[1], runs_of[0]
    mask = torch.zeros(6, dtype=torch.bool)
    while not mask.any():  # until a lane is ahead, and not under way
        state, whole = fc.rollout(env, policy, state, 20)[0], fc.rollout(whole_env, policy, whole, 20)[0]
        simulation = state.env_state.simulation
        mask[[lane for lane in simulation.carried.ahead.nonzero()[0] if lane not in simulation.simulators.busy]] = True
    state = fc.reset(env, state, mask)
    batch, wanted = fc.rollout(env, policy, state, 20)[1], fc.rollout(whole_env, policy, whole, 20)[1]
    assert_same(batch[~mask], wanted[~mask])
    assert batch["observation"][mask, 0].abs().max() < 0.05  # where episodes begin
    assert (batch["collector", "traj_ids"][mask, 0] > wanted["collector", "traj_ids"][mask, 0]).all()


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("begin", [fc.reset, fc.recover])
def test_an_asynchronous_pool_resets_all_lanes_in_mid_run(size, begin):
    env, policy, state = fresh("envpool/CartPole-v1", num_envs=6, batch_size=size)
    for _ in range(5):
        state, _ = fc.rollout(env, policy, state, 20)
        ids, state = state.traj_ids, begin(env, state)
        assert state.observation["observation",].abs().max() < 0.05  # where episodes begin
        assert (state.traj_ids > ids).all()
        state, batch = fc.rollout(env, policy, state, 9)
        assert batch["collector", "step"][:, 0].eq(0).all()


def test_an_asynchronous_pool_refuses_what_it_cannot_do():
    env, policy, state = fresh("envpool/CartPole-v1", steps=20, num_envs=6, batch_size=2)
    busy = torch.arange(6) == min(state.env_state.simulation.simulators.busy)
    with pytest.raises(fc.EnvError, match=r"under way.*leave batch_size out"):
        fc.reset(env, state, busy)
    fc.rollout(env, policy, state, 9)  # nothing was lost
    with pytest.raises(ValueError, match="batch_size is 4, expected a divisor of num_envs=6"):
        fc.make_env("envpool/CartPole-v1", num_envs=6, batch_size=4)
    for size in (None, 6):
        with pytest.raises(ValueError, match=r"max_carry is 9, .* never run ahead of a rollout: pass batch_size too"):
            fc.make_env("envpool/CartPole-v1", num_envs=6, batch_size=size, max_carry=9)
