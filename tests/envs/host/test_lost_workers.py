"""Workers of lanes that die, hang, raise or are interrupted, and how they end."""

import contextlib
import gc
import os
import random
import re
import signal
import subprocess
import sys
import time
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import funcollect as fc
from funcollect.envs.host.lane_workers.simulators import WorkerLanes
from funcollect.errors import EnvError
from funcollect.processes.pool import FailurePolicy
from tests.support.compare import assert_same, fresh
from tests.support.envs.light_envs import Nested
from tests.support.faulty.faulty_workers import INFOS, Doomed, Late, check_lanes, kill, pids_of
from tests.support.running import in_soak, scaled
from tests.support.workers import gone, held, wait_until

DEEDS = {
    "die": "was killed by SIGKILL",
    "exit": "ended with exit code 3",
    "raise": "out of petrol",
    "leave": "raised SystemExit: no more",
    "hang": "has not answered for",
    "stop": "has not answered for",
}


def doomed(folder, deed, lane, step, wait="all"):
    """Six lanes over three workers, one of which does `deed` at a step of its life."""
    (folder / f"{lane} {step}").write_text(deed)
    factories = [partial(Doomed, str(folder), lane) for lane in range(6)]
    return fc.make_env(factories, num_workers=3, info_keys=INFOS, timeout=2.0, wait=wait)


LOSSES = [*((deed, 9, "all") for deed in DEEDS), ("hang", 4, "all")]  # also in the last step
LOSSES += [("raise", 9, "any"), *in_soak([("die", 9, "any"), ("hang", 9, "any")])]


@pytest.mark.parametrize(("deed", "length", "wait"), LOSSES)
def test_a_lost_worker_is_reported_with_its_lanes_and_a_recovery_goes_on(deed, length, wait, tmp_path):
    env, policy, state = fresh(doomed(tmp_path, deed, 3, 4, wait))
    with pytest.raises(EnvError, match=rf"{DEEDS[deed]}.*funcollect.recover\(env, state\)") as caught:
        fc.rollout(env, policy, state, length)
    assert re.match(r"lane 3: step|lanes 2 to 3 \(worker 1\)", str(caught.value))
    notes = "".join(getattr(caught.value, "__notes__", ()))
    assert ("Doomed" in notes or "in step" in notes) == (deed in ("raise", "leave", "hang"))
    state, batch = fc.rollout(env, policy, fc.recover(env, state), 9)
    assert batch["collector", "step"][:, 0].eq(0).all()
    check_lanes(batch)
    fork = fc.fork(env, state)
    assert_same(fc.rollout(env, policy, fork, 9)[1], fc.rollout(env, policy, state, 9)[1])
    for each in (fork, state):
        fc.close(each)


def test_a_collector_goes_on_with_another_worker(tmp_path):
    env = doomed(tmp_path, "die", 3, 14)
    with fc.SyncDataCollector(env, None, frames_per_batch=60, total_frames=180, seed=0) as collector:
        first = next(collector).clone()
        pids = pids_of(collector.state)
        with pytest.raises(EnvError, match="was killed by SIGKILL"):
            next(collector)
        batch = next(collector).clone()
        assert [one == other for one, other in zip(pids, pids_of(collector.state), strict=True)] == [True, False, True]
    check_lanes(batch)
    ids = [set(each["collector", "traj_ids"].flatten().tolist()) for each in (first, batch)]
    assert not ids[0] & ids[1]


@pytest.mark.parametrize("how", ["closed", "dropped", "killed", "broken off"])
def test_nothing_is_left_behind(how):
    env = fc.make_env([Nested, Unmade] if how == "broken off" else ["CartPole-v1"] * 4, num_workers=2)

    def cycle():
        if how == "broken off":
            with pytest.raises(RuntimeError, match="no such car"):
                fresh(env)
            return
        *_, state = fresh(env, steps=5)
        pids = pids_of(state)
        if how == "killed":
            kill(state, 0)
        if how in ("closed", "killed"):
            fc.close(state)
        del state
        gc.collect()
        wait_until(lambda: all(map(gone, pids)))

    cycle()
    before = held()
    for _ in range(scaled(2)):
        cycle()
    assert held() == before


