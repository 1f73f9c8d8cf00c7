from functools import partial

import numpy as np
import pytest
import torch
from gymnasium import spaces

from funcollect.specs import ActionSpec, assemble, disassemble, observation_leaves

BOX = spaces.Box(-1, 1, (3,))
IMAGE = spaces.Box(0, 255, (2, 2, 1), np.uint8)
NESTED = spaces.Dict(
    {"z": spaces.Dict({"image": IMAGE, "flags": spaces.MultiBinary(2)}), "a": spaces.Tuple([BOX, spaces.Discrete(4)])}
)

LEAVES = [
    (BOX, "observation float32 (3,)"),
    (spaces.Box(-1, 1, (), np.float64), "observation float32 ()"),
    (spaces.Box(-1, 1, (2, 3), np.float16), "observation float32 (2, 3)"),
    (IMAGE, "observation uint8 (2, 2, 1)"),
    (spaces.Discrete(5, start=-2), "observation int64 ()"),
    (spaces.MultiDiscrete([[2, 3], [4, 5]]), "observation int64 (2, 2)"),
    (spaces.MultiBinary((2, 3)), "observation int8 (2, 3)"),
    (
        spaces.Tuple([BOX, spaces.Tuple([spaces.Discrete(2), IMAGE])]),
        "observation.0 float32 (3,); observation.1.0 int64 (); observation.1.1 uint8 (2, 2, 1)",
    ),
    (NESTED, "a.0 float32 (3,); a.1 int64 (); z.flags int8 (2,); z.image uint8 (2, 2, 1)"),
]


def test_dtype_is_that_of_floating_boxes_only():
    leaves = {leaf.name: leaf.dtype for leaf in observation_leaves(NESTED, np.float64)}
    assert leaves == {"z.image": np.uint8, "z.flags": np.int8, "a.0": np.float64, "a.1": np.int64}


NOT_FIXED = r"the observation space at (observation|x) is \w+, expected Box,.*flatten it"
NO_ARRAYS = r"the observation space .* has no arrays, expected at least one: add one"
UNREADABLE = r"the observation key \(.*\) holds a dot or is empty: rename it"
STRUCTURED = r"the action space is \w+, expected Box, Discrete, MultiDiscrete .*flatten it"
OWN_KEYS = ("action", "action_log_prob", "next", "done", "collector", "reward", "terminated")
TWO = spaces.Tuple([BOX, BOX])
REFUSED = [  # what takes a space, spaces that it does not take, the error, and words of the message
    (partial(observation_leaves, dtype=np.int32), [BOX], ValueError, "expected a floating one"),
    (observation_leaves, [spaces.Dict({name: BOX}) for name in OWN_KEYS], ValueError, r"'\w+' collides .*rename it"),
    (observation_leaves, [spaces.Dict({"a.b": BOX}), spaces.Dict({"": BOX})], ValueError, UNREADABLE),
    (observation_leaves, [spaces.Text(3), spaces.Dict(x=spaces.Sequence(BOX))], TypeError, NOT_FIXED),
    (observation_leaves, [spaces.Tuple(()), spaces.Dict({"inner": spaces.Dict()})], ValueError, NO_ARRAYS),
    (ActionSpec, [spaces.Text(3), spaces.Dict(a=BOX), TWO], TypeError, STRUCTURED),
    (ActionSpec, [spaces.MultiDiscrete([])], ValueError, r"MultiDiscrete\(\[\]\) has no components.*: add one"),
    (partial(ActionSpec, one_hot=True), [BOX, spaces.MultiBinary(3)], ValueError, "needs a Discrete .*: leave it"),
    (lambda space: disassemble(space, (np.zeros(3),)), [TWO], ValueError, "zip"),
]


@pytest.mark.parametrize(("take", "given", "error", "words"), REFUSED)
def test_a_space_that_does_not_suit_is_refused(take, given, error, words):
    for space in given:
        with pytest.raises(error, match=words):
            take(space)


@pytest.mark.parametrize(("space", "wanted"), LEAVES, ids=lambda value: type(value).__name__)
def test_leaves_of_observations_which_assemble_and_disassemble(space, wanted):
    space.seed(3)
    observation = space.sample()
    leaves = observation_leaves(space)
    assert sorted(f"{'.'.join(leaf.path)} {leaf.dtype} {leaf.shape}" for leaf in leaves) == wanted.split("; ")
    parts = disassemble(space, observation)
    assert [np.shape(part) for part in parts] == [leaf.shape for leaf in leaves]
    back = assemble(space, {leaf.path: part for leaf, part in zip(leaves, parts, strict=True)})
    assert type(back) in (type(observation), dict)
    again = disassemble(space, back)
    assert all(one is two for one, two in zip(again, parts, strict=True))


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
def test_action_spec(space, one_hot, categories, shape, dtype):
    spec = ActionSpec(space, one_hot)
    assert (spec.categories, spec.shape, spec.dtype) == (categories, shape, dtype)
    assert not spec.start.any()
    assert ActionSpec(spaces.Discrete(3, start=-1)).start == -1
    assert ActionSpec(spaces.MultiDiscrete([2, 4], start=[5, -3])).start.tolist() == [5, -3]
