"""The columns of a traced rollout: memory for what every step records."""

from __future__ import annotations

from functools import partial
from typing import Any, TypeVar

from funcollect.core.traced_step.batch import recorded_step
from funcollect.core.traced_step.keys import run_keys
from funcollect.core.traced_step.starts import Traced
from funcollect.core.traced_step.step import Row, StepConfig
from funcollect.interop import words
from funcollect.interop.jax_setup import import_jax

Name = TypeVar("Name")

_CONSTANT = [("collector", "lane"), ("collector", "policy_version")]


def bucket(length: int) -> int:
    """Return the number of rows to reserve for `length`. Lengths within an eighth share a compiled program.

    It is at least two: XLA turns a write into a single row into a copy, and may then round the step differently.

    >>> [bucket(length) for length in (1, 7, 64, 100, 2000)]
    [2, 7, 64, 104, 2048]
    """
    grain = 1 << max(length.bit_length() - 4, 0)
    return max(-(-length // grain) * grain, 2)


def recorded_row(config: StepConfig, bound: Any, state: Traced) -> Row:
    """Return the shapes and dtypes of the row that a step records, without the constant columns."""
    keys = run_keys(state.key, state.lane)
    _, row = import_jax().eval_shape(partial(recorded_step, config), bound, state, keys)
    return {path: leaf for path, leaf in row.items() if path not in _CONSTANT}


def constant_columns(state: Traced, capacity: int) -> Row:
    """Trace the columns [capacity, P] of the entries that are the same at every step."""
    jnp = import_jax().numpy
    lanes = {path: jnp.broadcast_to(getattr(state, path[-1]), state.lane.shape) for path in _CONSTANT}
    rows = {path: words.int64(values) for path, values in lanes.items()}
    return {path: jnp.broadcast_to(row, (capacity, *row.shape)) for path, row in rows.items()}


def empty_columns(row: Row, capacity: int) -> Row:
    """Trace columns of zeros for rows of these shapes and dtypes."""
    return {path: import_jax().numpy.zeros((capacity, *leaf.shape), leaf.dtype) for path, leaf in row.items()}


def write_row(columns: dict[Name, Any], row: dict[Name, Any], t: Any) -> dict[Name, Any]:
    """Trace the columns with row `t` written; a row may have keys without a column."""
    write = import_jax().lax.dynamic_update_index_in_dim
    return {path: write(column, row[path], t, 0) for path, column in columns.items()}
