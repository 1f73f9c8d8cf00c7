"""Memory of both frameworks: arrays that both read without a copy, and which of the two holds a device's memory."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_ALIGNMENT = 64  # bytes: XLA takes such memory without a copy, and Torch computes the same bits from run to run


def aligned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """A zeroed array whose memory begins at a multiple of 64 bytes."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.zeros(size + _ALIGNMENT, np.uint8)
    offset = -memory.ctypes.data % _ALIGNMENT
    return memory[offset : offset + size].view(dtype).reshape(shape)


def fixed(value: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor; on the CPU its memory is aligned, because Torch's bits depend on the alignment."""
    if value.device.type != "cpu":
        return value.clone()
    return torch.from_numpy(aligned(tuple(value.shape), value.numpy().dtype)).copy_(value)


@contextlib.contextmanager
def naming_memory(what: str) -> Iterator[None]:
    """Raise a MemoryError that names `what` and the framework that holds memory, if JAX or Torch has too little."""
    try:
        yield
    except RuntimeError as error:  # the base of both frameworks' errors
        torch_lacks = isinstance(error, torch.OutOfMemoryError)
        if not torch_lacks and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        lacking, other = ("Torch", _held_by_jax()) if torch_lacks else ("JAX", _held_by_torch())
        raise MemoryError(f"{lacking} has no memory for {what}: collect fewer frames at once{other}") from error


def _held_by_torch() -> str:
    """The end of a message if JAX lacks memory: how much Torch reserves, and how to free it; empty without a GPU."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return ""
    held = torch.cuda.memory_reserved() / 2**30
    return f", or give back what Torch keeps of the GPU ({held:.1f} GiB): torch.cuda.empty_cache()"


def _held_by_jax() -> str:
    """The end of a message if Torch lacks memory: the setting that makes JAX reserve less."""
    share = os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.75")
    if os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "true").lower() in ("false", "0"):
        return ", or set XLA_PYTHON_CLIENT_ALLOCATOR=platform before JAX starts: it then gives back what it frees"
    return (
        f", or keep JAX from reserving {share} of the GPU: set XLA_PYTHON_CLIENT_PREALLOCATE=false before JAX starts "
        "(funcollect does where it is imported before JAX)"
    )
