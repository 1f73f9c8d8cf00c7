"""Memory that both frameworks read without a copy."""

from __future__ import annotations

import math
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
