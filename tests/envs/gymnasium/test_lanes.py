"""What lanes return and get: in memory that all may write, as texts, in parts, within infos, left out, as copies."""

import functools
import threading

import cloudpickle
import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import funcollect as fc
from funcollect.envs.plain_spaces import plain_actions
from funcollect.errors import EnvError
from funcollect.interop.memory import aligned
from tests.support.compare import assert_same, collect, fresh
from tests.support.misuse import Rigged
from tests.support.running import once, pairwise

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


WIDE = spaces.Box(-9, 9, (3,))
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
    (WIDE, None, EXACT, EXACT.astype(np.float32).tolist()),
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


BOX = spaces.Box(np.array([-1.0, 0.0], np.float32), np.array([1.0, 9.0], np.float32))
DISABLED, PUSH = AutoresetMode.DISABLED, spaces.Discrete(2)
CHOICES = spaces.Tuple([spaces.Discrete(3, start=2), spaces.MultiDiscrete([4, 5]), spaces.MultiBinary(2)])
BOXES = spaces.Dict({"arm": spaces.Dict({"left": BOX, "right": BOX}), "grip": spaces.Box(-2.0, 2.0, (1,))})


class Missions(gymnasium.Env):
    """Its mission is a text; infos have the last action as it came, as numbers, and whether it was in its space."""

    def __init__(self, action_space=CHOICES, text="go to the däor", **parts):
        self.text, self.action_space = text, action_space
        image, mission = spaces.Box(0, 255, (2,), np.uint8), spaces.Text(400)
        self.observation_space = spaces.Dict({"image": image, "mission": mission} | parts)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.seen(), {}

    def seen(self):
        return {"image": np.ones(2, np.uint8), "mission": self.text}

    def step(self, action):
        kept = np.asarray(spaces.flatten(self.action_space, action), np.float64)
        got = {"inside": self.action_space.contains(action), "parts": {"flat": kept}}
        return self.seen(), 1.0, False, False, {"action": got, "action.inside": 7, "score": 0.5}


LANES = {
    "one": lambda make, **k: fc.make_env(make, **k),
    "lanes": lambda make, **k: fc.make_env(make, num_envs=2, **k),
    "workers": lambda make, **k: fc.make_env(make, num_envs=2, num_workers=2, **k),
    "vector": lambda make, **k: fc.make_env(SyncVectorEnv([make] * 2, autoreset_mode=DISABLED), **k),
}


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("space", [CHOICES, BOXES], ids=["choices", "boxes"])
def test_parts_of_actions_texts_and_nested_infos(lanes, space):
    make = functools.partial(Missions, space)
    infos = ("action.parts.flat", "action.inside", "score")
    env = LANES[lanes](make, text=20, info_keys=infos)
    batch = collect(env, fc.random_policy(env), 6, seed=0)
    text = "go to the däor".encode()
    assert batch["mission"].dtype == torch.uint8
    assert batch["mission"].reshape(-1, 20).unique(dim=0).tolist() == [[*text, *[0] * (20 - len(text))]]
    got = batch["next", "info"]
    assert got["action.inside"].unique().tolist() == [7]  # the key with a dot comes first
    for action, flat in zip(batch["action"].flatten(0, -2), got["action.parts.flat"].flatten(0, -2), strict=True):
        assert env.action_space.contains(action.numpy())
        if space is BOXES:
            assert torch.equal(action, flat.float())
        else:
            parts = 2 + int(action[0]) - 2, action[1:3].numpy(), action[3:].to(torch.int8).numpy()
            assert flat.tolist() == spaces.flatten(CHOICES, parts).tolist()


def test_an_action_is_in_the_environments_own_space_and_forks():
    class Plain(Missions):
        def step(self, action):
            return self.seen(), 1.0, False, False, {"inside": self.action_space.contains(action)}

    env = fc.make_env(Plain, num_envs=3, drop=["mission"], info_keys=["inside"])
    assert [leaf.name for leaf in env.observation_leaves] == ["image"]
    assert collect(env, fc.random_policy(env), 5, seed=0)["next", "info", "inside"].all()
    fc.testing.check_env(functools.partial(Missions, BOXES), num_envs=2, text=16)


def test_a_key_within_a_key_is_left_out():
    nested = functools.partial(Missions, talk=spaces.Dict(said=spaces.Text(9), loud=spaces.Discrete(2)))
    env = fc.make_env(nested, drop=["mission", "talk.said"])
    assert [leaf.path for leaf in env.observation_leaves] == [("image",), ("talk", "loud")]
    with pytest.raises(ValueError, match=r"drop names \['heard'\], expected the keys .*\['said', 'loud'\]"):
        fc.make_env(nested, drop=["mission", "talk.heard"])


