"""`apply`: functions called with lanes' environments, wherever these live, and the copies that repeat the calls."""

import itertools
import os
import signal
import time

import gymnasium
import pytest
import torch

import funcollect as fc
from tests.support.compare import assert_same, fresh
from tests.support.faulty.faulty_workers import pids_of, workers_of
from tests.support.running import LOSES_WORKERS, in_soak, once
from tests.support.workers import COLLECTORS, TRANSPORTS, multi


class Weighted(gymnasium.Wrapper):
    done_to_it = 0


def make():
    return Weighted(gymnasium.make("CartPole-v1"))


def set_force(lane, force):
    lane.unwrapped.force_mag = force
    lane.done_to_it += 1
    return lane.done_to_it


def force_of(lane):
    return lane.unwrapped.force_mag


def push(lane, x):
    """Move the cart: the next observation changes, not the last one."""
    lane.unwrapped.state = (x, *lane.unwrapped.state[1:])


def set_force_and_return_a_generator(lane, force):
    set_force(lane, force)
    return (each for each in ())


def stumble(lane):
    raise KeyError("no such thing")


ENVS = {"one": {}, "several": {"num_envs": 3}, "workers": {"num_envs": 4, "num_workers": 2}}


def begun(name, steps=0):
    """An environment, a policy, and a state."""
    return fresh(make, steps=steps, **ENVS[name])


@pytest.mark.parametrize("name", ENVS)
def test_a_function_acts_from_the_next_step_on(name):
    env, policy, state = begun(name, steps=5)
    state, counts = fc.apply(env, state, set_force, 100.0)
    lanes = env.num_envs or 1
    assert counts == [1] * lanes
    state, forces = fc.apply(env, state, force_of)
    assert forces == [100.0] * lanes
    seen = state.observation["observation",].clone()
    state, batch = fc.rollout(env, policy, state, 1)
    root, after = batch["observation"].reshape(lanes, 4), batch["next", "observation"].reshape(lanes, 4)
    assert torch.equal(root, seen)
    assert ((after - root)[:, 1].abs() > 1).all()  # a push of 100 N, in place of 10
    fc.close(state)


MOMENTS = ["before the episode", "during it", "at its beginning"]
REPEATED = [("several times", name) for name in ENVS]  # it covers all the others but the third
REPEATED += [("at its beginning", "several"), *in_soak(itertools.product(MOMENTS, ENVS))]


@pytest.mark.parametrize(("moment", "name"), REPEATED)
def test_copies_repeat_it(name, moment):
    env, policy, state = begun(name)
    if moment in ("before the episode", "several times"):
        state, _ = fc.apply(env, state, set_force, 15.0)
        state, _ = fc.rollout(env, policy, state, 70)  # episodes of some 20 steps
    if moment == "at its beginning":
        state, _ = fc.rollout(env, policy, state, 30)
        state, _ = fc.apply(env, state, set_force, 12.0)
        state = fc.reset(env, state)
        state, _ = fc.apply(env, state, push, 0.5)
    if moment in ("during it", "several times"):
        state, _ = fc.apply(env, state, set_force, 20.0)
        state, _ = fc.rollout(env, policy, state, 3)
        state, _ = fc.apply(env, state, push, 0.1)
        state, _ = fc.apply(env, state, set_force, 5.0)
        state, _ = fc.rollout(env, policy, state, 2)
        state, _ = fc.apply(env, state, set_force, 8.0)
    fork = fc.fork(env, state)
    again = fc.fork(env, fork)
    made = [fc.rollout(env, policy, each, 40) for each in (state, fork, again)]
    forces = [fc.apply(env, after, force_of)[1] for after, _ in made]
    assert forces[0] == forces[1] == forces[2]
    for after, batch in made:
        assert_same(batch, made[0][1])
        fc.close(after)


class Bonus(gymnasium.Wrapper):
    bonus = 0.0

    def step(self, action):
        observation, reward, *rest = self.env.step(action)
        return observation, reward + self.bonus, *rest


def add_bonus(lane, number):
    lane.bonus += number


