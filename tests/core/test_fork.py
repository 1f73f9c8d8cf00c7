"""States as values: forked, saved, used again, stepped one by one; simulators replayed from seeds and actions."""

import random
from dataclasses import replace
from functools import partial

import gymnasium
import jax
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import funcollect as fc
from tests.support.cases import ENVS, KINDS, POLICIES, make_env, pair
from tests.support.compare import COPIES, assert_same, fresh, rollouts
from tests.support.envs.own_envs import HostWalk, SnapshotWalkers, Walkers
from tests.support.misuse import Rigged
from tests.support.running import once, pairwise, scaled


def lander():
    return gymnasium.make("LunarLander-v3", max_episode_steps=60, disable_env_checker=True)


SOURCES = {
    "CartPole-v1": lambda: make_env("CartPole-v1", 3),
    "HalfCheetah-v5": lambda: make_env("HalfCheetah-v5", 3),
    "LunarLander-v3": lambda: fc.make_env([lander] * 3),
    "Pendulum-v1": lambda: fc.make_env("Pendulum-v1", num_envs=2, max_episode_steps=50),
    "vector": lambda: fc.make_env(SyncVectorEnv([lander] * 3, autoreset_mode=AutoresetMode.DISABLED)),
    "torch": lambda: make_env("torch/CartPole-v1", 3),
    "snapshots": lambda: HostWalk(SnapshotWalkers),
    "masked": lambda: fc.make_env(Masked, num_envs=4),  # an action of another episode would be illegal
}


@pytest.mark.parametrize(("name", "copied", "kind", "seed"), once(SOURCES, COPIES, KINDS, range(scaled(2))))
def test_copies_of_lanes_of_any_age(name, kind, seed, copied):
    """Lanes reset by themselves, by a mask and by a limit; copies of copies; copies of states just begun."""
    env = SOURCES[name]()
    policy = POLICIES["random" if name == "masked" else kind](env)
    copy_of = partial(COPIES[copied], env, policy)
    state = fc.init(env, policy, seed=seed)
    lanes = state.num_lanes
    generator = torch.Generator().manual_seed(seed)
    for length in (0, 1, 40, 7, 64):
        if length:
            state, _ = fc.rollout(env, policy, state, length, max_frames_per_traj=[None, 30][length % 2])
        if length == 40:
            state = fc.reset(env, state, torch.rand(lanes, generator=generator) < 0.6)
        first, second = copy_of(state), copy_of(state)
        second = copy_of(second)
        first, one = rollouts(env, policy, first, [50, 3])
        second, two = rollouts(env, policy, second, [20, 33])
        fork, three = rollouts(env, policy, copy_of(state), [53])
        assert_same(one, two)
        assert_same(one, three)
        _, further = rollouts(env, policy, copy_of(fork), [10])
        assert_same(further, rollouts(env, policy, fork, [10])[1])
        for each in (first, second, fork):
            fc.close(each)
    before = copy_of(state)
    assert_same(rollouts(env, policy, state, [30])[1], rollouts(env, policy, before, [30])[1])


@pytest.mark.parametrize("copied", COPIES)
@pytest.mark.parametrize("name", ["CartPole-v1", "torch/CartPole-v1"])
def test_a_finished_lane_is_finished_in_the_copy(name, copied):
    env = make_env(name, 3)
    collector = fc.SyncDataCollector(env, frames_per_batch=45, reset_when_done=False, seed=6)
    assert 0 < next(collector)["next", "done"][:, -1].sum() < 3
    twin = fc.SyncDataCollector(env, frames_per_batch=45, reset_when_done=False, seed=1)
    twin.state = COPIES[copied](env, collector.policy, collector.state)
    for _ in range(3):
        assert_same(next(collector), next(twin))


def values(state):
    """Copies of everything that a state holds, except its handle on simulators."""
    held = {name: value for name, value in vars(state).items() if name != "env_state" or not hasattr(value, "version")}
    return [np.asarray(leaf).copy() for leaf in jax.tree.leaves(held)]


