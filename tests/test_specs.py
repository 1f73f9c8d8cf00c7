from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

import funcollect as fc
from funcollect.envs.host.host_env import seeding_of
from funcollect.specs import ActionSpec, assemble, disassemble, observation_leaves

BOX = spaces.Box(-1, 1, (3,))
IMAGE = spaces.Box(0, 255, (2, 2, 1), np.uint8)
NESTED = spaces.Dict(
    {"z": spaces.Dict({"image": IMAGE, "flags": spaces.MultiBinary(2)}), "a": spaces.Tuple([BOX, spaces.Discrete(4)])}
)

LEAVES: list[tuple[spaces.Space[Any], list[tuple[tuple[str, ...], tuple[int, ...], str]]]] = [
    (BOX, [(("observation",), (3,), "float32")]),
    (spaces.Box(-1, 1, (), np.float64), [(("observation",), (), "float32")]),
    (spaces.Box(-1, 1, (2, 3), np.float16), [(("observation",), (2, 3), "float32")]),
    (IMAGE, [(("observation",), (2, 2, 1), "uint8")]),
    (spaces.Discrete(5, start=-2), [(("observation",), (), "int64")]),
    (spaces.MultiDiscrete([[2, 3], [4, 5]]), [(("observation",), (2, 2), "int64")]),
    (spaces.MultiBinary((2, 3)), [(("observation",), (2, 3), "int8")]),
    (
        spaces.Tuple([BOX, spaces.Tuple([spaces.Discrete(2), IMAGE])]),
        [
            (("observation", "0"), (3,), "float32"),
            (("observation", "1", "0"), (), "int64"),
            (("observation", "1", "1"), (2, 2, 1), "uint8"),
        ],
    ),
    (
        NESTED,
        [
            (("z", "image"), (2, 2, 1), "uint8"),
            (("z", "flags"), (2,), "int8"),
            (("a", "0"), (3,), "float32"),
            (("a", "1"), (), "int64"),
        ],
    ),
]


@pytest.mark.parametrize(("space", "wanted"), LEAVES, ids=lambda value: type(value).__name__)
def test_observation_leaves(
    space: spaces.Space[Any], wanted: list[tuple[tuple[str, ...], tuple[int, ...], str]]
) -> None:
    found = {leaf.path: (leaf.shape, str(leaf.dtype)) for leaf in observation_leaves(space)}
    assert found == {path: (shape, dtype) for path, shape, dtype in wanted}


def test_dtype_is_that_of_floating_boxes_only() -> None:
    leaves = {leaf.name: leaf.dtype for leaf in observation_leaves(NESTED, np.float64)}
    assert leaves == {"z.image": np.uint8, "z.flags": np.int8, "a.0": np.float64, "a.1": np.int64}


def test_a_dtype_that_is_not_floating_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a floating one"):
        observation_leaves(BOX, np.int32)


@pytest.mark.parametrize("space", [spaces.Text(3), spaces.Sequence(BOX), spaces.Dict(x=spaces.Text(3))])
def test_a_space_without_arrays_of_fixed_size_is_refused(space: spaces.Space[Any]) -> None:
    with pytest.raises(TypeError, match=r"the observation space at (observation|x) is \w+, expected Box,.*flatten it"):
        observation_leaves(space)


@pytest.mark.parametrize("space", [spaces.Dict(), spaces.Tuple(()), spaces.Dict({"inner": spaces.Dict()})])
def test_a_space_without_arrays_is_refused(space: spaces.Space[Any]) -> None:
    with pytest.raises(ValueError, match=r"the observation space .* has no arrays, expected at least one: add one"):
        observation_leaves(space)


def test_an_environment_for_its_space_is_refused() -> None:
    with pytest.raises(TypeError, match=r"space is .*expected Space: pass a space .*env\.observation_space"):
        fc.running_statistics.init(fc.make_env("CartPole-v1"))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["action", "action_log_prob", "next", "done", "collector", "reward", "terminated"])
def test_a_key_that_a_batch_uses_itself_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"the observation key '{name}' collides .*rename it .*taken are"):
        observation_leaves(spaces.Dict({name: BOX}))


@pytest.mark.parametrize("name", ["a.b", ""])
def test_a_key_that_would_not_read_back_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"the observation key \(.*\) holds a dot or is empty: rename it"):
        observation_leaves(spaces.Dict({name: BOX}))


