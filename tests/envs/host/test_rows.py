from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from funcollect.envs import from_gymnasium
from funcollect.envs.host.host_env import Rows
from funcollect.errors import EnvError
from funcollect.interop.memory import aligned
from funcollect.specs import assemble, observation_leaves

CARTPOLE = from_gymnasium("CartPole-v1")
BOX = spaces.Box(-9, 9, (3,))
BYTES = spaces.Box(0, 255, (2,), np.uint8)
BOTH = spaces.Dict(box=BOX, inner=spaces.Dict(bytes=BYTES, count=spaces.Discrete(9)))


def make_rows(space: spaces.Space[Any], num_envs: int, dtype: Any = None) -> Rows:
    leaves = observation_leaves(space, dtype)
    return Rows(replace(CARTPOLE, num_envs=num_envs, observation_space=space, observation_leaves=leaves))


def write(rows: Rows, values: list[Any]) -> None:
    for lane, value in enumerate(values):
        rows.write_lane(lane, value)


def only(rows: Rows) -> np.ndarray:
    (array,) = rows.arrays.values()
    return array


@pytest.mark.parametrize(
    ("shape", "dtype"), [((1,), np.uint8), ((3, 17), np.float32), ((8, 5, 5), np.int64), ((2, 0), np.int8)]
)
def test_memory_begins_at_a_multiple_of_64_bytes(shape: tuple[int, ...], dtype: Any) -> None:
    arrays = [aligned(shape, np.dtype(dtype)) for _ in range(20)]
    assert all(array.ctypes.data % 64 == 0 for array in arrays if array.size)
    assert all(array.shape == shape and array.dtype == dtype and not array.any() for array in arrays)
    assert all(array.flags.c_contiguous and array.flags.writeable for array in arrays)


def test_the_policy_reads_the_same_aligned_memory_in_the_structure_of_the_space() -> None:
    rows = make_rows(BOTH, 2)
    before = {path: array.ctypes.data for path, array in rows.arrays.items()}
    arrays = assemble(BOTH, rows.arrays)
    tensors = assemble(BOTH, {path: torch.from_numpy(array) for path, array in rows.arrays.items()})
    rows.write_lane(1, {"box": np.full(3, 2.0), "inner": {"bytes": np.array([7, 8], np.uint8), "count": 5}})
    assert arrays["box"].tolist() == [[0, 0, 0], [2, 2, 2]]
    assert tensors["inner"]["bytes"].tolist() == [[0, 0], [7, 8]]
    assert tensors["inner"]["count"].tolist() == [0, 5]
    assert tensors["inner"]["count"].dtype == torch.int64
    assert {path: array.ctypes.data for path, array in rows.arrays.items()} == before
    assert all(address % 64 == 0 for address in before.values())


def test_write_puts_each_lane_in_its_row() -> None:
    rows = make_rows(BOX, 3)
    write(rows, [np.arange(3, dtype=np.float32) + 10 * lane for lane in range(3)])
    assert only(rows).tolist() == [[0, 1, 2], [10, 11, 12], [20, 21, 22]]
    rows.write_lane(2, np.zeros(3, np.float32))
    assert only(rows).tolist() == [[0, 1, 2], [10, 11, 12], [0, 0, 0]]


EXACT = np.array([0.1, 1 / 3, 2.0**-60])
GOOD: list[tuple[spaces.Space[Any], Any, Any, Any]] = [
    *((spaces.Discrete(9), None, value, 4) for value in (4, np.int64(4), np.int32(4), np.uint8(4), np.array(4))),
    *((BYTES, None, given, [3, 255]) for given in (np.array([3, 255]), np.array([3, 255], np.int16), [3, 255])),
    (BOX, None, EXACT, EXACT.astype(np.float32).tolist()),
    (spaces.Box(-9, 9, (3,), np.float64), np.float64, EXACT, EXACT.tolist()),
]


@pytest.mark.parametrize(("space", "dtype", "value", "wanted"), GOOD)
def test_values_that_fit_are_cast_once(space: spaces.Space[Any], dtype: Any, value: Any, wanted: Any) -> None:
    rows = make_rows(space, 2, dtype)
    write(rows, [value] * 2)
    assert only(rows).tolist() == [wanted] * 2


# Other kinds of wrong rows are in tests/misuse/test_lanes.py.
WRONG: list[tuple[str, spaces.Space[Any], Any, str]] = [
    ("negative", BYTES, np.array([3, -1]), "dtype int64.*uint8"),
    ("fraction in integers", BYTES, np.array([3.0, 1.0]), "dtype float64.*uint8"),
    ("text", BOX, np.array(["a", "b", "c"]), "dtype <U1.*float32"),
    ("scalar", BOX, np.float32(0), r"shape \(\).*\(3,\)"),
    ("one dimension more", BOX, np.zeros((3, 1), np.float32), r"shape \(3, 1\).*\(3,\)"),
    ("a row", spaces.Discrete(9), np.array([1]), r"shape \(1,\).*\(\)"),
]


@pytest.mark.parametrize(("space", "bad", "message"), [case[1:] for case in WRONG], ids=[c[0] for c in WRONG])
def test_a_wrong_row_is_named_with_its_lane(space: spaces.Space[Any], bad: Any, message: str) -> None:
    rows = make_rows(space, 3)
    with pytest.raises(EnvError, match=f"lane 2: observation 'observation' has {message}"):
        write(rows, [*[space.sample()] * 2, bad])
    with pytest.raises(EnvError, match=f"lane 0: observation 'observation' has {message}"):
        write(rows, [bad] * 3)


@pytest.mark.parametrize("observation", [np.zeros(3), (np.zeros(3), 1), None])
def test_a_wrong_structure_is_named(observation: Any) -> None:
    rows = make_rows(BOTH, 2)
    with pytest.raises(EnvError, match=r"lane 1: the observation .* lacks the structure of its space"):
        write(rows, [BOTH.sample(), observation])


def test_a_vector_environments_batch_is_written_at_once() -> None:
    rows = make_rows(BOTH, 2)
    rows.write_batch(
        {"box": np.ones((2, 3)), "inner": {"bytes": np.array([[1, 2], [3, 4]]), "count": np.array([5, 6])}}
    )
    assert rows.arrays["box",].tolist() == [[1, 1, 1], [1, 1, 1]]
    assert rows.arrays["inner", "bytes"].tolist() == [[1, 2], [3, 4]]
    assert rows.arrays["inner", "count"].tolist() == [5, 6]
    with pytest.raises(EnvError, match=r"the vector environment: observation 'box' has shape \(1, 3\).*\(2, 3\)"):
        rows.write_batch({"box": np.ones((1, 3)), "inner": {"bytes": np.zeros((2, 2)), "count": np.zeros(2)}})
