from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from funcollect.envs import from_gymnasium
from funcollect.envs.host.rows import Rows
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


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.float32, np.int64, np.float64])
@pytest.mark.parametrize("shape", [(1,), (3, 17), (8, 5, 5), (2, 0)])
def test_memory_begins_at_a_multiple_of_64_bytes(shape: tuple[int, ...], dtype: Any) -> None:
    arrays = [aligned(shape, np.dtype(dtype)) for _ in range(20)]
    assert all(array.ctypes.data % 64 == 0 for array in arrays if array.size)
    assert all(array.shape == shape and array.dtype == dtype and not array.any() for array in arrays)
    assert all(array.flags.c_contiguous and array.flags.writeable for array in arrays)


def test_every_leaf_is_aligned_and_stays_where_it_is() -> None:
    rows = make_rows(BOTH, 3)
    before = {path: array.ctypes.data for path, array in rows.arrays.items()}
    write(rows, [BOTH.sample() for _ in range(3)])
    rows.write_lane(1, BOTH.sample())
    assert {path: array.ctypes.data for path, array in rows.arrays.items()} == before
    assert all(address % 64 == 0 for address in before.values())


def test_the_policy_reads_the_same_memory_in_the_structure_of_the_space() -> None:
    rows = make_rows(BOTH, 2)
    arrays = assemble(BOTH, rows.arrays)
    tensors = assemble(BOTH, {path: torch.from_numpy(array) for path, array in rows.arrays.items()})
    rows.write_lane(1, {"box": np.full(3, 2.0), "inner": {"bytes": np.array([7, 8], np.uint8), "count": 5}})
    assert arrays["box"].tolist() == [[0, 0, 0], [2, 2, 2]]
    assert tensors["inner"]["bytes"].tolist() == [[0, 0], [7, 8]]
    assert tensors["inner"]["count"].tolist() == [0, 5]
    assert tensors["inner"]["count"].dtype == torch.int64


@pytest.mark.parametrize("num_envs", [1, 2, 3])
def test_write_puts_each_lane_in_its_row(num_envs: int) -> None:
    rows = make_rows(BOX, num_envs)
    write(rows, [np.arange(3, dtype=np.float32) + 10 * lane for lane in range(num_envs)])
    assert only(rows).tolist() == [[10 * lane + i for i in range(3)] for lane in range(num_envs)]
    rows.write_lane(num_envs - 1, np.zeros(3, np.float32))
    assert only(rows)[-1].tolist() == [0, 0, 0]
    assert only(rows)[:-1].tolist() == [[10 * lane + i for i in range(3)] for lane in range(num_envs - 1)]


EXACT = np.array([0.1, 1 / 3, 2.0**-60])
GOOD: list[tuple[spaces.Space[Any], Any, Any, Any]] = [
    *((spaces.Discrete(9), None, value, 4) for value in (4, np.int64(4), np.int32(4), np.uint8(4), np.array(4))),
    *((BYTES, None, given, [3, 255]) for given in (np.array([3, 255]), np.array([3, 255], np.int16), [3, 255])),
    (BOX, None, EXACT, EXACT.astype(np.float32).tolist()),
    (spaces.Box(-9, 9, (3,), np.float64), np.float64, EXACT, EXACT.tolist()),
]


@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize(("space", "dtype", "value", "wanted"), GOOD)
def test_values_that_fit_are_cast_once(
    space: spaces.Space[Any], dtype: Any, value: Any, wanted: Any, num_envs: int
) -> None:
    rows = make_rows(space, num_envs, dtype)
    write(rows, [value] * num_envs)
    assert only(rows).tolist() == [wanted] * num_envs


WRONG: list[tuple[str, spaces.Space[Any], Any, Any, str]] = [
    ("too large", BYTES, np.zeros(2, np.uint8), np.array([3, 256]), "dtype int64.*uint8"),
    ("negative", BYTES, np.zeros(2, np.uint8), np.array([3, -1]), "dtype int64.*uint8"),
    ("fraction in integers", BYTES, np.zeros(2, np.uint8), np.array([3.0, 1.0]), "dtype float64.*uint8"),
    ("fraction as a choice", spaces.Discrete(9), 1, 1.5, "dtype float64.*int64"),
    ("complex", BOX, np.zeros(3, np.float32), np.zeros(3, complex), "dtype complex128.*float32"),
    ("text", BOX, np.zeros(3, np.float32), np.array(["a", "b", "c"]), "dtype <U1.*float32"),
    ("shorter", BOX, np.zeros(3, np.float32), np.zeros(2, np.float32), r"shape \(2,\).*\(3,\)"),
    ("would broadcast", BOX, np.zeros(3, np.float32), np.zeros(1, np.float32), r"shape \(1,\).*\(3,\)"),
    ("scalar", BOX, np.zeros(3, np.float32), np.float32(0), r"shape \(\).*\(3,\)"),
    ("one dimension more", BOX, np.zeros(3, np.float32), np.zeros((3, 1), np.float32), r"shape \(3, 1\).*\(3,\)"),
    ("a row", spaces.Discrete(9), 1, np.array([1]), r"shape \(1,\).*\(\)"),
]


@pytest.mark.parametrize(("space", "good", "bad", "message"), [case[1:] for case in WRONG], ids=[c[0] for c in WRONG])
@pytest.mark.parametrize("lanes", [1, 3])
def test_a_wrong_row_is_named_with_its_lane(
    space: spaces.Space[Any], good: Any, bad: Any, message: str, lanes: int
) -> None:
    rows = make_rows(space, lanes)
    wrong = lanes - 1
    with pytest.raises(EnvError, match=f"lane {wrong}: observation 'observation' has {message}"):
        write(rows, [*[good] * wrong, bad])


@pytest.mark.parametrize("shape", [(3, 1), (1,), (2,), (1, 3), ()])
def test_a_shape_that_is_wrong_in_all_lanes_is_seen(shape: tuple[int, ...]) -> None:
    rows = make_rows(BOX, 3)
    with pytest.raises(EnvError, match="lane 0: observation 'observation' has shape"):
        write(rows, [np.zeros(shape, np.float32)] * 3)


@pytest.mark.parametrize("observation", [{"box": np.zeros(3)}, np.zeros(3), (np.zeros(3), 1), None])
def test_a_wrong_structure_is_named(observation: Any) -> None:
    rows = make_rows(BOTH, 2)
    with pytest.raises(EnvError, match=r"lane 1: the observation .* lacks the structure of its space"):
        write(rows, [BOTH.sample(), observation])
    with pytest.raises(EnvError, match=r"lane 0: the observation .* lacks the structure of its space"):
        rows.write_lane(0, observation)


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