def test_the_flat_space():
    flat = plain_actions(CHOICES)
    assert flat == spaces.MultiDiscrete([3, 4, 5, 2, 2], start=[2, 0, 0, 0, 0])
    box = plain_actions(BOXES)
    assert (box.low.tolist(), box.high.tolist()) == ([-1, 0, -1, 0, -2], [1, 9, 1, 9, 2])
    assert plain_actions(BOX) is BOX
    one_hot = fc.make_env(Missions, text=20, one_hot=True)
    assert one_hot.action_spec.shape == (16,)
    assert collect(one_hot, fc.random_policy(one_hot), 3, seed=0)["action"].sum(-1).unique().tolist() == [5]


LOGGED = functools.partial(Missions, log=spaces.Sequence(BOX))
REFUSED = {
    "text": (lambda: fc.make_env(LOGGED, drop=["log"]), r"at mission is Text.*drop=\['mission'\].*text=256"),
    "sequence": (lambda: fc.make_env(LOGGED, drop=["mission"]), r"at log is Sequence.*drop=.*FilterObservation"),
    "unknown": (lambda: fc.make_env(LOGGED, drop=["map"]), r"drop names \['map'\].*\['image', 'log', 'mission'\]"),
    "no dict": (lambda: fc.make_env("CartPole-v1", drop=["map"]), "expected a Dict observation, not Box"),
    "no text": (lambda: fc.make_env("CartPole-v1", text=9), "text=9 was given, .* has no Text: leave it out"),
    "kinds": (lambda: plain_actions(spaces.Tuple([BOX, PUSH])), "mixes kinds.*gymnasium.ActionWrapper"),
    "nothing": (lambda: plain_actions(spaces.Dict(a=spaces.Tuple([]))), "has no parts, expected one or more: declare"),
    "texts": (lambda: plain_actions(spaces.Dict(say=spaces.Text(3))), "mixes kinds, expected a Tuple or Dict"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_an_array_is_refused_with_the_way_out(name):
    make, says = REFUSED[name]
    with pytest.raises((TypeError, ValueError), match=says):
        make()


def test_a_longer_text_is_an_error_with_its_length():
    env = fc.make_env([Missions, functools.partial(Missions, text="x" * 30)], text=20)
    with pytest.raises(EnvError, match=r"lane 1: the text of observation 'mission' has 30 bytes, .* at most 20: .*=30"):
        fc.init(env, fc.random_policy(env), seed=0)


DICTS = {"action": r"'action' holds a dict, .*\['action.inside', 'action.parts.flat'\]", "action.out": "no info key"}


@pytest.mark.parametrize(("lanes", "key"), dict.fromkeys([*once(LANES, DICTS), ("vector", "action")]))
def test_a_dict_among_infos_is_named_with_its_keys(lanes, key):
    says = DICTS[key]
    env, policy, state = fresh(LANES[lanes](Missions, text=20, info_keys=[key]))
    with pytest.raises(EnvError, match=says):
        fc.rollout(env, policy, state, 2)


class Worn(gymnasium.Env):
    """Observes how many steps it has made since it was built, and whether it was closed; a lock cannot be pickled."""

    observation_space, action_space = spaces.Box(-np.inf, np.inf, (2,)), spaces.Discrete(2)
    steps = closed = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.lock, self.time = threading.Lock(), 0
        return np.array([self.steps, self.closed], np.float32), {}

    def step(self, action):
        self.steps, self.time = self.steps + 1, self.time + 1
        return np.array([self.steps, self.closed], np.float32), 1.0, False, self.time == 4, {}

    def close(self):
        self.closed = 1


@pytest.mark.parametrize(
    "make",
    [
        lambda: fc.make_env(Worn),
        lambda: fc.make_env(lambda: Worn(), num_envs=2),
        lambda: fc.make_env([Worn, Worn]),
        lambda: fc.envs.from_gymnasium(Worn, num_envs=2),
        lambda: fc.make_env(lambda: SyncVectorEnv([Worn] * 2, autoreset_mode=AutoresetMode.DISABLED)),
    ],
)
def test_a_copy_of_an_environment_that_ran_has_simulators_of_its_own(make):
    env = make()
    policy = fc.random_policy(env)
    fc.close(fc.rollout(env, policy, fc.init(env, policy, seed=0), 9)[0])
    copy = cloudpickle.loads(cloudpickle.dumps(env))
    batch = fc.rollout(copy, policy, fc.init(copy, policy, seed=0), 2)[1]
    assert batch["observation"].reshape(-1, 2, 2)[:, 0].eq(0).all()
