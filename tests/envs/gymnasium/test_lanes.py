"""What lanes return, in objects that all of them may write, and get: actions as the space's `sample` returns them."""

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

import funcollect as fc
from funcollect.interop.memory import aligned
from tests.support.compare import assert_same, collect, fresh
from tests.support.misuse import Rigged
from tests.support.running import pairwise

NUMBERS = [0.0, 0.0]
CONTAINERS = {"tensor": torch.from_numpy, "list": np.ndarray.tolist, "memoryview": memoryview}
CONTAINERS |= {"array": lambda memory: memory, "view": lambda memory: memory[:]}


class Shared(gymnasium.Env):
    """Returns its step and a number of its own, from `since` steps on in memory of the class, before in new arrays."""

    action_space = spaces.Discrete(2)
    memory, rewarded, told = np.zeros(2, np.float32), np.zeros((), np.float32), np.zeros((), np.float32)
    flag = np.zeros((), bool)

    def __init__(self, *, kind, since, nested):
        box = spaces.Box(0, 99, (2,))
        self.observation_space = spaces.Dict({"part": box}) if nested else box
        self.kind, self.since, self.nested = kind, since, nested

    def seen(self):
        shared = self.steps >= self.since
        memory = self.memory if shared else np.zeros(2, np.float32)
        memory[:] = self.steps, self.number
        NUMBERS[:] = memory.tolist()
        seen = NUMBERS if shared and self.kind == "list" else CONTAINERS[self.kind](memory)
        return {"part": seen} if self.nested else seen

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps, self.number = 0, self.np_random.random()
        return self.seen(), {}

    def step(self, action):
        self.steps += 1
        over = self.steps == 7 + action + 2 * (self.number > 0.5)
        if self.steps < self.since:
            return self.seen(), self.number, over, False, {"number": self.number}
        self.rewarded[...] = self.told[...] = self.number
        self.flag[...] = over
        return self.seen(), self.rewarded, self.flag, self.flag & False, {"number": self.told}


def collected(workers=0, over=True, **kwargs):
    env = fc.make_env(lambda: Shared(**kwargs), num_envs=4, num_workers=workers, info_keys=["number"])
    with fc.SyncDataCollector(env, frames_per_batch=100, reset_when_done=over, seed=0) as collector:
        return next(collector).clone()


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", CONTAINERS)
def test_each_lane_has_what_it_returned(kind, nested):
    wanted = collected(kind="array", since=float("inf"), nested=nested)
    assert len(torch.unique(wanted["next", "reward"][:, 0])) == 4
    for since in (0, 3):
        assert_same(collected(kind=kind, since=since, nested=nested), wanted)
    finished = collected(over=False, kind="array", since=float("inf"), nested=nested)
    assert_same(collected(over=False, kind=kind, since=0, nested=nested), finished)


def test_the_same_in_worker_processes():
    wanted = collected(kind="array", since=float("inf"), nested=False)
    assert_same(collected(workers=2, kind="tensor", since=3, nested=False), wanted)


class Returned(gymnasium.Env):
    """Returns the same tuple from each step of each lane."""

    observation_space, action_space = spaces.Box(0, 99, (1,)), spaces.Discrete(2)
    answer = (np.zeros(1, np.float32), 0.0, False, False, {})

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.number = self.np_random.integers(99)
        return np.array([self.number], np.float32), {}

    def step(self, action):
        self.answer[0][:] = self.number
        return self.answer


def test_one_tuple_for_all_lanes():
    env = fc.make_env(Returned, num_envs=3)
    batch = collect(env, fc.random_policy(env), 4)
    assert torch.equal(batch["next", "observation"], batch["observation"])


class Strict(gymnasium.Env):
    """Returns the action that it got, and refuses other types than its space has."""

    observation_space = spaces.Box(-99, 99, (), np.int64)

    def __init__(self, start, dtype):
        self.action_space = spaces.Discrete(3, start=start, dtype=dtype)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.int64(0), {}

    def step(self, action):
        assert type(action) is type(self.action_space.sample())
        assert (action.dtype, action.shape) == (self.action_space.dtype, ())
        return np.int64(action.item()), 0.0, False, False, {}


STARTS = [(0, np.int64), (-1, np.int64), (5, np.int32)]


@pytest.mark.parametrize(("lanes", "one_hot", "numbers"), pairwise([(None, 0), (3, 0), (3, 2)], [False, True], STARTS))
def test_a_discrete_action_is_a_number_of_numpy(lanes, one_hot, numbers):
    (num_envs, workers), (start, dtype) = lanes, numbers
    env = fc.make_env(lambda: Strict(start, dtype), num_envs=num_envs, num_workers=workers, one_hot=one_hot)
    batch = collect(env, fc.random_policy(env), 10, seed=0)
    action = batch["action"].argmax(-1) + start if one_hot else batch["action"]
    assert batch["next", "observation"].tolist() == action.tolist()
    assert len(action.unique()) > 1


BOX = spaces.Box(-9, 9, (3,))
BYTES = spaces.Box(0, 255, (2,), np.uint8)


@pytest.mark.parametrize(
    ("shape", "dtype"), [((1,), np.uint8), ((3, 17), np.float32), ((8, 5, 5), np.int64), ((2, 0), np.int8)]
)
def test_memory_begins_at_a_multiple_of_64_bytes(shape, dtype):
    arrays = [aligned(shape, np.dtype(dtype)) for _ in range(20)]
    assert all(array.ctypes.data % 64 == 0 for array in arrays if array.size)
    assert all(array.shape == shape and array.dtype == dtype and not array.any() for array in arrays)
    assert all(array.flags.c_contiguous and array.flags.writeable for array in arrays)


EXACT = np.array([0.1, 1 / 3, 2.0**-60])
GOOD = [
    *((spaces.Discrete(9), None, value, 4) for value in (4, np.int64(4), np.int32(4), np.uint8(4), np.array(4))),
    *((BYTES, None, given, [3, 255]) for given in (np.array([3, 255]), np.array([3, 255], np.int16), [3, 255])),
    (BOX, None, EXACT, EXACT.astype(np.float32).tolist()),
    (spaces.Box(-9, 9, (3,), np.float64), np.float64, EXACT, EXACT.tolist()),
]


@pytest.mark.parametrize(("space", "dtype", "value", "wanted"), GOOD)
def test_values_that_fit_are_cast_once(space, dtype, value, wanted):
    *_, state = fresh([Rigged(space=space, good=value) for _ in range(2)], dtype=dtype)
    assert state.observation["observation",].tolist() == [wanted] * 2


def test_the_policy_reads_aligned_memory():
    places = []

    def still(seen):
        places.append(seen.data_ptr())
        return torch.zeros(len(seen), dtype=torch.int64)

    collect(fc.make_env("CartPole-v1", num_envs=3), fc.torch_policy(still), 4)
    assert len(places) == 4
    assert not any(place % 64 for place in places)
