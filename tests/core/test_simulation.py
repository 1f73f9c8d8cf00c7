import gc

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

import funcollect as fc
from funcollect.core import simulators
from funcollect.core.simulators import LARGEST_LOG, ActionLog
from tests.support.compare import fresh

LIVE = []


class Simulator(gymnasium.Env):
    """Counts how often it was closed, and raises at step `fail_at`."""

    observation_space = spaces.Box(-99, 99, (1,))
    action_space = spaces.Discrete(2)
    closed, fail_at = 0, None

    def __init__(self):
        LIVE.append(self)

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.t += 1
        if self.t == self.fail_at:
            raise KeyboardInterrupt
        return np.float32([self.t]), 1.0, False, False, {}

    def close(self):
        self.closed += 1


@pytest.fixture(autouse=True)
def live():
    LIVE.clear()


def begun(**options):
    return fresh([Simulator, Simulator], **options)


def test_recover_accepts_a_stale_state():
    env, policy, old = begun()
    newer, _ = fc.rollout(env, policy, old, 3)
    seen = []
    for made in (3, 5, 7):
        state = fc.recover(env, old)
        assert state.steps == made  # so that the noise of these steps is not used again
        with pytest.raises(fc.StaleStateError):
            fc.rollout(env, policy, newer, 1)
        newer, batch = fc.rollout(env, policy, state, 2)
        assert batch["observation"][0, :, 0].tolist() == [0, 1]
        seen += batch["collector", "traj_ids"].unique().tolist()
    assert len(set(seen)) == 6


def test_there_is_a_way_back_after_an_interrupt():
    env, policy, state = begun()
    state, first = fc.rollout(env, policy, state, 3)
    LIVE[-1].fail_at = 5
    with pytest.raises(KeyboardInterrupt):
        fc.rollout(env, policy, state, 9)
    with pytest.raises(fc.StaleStateError, match=r"(?s)did not end \(an exception, or Ctrl-C\).*funcollect\.recover"):
        fc.rollout(env, policy, state, 9)
    LIVE[-1].fail_at = None
    state, batch = fc.rollout(env, policy, fc.recover(env, state), 4)
    assert batch["observation"][1, :, 0].tolist() == [0, 1, 2, 3]
    ids = [set(part["collector", "traj_ids"].flatten().tolist()) for part in (first, batch)]
    assert not ids[0] & ids[1]
    assert state.frames == 2 * (3 + 9 + 4)
    LIVE[-1].fail_at = 6
    with pytest.raises(KeyboardInterrupt):
        fc.rollout(env, policy, state, 9)
    del state
    gc.collect()
    assert LIVE[-1].closed == 1


def test_the_action_log_is_bounded_by_its_bytes():
    """The log of an endless episode is bounded; later episodes can be replayed, and ordinary ones fit."""
    log, actions = ActionLog(2, 80), torch.arange(24).reshape(12, 2)
    for first in range(0, 12, 3):
        log.extend(actions[first : first + 3], torch.tensor([first + 3, 1]))
        assert log.since_reset() is None or first == 0
        assert sum(chunk.nbytes for chunk in log._chunks) <= 80
    log.ages = torch.tensor([0, 5])
    assert torch.equal(log.since_reset(), actions[-5:])
    for steps, lanes, numbers in ((27_000, 1, 17), (1_000, 1_024, 17), (10_000, 64, 17)):
        assert steps * lanes * numbers * 4 <= LARGEST_LOG


@pytest.mark.parametrize(("limit", "kwargs", "words"), [
    (100, {}, "lane 1 is too long to be replayed .50 steps; .* funcollect.reset"),
    (LARGEST_LOG, {"replayable": False}, "keeps no actions to replay.*without replayable=False"),
])  # fmt: skip
def test_a_state_without_its_actions_is_saved_without_its_episodes(monkeypatch, tmp_path, limit, kwargs, words):
    monkeypatch.setattr(simulators, "LARGEST_LOG", limit)
    env = fc.make_env("Pendulum-v1", num_envs=2, **kwargs)
    with fc.SyncDataCollector(env, frames_per_batch=100, seed=0) as collector:
        next(collector)
        collector.state = state = fc.reset(env, collector.state, torch.tensor([True, False]))
        assert sum(chunk.nbytes for chunk in state.env_state.simulation.action_log._chunks) <= 100
        for call, *given in ((fc.fork, env, state), (fc.save, tmp_path / "x", state), (collector.save, tmp_path / "x")):
            with pytest.raises(fc.ReplayError, match=words):
                call(*given)
        fc.save(tmp_path / "state", state, episodes="restart")
        collector.save(tmp_path / "run", episodes="restart")
        collector.load_state_dict(collector.state_dict())
        assert next(collector)["collector", "step"].max() == 49
    assert fc.load(tmp_path / "state", env, fc.random_policy(env)).steps == 50
    with pytest.raises(ValueError, match=r"replayable=False was given for Atari games, .* leave it out"):
        fc.make_env("ale/Pong", replayable=False)


@pytest.mark.parametrize("length", [1, 3, 64, 100])
def test_the_action_log_of_short_rollouts_has_few_chunks(length):
    log, whole = ActionLog(3), torch.empty(0, 3, dtype=torch.int64)
    assert len(log.since_reset()) == 0
    for number in range(1, 400):
        actions = torch.randint(9, (length, 3))
        whole = torch.cat((whole, actions))
        age = min(number * length, 700)
        log.extend(actions, torch.tensor([age, 0, 0]))
        if number % 50 == 0:
            assert torch.equal(log.since_reset(), whole[-age:])
    assert sum(map(len, log._chunks)) < 700 + max(length, 64)
    assert len(log._chunks) < 20
