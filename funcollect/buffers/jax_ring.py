"""A ring of frames in JAX, for use inside the user's own `jit` and `scan`; all lanes advance together.

The state is a pytree. If it is donated to `jit` or carried through a `scan`, `extend` copies only the added frames.
Arrays are time-major, ``[T, L, ...]``, as returned by `funcollect.traced.rollout`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from funcollect.arguments import check_kind, check_optional_positive, check_positive
from funcollect.interop.jax_setup import import_jax
from funcollect.trajectories.split import check_time_first

__all__ = ["JaxRing", "extend", "held", "init", "sample", "sample_slices"]

_TRIES = 4  # random draws per slice before all frames are searched


class JaxRing(NamedTuple):
    """The newest steps of every lane.

    >>> import funcollect as fc, jax.numpy as jnp
    >>> fc.jax_ring.init({"x": jnp.zeros((1, 3))}, steps=10).data["x"].shape
    (10, 3)
    """

    data: Any  # a pytree of [steps, L, ...]
    begin: Any  # [steps, L] int32: the step number at which each frame's trajectory begins
    going: Any  # [L] int32: the step at which each lane's open trajectory begins; -1 if it has none
    written: Any  # int32: steps written since `init`; step n is in row n % steps


def init(example: Any, *, steps: int, lanes: int | None = None) -> JaxRing:
    """An empty ring for `steps` steps of each lane.

    The example is a pytree of arrays, or of shapes and dtypes, ``[T, L, ...]``, like the batches for `extend`; for
    example the result of `jax.eval_shape` on `funcollect.traced.rollout`. Raises ValueError if it has no leaves, or its
    arrays do not have the same L, or not that of `lanes`.

    >>> import funcollect as fc, jax.numpy as jnp
    >>> int(fc.jax_ring.init({"x": jnp.zeros((1, 3))}, steps=10, lanes=3).written)
    0
    """
    check_positive("steps", steps)
    check_optional_positive("lanes", lanes)
    jax = import_jax()
    leaves = jax.tree.leaves(example)
    if not leaves:
        raise ValueError("the example has no leaves, expected at least one array [T, L, ...]: nothing would be stored")
    sizes = {tuple(leaf.shape[1:2]) for leaf in leaves}
    if len(sizes) != 1 or sizes == {()} or (lanes is not None and sizes != {(lanes,)}):
        what = f"the example's arrays have shapes {[tuple(leaf.shape) for leaf in leaves]}, expected [T, L, ...] with L"
        raise ValueError(f"{what} = {lanes or 'the same for all'}: give a batch with time first, then lanes")
    ((number,),) = sizes
    if steps * number >= 2**31:
        raise ValueError(f"{steps} steps of {number} lanes are 2**31 frames or more: give fewer steps")
    data = jax.tree.map(lambda leaf: jax.numpy.zeros((steps, number, *leaf.shape[2:]), leaf.dtype), example)
    counters = jax.numpy.zeros((steps, number), "int32"), jax.numpy.full(number, -1, "int32")
    return JaxRing(data, *counters, jax.numpy.zeros((), "int32"))


def held(ring: JaxRing) -> Any:
    """The number of steps of each lane in the ring, int32.

    >>> import funcollect as fc, jax.numpy as jnp
    >>> int(fc.jax_ring.held(fc.jax_ring.init({"x": jnp.zeros((1, 3))}, steps=10)))
    0
    """
    return _jax_for(ring).numpy.minimum(ring.written, len(ring.begin))


def extend(ring: JaxRing, batch: Any) -> JaxRing:
    """Add steps of every lane; they replace the oldest. The ring may be donated.

    The batch is a pytree like the example, ``[T, L, ...]`` with any T; if it is longer than the ring, its end is kept.
    Raises ValueError if its structure, shapes or dtypes differ from the example.

    >>> import funcollect as fc, jax.numpy as jnp
    >>> ring = fc.jax_ring.init({"x": jnp.zeros((1, 3))}, steps=10)
    >>> int(fc.jax_ring.held(fc.jax_ring.extend(ring, {"x": jnp.ones((12, 3))})))
    10
    """
    jax = _jax_for(ring)
    length, steps = _check(ring, batch), len(ring.begin)
    check_time_first(_leaf(batch, "collector", "lane"))
    if not length:
        return ring
    number = ring.written + jax.numpy.arange(length, dtype="int32")
    begin, going = _begins(ring, batch, number)
    skipped = max(length - steps, 0)
    row = number[skipped:] % steps

    def write(memory: Any, new: Any) -> Any:
        return memory.at[row].set(new[skipped:], unique_indices=True)

    data = jax.tree.map(write, ring.data, batch)
    return JaxRing(data, write(ring.begin, begin), going, ring.written + length)


def _begins(ring: JaxRing, batch: Any, number: Any) -> tuple[Any, Any]:
    """``begin`` of the frames of a batch [T, L], and ``going`` of the lanes after it [L]; see `JaxRing`."""
    jax = import_jax()
    done, step = _leaf(batch, "next", "done"), _leaf(batch, "collector", "step")
    if done is None:
        going = jax.numpy.where(ring.going < 0, number[0], ring.going)
        return jax.numpy.broadcast_to(going, (len(number), len(going))), going
    starts = jax.numpy.concatenate([(ring.going < 0)[None], done[:-1]])
    if step is not None:
        starts |= step == 0
    marks = jax.numpy.where(starts, number[:, None], -1)
    begin = jax.lax.cummax(marks.at[0].max(ring.going), axis=0)
    return begin, jax.numpy.where(done[-1], -1, begin[-1])


def _leaf(batch: Any, *path: str) -> Any:
    for name in path:
        batch = batch.get(name) if isinstance(batch, Mapping) else None
    return batch


def sample(ring: JaxRing, key: Any, batch_size: int) -> Any:
    """Single frames, drawn uniformly with replacement: a pytree ``[batch_size, ...]``.

    The ring must not be empty. This is not checked, since the number of steps in it is unknown when this is compiled.
    Raises TypeError or ValueError if `ring` is something else, or `batch_size` is no positive int.

    >>> import funcollect as fc, jax, jax.numpy as jnp
    >>> ring = fc.jax_ring.init({"x": jnp.zeros((1, 3))}, steps=10)
    >>> ring = fc.jax_ring.extend(ring, {"x": jnp.ones((4, 3))})
    >>> fc.jax_ring.sample(ring, jax.random.PRNGKey(0), 5)["x"].shape
    (5,)
    """
    jax = _jax_for(ring)
    check_positive("batch_size", batch_size)
    return _take(ring.data, jax.random.randint(key, (batch_size,), 0, held(ring) * ring.begin.shape[1]))


def _take(tree: Any, frame: Any) -> Any:
    """The frames at the indices ``row * L + lane`` of a pytree ``[steps, L, ...]``; all must be in the ring."""
    return import_jax().tree.map(
        lambda leaf: leaf.reshape(-1, *leaf.shape[2:]).at[frame].get(mode="promise_in_bounds"), tree
    )


def sample_slices(ring: JaxRing, key: Any, *, num_slices: int, slice_len: int) -> tuple[Any, Any]:
    """Slices of trajectories, each of `slice_len` frames, drawn uniformly from all possible starts.

    Raises ValueError if the ring's batches have no ``next.done`` ``[T, L]`` bool, or slices are longer than the ring. A
    ``collector.step`` of 0 also begins a trajectory.

    Returns:
        A pytree ``[slice_len, num_slices, ...]``, and a bool that is False if the ring has no such slice; the pytree is
        meaningless then. ``next.done`` and ``next.truncated``, if it is there, are True in the last row.
        ``collector.is_first`` ``[slice_len, num_slices]`` bool is True in the first row, and so is ``is_init``, nested
        ones included, if it is there.

    >>> import funcollect as fc, jax, jax.numpy as jnp
    >>> batch = {"x": jnp.arange(12.0).reshape(6, 2), "next": {"done": jnp.zeros((6, 2), bool)}}
    >>> ring = fc.jax_ring.extend(fc.jax_ring.init(batch, steps=10), batch)
    >>> slices, found = fc.jax_ring.sample_slices(ring, jax.random.PRNGKey(0), num_slices=4, slice_len=3)
    >>> slices["x"].shape, bool(found)
    ((3, 4), True)
    """
    jax, (steps, lanes) = _jax_for(ring), ring.begin.shape
    check_positive("num_slices", num_slices)
    check_positive("slice_len", slice_len)
    if _leaf(ring.data, "next", "done") is None:
        raise ValueError('the ring\'s batches lack ["next"]["done"], which marks the ends of trajectories: store it')
    if slice_len > steps:
        raise ValueError(f"slice_len is {slice_len}, the ring holds {steps} steps of each lane: ask for shorter slices")
    end, found = _draw_ends(ring, key, num_slices, slice_len)
    back = (jax.numpy.arange(slice_len)[:, None] - (slice_len - 1)) * lanes
    slices = jax.tree_util.tree_map_with_path(_flagged, _take(ring.data, (end[None] + back) % (steps * lanes)))
    first = jax.numpy.zeros((slice_len, num_slices), bool).at[0].set(True)
    return {**slices, "collector": {**slices.get("collector", {}), "is_first": first}}, found


def _flagged(path: tuple[Any, ...], leaf: Any) -> Any:
    """A leaf of slices with its flags set; ``is_init`` under ``next`` stays, since it belongs to later frames."""
    names = [getattr(part, "key", None) for part in path]
    if names in (["next", "truncated"], ["next", "done"]):
        return leaf.at[-1].set(True)
    return leaf.at[0].set(True) if names[-1] == "is_init" and "next" not in names else leaf


def _draw_ends(ring: JaxRing, key: Any, count: int, slice_len: int) -> tuple[Any, Any]:
    """Indices ``row * L + lane`` of the last frames of slices, found by a few random tries, else by a full search."""
    jax = import_jax()
    jnp = jax.numpy
    key, search_key = jax.random.split(key)
    frames = jax.random.randint(key, (_TRIES, count), 0, held(ring) * ring.begin.shape[1])  # filled from row 0 on
    ends = _is_end(ring, frames, slice_len)
    tried = frames[ends.argmax(axis=0), jnp.arange(count)]

    def search() -> tuple[Any, Any]:
        upto = _is_end(ring, jnp.arange(ring.begin.size), slice_len).cumsum()
        rank = jax.random.randint(search_key, (count,), 0, jnp.maximum(upto[-1], 1))
        return jnp.searchsorted(upto, rank, side="right").astype("int32") % ring.begin.size, upto[-1] > 0

    end, found = jax.lax.cond(ends.any(axis=0).all(), lambda: (tried, jnp.array(True)), search)
    return end, found


def _is_end(ring: JaxRing, frame: Any, slice_len: int) -> Any:
    """Whether the frame at the index ``row * L + lane`` and those before it form a slice of one trajectory."""
    row, newest = frame // ring.begin.shape[1], ring.written - 1
    number = newest - (newest - row) % len(ring.begin)
    first = number - slice_len + 1
    return (row < ring.written) & (first >= _take(ring.begin, frame)) & (first >= ring.written - held(ring))


def _jax_for(ring: Any) -> Any:
    check_kind("ring", ring, JaxRing, "pass the result of init or extend")
    return import_jax()


def _check(ring: JaxRing, batch: Any) -> int:
    """The number of steps in a batch; ValueError if its structure, shapes or dtypes differ from the ring's."""
    jax = import_jax()
    stored, structure = jax.tree_util.tree_flatten_with_path(ring.data)
    leaves, other = jax.tree.flatten(batch)
    if structure != other:
        raise ValueError(f"the batch has the structure {other}, the ring {structure}: give batches like its example")
    length = int(leaves[0].shape[0])
    for (path, memory), leaf in zip(stored, leaves, strict=True):
        if leaf.shape != (wanted := (length, *memory.shape[1:])) or leaf.dtype != memory.dtype:
            what = f"{jax.tree_util.keystr(path)} has shape {list(leaf.shape)} and dtype {leaf.dtype}"
            raise ValueError(f"{what}, the ring takes {list(wanted)} {memory.dtype}: give batches like its example")
    return length
