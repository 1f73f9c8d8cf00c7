"""The columns of a traced rollout: what every step records, memory for it, and batches in Torch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial
from typing import Any, TypeVar

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from funcollect.arguments import check_kind, check_optional_positive
from funcollect.core.batch import REWARD, ROOT_FLAGS, as_batch
from funcollect.core.lanes import RunKeys, run_keys
from funcollect.core.traced_step.starts import Traced
from funcollect.core.traced_step.step import Row, StepConfig, step
from funcollect.interop import words
from funcollect.interop.bridge import torch_view
from funcollect.interop.jax_setup import import_jax
from funcollect.protocols import JaxEnv
from funcollect.specs import torch_dtype
from funcollect.trajectories.split import LANE, check_time_first
from funcollect.tree import Path, flatten

Name = TypeVar("Name")
Dtypes = dict[Path, torch.dtype]

_EPISODE, _LANE, _VERSION = ("collector", "episode"), ("collector", "lane"), ("collector", "policy_version")
_TRAJECTORY = ("collector", "traj_ids")
_CONSTANT = [_LANE, _VERSION]  # the same at every step
_COUNTERS: Dtypes = dict.fromkeys((_TRAJECTORY, ("collector", "step"), *_CONSTANT), torch.int64)
_DONE = ("next", "done")


def recorded_step(config: StepConfig, bound: Any, state: Traced, keys: RunKeys) -> tuple[Traced, Row]:
    """Do what `step` does, and return the row as a loop's columns hold it, with 64-bit integers as words.

    Root flags are omitted if lanes restart, since they are then False in every row.
    """
    after, row = step(config, bound, state, keys)
    row = _widen(row, dtypes=dtypes_of(config.env), total_lanes=state.total_lanes)
    omitted = ROOT_FLAGS if config.options.reset_when_done else []
    return after, {path: value for path, value in row.items() if path not in omitted}


def recorded_row(config: StepConfig, bound: Any, state: Traced) -> Row:
    """Return the shapes and dtypes of the row that a step records, without the constant columns."""
    keys = run_keys(state.key, state.lane)
    _, row = import_jax().eval_shape(partial(recorded_step, config), bound, state, keys)
    return {path: leaf for path, leaf in row.items() if path not in _CONSTANT}


def bucket(length: int) -> int:
    """Return the number of rows to reserve for `length`. Lengths within an eighth share a compiled program.

    It is at least two: XLA turns a write into a single row into a copy, and may then round the step differently.

    >>> [bucket(length) for length in (1, 7, 64, 100, 2000)]
    [2, 7, 64, 104, 2048]
    """
    grain = 1 << max(length.bit_length() - 4, 0)
    return max(-(-length // grain) * grain, 2)


def constant_columns(state: Traced, capacity: int) -> Row:
    """Trace the columns [capacity, P] of the entries that are the same at every step."""
    jnp = import_jax().numpy
    lanes = {path: jnp.broadcast_to(getattr(state, path[-1]), state.lane.shape) for path in _CONSTANT}
    rows = {path: words.int64(values) for path, values in lanes.items()}
    return {path: jnp.broadcast_to(row, (capacity, *row.shape)) for path, row in rows.items()}


def empty_columns(config: StepConfig, bound: Any, state: Traced, capacity: int) -> Row:
    """Trace columns of zeros for `recorded_row`."""
    zeros, row = import_jax().numpy.zeros, recorded_row(config, bound, state)
    return {path: zeros((capacity, *leaf.shape), leaf.dtype) for path, leaf in row.items()}


def write_row(columns: dict[Name, Any], row: dict[Name, Any], t: Any) -> dict[Name, Any]:
    """Trace the columns with row `t` written; a row may have keys without a column."""
    write = import_jax().lax.dynamic_update_index_in_dim
    return {path: write(column, row[path], t, 0) for path, column in columns.items()}


def dtypes_of(env: JaxEnv) -> Dtypes:
    """Return the dtypes of a batch's leaves, as far as the spaces and the counters fix them."""
    dtypes: Dtypes = {("action",): env.action_spec.dtype}
    for leaf in env.observation_leaves:
        dtypes[leaf.path] = dtypes["next", *leaf.path] = torch_dtype(leaf.dtype)
    return dtypes | _COUNTERS