@pytest.mark.parametrize(("name", "kind"), once(ENVS, KINDS))
def test_a_state_never_changes(name, kind):
    env, policy, state = fresh(*pair(name, kind, 3), steps=13)
    states, kept = [state], [values(state)]
    for change in (
        lambda state: fc.rollout(env, policy, state, 11)[0],
        lambda state: fc.reset(env, state, torch.tensor([True, False, False])),
        lambda state: fc.step(env, policy, state)[0],
        lambda state: fc.reset(env, state),
        lambda state: fc.fork(env, state),
        lambda state: fc.rollout(env, policy, state, 40)[0],
    ):
        states.append(change(states[-1]))
        kept.append(values(states[-1]))
    for state, before in zip(states, kept, strict=True):
        assert all(map(np.array_equal, values(state), before))


@pytest.mark.parametrize(("name", "kind", "num_envs"), pairwise(ENVS, KINDS, (None, 3)))
def test_steps_make_a_rollout(name, kind, num_envs):
    env, policy = pair(name, kind, num_envs)
    _, whole = fc.rollout(env, policy, fc.init(env, policy, seed=0), 35)
    state, transitions = fc.init(env, policy, seed=0), []
    for _ in range(35):
        state, transition = fc.step(env, policy, state)
        transitions.append(transition.clone())
    assert_same(whole, torch.stack(transitions, -1))


@pytest.mark.parametrize("missing", [["snapshot"], ["restore"], ["snapshot", "restore"]])
def test_simulators_without_snapshots_are_refused_at_init(missing):
    kept = {name: getattr(SnapshotWalkers, name) for name in ("snapshot", "restore") if name not in missing}
    env = HostWalk(type("Bare", (Walkers,), kept))
    with pytest.raises(TypeError, match=r"Bare lacks snapshot\(\) or restore.*, expected both, .*: write both"):
        fc.init(env, fc.random_policy(env), seed=0)
    assert [each.closed for each in env.opened] == [True]
    env.forking = "none"
    fc.close(fc.init(env, fc.random_policy(env), seed=0))


class Masked(gymnasium.Env):
    """One of two actions is legal at each step, and an episode has 3 to 22 steps."""

    action_space = spaces.Discrete(2)
    observation_space = spaces.Dict(action_mask=spaces.MultiBinary(2), x=spaces.Box(0, 1, (1,)))

    def _seen(self):
        self.legal = int(self.np_random.integers(2))
        mask = np.eye(2, dtype=np.int8)[self.legal]
        return {"action_mask": mask, "x": self.np_random.random(1, np.float32)}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = int(self.np_random.integers(3, 23))
        return self._seen(), {}

    def step(self, action):
        if action != self.legal:
            raise ValueError("an illegal action")
        self.left -= 1
        return self._seen(), 1.0, self.left == 0, False, {}


class Secret(Rigged):
    """Draws from Python's global generator, which no seed sets, at the reset or at each step."""

    def __init__(self, drawn_at, made):
        super().__init__()
        self.drawn_at = drawn_at
        made.append(self)

    def _spoilt(self, answer):
        drawn = (self.drawn_at == "step") is (len(answer) == 5)
        return (answer[0] + np.float32(random.random()), *answer[1:]) if self.drawn_at and drawn else answer


@pytest.mark.parametrize("seeding", ["lane", "run"])
def test_episodes_without_a_seed_of_their_own_are_not_replayed(seeding):
    env, policy, state = fresh(replace(fc.make_env([Masked] * 2), seeding=seeding), steps=20)
    with pytest.raises(fc.ReplayError, match=f"seeded by {seeding} and gives no snapshot"):
        fc.fork(env, state)
    fc.rollout(env, policy, state, 3)


@pytest.mark.parametrize(("at", "length"), [("reset", 0), ("step", 1), ("step", 6)])
def test_an_environment_that_cannot_be_replayed_is_named_and_the_state_stays_good(at, length):
    made = []
    env, policy, state = fresh([lambda: Secret(None, made), lambda: Secret(at, made)])
    if length:
        state, _ = fc.rollout(env, policy, state, length)
    says = r"(?s)lane 1: replaying .* gave another observation.*expected the same.*self\.np_random.*can still be used"
    with pytest.raises(fc.ReplayError, match=says) as caught:
        fc.fork(env, state)
    assert caught.tb is not None  # it keeps the copy alive, so only fork can have closed it
    assert [secret.closed for secret in made] == [0, 0, 1, 1]
    fc.rollout(env, policy, state, 3)
