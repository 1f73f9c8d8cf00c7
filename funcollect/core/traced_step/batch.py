"""Batches of traced rollouts: 64-bit integers, keys and shapes as in every other batch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from funcollect.arguments import check_kind, check_optional_positive
from funcollect.core.loops.delivery import REWARD, ROOT_FLAGS, as_batch
from funcollect.core.traced_step.keys import RunKeys
from funcollect.core.traced_step.starts import Traced
from funcollect.core.traced_step.step import Row, StepConfig, step
from funcollect.interop import words
from funcollect.interop.bridge import torch_view
from funcollect.interop.jax_setup import import_jax
from funcollect.protocols import JaxEnv
from funcollect.specs import torch_dtype
from funcollect.trajectories.split import LANE, check_time_first
from funcollect.tree import Path, flatten

Dtypes = dict[Path, torch.dtype]

_EPISODE, _LANE = ("collector", "episode"), ("collector", "lane")
_TRAJECTORY = ("collector", "traj_ids")
_COUNTERS: Dtypes = {("collector", name): torch.int64 for name in ("traj_ids", "step", "lane", "policy_version")}
_DONE = ("next", "done")


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
    dtypes = dtypes_of(env) if env is not None else _guessed(flat)
    columns = _widening(frozenset(dtypes.items()), total)(flat)
    leaves = {path: torch_view(_gathered(column)) for path, column in columns.items()}
    single = env is not None and env.num_envs is None
    return as_batch(cast(leaves, dtypes), single=single, time=flat[_DONE].ndim - 2)


@cache
def _widening(dtypes: frozenset[tuple[Path, torch.dtype]], total_lanes: int) -> Any:
    """Return `_widen` under `jit`, cached so that it compiles once for all batches of a run."""
    return import_jax().jit(partial(_widen, dtypes=dict(dtypes), total_lanes=total_lanes))


def _checked(arrays: Any) -> Row:
    """Return the arrays by path, after a check that they are those of a rollout."""
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


def dtypes_of(env: JaxEnv) -> Dtypes:
    """Return the dtypes of a batch's leaves, as far as the spaces and the counters fix them."""
    dtypes: Dtypes = {("action",): env.action_spec.dtype}
    for leaf in env.observation_leaves:
        dtypes[leaf.path] = dtypes["next", *leaf.path] = torch_dtype(leaf.dtype)
    return dtypes | _COUNTERS


def _gathered(column: Any) -> Any:
    """Return the column on one device, since DLPack does not support several."""
    devices = column.sharding.device_set
    return column if len(devices) == 1 else import_jax().device_put(column, min(devices, key=lambda each: each.id))


def _guessed(flat: Row) -> Dtypes:
    integers = np.dtype(flat["action",].dtype).kind in "iu"
    return _COUNTERS | ({("action",): torch.int64} if integers else {})


def recorded_step(config: StepConfig, bound: Any, state: Traced, keys: RunKeys) -> tuple[Traced, Row]:
    """Do what `step` does, and return the row as a loop's columns hold it, with 64-bit integers as words.

    Root flags are omitted if lanes restart, since they are then False in every row.
    """
    after, row = step(config, bound, state, keys)
    row = _widen(row, dtypes=dtypes_of(config.env), total_lanes=state.total_lanes)
    omitted = ROOT_FLAGS if config.reset_when_done else []
    return after, {path: value for path, value in row.items() if path not in omitted}


def _widen(row: Row, *, dtypes: Dtypes, total_lanes: int) -> Row:
    """Trace 64-bit integers, as words [..., 2] of int32 if JAX has no int64, and trajectory ids from episodes."""
    row = dict(row)
    episode, lane = row.pop(_EPISODE), row[_LANE]
    wide = {path: words.int64(value) for path, value in row.items() if dtypes.get(path) == torch.int64}
    return row | wide | {_TRAJECTORY: words.trajectory_ids(lane, episode, total_lanes)}


def cast(leaves: dict[Path, Tensor], dtypes: Dtypes) -> dict[Path, Tensor]:
    """Return the leaves in these dtypes: words as int64 over the same memory, others converted."""
    return {path: _cast(leaf, dtypes.get(path, leaf.dtype)) for path, leaf in leaves.items()}


def _cast(leaf: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype == torch.int64 and leaf.dtype == torch.int32:
        return words.as_int64(leaf)
    return leaf.to(dtype)  # the leaf itself if it has the dtype
