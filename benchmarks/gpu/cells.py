"""The cells of the benchmark: which contestants run an environment, with how many lanes and steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from benchmarks.gpu import peer
from benchmarks.gpu.built import Builder, Built
from benchmarks.gpu.measures import timing
from benchmarks.gpu.pairs import (
    BY_GRAPH,
    BY_HAND,
    CAPTURED,
    GYMNAX_CARTPOLE,
    PIXELS,
    TORCH_CARTPOLE,
    TORCH_PENDULUM,
    Size,
    contestants,
)
from benchmarks.harness.runner import Options, Result

BLOCK = {"cuda": 0.3, "cpu": 0.1}  # seconds that a contestant has per round
FUSED = (BY_HAND, "JAX policy, fused", "Torch policy, lowered")
TORCH = (BY_HAND, BY_GRAPH, "Torch policy", CAPTURED)


class Cell(NamedTuple):
    """Contestants that do the same work; those that a platform lacks are left out."""

    names: tuple[str, ...]  # the loop by hand first, because every ratio needs it
    cuda: Size
    cpu: Size

    def size(self, platform: str) -> Size:
        """The size on this platform."""
        return self.cuda if platform == "cuda" else self.cpu

    def builds(self, builder: Builder, platform: str) -> dict[str, Callable[[], Built]]:
        """What builds each contestant, by name."""
        size = self.size(platform)
        factories = contestants(*size, platform)
        return {name: partial(builder.build, (size, name), factories[name]) for name in self.names if name in factories}


_FEW = Size(GYMNAX_CARTPOLE, 2**11, 256), Size(GYMNAX_CARTPOLE, 32, 40)
_MANY = Size(GYMNAX_CARTPOLE, 2**16, 64), Size(GYMNAX_CARTPOLE, 256, 40)
_TORCH = Size(TORCH_CARTPOLE, 2**16, 64), Size(TORCH_CARTPOLE, 256, 16)
GOALS = {
    "cartpole few": Cell(FUSED, *_FEW),
    "cartpole many": Cell(FUSED, *_MANY),
    "cartpole torch": Cell(TORCH, *_TORCH),
    "pendulum torch": Cell(TORCH, Size(TORCH_PENDULUM, 2**14, 64), Size(TORCH_PENDULUM, 64, 16)),
    "ant": Cell(FUSED[:2], Size("brax/ant", 4096, 32), Size("brax/inverted_pendulum", 4, 4)),
}
CROSSING = {
    "cartpole crossing": Cell((BY_HAND, "Torch policy, crossing"), *_FEW),
    "cartpole torch crossing": Cell((BY_HAND, "JAX policy", "Torch policy, one XLA call per step"), *_TORCH),
}
OTHERS = {
    **{
        f"cartpole 2^{power}": Cell(
            FUSED, Size(GYMNAX_CARTPOLE, 2**power, 64), Size(GYMNAX_CARTPOLE, 2 ** (power - 8), 16)
        )
        for power in (10, 14, 18)
    },
    "breakout": Cell(FUSED, Size("gymnax/Breakout-MinAtar", 2**14, 64), Size("gymnax/Breakout-MinAtar", 16, 8)),
    "pixels": Cell(FUSED, Size(PIXELS, 1024, 32), Size(PIXELS, 2, 4)),
    "torchrl": Cell((BY_HAND, *peer.WAYS), *_TORCH),
    "inverted pendulum": Cell(FUSED, Size("brax/inverted_pendulum", 4096, 32), Size("brax/inverted_pendulum", 4, 4)),
}
CELLS = GOALS | CROSSING | OTHERS
PROFILED = ("cartpole few", "cartpole many", "cartpole torch", *CROSSING)


def rates(name: str, builder: Builder, options: Options, deadline: float) -> Iterator[Result]:
    """Frames per second of every contestant of one cell."""
    cell, platform = CELLS[name], options.platform
    yield from measured(name, cell.size(platform), cell.builds(builder, platform), options, deadline)


def measured(
    name: str, size: Size, builds: dict[str, Callable[[], Built]], options: Options, deadline: float
) -> Iterator[Result]:
    """The rates of contestants of one size, after each contestant and each round."""
    note = f"{size.env_id}: {size.lanes:,} lanes, {size.length} steps per batch"
    seconds = BLOCK[options.platform] * options.scale
    for timings in timing.measure(builds, rounds=options.rounds, block_seconds=seconds, deadline=deadline):
        yield timing.result(name, note, timings)