class Unmade(Nested):
    def __init__(self):
        raise RuntimeError("no such car")


SCRIPT = """
import gymnasium
import funcollect as fc

class Own(gymnasium.Wrapper):
    pass

print("begun")
env = fc.make_env(lambda: Own(gymnasium.make("CartPole-v1")), num_envs=2, parallel=True)
policy = fc.random_policy(env)
state, batch = fc.rollout(env, policy, fc.init(env, policy, seed=0), 5)
print(tuple(batch.shape), __file__, __spec__)
"""


@pytest.mark.evening
def test_a_script_needs_no_main_guard_and_leaves_nothing(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    path = {"PYTHONPATH": str(Path(fc.__file__).parents[1])}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=os.environ | path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["begun", f"(2, 5) {script} None"]


@pytest.mark.parametrize("wait", ["all", "any"])
def test_rollouts_that_are_interrupted_at_any_moment_are_followed_by_new_episodes(wait):
    env, policy, state = fresh(Nested, num_envs=4, num_workers=2, wait=wait)
    moments, pids = random.Random(1), pids_of(state)
    handler = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for _ in range(scaled(8)):
            batches = []
            signal.setitimer(signal.ITIMER_REAL, moments.uniform(0.0005, 0.02))
            with contextlib.suppress(KeyboardInterrupt):
                while True:
                    state, batch = fc.rollout(env, policy, state, 5)
                    batches.append(batch)
            if batches:
                check_lanes(torch.cat(batches, 1))
            state = fc.recover(env, state)
            assert pids_of(state) == pids
            fork = fc.fork(env, state)
            state, batch = fc.rollout(env, policy, state, 9)
            assert batch["collector", "step"][:, 0].eq(0).all()
            check_lanes(batch)
            assert_same(batch, fc.rollout(env, policy, fork, 9)[1])
            fc.close(fork)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        fc.close(state)


def test_a_run_goes_on_after_a_fork_that_was_interrupted(monkeypatch):
    env, batches = fc.make_env("ale/Pong", num_envs=2, num_workers=2, noop_max=3), []
    for moment in (None, "submit", "wait"):
        _, policy, state = fresh(env, steps=3)
        if moment is not None:
            with monkeypatch.context() as patch:
                patch.setattr(WorkerLanes, moment, ctrl_c)
                with pytest.raises(KeyboardInterrupt):
                    fc.fork(env, state)
        for each in (state, fc.fork(env, state)):
            after, batch = fc.rollout(env, policy, each, 6)
            batches.append(batch)
            fc.close(after)
    for batch in batches[1:]:
        assert_same(batch, batches[0])


def ctrl_c(*_):
    raise KeyboardInterrupt


def test_a_hang_is_told_again_by_the_rollout_after_a_fork(monkeypatch):
    env, policy, state = fresh("ale/Pong", num_envs=2, num_workers=2)
    processes = state.env_state.simulation.simulators
    os.kill(pids_of(state)[0], signal.SIGSTOP)
    with monkeypatch.context() as patch:
        patch.setattr(processes, "_failure_policy", FailurePolicy(0.5, 0.5))
        for use in (lambda: fc.fork(env, state), lambda: fc.rollout(env, policy, state, 3)):
            with pytest.raises(EnvError, match=r"lane 0 \(worker 0\): its process has not answered"):
                use()
    _, batch = fc.rollout(env, policy, fc.recover(env, state), 3)
    assert batch["collector", "step"][:, 0].eq(0).all()


def test_infos_that_an_interrupt_left_unread_are_dropped(monkeypatch):
    env, policy, state = fresh(Late, steps=3, num_envs=1, num_workers=1, info_keys=INFOS)
    with monkeypatch.context() as patch:
        patch.setattr(WorkerLanes, "_infos", ctrl_c)
        with pytest.raises(KeyboardInterrupt):
            fc.rollout(env, policy, state, 3)
    infos = fc.rollout(env, policy, fc.recover(env, state), 5)[1]["next", "info"]
    assert torch.equal(infos["vector"][0, :, 0].float(), infos["draw"][0].float())


class NeverAgain(Late):
    """Cannot be reset a second time."""

    def reset(self, *, seed=None, options=None):
        if getattr(self, "time", 0):
            raise RuntimeError("sold")
        return super().reset(seed=seed)


def test_a_reset_ahead_that_fails_is_reported_beside_large_infos():
    env, policy, state = fresh(NeverAgain, num_envs=2, num_workers=1, info_keys=INFOS)
    with pytest.raises(EnvError, match=r"lane 0: reset\(seed=\d+\) raised.*sold"):
        fc.rollout(env, policy, state, 9)
    fc.close(state)


def test_a_loss_ends_an_evaluation(tmp_path):
    env = doomed(tmp_path, "die", 3, 4)
    policy = fc.random_policy(env)
    with pytest.raises(EnvError, match=r"lanes 2 to 3 \(worker 1\)"):
        fc.evaluate(env, policy, episodes=6, seed=0)
    assert len(fc.evaluate(env, policy, episodes=6, seed=0)) == 6


class Closed(Nested):
    """Leaves a file when a worker closes it, slowly if that is wanted."""

    def __init__(self, folder, parent, seconds=0):
        self.folder, self.parent, self.seconds = folder, parent, seconds

    def close(self):
        if os.getpid() != self.parent:
            time.sleep(self.seconds)
            (self.folder / f"{os.getpid()} {id(self)}").touch()


def test_every_environment_is_closed_however_busy_the_processors_are(tmp_path):
    cpus = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cpus)})
    try:
        for number in range(1, scaled(2) + 1):
            *_, state = fresh(partial(Closed, tmp_path, os.getpid()), num_envs=4, num_workers=4)
            fc.close(state)
            assert len([*tmp_path.iterdir()]) == 4 * number
    finally:
        os.sched_setaffinity(0, cpus)


