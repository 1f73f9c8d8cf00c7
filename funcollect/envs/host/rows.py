"""Write the observations of many simulators into one fixed, aligned array per leaf.

Torch's bits depend on the alignment of an input row, and NumPy's assignment broadcasts and truncates silently. So the
policy always reads the same 64-byte-aligned arrays, and the shape and dtype of every row are checked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from funcollect.envs.host.host_env import SimulatedEnv, observation_rows
from funcollect.errors import EnvError
from funcollect.specs import Leaf, disassemble

Array = npt.NDArray[Any]


class LeafRows:
    """The current rows of one leaf, in `array` [P, *shape]; all methods raise EnvError for other shapes and dtypes."""

    def __init__(self, leaf: Leaf, array: Array, first_lane: int) -> None:
        self.leaf, self.array, self._first_lane = leaf, array, first_lane
        casting: Literal["same_kind", "safe"] = "same_kind" if leaf.dtype.kind == "f" else "safe"
        dtypes = [np.dtype(kind) for kind in "?bhilqBHILQefd"]
        self.dtypes = {dtype for dtype in dtypes if np.can_cast(dtype, leaf.dtype, casting)}  # accepted as is

    def write_batch(self, values: Any, lanes: Sequence[int] | Array | None = None, *, of_all: bool = False) -> None:
        """Write an array [P, *shape], or the rows of k lanes from [k, *shape] or, if it is `of_all`, [P, *shape]."""
        wanted = self.array.shape if lanes is None or of_all else (len(lanes), *self.leaf.shape)
        values = self._as_array("the vector environment", values, wanted)
        if lanes is not None and of_all:
            lanes = None if len(lanes) == len(values) else np.array(lanes)
            values = values if lanes is None else values[lanes]
        if values.dtype in self.dtypes:
            self.array[... if lanes is None else lanes] = values
        else:
            for lane, value in zip(range(len(values)) if lanes is None else lanes, values, strict=True):
                self.write_lane(lane, value)

    def write_lane(self, lane: int, value: Any) -> None:
        """Write one lane's row. Any number is cast to a floating dtype; integers have to keep their values."""
        if getattr(value, "dtype", None) in self.dtypes and value.shape == self.leaf.shape:
            self.array[lane] = value
            return
        given = self._as_array(f"lane {self._first_lane + lane}", value, self.leaf.shape)
        dtype = self.leaf.dtype
        integers = {given.dtype.kind, dtype.kind} <= set("iub")
        if given.dtype not in self.dtypes and not (integers and (given.astype(dtype) == given).all()):
            raise EnvError(
                f"lane {self._first_lane + lane}: observation {self.leaf.name!r} has dtype {given.dtype}, "
                f"its space wants {dtype}: correct the space's dtype or cast the observation"
            )
        self.array[lane] = given

    def _as_array(self, where: str, value: Any, shape: tuple[int, ...]) -> Array:
        """The value as an array; EnvError, which names the place `where`, unless it has this shape."""
        try:
            array = np.asarray(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise EnvError(
                f"{where}: observation {self.leaf.name!r} is {type(value).__name__} and no array ({error}), "
                f"its space wants {self.leaf.dtype} {self.leaf.shape}: correct the space or the observation"
            ) from error
        if array.shape != shape:
            raise EnvError(
                f"{where}: observation {self.leaf.name!r} has shape {array.shape}, its space wants {shape}: correct "
                "the space or the observation"
            )
        return array


class Rows:
    """The current observations of all lanes of an environment, for all leaves of its space."""

    def __init__(self, env: SimulatedEnv) -> None:
        self.space, leaves, num_envs = env.observation_space, env.observation_leaves, env.num_envs or 1
        self._first_lane = env.first_lane
        arrays = env.memory or observation_rows(env)
        self.leaves = tuple(LeafRows(leaf, arrays[leaf.path], env.first_lane) for leaf in leaves)
        self.arrays = {rows.leaf.path: rows.array for rows in self.leaves}  # [P, ...] each: always the same memory
        plain = len(self.leaves) == 1 and leaves[0].path == ("observation",)  # no Dict or Tuple to take apart
        self.write_lane: Callable[[int, Any], None] = self.leaves[0].write_lane if plain else self._write_lane
        # The rows, and the dtypes and the shape that go into them as they are; no dtypes for a Dict or a Tuple.
        self.plain: tuple[list[Array], set[np.dtype[Any]], tuple[int, ...]] = ([], set(), ())
        if plain:
            (only,) = self.leaves
            self.plain = [only.array[lane, ...] for lane in range(num_envs)], only.dtypes, only.leaf.shape

    def _write_lane(self, lane: int, observation: Any) -> None:
        for rows, value in zip(self.leaves, self._parts(lane, observation), strict=True):
            rows.write_lane(lane, value)

    def write_batch(
        self, observations: Any, lanes: Sequence[int] | Array | None = None, *, of_all: bool = False
    ) -> None:
        """Write a vector environment's observation, whose leaves `LeafRows.write_batch` describes."""
        for rows, values in zip(self.leaves, self._parts(None, observations), strict=True):
            rows.write_batch(values, lanes, of_all=of_all)

    def _parts(self, lane: int | None, observation: Any) -> list[Any]:
        """The leaves of one lane's observation, or of all lanes' (None), in order; EnvError for another structure."""
        try:
            return disassemble(self.space, observation)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            where = "the vector environment" if lane is None else f"lane {self._first_lane + lane}"
            raise EnvError(
                f"{where}: the observation is {_structure(observation)} and lacks the structure of its space, "
                f"{_structure(getattr(self.space, 'spaces', None))} ({error!r}): return every one of these"
            ) from error


def _structure(observation: Any) -> str:
    if isinstance(observation, Mapping):
        return f"a dict with the keys {sorted(map(str, observation))}"
    if isinstance(observation, (tuple, list)):
        return f"a tuple of {len(observation)}"
    return f"of type {type(observation).__name__}"