@pytest.mark.parametrize("options", [{}, *in_soak([{"num_workers": 1}])], ids=str)
@pytest.mark.parametrize("steps", [100, *in_soak([300, 3])])
def test_a_game_is_changed_and_copied_as_it_was_changed(steps, options):
    env, policy, state = fresh(lambda: Bonus(gymnasium.make("ale_py:ALE/Pong-v5")), num_envs=2, **options)
    state, batch = fc.rollout(env, policy, state, steps)
    assert batch["next", "reward"].abs().max() <= 1
    for _ in range(2):
        state, _ = fc.apply(env, state, add_bonus, 5.0)
    fork = fc.fork(env, state)
    second = fc.fork(env, fork)
    state, batch = fc.rollout(env, policy, state, 4)
    assert batch["next", "reward"].min() >= 9
    for each in (fork, second):
        assert_same(fc.rollout(env, policy, each, 4)[1], batch)
    fork = fc.fork(env, state)
    assert_same(fc.rollout(env, policy, fork, 4)[1], fc.rollout(env, policy, state, 4)[1])
    fc.close(state)


def test_states_are_used_once_and_reseeding_forgets_no_call():
    env, policy, old = begun("several")
    state, _ = fc.apply(env, old, set_force, 20.0)
    with pytest.raises(fc.StaleStateError):
        fc.apply(env, old, force_of)
    with fc.SyncDataCollector(env, policy, frames_per_batch=30, seed=0) as collector:
        next(collector)
        assert collector.apply(set_force, 20.0) == [1] * 3
        collector.set_seed(5)
        next(collector)
        fork, forces = fc.apply(env, fc.fork(env, collector.state), force_of)
        assert forces == [20.0] * 3
        assert_same(fc.rollout(env, policy, fork, 10)[1], next(collector))
    fc.close(state)


def test_a_function_that_raises_names_the_lane_and_a_recovery_goes_on():
    for name in ("several", "workers"):
        env, policy, state = begun(name)
        with pytest.raises(fc.EnvError, match=r"lane \d: stumble raised KeyError\('no such thing'\)"):
            fc.apply(env, state, stumble)
        with pytest.raises(fc.StaleStateError):
            fc.rollout(env, policy, state, 3)
        state, batch = fc.rollout(env, policy, fc.recover(env, state), 3)
        assert batch["collector", "step"][:, 0].eq(0).all()
        fc.close(state)


@pytest.mark.parametrize("name", ["torch/CartPole-v1", "envpool/CartPole-v1", "vector", *in_soak(["pgx/tic_tac_toe"])])
def test_environments_without_an_object_for_each_lane_are_refused(name):
    kwargs = {"autoreset_mode": gymnasium.vector.AutoresetMode.DISABLED}
    vector = {"vector": gymnasium.make_vec("CartPole-v1", 2, "sync", vector_kwargs=kwargs)}
    env, policy, state = fresh(vector.get(name, name), num_envs=None if name == "vector" else 2)
    with pytest.raises(TypeError, match="has no object for each lane"):
        fc.apply(env, state, force_of)
    fc.rollout(env, policy, state, 2)  # the state can still be used


def test_what_cannot_be_called_or_sent():
    env, _, state = begun("workers")
    with pytest.raises(TypeError, match="function is 3, expected"):
        fc.apply(env, state, 3)
    with pytest.raises(TypeError, match="cannot be sent to the worker processes"):
        fc.apply(env, state, set_force, (each for each in ()))
    with pytest.raises(TypeError, match="the result of function cannot be sent"):
        fc.apply(env, state, set_force_and_return_a_generator, 60.0)
    fork = fc.fork(env, state)
    for each in (state, fork):  # both can still be used
        after, forces = fc.apply(env, each, force_of)
        assert forces == [60.0] * 4
        fc.close(after)


def test_files_refuse_it_unless_episodes_begin_anew(tmp_path):
    env, policy, state = begun("several")
    state, _ = fc.apply(env, state, set_force, 20.0)
    with pytest.raises(fc.ReplayError, match="functions were applied to its environments, which are not saved"):
        fc.save(tmp_path / "state", state)
    fc.save(tmp_path / "state", state, episodes="restart")
    loaded = fc.load(tmp_path / "state", env, policy, episodes="restart")
    assert fc.apply(env, loaded, force_of)[1] == [10.0] * 3
    fc.close(state)


