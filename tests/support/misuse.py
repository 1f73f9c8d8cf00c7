"""Misuses as a table, and environments and policies that go wrong once, at a known lane and step."""

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from torch import nn

import funcollect as fc

FAULT = 3  # the step of an episode, counted from 1, at which a rigged environment goes wrong
OBSERVATION = np.array([1.0, 2.0], np.float32)


Says = str | tuple[str, ...]  # parts of a message, in this order; in a string " … " stands between them


class Misuse(NamedTuple):
    """Something wrong, the error that says so, and the way out that the error names.

    `says` has what and where, what was got, what was expected, the mend.
    """

    what: str
    do: Callable[..., Any]
    error: type[BaseException]
    says: Says
    mend: Callable[..., Any] | None = None


def table(*misuses):
    """A case for each tuple of what a `Misuse` has; those whose names begin with TorchRL need that."""
    needs = {True: [pytest.mark.needs("torchrl")], False: []}
    cases = [pytest.param(Misuse(*each), id=each[0], marks=needs[each[0].startswith("TorchRL")]) for each in misuses]
    return pytest.mark.parametrize("misuse", cases)


@contextmanager
def refused(error, says):
    """The block raises exactly `error`, with the parts of `says` in the message, in this order."""
    with pytest.raises(error) as caught:
        yield
    assert type(caught.value) is error
    message, start = str(caught.value), 0
    for part in says.split(" … ") if isinstance(says, str) else says:
        assert part in message[start:], f"{part!r} does not stand in {message!r} from {start} on"
        start = message.index(part, start) + len(part)


class Rigged(gymnasium.Env):
    """A harmless environment, except that `spoil` is applied once to what step (or reset) number `at` returns."""

    observation_space = spaces.Box(-9, 9, (2,))
    action_space = spaces.Discrete(3)

    def __init__(self, spoil=None, space=None, good=OBSERVATION, at=FAULT):
        self.observation_space = Rigged.observation_space if space is None else space
        self.spoil = spoil
        self.good = good
        self.at = at
        self.time = 0
        self.closed = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return self._spoilt((self.good, {}))

    def step(self, action):
        self.time += 1
        return self._spoilt((self.good, 1.0, False, False, {"speed": 0.5}))

    def _spoilt(self, answer):
        if self.spoil is None or self.time != self.at:
            return answer
        spoil, self.spoil = self.spoil, None
        return spoil(answer)

    def close(self):
        self.closed += 1


class Acting(Rigged):
    def __init__(self, space):
        super().__init__()
        self.action_space = space


def raises(error):
    def spoil(_):
        raise error

    return spoil


def swaps(index, value):
    """A spoiler that puts `value` in place `index` of the answer."""
    return lambda answer: (*answer[:index], value, *answer[index + 1 :])


class Once:
    """A function from observations to `good`, except that its call number `at`, from 0, answers with `bad`."""

    def __init__(self, good, bad, at=2):
        self.good, self.bad, self.at = good, bad, at
        self.calls = 0

    def __call__(self, observation, *state):
        self.calls += 1
        return self.bad if self.calls == self.at + 1 else self.good


def runs(env, policy=None, state=None):
    """Collect a few steps; the next state."""
    policy = fc.random_policy(env) if policy is None else policy
    state = fc.init(env, policy, seed=0) if state is None else state
    state, batch = fc.rollout(env, policy, state, 4)
    assert batch.numel() == 4 * state.num_lanes
    return state


def fails_then_runs(make_env, make_policy, error, says, steps=6, repair=None):
    """A rollout and a collector both raise; then a reset is the way back, and the collector finds it by itself."""
    env = make_env()
    policy = make_policy(env)
    state = fc.init(env, policy, seed=0)
    with refused(error, says):
        fc.rollout(env, policy, state, steps)
    if repair is not None:
        repair(policy)
    after, batch = fc.rollout(env, policy, fc.recover(env, state), steps)
    assert batch["collector", "step"][..., 0].eq(0).all()
    assert after.num_lanes == state.num_lanes
    fc.close(after)

    env = make_env()
    policy = make_policy(env)
    lanes = env.num_envs or 1
    with fc.SyncDataCollector(env, policy, frames_per_batch=steps * lanes, total_frames=2 * steps * lanes) as collector:
        with refused(error, says):
            next(collector)
        if repair is not None:
            repair(policy)
        batches = list(collector)
    assert [each.numel() for each in batches] == [steps * lanes] * 2
    assert batches[0]["collector", "step"][..., 0].eq(0).all()
    if lanes > 1:
        assert batches[0]["collector", "traj_ids"].ge(lanes).all()  # never an id of the broken episodes


def refused_then_mended(misuse):
    """An environment given wrongly is refused, and the one that the message leads to runs."""
    with refused(misuse.error, misuse.says):
        misuse.do()
    if misuse.mend is not None:
        fc.close(runs(misuse.mend()))


def linear(outputs=2):
    return nn.Linear(4, outputs)


def good():
    return fc.torch_policy(linear(), head=fc.heads.categorical)
