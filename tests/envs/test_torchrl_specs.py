from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torchrl.data import (
    Binary,
    Bounded,
    Categorical,
    Composite,
    MultiCategorical,
    MultiOneHot,
    NonTensor,
    OneHot,
    Unbounded,
)

from funcollect.envs.torchrl_specs import action_spec, observation_space
from funcollect.specs import ActionSpec, observation_leaves

OBSERVATIONS = {
    "float": (Unbounded((3,)), spaces.Box(-np.inf, np.inf, (3,), np.float32)),
    "bounded": (
        Bounded(-1, [1.0, 2.0], (2,), dtype=torch.float64),
        spaces.Box(-1, np.array([1.0, 2.0]), dtype=np.float64),
    ),
    "pixels": (Bounded(0, 255, (3, 8, 8), dtype=torch.uint8), spaces.Box(0, 255, (3, 8, 8), np.uint8)),
    "integers": (
        Unbounded((1,), dtype=torch.int32),
        spaces.Box(-(2**31), 2**31 - 1, (1,), np.int32),
    ),
    "choice": (Categorical(4), spaces.Discrete(4)),
    "choices": (Categorical(4, shape=(2,)), spaces.Box(0, 3, (2,), np.int64)),
    "flag": (Categorical(2, shape=(1,), dtype=torch.bool), spaces.Box(0, 1, (1,), bool)),
    "several choices": (MultiCategorical([2, 5]), spaces.Box(0, np.array([1, 4]), dtype=np.int64)),
    "one hot": (OneHot(4, dtype=torch.int64), spaces.Box(0, 1, (4,), np.int64)),
    "binary": (Binary(3), spaces.Box(0, 1, (3,), np.int8)),
    "nested": (
        Composite(a=Composite(b=Unbounded(2)), c=Categorical(3)),
        spaces.Dict({"a": spaces.Dict({"b": spaces.Box(-np.inf, np.inf, (2,))}), "c": spaces.Discrete(3)}),
    ),
}


@pytest.mark.parametrize("name", OBSERVATIONS)
def test_observations(name):
    spec, wanted = OBSERVATIONS[name]
    space = observation_space(spec)
    assert space == wanted
    leaves = observation_leaves(space, np.float64)
    assert [leaf.path for leaf in leaves] == ([("a", "b"), ("c",)] if name == "nested" else [("observation",)])


ACTIONS = {
    "choice": (Categorical(4), ActionSpec(spaces.Discrete(4))),
    "choices": (Categorical(4, shape=(2,)), ActionSpec(spaces.MultiDiscrete([4, 4]))),
    "several choices": (MultiCategorical([2, 5]), ActionSpec(spaces.MultiDiscrete([2, 5]))),
    "one hot": (OneHot(4), ActionSpec(spaces.Discrete(4), one_hot=True)),
    "several one hot": (MultiOneHot([2, 5]), ActionSpec(spaces.MultiDiscrete([2, 5]), one_hot=True)),
    "binary": (Binary(3), ActionSpec(spaces.MultiBinary((3,)))),
    "bounded": (Bounded(-2, 2, (1,)), ActionSpec(spaces.Box(-2, 2, (1,)))),
    "unbounded": (Unbounded((2,)), ActionSpec(spaces.Box(-np.inf, np.inf, (2,)))),
}


@pytest.mark.parametrize("name", ACTIONS)
def test_actions_keep_their_encoding(name):
    spec, wanted = ACTIONS[name]
    assert action_spec(spec) == wanted
    assert wanted.shape == tuple(spec.shape)


@pytest.mark.parametrize(
    ("convert", "spec", "message"),
    [
        (observation_space, Composite(text=NonTensor(())), "'text' is NonTensor"),
        (observation_space, Unbounded((2,), dtype=torch.bfloat16), "a dtype that NumPy has"),
        (observation_space, Unbounded((-1,)), "its shape varies"),
        (action_spec, OneHot(4, shape=(2, 4)), r"one-hot action has shape \[2, 4\], expected \[4\]"),
        (action_spec, Composite(a=Binary(2)), "the action spec is Composite"),
    ],
)
def test_what_has_no_space_is_said(convert, spec, message):
    with pytest.raises(TypeError, match=message):
        convert(spec)