def test_a_close_that_takes_too_long_is_told(tmp_path):
    *_, state = fresh(partial(Closed, tmp_path, os.getpid(), 1.2), num_envs=2, num_workers=2)
    fc.close(state)
    assert len([*tmp_path.iterdir()]) == 2
    *_, state = fresh(partial(Closed, tmp_path, os.getpid(), 1e3), num_envs=1, num_workers=1, timeout=0.5)
    with pytest.warns(RuntimeWarning, match=r"lane 0 \(worker 0\): close\(\) has not returned in 0.5 s"):
        fc.close(state)


class Dead(Nested):
    def __init__(self, deed, parent):
        if os.getpid() != parent:
            if deed == "exit":
                os._exit(3)
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("deed", ["die", "exit"])
def test_a_worker_that_ends_as_it_makes_its_environments_is_named(deed):
    with pytest.raises(EnvError, match=rf"lane 1 \(worker 1\): its process {DEEDS[deed]}.*as it made its environments"):
        fresh([Nested, partial(Dead, deed, os.getpid())], num_workers=2)


def test_a_forked_process_does_not_use_its_parents_workers():
    env, policy, state = fresh(Nested, num_envs=2, num_workers=2)
    meanwhile, gone_on = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pid = os.fork()
    if not pid:
        refusals = 0
        try:
            os.read(meanwhile, 1)
            for use in (lambda: fc.rollout(env, policy, state, 3), lambda: fc.apply(env, state, id)):
                try:
                    use()
                except fc.ClosedError:
                    refusals += 1
            fc.close(state)
        finally:
            os._exit(refusals)
    state, _ = fc.rollout(env, policy, state, 3)
    block = state.env_state.simulation.simulators.block
    before = [array.copy() for array in (block.action, block.next_seeds, *block.observation.values())]
    os.write(gone_on, b"1")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 2
    for array, own in zip((block.action, block.next_seeds, *block.observation.values()), before, strict=True):
        np.testing.assert_array_equal(array, own)
    _, batch = fc.rollout(env, policy, state, 3)
    check_lanes(batch)
    fc.close(state)
    for fd in (meanwhile, gone_on):
        os.close(fd)
