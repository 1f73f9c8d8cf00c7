"""The columns of a traced rollout: what each step records, memory for it, packed rows, and batches in Torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from funcollect.arguments import check_kind, check_optional_positive
from funcollect.core.batch import REWARD, ROOT_FLAGS, as_batch, check_reward, shown
from funcollect.core.request import Request
from funcollect.core.traced_step.step import Row, RunKeys, StepConfig, Traced, run_keys, step
from funcollect.interop import words
from funcollect.interop.bridge import torch_view
from funcollect.interop.jax_setup import import_jax, with_jax
from funcollect.protocols import Columns, JaxEnv
from funcollect.specs import GroupedSpec, torch_dtype
from funcollect.trajectories.split import LANE, STEP, TRAJECTORY_IDS, check_time_first
from funcollect.tree import Path, flatten, form_of

Dtypes = dict[Path, torch.dtype]
Packed = dict[str, Any]  # by dtype name, arrays [R] of a row or [T, R] of columns; and the large leaves by themselves
_LARGE = 1 << 22  # bytes of a leaf that is not packed: to write it takes longer than to launch a kernel
_SMALL = 1 << 17  # bytes of all columns of a rollout, up to which they are packed
_AS_TENSORS = 64  # bytes: packed columns begin at multiples, since Torch's results depend on the alignment
_ALIGNED = 16  # bytes: leaves of a packed row begin at multiples, so that Torch can view two words as an int64

_EPISODE = ("collector", "episode")
_CONSTANT = [LANE, ("collector", "policy_version")]  # the same at every step
_COUNTERS: Dtypes = dict.fromkeys((TRAJECTORY_IDS, STEP, *_CONSTANT), torch.int64)
_DONE = ("next", "done")


def recorded_step(config: StepConfig, bound: Any, state: Traced, keys: RunKeys) -> tuple[Traced, Row]:
    """Do what `step` does, and return the row as columns hold it: 64-bit integers as words, with trajectory ids."""
    after, row = step(config, bound, state, keys)
    row = _widen(row, dtypes=dtypes_of(config.env), total_lanes=state.total_lanes)
    omitted = ROOT_FLAGS if config.options.reset_when_done else []  # which would be False in every row
    return after, {path: value for path, value in row.items() if path not in omitted}


def row_form(config: StepConfig, bound: Any, state: Traced) -> Row:
    """Return the shapes and dtypes of the row that a step records, without the entries of constant columns."""
    keys = run_keys(state.key, state.lane)
    _, row = import_jax().eval_shape(partial(recorded_step, config), bound, state, keys)
    return {path: leaf for path, leaf in row.items() if path not in _CONSTANT}


def bucket(length: int) -> int:
    """Return the number of rows to reserve for `length`: lengths within an eighth share a compiled program.

    It is at least two: XLA turns a write into a single row into a copy, and may then round the step differently.

    >>> [bucket(length) for length in (1, 7, 64, 100, 2000)]
    [2, 7, 64, 104, 2048]
    """
    grain = 1 << max(length.bit_length() - 4, 0)
    return max(-(-length // grain) * grain, 2)


def constant_columns(state: Traced, capacity: int) -> Row:
    """Trace the columns [capacity, P] of the entries that are the same at every step."""
    spread = import_jax().numpy.broadcast_to
    rows = {path: words.int64(spread(getattr(state, path[-1]), state.lane.shape)) for path in _CONSTANT}
    return {path: spread(row, (capacity, *row.shape)) for path, row in rows.items()}


def memory(config: StepConfig, bound: Any, state: Traced, capacity: int) -> tuple[Row, Row]:
    """Trace the columns [capacity, P, ...]: zeros for the leaves of `row_form`, and the constant ones."""
    zeros, row = import_jax().numpy.zeros, row_form(config, bound, state)
    columns = {path: zeros((capacity, *leaf.shape), leaf.dtype) for path, leaf in row.items()}
    return columns, constant_columns(state, capacity)


def write_row(columns: dict[Any, Any], row: dict[Any, Any], t: Any) -> dict[Any, Any]:
    """Trace the columns with `row` written at index `t`; keys of the row without a column are ignored."""
    write = import_jax().lax.dynamic_update_index_in_dim
    return {path: write(column, row[path], t, 0) for path, column in columns.items()}


def dtypes_of(env: JaxEnv) -> Dtypes:
    """Return the dtypes of a batch's leaves, as far as the spaces and the counters fix them."""
    spec, dtypes = env.action_spec, Dtypes({("action",): env.action_spec.dtype})
    if isinstance(spec, GroupedSpec):
        dtypes |= {(name, "action"): group.action_spec.dtype for name, group in spec.groups.items()}
    for leaf in env.observation_leaves:
        dtypes[leaf.path] = dtypes["next", *leaf.path] = torch_dtype(leaf.dtype)
    return dtypes | _COUNTERS


