"""A ring of frames in JAX, for use inside the user's own `jit` and `scan`: a fixed number of lanes, all in step.

The state is a pytree. Give it to `jit` as a donated argument, or carry it through a `scan`, and an `extend` copies no
more than the frames that it adds. Arrays are time-major, ``[T, L, ...]``, as `funcollect.traced.rollout` returns them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from funcollect.arguments import check_kind, check_optional_positive, check_positive
from funcollect.interop.jax_setup import import_jax

__all__ = ["JaxRing", "extend", "held", "init", "sample", "sample_slices"]

_CUT = ("truncated", "done")
_TRIES = 4


class JaxRing(NamedTuple):
    """The newest `steps` steps of every lane."""

    data: Any  # a pytree of [steps, L, ...]
    begin: Any  # [steps, L] int32: the number of the step at which each frame's trajectory begins
    going: Any  # [L] int32: the same for the trajectory that each lane is in; -1 where the next frame begins one
    written: Any  # int32: steps given in all; step n lies in row n % steps


def init(example: Any, *, steps: int, lanes: int | None = None) -> JaxRing:
    """An empty ring.

    Args:
        example: a pytree of arrays, or of their shapes and dtypes, ``[T, L, ...]``: a batch as `extend` will get it. It
            may be what `jax.eval_shape` says of `funcollect.traced.rollout`.
        steps: steps to hold, of every lane.
        lanes: L, checked; the example's unless given.

    Raises:
        ValueError: for an example without leaves, of arrays without ``[T, L]``, or of other lanes.

    >>> import jax.numpy as jnp
    >>> import funcollect as fc
    >>> ring = fc.jax_ring.init({"x": jnp.zeros((1, 3))}, steps=10)
    >>> ring = fc.jax_ring.extend(ring, {"x": jnp.ones((4, 3))})
    >>> int(fc.jax_ring.held(ring)), ring.data["x"].shape
    (4, (10, 3))
    """
    check_positive("steps", steps)
    check_optional_positive("lanes", lanes)
    jax = import_jax()
    leaves = jax.tree.leaves(example)
    if not leaves:
        raise ValueError("the example has no leaves, expected at least one array [T, L, ...]: nothing would be stored")
    found = {tuple(leaf.shape[1:2]) for leaf in leaves}
    if len(found) != 1 or found == {()} or (lanes is not None and found != {(lanes,)}):
        raise ValueError(
            f"the example's arrays have shapes {[tuple(leaf.shape) for leaf in leaves]}, expected [T, L, ...] with "
            f"L = {'the same for all' if lanes is None else lanes}: give a batch with time first, then lanes"
        )
    ((number,),) = found
    if steps * number >= 2**31:
        raise ValueError(f"{steps} steps of {number} lanes are 2**31 frames or more: give fewer steps")
    data = jax.tree.map(lambda leaf: jax.numpy.zeros((steps, number, *leaf.shape[2:]), leaf.dtype), example)
    counters = jax.numpy.zeros((steps, number), "int32"), jax.numpy.full(number, -1, "int32")
    return JaxRing(data, *counters, jax.numpy.zeros((), "int32"))


def held(ring: JaxRing) -> Any:
    """How many steps of each lane it holds, int32."""
    _check_ring(ring)
    return import_jax().numpy.minimum(ring.written, _steps(ring))


def _steps(ring: JaxRing) -> int:
    return int(ring.begin.shape[0])


def extend(ring: JaxRing, batch: Any) -> JaxRing:
    """Add steps of every lane; the oldest ones make room.

    Args:
        ring: the ring; it may be donated.
        batch: a pytree like the example's, ``[T, L, ...]`` with any T. Of more than the ring holds, the last stay.

    Raises:
        ValueError: for another structure, shapes or dtypes than the example's.
    """
    _check_ring(ring)
    jax = import_jax()
    length = _check(ring, batch)
    steps = _steps(ring)
    number = ring.written + jax.numpy.arange(length, dtype="int32")
    begin, going = _begins(ring, batch, number)
    skipped = max(length - steps, 0)
    row = number[skipped:] % steps

    def write(memory: Any, new: Any) -> Any:
        return memory.at[row].set(new[skipped:], unique_indices=True)

    data = jax.tree.map(write, ring.data, batch)
    return JaxRing(data, write(ring.begin, begin), going, ring.written + length)


def _begins(ring: JaxRing, batch: Any, number: Any) -> tuple[Any, Any]:
    """At which step each frame's trajectory begins, [T, L], and the lanes' own after it, [L]."""
    jax = import_jax()
    done, step = _leaf(batch, "next", "done"), _leaf(batch, "collector", "step")
    if done is None:
        going = jax.numpy.where(ring.going < 0, number[0], ring.going)
        return jax.numpy.broadcast_to(going, (len(number), len(going))), going
    starts = jax.numpy.concatenate([(ring.going < 0)[None], done[:-1]])
    if step is not None:
        starts |= step == 0
    marks = jax.numpy.where(starts, number[:, None], -1)
    marks = marks.at[0].max(ring.going)
    begin = jax.lax.cummax(marks, axis=0)
    return begin, jax.numpy.where(done[-1], -1, begin[-1])


def _leaf(batch: Any, *path: str) -> Any:
    for name in path:
        if not isinstance(batch, Mapping) or name not in batch:
            return None
        batch = batch[name]
    return batch


def sample(ring: JaxRing, key: Any, batch_size: int) -> Any:
    """Single frames, each uniform over all that are held: a pytree of ``[batch_size, ...]``.

    The ring must hold a step; how many it holds is not known when this is compiled, so that is not checked.
    """
    _check_ring(ring)
    check_positive("batch_size", batch_size)
    return _take(ring.data, _draw(ring, key, (batch_size,)))


def _draw(ring: JaxRing, key: Any, shape: tuple[int, ...]) -> Any:
    """Random frames: ``row * L + lane`` of each. A ring that is not full is filled from row 0 on."""
    return import_jax().random.randint(key, shape, 0, held(ring) * ring.begin.shape[1])


def _take(tree: Any, frame: Any) -> Any:
    """The frames at ``row * L + lane``, all of which are in the ring, of a pytree ``[steps, L, ...]``."""
    return import_jax().tree.map(
        lambda leaf: leaf.reshape(-1, *leaf.shape[2:]).at[frame].get(mode="promise_in_bounds"), tree
    )


def sample_slices(ring: JaxRing, key: Any, *, num_slices: int, slice_len: int) -> tuple[Any, Any]:
    """Slices of trajectories, uniform over all places at which one can begin.

    ``next.truncated`` and ``next.done``, where a batch has them, are True on each slice's last row.

    Args:
        ring: extended with batches that have ``next.done``, ``[T, L]`` bool; where ``collector.step`` is 0, a
            trajectory begins too.
        key: a JAX key.
        num_slices: how many.
        slice_len: frames of each.

    Returns:
        A pytree of ``[slice_len, num_slices, ...]``, and a bool: whether there is such a slice at all. If not, what was
        returned is not one.

    Raises:
        ValueError: for batches without ``next.done``, and for slices longer than the ring.
    """
    _check_ring(ring)
    check_positive("num_slices", num_slices)
    check_positive("slice_len", slice_len)
    jax, (steps, lanes) = import_jax(), ring.begin.shape
    if _leaf(ring.data, "next", "done") is None:
        raise ValueError('the ring\'s batches lack ["next"]["done"], by which slices tell trajectories apart: store it')
    if slice_len > steps:
        raise ValueError(f"slice_len is {slice_len}, the ring holds {steps} steps of each lane: ask for shorter slices")
    end, found = _draw_ends(ring, key, num_slices, slice_len)
    back = (jax.numpy.arange(slice_len)[:, None] - (slice_len - 1)) * lanes
    slices = _take(ring.data, (end + back) % (steps * lanes))
    cut = {name: slices["next"][name].at[-1].set(True) for name in _CUT if name in slices["next"]}
    return {**slices, "next": {**slices["next"], **cut}}, found


def _draw_ends(ring: JaxRing, key: Any, count: int, slice_len: int) -> tuple[Any, Any]:
    """Frames at which a slice ends, ``row * L + lane``; tries a few each, and looks through all where that fails."""
    jax = import_jax()
    jnp = jax.numpy
    one, two = jax.random.split(key)
    frames = _draw(ring, one, (_TRIES, count))
    ends = _is_end(ring, frames, slice_len)
    tried = frames[ends.argmax(axis=0), jnp.arange(count)]

    def look_through() -> tuple[Any, Any]:
        upto = _is_end(ring, jnp.arange(ring.begin.size), slice_len).cumsum()
        which = jax.random.randint(two, (count,), 0, jnp.maximum(upto[-1], 1))
        return jnp.searchsorted(upto, which, side="right").astype("int32") % ring.begin.size, upto[-1] > 0

    end, found = jax.lax.cond(ends.any(axis=0).all(), lambda: (tried, jnp.array(True)), look_through)
    return end, found


def _is_end(ring: JaxRing, frame: Any, slice_len: int) -> Any:
    """Whether the frames up to this one, ``row * L + lane``, are one slice of what is held of one trajectory."""
    row, newest = frame // ring.begin.shape[1], ring.written - 1
    number = newest - (newest - row) % _steps(ring)
    first = number - slice_len + 1
    oldest = ring.written - held(ring)
    return (row < ring.written) & (first >= _take(ring.begin, frame)) & (first >= oldest)


def _check_ring(ring: Any) -> None:
    check_kind("ring", ring, JaxRing, "pass what init or extend returned")


def _check(ring: JaxRing, batch: Any) -> int:
    """Check a batch against the ring; returns its steps."""
    jax = import_jax()
    mine, structure = jax.tree_util.tree_flatten_with_path(ring.data)
    leaves, other = jax.tree.flatten(batch)
    if structure != other:
        raise ValueError(f"the batch has the structure {other}, the ring {structure}: give what its example was like")
    for (path, memory), leaf in zip(mine, leaves, strict=True):
        if leaf.shape[1:] != memory.shape[1:] or leaf.dtype != memory.dtype or leaf.shape[0] != leaves[0].shape[0]:
            wanted = [leaves[0].shape[0], *memory.shape[1:]]
            raise ValueError(
                f"{jax.tree_util.keystr(path)} has shape {list(leaf.shape)} and dtype {leaf.dtype}, the ring takes "
                f"{wanted} {memory.dtype}: give what its example was like"
            )
    return int(leaves[0].shape[0])