def _widen(row: Row, *, dtypes: Dtypes, total_lanes: int) -> Row:
    """Trace 64-bit integers, as words [..., 2] of int32 if JAX has no int64, and trajectory ids from episodes."""
    row = dict(row)
    episode, lane = row.pop(_EPISODE), row[_LANE]
    wide = {path: words.int64(value) for path, value in row.items() if dtypes.get(path) == torch.int64}
    return row | wide | {_TRAJECTORY: words.trajectory_ids(lane, episode, total_lanes)}


def typed(leaves: dict[Path, Tensor], of: JaxEnv | Dtypes) -> dict[Path, Tensor]:
    """Return the leaves in the dtypes of a batch: words as int64 over the same memory, others converted."""
    dtypes = of if isinstance(of, dict) else dtypes_of(of)
    wanted = ((path, leaf, dtypes.get(path, leaf.dtype)) for path, leaf in leaves.items())
    return {
        path: words.as_int64(leaf) if (dtype, leaf.dtype) == (torch.int64, torch.int32) else leaf.to(dtype)
        for path, leaf, dtype in wanted
    }


def deliver(arrays: Mapping[str, Any], env: JaxEnv | None = None, *, total_lanes: int | None = None) -> TensorDict:
    """Return the batch of the result of `funcollect.traced.rollout`, in new memory.

    Args:
        arrays: the nested dict, ``[T, P, ...]``. Leading dimensions, from a rollout under `vmap`, stay in front. Arrays
            on several devices are gathered on the first.
        env: the environment. It gives integer observations and actions the dtypes of its spaces, and a single
            environment's batch no ``P``; without it, integer actions become int64 and other leaves keep their dtypes.
        total_lanes: the state's `total_lanes`; P by default. With it the trajectory ids are the same as
            in `funcollect.rollout`. Under `vmap` they are unique within each run.

    Returns:
        A locked TensorDict ``[*B, P, T]`` (``[*B, T]`` for an `env` without a batch dimension).

    Raises:
        TypeError: if `arrays` is not a dict.
        ValueError: for arrays that lack a key or the time dimension.

    >>> import jax, funcollect as fc
    >>> env = fc.envs.from_gymnax("CartPole-v1", num_envs=2)
    >>> policy = fc.random_policy(env)
    >>> state = fc.traced.init(env, policy, None, key=jax.random.PRNGKey(0))
    >>> state, arrays = fc.traced.rollout(env, policy, None, state, 5)
    >>> batch = deliver(arrays, env)
    >>> batch.batch_size, batch["collector", "traj_ids"].dtype
    (torch.Size([2, 5]), torch.int64)
    """
    check_kind("env", env, (JaxEnv, type(None)), "pass that of the rollout")
    check_optional_positive("total_lanes", total_lanes)
    flat = _checked(arrays)
    check_time_first(flat.get(LANE))
    total = flat[_DONE].shape[-1] if total_lanes is None else total_lanes
    integers = np.dtype(flat["action",].dtype).kind in "iu"
    guessed = _COUNTERS | ({("action",): torch.int64} if integers else {})
    dtypes = guessed if env is None else dtypes_of(env)
    columns = _widening(frozenset(dtypes.items()), total)(flat)
    leaves = {path: torch_view(_gathered(column)) for path, column in columns.items()}
    single = env is not None and env.num_envs is None
    return as_batch(typed(leaves, dtypes), single=single, time=flat[_DONE].ndim - 2)


@cache
def _widening(dtypes: frozenset[tuple[Path, torch.dtype]], total_lanes: int) -> Any:
    """Return `_widen` under `jit`, cached so that it compiles once for all batches of a run."""
    return import_jax().jit(partial(_widen, dtypes=dict(dtypes), total_lanes=total_lanes))


def _checked(arrays: Any) -> Row:
    check_kind("arrays", arrays, Mapping, "pass the dict that traced.rollout returned")
    flat = flatten(arrays)
    needed = [("action",), REWARD, _DONE, _EPISODE, _LANE]
    if missing := [".".join(path) for path in needed if path not in flat]:
        raise ValueError(
            f"the arrays lack {missing}, expected all arrays that traced.rollout returned: pass the whole result"
        )
    if flat[_DONE].ndim < 2:
        raise ValueError(
            f"next.done has shape {list(flat[_DONE].shape)}, expected [T, P]: give what traced.step returned a time "
            "dimension, jax.tree.map(lambda leaf: leaf[None], arrays)"
        )
    return flat


def _gathered(column: Any) -> Any:
    """Return the column on one device, since DLPack does not support several."""
    devices = column.sharding.device_set
    return column if len(devices) == 1 else import_jax().device_put(column, min(devices, key=lambda each: each.id))