def _widen(row: Row, *, dtypes: Dtypes, total_lanes: int) -> Row:
    """Trace the row with 64-bit integers, as int32 words [..., 2] if JAX has no int64, and ids in place of episodes."""
    ids = words.trajectory_ids(row[LANE], row[_EPISODE], total_lanes)
    wide = {path: words.int64(value) for path, value in row.items() if dtypes.get(path) == torch.int64}
    return {path: value for path, value in (row | wide).items() if path != _EPISODE} | {TRAJECTORY_IDS: ids}


def typed(leaves: dict[Path, Tensor], of: JaxEnv | Dtypes) -> dict[Path, Tensor]:
    """Return the leaves in the dtypes of a batch: words as int64 over the same memory, others converted."""
    dtypes = of if isinstance(of, dict) else dtypes_of(of)
    return {path: _whole(leaf, dtypes.get(path)).to(dtypes.get(path, leaf.dtype)) for path, leaf in leaves.items()}


def _whole(leaf: Tensor, dtype: torch.dtype | None) -> Tensor:
    return words.as_int64(leaf) if (dtype, leaf.dtype) == (torch.int64, torch.int32) else leaf


def deliver(arrays: Mapping[str, Any], env: JaxEnv | None = None, *, total_lanes: int | None = None) -> TensorDict:
    """Return the result of `funcollect.traced.rollout` as a batch, in new memory.

    `arrays` are ``[*B, T, P, ...]``; a rollout under `vmap` has leading dimensions. The batch is a locked TensorDict
    ``[*B, P, T]``, or ``[*B, T]`` for an `env` without a batch dimension. Arrays on several devices are gathered on the
    first. Integers get the dtypes of the spaces of `env`; without it, integer actions are int64. Trajectory ids follow
    from the state's `total_lanes`, P by default. Raises ValueError for arrays that lack a key or the time dimension.

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
    check_kind("arrays", arrays, Mapping, "pass the dict that traced.rollout returned")
    flat = flatten(arrays)
    needed = [REWARD, _DONE, _EPISODE, LANE, *[("action",)] * all(path[-1] != "action" for path in flat)]
    if missing := [".".join(path) for path in needed if path not in flat]:
        raise ValueError(f"the arrays lack {missing}, expected all that traced.rollout returned: pass the whole result")
    if flat[_DONE].ndim < 2:
        mend = "give the result of traced.step a time dimension, jax.tree.map(lambda leaf: leaf[None], arrays)"
        raise ValueError(f"next.done has shape {list(flat[_DONE].shape)}, expected [T, P]: {mend}")
    check_time_first(flat[LANE])
    dtypes = _COUNTERS if env is None else dtypes_of(env)
    if env is None:
        actions = (path for path, leaf in flat.items() if path[-1] == "action" and np.dtype(leaf.dtype).kind in "iu")
        dtypes = dtypes | dict.fromkeys(actions, torch.int64)
    columns = _widening(frozenset(dtypes.items()), total_lanes or flat[_DONE].shape[-1])(flat)
    devices = {device for column in columns.values() for device in column.sharding.device_set}
    if len(devices) > 1:  # DLPack does not support several
        columns = import_jax().device_put(columns, min(devices, key=lambda device: device.id))
    leaves = {path: torch_view(column) for path, column in columns.items()}
    single = env is not None and env.num_envs is None
    return as_batch(typed(leaves, dtypes), single=single, time=flat[_DONE].ndim - 2)


@cache
def _widening(dtypes: frozenset[tuple[Path, torch.dtype]], total_lanes: int) -> Any:
    """`_widen` under `jit`, cached so that it is compiled once for all batches of a run."""
    return import_jax().jit(partial(_widen, dtypes=dict(dtypes), total_lanes=total_lanes))


class PackedRows:
    """Packs a row: all leaves but large ones share an array of integers with leaves of the same element size."""

    def __init__(self, row: Row) -> None:  # of arrays, or their shapes and dtypes
        # by path: the dtype of the packed array that holds the leaf, its first element there, and the leaf's form
        self._places: dict[Path, tuple[str, int, tuple[int, ...], np.dtype[Any]]] = {}
        self._sizes: dict[str, int] = {}
        self._alone: dict[str, tuple[Path, Any]] = {}  # large leaves
        for path, leaf in row.items():
            dtype = np.dtype(leaf.dtype)
            if math.prod(leaf.shape) * dtype.itemsize >= _LARGE:
                self._alone[f"large {len(self._alone)}"] = path, leaf
                continue
            carrier = str(dtype) if dtype.kind == "c" else f"int{8 * dtype.itemsize}"
            first = self._sizes.get(carrier, 0)
            self._places[path] = carrier, first, tuple(leaf.shape), dtype
            self._sizes[carrier] = first + _padded(math.prod(leaf.shape), dtype.itemsize)

    def zeros(self, capacity: int) -> Packed:
        """Trace columns [capacity, R] of zeros."""
        zeros = import_jax().numpy.zeros
        shared = {name: zeros((capacity, size), name) for name, size in self._sizes.items()}
        alone = {name: zeros((capacity, *leaf.shape), leaf.dtype) for name, (_, leaf) in self._alone.items()}
        return shared | alone

    def pack(self, row: Row) -> Packed:
        """Trace the arrays [R] of a row."""
        jax = import_jax()
        parts: dict[str, list[Any]] = {name: [] for name in self._sizes}
        for path, (carrier, _, _, dtype) in self._places.items():
            flat = row[path].reshape(-1)
            if dtype.kind == "b":
                flat = flat.astype(carrier)
            elif str(dtype) != carrier:
                flat = jax.lax.bitcast_convert_type(flat, carrier)
            missing = _padded(flat.size, dtype.itemsize) - flat.size
            parts[carrier] += [flat, jax.numpy.zeros(missing, carrier)] if missing else [flat]
        shared = {name: jax.numpy.concatenate(each) for name, each in parts.items()}
        return shared | {name: row[path] for name, (path, _) in self._alone.items()}

    def unpack(self, columns: Mapping[str, Tensor]) -> dict[Path, Tensor]:
        """The leaves [T, *shape] over the memory of columns [T, R]."""
        leaves = dict[Path, Tensor]()
        for path, (carrier, first, shape, dtype) in self._places.items():
            flat = columns[carrier].narrow(1, first, math.prod(shape)).view(getattr(torch, dtype.name))
            leaves[path] = flat.view(len(flat), *shape)
        return leaves | {path: columns[name] for name, (path, _) in self._alone.items()}


def _padded(count: int, itemsize: int) -> int:
    grain = max(_ALIGNED // itemsize, 1)
    return -(-count // grain) * grain


@dataclass(frozen=True)
class Places:
    """Where columns lie in an array of bytes."""

    of: tuple[tuple[Path, int, tuple[int, ...], torch.dtype], ...]  # path, first byte, shape and dtype of each column
    size: int  # bytes


with_jax(lambda jax: jax.tree_util.register_static(Places))


def packed(columns: Row) -> tuple[Row, None] | tuple[Any, Places]:
    """Trace small columns as one array of bytes, and return their places; each view of an array in Torch takes 6 µs."""
    jax = import_jax()
    small = sum(column.nbytes for column in columns.values()) <= _SMALL
    if not small or any(column.dtype.kind == "c" for column in columns.values()):
        return columns, None
    parts, places, first = list[Any](), [], 0
    for path, column in columns.items():
        places.append((path, first, tuple(column.shape), getattr(torch, column.dtype.name)))
        plain = column.astype("uint8") if column.dtype.kind == "b" else column
        flat = jax.lax.bitcast_convert_type(plain, "uint8").reshape(-1)
        parts += [flat, jax.numpy.zeros(-flat.size % _AS_TENSORS, "uint8")]
        first += flat.size + parts[-1].size
    return jax.numpy.concatenate(parts), Places(tuple(places), first)


class View(NamedTuple):
    """Where a leaf lies in an array of bytes."""

    read: torch.dtype
    place: tuple[torch.Size, tuple[int, ...], int]  # size, stride, and the first element
    dtype: torch.dtype  # of the leaf in a batch

    def of(self, arrays: Mapping[torch.dtype, Tensor]) -> Tensor:
        """The leaf, from views of the array in each dtype that is read."""
        leaf = arrays[self.read].as_strided(*self.place)
        return leaf if self.dtype is self.read else leaf.to(self.dtype)


class BatchOfBytes:
    """Makes batches from packed columns; where the leaves lie is worked out once, on Torch's meta device."""

    def __init__(self, places: Places, env: JaxEnv, outputs: Sequence[Path], request: Request) -> None:
        dtypes = dtypes_of(env)

        def view(path: Path, leaf: Tensor) -> View:
            place = leaf.size(), leaf.stride(), int(leaf.storage_offset())
            return View(leaf.dtype, place, dtypes.get(path, leaf.dtype))

        memory, columns = torch.empty(places.size, dtype=torch.uint8, device="meta"), dict[Path, Tensor]()
        for path, first, shape, dtype in places.of:
            column = memory[first : first + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
            columns[path] = _whole(column, dtypes.get(path))[: request.length]
        self._outputs = {path: view(path, columns.pop(path)) for path in outputs}
        self._reward = view(REWARD, columns[REWARD])
        self._shown: Any = {"single": env.num_envs is None, "with_time": request.with_time}
        batch = as_batch(columns, **self._shown)
        self._views, self._size = {path: view(path, leaf) for path, leaf in flatten(batch).items()}, batch.batch_size
        self._dtypes = {each.read for each in (*self._outputs.values(), self._reward, *self._views.values())}

    def of(self, memory: Tensor, finish: Callable[[Columns], Columns]) -> TensorDict:
        """The checked batch over packed columns; `finish` completes the policy's outputs."""
        arrays = {dtype: memory.view(dtype) for dtype in self._dtypes}
        outputs = finish({path: view.of(arrays) for path, view in self._outputs.items()})
        check_reward(self._reward.of(arrays))
        leaves = [view.of(arrays) for view in self._views.values()]
        leaves += [shown(column, 0, **self._shown) for column in outputs.values()]
        return form_of((*self._views, *outputs), self._size, self._shown["with_time"]).filled(leaves)