def test_lanes_of_a_lost_worker_are_called_again():
    env, policy, state = begun("workers")
    for force in (20.0, 30.0):
        state, _ = fc.apply(env, state, set_force, force)
    os.kill(pids_of(state)[1], signal.SIGKILL)
    with pytest.raises(fc.EnvError, match="was killed by SIGKILL"):
        fc.rollout(env, policy, state, 10)
    state, forces = fc.apply(env, fc.recover(env, state), force_of)
    assert forces == [30.0] * 4
    assert fc.apply(env, state, set_force, 10.0)[1] == [3] * 4
    fc.close(state)


@pytest.mark.parametrize(("kind", "transport"), once(COLLECTORS, TRANSPORTS))
def test_workers_of_collectors(kind, transport):
    with multi(kind, transport, create_env_fn=[make] * 2, policy=None, frames_per_batch=20) as collector:
        next(collector)
        assert collector.apply(set_force, 50.0) == [1, 1]
        assert collector.apply(force_of) == [50.0, 50.0]
        with pytest.raises(fc.EnvError, match="stumble raised KeyError"):
            collector.apply(stumble)
        next(collector)
        assert collector.apply(set_force, 60.0) == [2, 2]


def test_a_collector_with_a_curriculum_is_the_run_of_the_functions():
    (env, policy, state), wanted = begun("several"), []
    for force in (10.0, 12.0, 14.0):
        state, _ = fc.apply(env, state, set_force, force)
        state, batch = fc.rollout(env, policy, state, 20)
        wanted.append(batch)
    fc.close(state)
    keywords = {"frames_per_batch": 60, "seed": 0}
    with (
        fc.SyncDataCollector(make, None, create_env_kwargs={"num_envs": 3}, **keywords) as alone,
        multi(transport="serial", create_env_fn=[make] * 3, policy=None, **keywords) as workers,
    ):
        for force, batch in zip((10.0, 12.0, 14.0), wanted, strict=True):
            for collector in (alone, workers):
                collector.apply(set_force, force)
                assert_same(next(collector), batch.clone())


@LOSES_WORKERS
def test_a_replaced_worker_calls_it_again():
    keywords = {"create_env_fn": [make] * 2, "policy": None, "frames_per_batch": 20, "on_failure": "restart"}
    with multi(**keywords) as collector:
        next(collector)
        collector.apply(set_force, 50.0)
        with pytest.raises(TypeError, match="the result of function cannot be sent"):
            collector.apply(set_force_and_return_a_generator, 70.0)
        os.kill(collector.run.records[1].handle.pid, signal.SIGKILL)
        for _ in itertools.islice(collector, 3):
            pass
        assert collector.stats()["restarts"] == 1
        assert collector.apply(force_of) == [70.0, 70.0]
        assert collector.apply(set_force, 1.0) == [3, 3]


def test_nothing_is_called_where_a_process_has_ended():
    with fc.SyncDataCollector(fc.make_env(make, **ENVS["workers"]), frames_per_batch=8, seed=0) as collector:
        next(collector)
        worker = workers_of(collector.state)[1]
        os.kill(worker.pid, signal.SIGKILL)
        while not worker.ended_by(0):
            time.sleep(0.01)
        with pytest.raises(fc.EnvError, match=r"lanes 2 to 3 \(worker 1\): its process was"):
            collector.apply(set_force, 20.0)
        assert collector.apply(force_of) == [10.0] * 4
        assert collector.apply(set_force, 20.0) == [1] * 4
        fc.close(fc.fork(collector.env, collector.state))


def test_a_function_that_raised_in_some_lanes_leaves_a_state_that_is_not_copied(tmp_path):
    env, policy, state = begun("several")
    with pytest.raises(fc.EnvError, match="lane 1"):
        fc.apply(env, state, once, str(tmp_path / "first"))
    state = fc.recover(env, state)
    for call in (lambda: fc.fork(env, state), lambda: fc.save(tmp_path / "state", state)):
        with pytest.raises(fc.ReplayError, match="a function was applied and raised in one lane"):
            call()
    fc.rollout(env, policy, state, 3)


def once(lane, file):
    with open(file, "x"):
        set_force(lane, 20.0)
