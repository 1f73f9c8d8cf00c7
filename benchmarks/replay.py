"""Replay buffers, frames per second: ours, TorchRL's, flashbax, and bare memory as the limit.

`gather` draws uniform rows and gathers every leaf of plain tensors; `memcpy` copies as many bytes as the frames have.
`funcollect` in the cells of `extend` does not follow trajectories, as TorchRL's does not when it is extended; `linked`
notes them, for slices, and `turns` counts all of that work: a batch goes in, then slices come out. `sizes` has a large
ring beside a small one: `nearby` takes from the large one only rows that lie as close together as in the small one, so
that what it is faster by is cache misses. Frames are CartPole's (13 leaves, episodes of 200) or 84x84x4 pixels;
in the cells of `stacks`, observations are stacks of four screens, `whole` stores them without `frame_stack`, and the
same batch is added again and again.
Prioritized samples are drawn, and their priorities set: `by hand` makes running sums of all priorities in NumPy, and
gathers every leaf of plain tensors. In JAX, and for `flashbax`, 100 calls run in one `jit`; `flashbax, called` runs one
call at a time, as a buffer for Torch does. flashbax's slices may cross the ends of episodes, ours do not; `gather`
takes as many rows of our arrays at random, in runs that may cross ends, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from benchmarks.harness.runner import Cell, Factory

OURS = "funcollect"
BATCH, SLICES, EXTEND = 256, 32, 1_000
IDS = ("collector", "traj_ids")
SLICED: dict[str, Any] = {"num_slices": SLICES, "traj_key": IDS}
LIBRARIES = {OURS: "funcollect", "torchrl": "torchrl.data"}
STACK = 4  # screens in an observation of the cells `stacks`
SIZES = {"cartpole": (10_000, 100_000, 1_000_000), "pixels": (10_000,)}
JAX_LANES, JAX_CALLS = 64, 100

Made = dict[str, Callable[..., Any]]


class Call:
    """A contestant that is a function, which returns a number of frames; made when the cell begins."""

    def __init__(self, make: Callable[[], Callable[[], int]]) -> None:
        self._call = make()

    def run(self) -> int:
        return self._call()

    def close(self) -> None:
        del self._call


def cells() -> Iterator[Cell]:
    yield from torch_cells()
    yield from stack_cells()
    yield from jax_cells()


def torch_cells() -> Iterator[Cell]:
    for kind, sizes in SIZES.items():
        each = bytes_of(kind)
        for size in sizes:
            note = f"{kind}, {size:,} frames held; {each}"
            ours, theirs = partial(filled, OURS, kind, size), partial(filled, "torchrl.data", kind, size)
            sample: Mapping[str, Callable[[], Callable[[], int]]] = {
                OURS: partial(sampling, ours), "torchrl": partial(sampling, theirs),
                "gather": partial(gather, kind, size), "memcpy": partial(memcpy, kind, BATCH),
            }  # fmt: skip
            extend = {
                OURS: partial(extending, ours, kind), "linked": partial(extending, ours, kind, **SLICED),
                "torchrl": partial(extending, theirs, kind), "memcpy": partial(memcpy, kind, EXTEND),
            }  # fmt: skip
            prioritized = {name: partial(by_priority, library, kind, size) for name, library in LIBRARIES.items()}
            prioritized["by hand"] = partial(priorities_by_hand, kind, size)
            if kind == "cartpole":
                prioritized["flashbax"] = partial(in_jax, their_priorities, "prioritized", size)
                prioritized["flashbax, called"] = partial(in_jax, their_priorities, "prioritized", size, calls=1)
            yield cell(f"sample {kind} {size}", f"{BATCH} frames; {note}", sample)
            for name, make in (("slices", sampling), ("turns", partial(turning, kind=kind))):
                contestants = {
                    OURS: partial(make, ours, **SLICED), "torchrl": partial(make, theirs, **SLICED),
                    "cached": partial(make, theirs, **SLICED, cache_values=True),
                }  # fmt: skip
                yield cell(f"{name} {kind} {size}", f"{SLICES} of {BATCH // SLICES}; {note}", contestants)
            yield cell(f"extend {kind} {size}", f"{EXTEND:,} frames; {note}", extend, ours=(OURS, "linked"))
            yield cell(f"prioritized {kind} {size}", f"{BATCH} frames, priorities updated; {note}", prioritized)
    yield by_size("cartpole", *SIZES["cartpole"][::2])


def stack_cells() -> Iterator[Cell]:
    """Stacks of screens of which each is new, stored whole and with `frame_stack`."""
    size = 4 * EXTEND
    for name, make in (("sample", sampling), ("extend", partial(extending, kind="stacks"))):
        makers: Mapping[str, Callable[[], Callable[[], int]]] = {
            who: partial(make, partial(filled, OURS, "stacks", size, storage=storage))
            for who, storage in ((OURS, {"frame_stack": STACK}), ("whole", {}), ("compact_obs", {"compact_obs": True}))
        }
        yield cell(f"{name} stacks {size}", f"stacks of {STACK} screens, {size:,} frames held", makers)


def by_size(kind: str, small: int, large: int) -> Cell:
    makers: Mapping[str, Callable[[], Callable[[], int]]] = {
        OURS: partial(sampling, partial(filled, OURS, kind, large)),
        "nearby": partial(nearby, kind, large, small),
        f"of {small:,}": partial(sampling, partial(filled, OURS, kind, small)),
        "gather": partial(gather, kind, large),
        f"gather of {small:,}": partial(gather, kind, small),
    }
    note = f"{BATCH} of {large:,} frames unless it says another number"
    return cell(f"sizes {kind}", note, makers, ours=())  # the cells of `sample` have them


def cell(
    name: str, note: str, makers: Mapping[str, Callable[[], Callable[[], int]]], ours: Sequence[str] = (OURS,)
) -> Cell:
    contestants: dict[str, Factory] = {who: partial(Call, make) for who, make in makers.items()}
    return Cell(name=name, note=note, contestants=contestants, block=0.2, ours=ours)


def frames(kind: str, count: int, start: int = 0) -> TensorDict:
    """Frames as a collector delivers them: [count]."""
    index = torch.arange(start, start + count)
    seen = torch.randn(count + 1, 4) if kind == "cartpole" else torch.randint(256, (1, 84, 84, 4)).byte()
    seen = seen.expand(count + 1, *seen.shape[1:])
    if kind == "stacks":
        seen = torch.randint(256, (count + STACK, 84, 84)).byte().unfold(0, STACK, 1).movedim(-1, 1)
    done, never = (index % 200 == 199)[:, None], torch.zeros(count, 1, dtype=torch.bool)
    following = {"observation": seen[1:], "reward": torch.ones(count, 1), "done": done, "terminated": done}
    return TensorDict(
        {
            "observation": seen[:-1],
            "action": index % 2,
            "action_log_prob": torch.randn(count),
            **dict.fromkeys(("done", "terminated", "truncated"), never),
            "next": {**following, "truncated": never},
            "collector": {"traj_ids": index // 200, "step": index % 200},
        },
        [count],
    )


def nbytes(batch: TensorDict) -> int:
    return sum(leaf.nbytes for leaf in batch.values(True, True))


def filled(
    library: str,
    kind: str,
    size: int,
    sampler: str = "SliceSampler",
    storage: Mapping[str, Any] = MappingProxyType({}),
    **options: Any,
) -> Any:
    """Return a full buffer of one of the libraries; with options for a slice sampler, one that samples slices."""
    import importlib
    import logging

    data = importlib.import_module(library)
    logging.getLogger("torchrl").setLevel(logging.WARNING)  # otherwise it reports every storage between the tables
    chosen = {"sampler": getattr(data, sampler)(**options)} if options else {}
    buffer = data.ReplayBuffer(storage=data.LazyTensorStorage(size, **storage), batch_size=BATCH, **chosen)
    for start in range(0, size, EXTEND):
        buffer.extend(frames(kind, EXTEND, start))
    return buffer


def bytes_of(kind: str) -> str:
    """Bytes per frame: of the data, and as a buffer of ours holds it."""
    import funcollect as fc

    told = {"data": nbytes(frames(kind, 1))}
    for name, compact in (("held", False), ("held with compact_obs", True)):
        storage = fc.LazyTensorStorage(EXTEND, compact_obs=compact)
        buffer, batch = fc.ReplayBuffer(storage=storage), frames(kind, EXTEND)
        for few in batch.split(EXTEND // 50):
            buffer.extend(few)
        told[name] = storage.nbytes // EXTEND
    return "bytes per frame: " + ", ".join(f"{name} {number:,}" for name, number in told.items())


def sampling(make: Callable[..., Any], **options: Any) -> Callable[[], int]:
    buffer = make(**options)
    return lambda: buffer.sample().numel()


def nearby(kind: str, size: int, among: int) -> Callable[[], int]:
    from funcollect.buffers.indices import SampleIndices

    buffer = filled(OURS, kind, size)
    buffer.sampler.draw = lambda memory, count, source: SampleIndices(slots=source.below(among, count))
    return lambda: buffer.sample().numel()


def extending(make: Callable[..., Any], kind: str, **options: Any) -> Callable[[], int]:
    buffer, batch = make(**options), frames(kind, EXTEND).clone()
    return lambda: buffer.extend(batch).numel()


def turning(make: Callable[..., Any], kind: str, **options: Any) -> Callable[[], int]:
    """Return a function that adds a batch, draws a sample, and returns the number of frames of both."""
    buffer, batch = make(**options), frames(kind, EXTEND).clone()

    def call() -> int:
        buffer.extend(batch)
        return EXTEND + buffer.sample().numel()

    return call


def by_priority(library: str, kind: str, size: int) -> Callable[[], int]:
    try:
        buffer = filled(library, kind, size, "PrioritizedSampler", max_capacity=size, alpha=0.6, beta=0.4)
    except RuntimeError as error:  # TorchRL's sum tree is compiled, for some versions of Torch
        raise ModuleNotFoundError(str(error), name="torchrl's sum tree") from error
    priorities = torch.rand(BATCH)

    def call() -> int:
        batch, info = buffer.sample(return_info=True)
        buffer.update_priority(info["index"], priorities)
        return int(batch.numel())

    return call


def gather(kind: str, size: int) -> Callable[[], int]:
    leaves = list(frames(kind, size).clone().values(True, True))

    def call() -> int:
        index = torch.randint(size, (BATCH,))
        gathered = [leaf.index_select(0, index) for leaf in leaves]
        return len(gathered[0])

    return call


def priorities_by_hand(kind: str, size: int) -> Callable[[], int]:
    """Draw by running sums of all priorities, gather every leaf of plain tensors, and set other priorities."""
    leaves = list(frames(kind, size).clone().values(True, True))
    generator = np.random.default_rng(0)
    weights = generator.random(size)

    def call() -> int:
        upto = weights.cumsum()
        slots = upto.searchsorted(generator.random(BATCH) * upto[-1], side="right")
        correction = torch.from_numpy((weights.take(slots) / weights.min()) ** -0.4).float()
        index = torch.from_numpy(slots)
        gathered = [correction, *(leaf.index_select(0, index) for leaf in leaves)]
        weights[slots] = (generator.random(BATCH) + 1e-8) ** 0.6
        return len(gathered[0])

    return call


def memcpy(kind: str, count: int) -> Callable[[], int]:
    source = torch.zeros(nbytes(frames(kind, 1)) * count, dtype=torch.uint8)
    target = source.clone()

    def call() -> int:
        target.copy_(source)
        return count

    return call


def jax_cells() -> Iterator[Cell]:
    for size in SIZES["cartpole"]:
        for what in ("sample", "slices", "extend"):
            makers = {OURS: partial(in_jax, our_ring, what, size), "flashbax": partial(in_jax, their_ring, what, size)}
            if what == "slices":
                makers["gather"] = partial(in_jax, our_ring, "gather", size)
            yield cell(f"jax {what} {size}", f"{JAX_CALLS} calls in one jit, {JAX_LANES} lanes", makers)


def arrays() -> Any:
    """16 steps of all lanes, time-major."""
    import jax.numpy as jnp

    batch = frames("cartpole", 16 * JAX_LANES).reshape(16, JAX_LANES)
    step = jnp.ones((16, JAX_LANES), jnp.int32)
    flat = {name: jnp.asarray(batch[name].clone().numpy()) for name in ("observation", "action_log_prob")}
    names = ("observation", "reward", "done", "truncated")
    following = {name: jnp.asarray(batch["next", name].clone().squeeze(-1).numpy()) for name in names}
    return {**flat, "action": step, "next": following, "collector": {"step": step}}


def our_ring(steps: int) -> tuple[Any, Made]:
    import jax

    import funcollect as fc

    batch, ring, length = arrays(), fc.jax_ring, BATCH // SLICES

    def gathered(state: Any, key: Any) -> Any:
        count = steps * JAX_LANES
        first = jax.random.randint(key, (SLICES,), 0, count)
        rows = (first + JAX_LANES * jax.numpy.arange(length)[:, None]) % count
        flat = jax.tree.map(lambda leaf: leaf.reshape(count, *leaf.shape[2:]), state.data)
        return state, jax.tree.map(lambda leaf: leaf.at[rows].get(mode="promise_in_bounds"), flat)

    calls: Any = {
        "sample": lambda state, key: (state, ring.sample(state, key, BATCH)),
        "slices": lambda state, key: (
            state, ring.sample_slices(state, key, num_slices=SLICES, slice_len=length)),
        "gather": gathered,
        "extend": lambda state, _: (ring.extend(state, batch), 0),
    }  # fmt: skip
    return ring.init(batch, steps=steps), calls


def their_ring(steps: int) -> tuple[Any, Made]:
    import flashbax

    def made(count: int, length: int) -> Any:
        return flashbax.make_trajectory_buffer(
            add_batch_size=JAX_LANES, sample_batch_size=count, sample_sequence_length=length, period=1,
            min_length_time_axis=length, max_length_time_axis=steps,
        )  # fmt: skip

    single, several = made(BATCH, 1), made(SLICES, BATCH // SLICES)
    first, batch = lanes_first()
    calls: Any = {
        "sample": lambda state, key: (state, single.sample(state, key)),
        "slices": lambda state, key: (state, several.sample(state, key)),
        "extend": lambda state, _: (single.add(state, batch), 0),
    }
    return single.init(first), calls


def their_priorities(steps: int) -> tuple[Any, Made]:
    import flashbax
    import jax

    buffer = flashbax.make_prioritised_trajectory_buffer(
        add_batch_size=JAX_LANES, sample_batch_size=BATCH, sample_sequence_length=1, period=1,
        min_length_time_axis=1, max_length_time_axis=steps, priority_exponent=0.6,
    )  # fmt: skip
    first, batch = lanes_first()

    def prioritized(state: Any, key: Any) -> Any:
        sample = buffer.sample(state, key)
        return buffer.set_priorities(state, sample.indices, jax.random.uniform(key, (BATCH,))), sample

    calls: Any = {"prioritized": prioritized, "extend": lambda state, _: (buffer.add(state, batch), 0)}
    return buffer.init(first), calls


def lanes_first() -> tuple[Any, Any]:
    """One frame, and 16 steps of all lanes, as flashbax takes them."""
    import jax

    batch = arrays()
    return jax.tree.map(lambda leaf: leaf[0, 0], batch), jax.tree.map(lambda leaf: leaf.swapaxes(0, 1), batch)


def in_jax(make: Callable[[int], Any], what: str, size: int, calls: int = JAX_CALLS) -> Callable[[], int]:
    """A hundred calls, or another number, in one jit, on a full ring that is carried and donated."""
    import jax

    state, functions = make(size // JAX_LANES)
    keys = jax.random.split(jax.random.PRNGKey(0), calls)
    extend = jax.jit(lambda state: functions["extend"](state, None)[0], donate_argnums=0)
    for _ in range(size // JAX_LANES // 16 + 1):
        state = extend(state)

    def turn(state: Any, key: Any) -> Any:
        state, got = functions[what](state, key)
        return state, jax.tree.map(jax.numpy.sum, got)

    run = jax.jit(lambda state: jax.lax.scan(turn, state, keys), donate_argnums=0)

    def call() -> int:
        nonlocal state
        state, sums = run(state)
        jax.block_until_ready((state, sums))
        return calls * (16 * JAX_LANES if what == "extend" else BATCH)

    return call
