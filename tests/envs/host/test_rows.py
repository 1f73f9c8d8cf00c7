"""Observations as they are written; what is wrong with one is named in `tests/misuse/test_lanes.py`."""

from dataclasses import replace

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


def make_rows(space, num_envs, dtype=None):
    leaves = observation_leaves(space, dtype)
    return Rows(replace(CARTPOLE, num_envs=num_envs, observation_space=space, observation_leaves=leaves))


@pytest.mark.parametrize(
    ("shape", "dtype"), [((1,), np.uint8), ((3, 17), np.float32), ((8, 5, 5), np.int64), ((2, 0), np.int8)]
)
def test_memory_begins_at_a_multiple_of_64_bytes(shape, dtype):
    arrays = [aligned(shape, np.dtype(dtype)) for _ in range(20)]
    assert all(array.ctypes.data % 64 == 0 for array in arrays if array.size)
    assert all(array.shape == shape and array.dtype == dtype and not array.any() for array in arrays)
    assert all(array.flags.c_contiguous and array.flags.writeable for array in arrays)


def test_the_policy_reads_the_same_aligned_memory_in_the_structure_of_the_space():
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


EXACT = np.array([0.1, 1 / 3, 2.0**-60])
GOOD = [
    *((spaces.Discrete(9), None, value, 4) for value in (4, np.int64(4), np.int32(4), np.uint8(4), np.array(4))),
    *((BYTES, None, given, [3, 255]) for given in (np.array([3, 255]), np.array([3, 255], np.int16), [3, 255])),
    (BOX, None, EXACT, EXACT.astype(np.float32).tolist()),
    (spaces.Box(-9, 9, (3,), np.float64), np.float64, EXACT, EXACT.tolist()),
]


@pytest.mark.parametrize(("space", "dtype", "value", "wanted"), GOOD)
def test_values_that_fit_are_cast_once(space, dtype, value, wanted):
    rows = make_rows(space, 2, dtype)
    for lane in range(2):
        rows.write_lane(lane, value)
    (array,) = rows.arrays.values()
    assert array.tolist() == [wanted] * 2


def test_a_vector_environments_batch_is_written_at_once():
    rows = make_rows(BOTH, 2)
    inner = {"bytes": np.array([[1, 2], [3, 4]]), "count": np.array([5, 6])}
    rows.write_batch({"box": np.ones((2, 3)), "inner": inner})
    assert rows.arrays["box",].tolist() == [[1, 1, 1], [1, 1, 1]]
    assert rows.arrays["inner", "bytes"].tolist() == [[1, 2], [3, 4]]
    assert rows.arrays["inner", "count"].tolist() == [5, 6]
    with pytest.raises(EnvError, match=r"the vector environment: observation 'box' has shape \(1, 3\).*\(2, 3\)"):
        rows.write_batch({"box": np.ones((1, 3)), "inner": inner})
