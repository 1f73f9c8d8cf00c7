"""Gymnasium spaces for what JAX delivers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from funcollect.interop.jax_setup import import_jax
from funcollect.specs import Space


def box(shape: tuple[int, ...], dtype: npt.DTypeLike, low: Any = None, high: Any = None) -> Space:
    """A Box of one dtype, bool among them; where no bounds are given, those of the dtype.

    >>> box((2,), bool)
    Box(False, True, (2,), bool)
    """
    dtype = np.dtype(dtype)
    kind: Any = dtype.type  # Gymnasium's annotation knows no bool
    if dtype.kind == "b":
        return spaces.Box(0, 1, shape, kind)
    least, most = (-np.inf, np.inf) if dtype.kind not in "iu" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    bounds = (least if low is None else low, most if high is None else high)
    lower, upper = (np.broadcast_to(np.clip(bound, least, most).astype(dtype), shape) for bound in bounds)
    return spaces.Box(lower, upper, shape, kind)


def space_like(delivered: Any) -> Space:
    """The space of an array or a dict of them, by shape and dtype alone.

    Args:
        delivered: arrays, or what `jax.eval_shape` says about them.
    """
    if isinstance(delivered, Mapping):
        return spaces.Dict({name: space_like(part) for name, part in delivered.items()})
    return box(delivered.shape, delivered.dtype)


def as_delivered(space: Space) -> Space:
    """The same space with integers of 32 bits where JAX makes them so."""
    match space:
        case spaces.Dict():
            return spaces.Dict({name: as_delivered(child) for name, child in space.spaces.items()})
        case spaces.Tuple():
            return spaces.Tuple([as_delivered(child) for child in space.spaces])
    own = np.dtype(space.dtype or np.float32)
    dtype = np.dtype(import_jax().dtypes.canonicalize_dtype(own))
    if own.kind not in "iu" or dtype == own:
        return space
    match space:
        case spaces.Discrete():
            return spaces.Discrete(int(space.n), start=int(space.start), dtype=dtype.type)
        case spaces.MultiDiscrete():
            return spaces.MultiDiscrete(space.nvec, dtype.type, start=space.start)
        case spaces.Box():
            return box(space.shape, dtype, space.low, space.high)
    return space
