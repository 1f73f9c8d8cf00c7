"""Make Gymnasium spaces from shapes and dtypes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from funcollect.interop.jax_setup import import_jax
from funcollect.specs import Space


def box(shape: tuple[int, ...], dtype: npt.DTypeLike, low: Any = None, high: Any = None) -> Space:
    """A Box of any dtype, bool included. Missing bounds are the dtype's range, or infinite for floats."""
    dtype = np.dtype(dtype)
    kind: Any = dtype.type  # Gymnasium's annotation knows no bool
    if dtype.kind == "b":
        return spaces.Box(0, 1, shape, kind)
    least, most = (-np.inf, np.inf) if dtype.kind not in "iu" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    bounds = (least if low is None else low, most if high is None else high)
    lower, upper = (np.broadcast_to(np.clip(bound, least, most).astype(dtype), shape) for bound in bounds)
    return spaces.Box(lower, upper, shape, kind)


def space_like(array: Any) -> Space:
    """The space of an array, or of a dict of arrays, which may be the results of `jax.eval_shape`."""
    if isinstance(array, Mapping):
        return spaces.Dict({name: space_like(part) for name, part in array.items()})
    return box(array.shape, array.dtype)


def as_delivered(space: Space) -> Space:
    """The same space with the integer dtypes of JAX's arrays: 32 bits, unless JAX has enabled 64."""
    own = np.dtype(space.dtype or np.float32)
    dtype = np.dtype(import_jax().dtypes.canonicalize_dtype(own))
    changes = own.kind in "iu" and dtype != own
    match space:
        case spaces.Dict():
            return spaces.Dict({name: as_delivered(child) for name, child in space.spaces.items()})
        case spaces.Tuple():
            return spaces.Tuple([as_delivered(child) for child in space.spaces])
        case spaces.Discrete() if changes:
            return spaces.Discrete(int(space.n), start=int(space.start), dtype=dtype.type)
        case spaces.MultiDiscrete() if changes:
            return spaces.MultiDiscrete(space.nvec, dtype.type, start=space.start)
        case spaces.Box() if changes:
            return box(space.shape, dtype, space.low, space.high)
    return space
