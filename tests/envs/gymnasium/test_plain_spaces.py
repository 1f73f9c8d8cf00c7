"""Keys left out, texts as bytes, actions of Tuple and Dict spaces, and infos within infos, over each kind of lanes."""

import functools

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import funcollect as fc
from funcollect.envs.plain_spaces import plain_actions
from funcollect.errors import EnvError
from tests.support.compare import collect, fresh
from tests.support.running import once

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
