"""Arrays between JAX and Torch by DLPack."""

from __future__ import annotations

from typing import Any

import torch
import torch.utils.dlpack


def to_torch(array: Any) -> torch.Tensor:
    """A tensor over the memory of a JAX array, which is kept alive with it."""
    return torch.utils.dlpack.from_dlpack(array)
