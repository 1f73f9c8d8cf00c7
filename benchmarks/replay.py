"""Replay buffers, frames per second: ours, TorchRL's, and bare memory as the limit.

`gather` draws uniform rows and gathers every leaf of plain tensors; `memcpy` copies as many bytes as the frames have.
`funcollect` in the cells of `extend` does not follow trajectories, as TorchRL's does not when it is extended;
`linked` does, for slices. Frames are CartPole's (13 leaves, episodes of 200) or 84x84x4 pixels.
In JAX, 100 calls run in one `jit`; flashbax's slices may cross the ends of episodes, ours do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict

from benchmarks.report import compare
from benchmarks.runner import Cell, Factory, Options, Result, measure

OURS = "funcollect"
BATCH, SLICES, EXTEND = 256, 32, 1_000
IDS = ("collector", "traj_ids")
SIZES = {"cartpole": (10_000, 100_000, 1_000_000), "pixels": (10_000,)}
JAX_LANES, JAX_CALLS = 64, 100

Made = dict[str, Callable[[], int]]


class Call:
    """A contestant that is a function, which says how many frames it was; made when the cell begins."""

    def __init__(self, make: Callable[[], Callable[[], int]]) -> None:
        self._call = make()

    def run(self) -> int:
        return self._call()

    def close(self) -> None:
        del self._call


def results(options: Options) -> Iterator[Result]:
    for cell in (*torch_cells(), *jax_cells()):
        if options.only in cell.name:
            yield compare(cell, measure(cell, options), OURS)


def torch_cells() -> Iterator[Cell]:
    for kind, sizes in SIZES.items():
        for size in sizes:
            note = f"{kind}, {size:,} frames of {nbytes(frames(kind, 1))} bytes held"
            ours, theirs = partial(filled, "funcollect", kind, size), partial(filled, "torchrl.data", kind, size)
            sample: Mapping[str, Callable[[], Callable[[], int]]] = {
                OURS: partial(sampling, ours), "torchrl": partial(sampling, theirs),
                "gather": partial(gather, kind, size), "memcpy": partial(memcpy, kind, BATCH),
            }  # fmt: skip
            slices = {
                OURS: partial(sampling, ours, num_slices=SLICES),
                "torchrl": partial(sampling, theirs, num_slices=SLICES),
                "cached": partial(sampling, theirs, num_slices=SLICES, cache_values=True),
            }
            extend = {
                OURS: partial(extending, ours, kind), "linked": partial(extending, ours, kind, num_slices=SLICES),
                "torchrl": partial(extending, theirs, kind), "memcpy": partial(memcpy, kind, EXTEND),
            }  # fmt: skip
            prioritized = {OURS: partial(by_priority, kind, size)}
            yield cell(f"sample {kind} {size}", f"{BATCH} frames; {note}", sample)
            yield cell(f"slices {kind} {size}", f"{SLICES} of {BATCH // SLICES}; {note}", slices)
            yield cell(f"extend {kind} {size}", f"{EXTEND:,} frames; {note}", extend)
            yield cell(f"prioritized {kind} {size}", f"{BATCH} frames, priorities updated; {note}", prioritized)


def cell(name: str, note: str, makers: Mapping[str, Callable[[], Callable[[], int]]]) -> Cell:
    contestants: dict[str, Factory] = {who: partial(Call, make) for who, make in makers.items()}
    return Cell(name=name, note=note, contestants=contestants, block=0.2)


def frames(kind: str, count: int, start: int = 0) -> TensorDict:
    """Frames as a collector delivers them: [count]."""
    index = torch.arange(start, start + count)
    observation = torch.randn(count, 4) if kind == "cartpole" else torch.randint(256, (1, 84, 84, 4)).byte()
    observation = observation.expand(count, *observation.shape[1:])
    done, never = (index % 200 == 199)[:, None], torch.zeros(count, 1, dtype=torch.bool)
    following = {"observation": observation, "reward": torch.ones(count, 1), "done": done, "terminated": done}
    return TensorDict(
        {
            "observation": observation,
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


def filled(library: str, kind: str, size: int, sampler: str = "SliceSampler", **options: Any) -> Any:
    """A full buffer of one of the libraries; one of slices where there are options for their sampler."""
    import importlib

    data = importlib.import_module(library)
    chosen = {"sampler": getattr(data, sampler)(**options)} if options else {}
    buffer = data.ReplayBuffer(storage=data.LazyTensorStorage(size), batch_size=BATCH, **chosen)
    for start in range(0, size, EXTEND):
        buffer.extend(frames(kind, EXTEND, start))
    return buffer


def sampling(make: Callable[..., Any], **options: Any) -> Callable[[], int]:
    if options:
        options["traj_key"] = IDS
    buffer = make(**options)
    return lambda: buffer.sample().numel()


def extending(make: Callable[..., Any], kind: str, **options: Any) -> Callable[[], int]:
    buffer, batch = make(**options), frames(kind, EXTEND).clone()
    return lambda: buffer.extend(batch).numel()


def by_priority(kind: str, size: int) -> Callable[[], int]:
    buffer = filled("funcollect", kind, size, "PrioritizedSampler", max_capacity=size, alpha=0.6, beta=0.4)
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


def our_ring(steps: int) -> tuple[Any, Any, Made]:
    import funcollect as fc

    batch, ring = arrays(), fc.jax_ring
    calls: Any = {
        "sample": lambda state, key: ring.sample(state, key, BATCH),
        "slices": lambda state, key: ring.sample_slices(state, key, num_slices=SLICES, slice_len=BATCH // SLICES),
        "extend": ring.extend,
    }
    return ring.init(batch, steps=steps), batch, calls


def their_ring(steps: int) -> tuple[Any, Any, Made]:
    import flashbax
    import jax

    batch = arrays()

    def made(count: int, length: int) -> Any:
        return flashbax.make_trajectory_buffer(
            add_batch_size=JAX_LANES, sample_batch_size=count, sample_sequence_length=length, period=1,
            min_length_time_axis=length, max_length_time_axis=steps,
        )  # fmt: skip

    single, several = made(BATCH, 1), made(SLICES, BATCH // SLICES)
    calls: Any = {"sample": single.sample, "slices": several.sample, "extend": single.add}
    state = single.init(jax.tree.map(lambda leaf: leaf[0, 0], batch))
    return state, jax.tree.map(lambda leaf: leaf.swapaxes(0, 1), batch), calls


def in_jax(make: Callable[[int], Any], what: str, size: int) -> Callable[[], int]:
    """A hundred calls in one jit, on a full ring that is carried and donated."""
    import jax

    state, batch, calls = make(size // JAX_LANES)
    extend = jax.jit(calls["extend"], donate_argnums=0)
    for _ in range(size // JAX_LANES // 16 + 1):
        state = extend(state, batch)
    keys = jax.random.split(jax.random.PRNGKey(0), JAX_CALLS)

    def turn(state: Any, key: Any) -> Any:
        if what == "extend":
            return calls["extend"](state, batch), 0
        return state, jax.tree.map(lambda leaf: leaf.sum(), calls[what](state, key))

    run = jax.jit(lambda state: jax.lax.scan(turn, state, keys), donate_argnums=0)

    def call() -> int:
        nonlocal state
        state, sums = run(state)
        jax.block_until_ready((state, sums))
        return JAX_CALLS * (16 * JAX_LANES if what == "extend" else BATCH)

    return call