@pytest.mark.parametrize("space", [space for space, _ in LEAVES], ids=lambda space: type(space).__name__)
def test_assemble_and_disassemble_are_inverse(space: spaces.Space[Any]) -> None:
    space.seed(3)
    observation = space.sample()
    leaves = observation_leaves(space)
    parts = disassemble(space, observation)
    assert [np.shape(part) for part in parts] == [leaf.shape for leaf in leaves]
    back = assemble(space, {leaf.path: part for leaf, part in zip(leaves, parts, strict=True)})
    assert type(back) in (type(observation), dict)
    again = disassemble(space, back)
    assert all(one is two for one, two in zip(again, parts, strict=True))


def test_disassemble_refuses_a_tuple_of_another_length() -> None:
    with pytest.raises(ValueError, match="zip"):
        disassemble(spaces.Tuple([BOX, BOX]), (np.zeros(3),))


SPECS = [
    (spaces.Discrete(3), False, (3,), (), torch.int64),
    (spaces.Discrete(3), True, (3,), (3,), torch.int64),
    (spaces.MultiDiscrete([2, 4]), False, (2, 4), (2,), torch.int64),
    (spaces.MultiDiscrete([2, 4]), True, (2, 4), (6,), torch.int64),
    (spaces.MultiDiscrete([[2, 4], [3, 5]]), False, (2, 4, 3, 5), (2, 2), torch.int64),
    (spaces.MultiDiscrete([2, 4], dtype=np.int32), False, (2, 4), (2,), torch.int32),
    (spaces.MultiBinary(4), False, (), (4,), torch.int8),
    (spaces.Box(-1, 1, (2, 3)), False, (), (2, 3), torch.float32),
    (spaces.Box(-1, 1, (), np.float64), False, (), (), torch.float64),
    (spaces.Box(0, 9, (2,), np.uint8), False, (), (2,), torch.uint8),
]


@pytest.mark.parametrize(("space", "one_hot", "categories", "shape", "dtype"), SPECS, ids=str)
def test_action_spec(
    space: spaces.Space[Any], one_hot: bool, categories: tuple[int, ...], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    spec = ActionSpec(space, one_hot)
    assert (spec.categories, spec.shape, spec.dtype) == (categories, shape, dtype)


def test_action_spec_knows_where_choices_start() -> None:
    assert ActionSpec(spaces.Discrete(3, start=-1)).start == -1
    assert ActionSpec(spaces.MultiDiscrete([2, 4], start=[5, -3])).start.tolist() == [5, -3]
    assert ActionSpec(BOX).start == 0


@pytest.mark.parametrize("space", [spaces.Text(3), spaces.Dict(a=BOX), spaces.Tuple([BOX])])
def test_action_spec_refuses_structured_actions(space: spaces.Space[Any]) -> None:
    with pytest.raises(TypeError, match=r"the action space is \w+, expected Box, Discrete, MultiDiscrete .*flatten it"):
        ActionSpec(space)


def test_an_action_space_without_components_is_refused() -> None:
    with pytest.raises(ValueError, match=r"MultiDiscrete\(\[\]\) has no components, expected at least one: add one"):
        ActionSpec(spaces.MultiDiscrete([]))


@pytest.mark.parametrize("space", [BOX, spaces.MultiBinary(3)])
def test_one_hot_needs_choices(space: spaces.Space[Any]) -> None:
    with pytest.raises(ValueError, match=r"one_hot=True needs a Discrete or MultiDiscrete .*: leave it out"):
        ActionSpec(space, one_hot=True)


@pytest.mark.parametrize(("name", "num_envs"), [("CartPole-v1", None), ("CartPole-v1", 2), ("torch/Pendulum-v1", 2)])
def test_environments_follow_the_protocol(name: str, num_envs: int | None) -> None:
    env = fc.make_env(name, num_envs=num_envs)
    assert isinstance(env, fc.Env)
    assert env.num_envs == num_envs
    assert seeding_of(env) == "episode"
    assert env.backend == ("torch" if name.startswith("torch/") else "host")
    assert env.observation_leaves == observation_leaves(env.observation_space)
    assert env.action_spec.space == env.action_space


def test_policies_follow_the_protocol() -> None:
    env = fc.make_env("CartPole-v1")
    assert isinstance(fc.random_policy(env), fc.Policy)
    assert isinstance(fc.torch_policy(torch.nn.Linear(4, 2)), fc.Policy)
    assert isinstance(fc.jax_policy(lambda params, x: x, {}), fc.Policy)
    assert not isinstance(torch.nn.Linear(4, 2), fc.Policy)
