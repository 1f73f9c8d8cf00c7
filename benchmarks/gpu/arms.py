"""The ways to build the fused loop on a GPU, side by side: what `BlockOptions` should be by default.

``with branches`` is the loop of the CPU. Command buffers are CUDA graphs that XLA records: none, those that it makes by
default, and those that hold whole loops. Each batch is finished before the next one is begun, as in `Ours`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import torch

from benchmarks.gpu.built import Builder
from benchmarks.gpu.cells import CELLS, measured
from benchmarks.gpu.pairs import BY_HAND, Ours, Size, jax_pair
from benchmarks.harness.runner import Options, Result

_GRAPHS = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION"
_LOOPS = f"{_GRAPHS},WHILE,CONDITIONAL"
SAME_SIZE = {"arms few": "cartpole few", "arms many": "cartpole many"}  # cells with the same loop by hand
ARMS: dict[str, dict[str, Any] | None] = {  # in the order of what is wanted most
    "with branches": None,
    "K = T, unroll 4": {},
    "unroll 1": {"unroll": 1},
    "buffers of loops": {
        "compiler_options": {"xla_gpu_enable_command_buffer": _LOOPS, "xla_gpu_graph_min_graph_size": 1}
    },
    "K = 32": {"steps": 32},
    "unroll 2": {"unroll": 2},
    "no command buffers": {"compiler_options": {"xla_gpu_enable_command_buffer": ""}},
    "K = 16": {"steps": 16},
    "K = 8": {"steps": 8},
    "K = 8, spare starts": {"steps": 8, "made_each_step": False},  # with more steps, some lanes need a third start
}


class Arm(Ours):
    """The fused loop of a JAX policy, built in one way; its state is its own."""

    def __init__(self, size: Size, device: str, options: dict[str, Any] | None) -> None:
        from funcollect.core.loops import over_jax
        from funcollect.core.loops.blocks import BlockOptions
        from funcollect.core.request import Request
        from funcollect.protocols import traced_values

        super().__init__(jax_pair, *size, device)
        request = Request(length=size.length)
        self._bound = self.policy.prepare(None), traced_values(request.exploration)
        self._frames = size.lanes * size.length
        self._owned = options is not None
        if options is None:
            self._loop: Any = over_jax.program(self.env, self.policy, self._state, request)
        else:
            self._loop = over_jax.block_loop(self.env, self.policy, self._state, request, BlockOptions(**options))

    def run(self) -> int:
        kept = {"owned": True} if self._owned else {}
        done = self._loop(self._bound, self._state, self._length, **kept)
        if done is None:
            raise RuntimeError("lanes lacked starts, so the loop would have run again with branches")
        self._state, columns = done[:2]
        jax.block_until_ready(columns)  # those of blocks are Torch's already
        if self._device == "cuda":
            torch.cuda.synchronize()
        return self._frames


def rates(name: str, builder: Builder, options: Options, deadline: float) -> Iterator[Result]:
    """Frames per second of each arm, and of the scan by hand."""
    cell, platform = CELLS[SAME_SIZE[name]], options.platform
    size = cell.size(platform)
    builds = {BY_HAND: cell.builds(builder, platform)[BY_HAND]}
    builds |= {arm: partial(builder.build, (name, arm), partial(Arm, size, platform, ARMS[arm])) for arm in ARMS}
    return measured(name, size, builds, options, deadline)
