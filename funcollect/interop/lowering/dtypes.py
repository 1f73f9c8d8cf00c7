"""Torch's dtypes in JAX, which has 32 bits by default."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from funcollect.errors import LoweringError
from funcollect.interop.jax_setup import import_jax

_WIDE = (torch.float64, torch.complex128)


def jax_dtype(dtype: torch.dtype) -> Any:
    """JAX's dtype for one of Torch: the same, or under 32-bit JAX the 32-bit dtype for 64-bit integers.

    LoweringError for float64 and complex128 under 32-bit JAX, which would round them.
    """
    jax = import_jax()
    named = jax.numpy.dtype(str(dtype).removeprefix("torch."))
    held = jax.dtypes.canonicalize_dtype(named)
    if dtype in _WIDE and held != named:
        raise LoweringError(
            f"it computes in {named}, and JAX has 32 bits here and would round: cast the module to float32 with "
            ".float(), or turn 64 bits on with jax.config.update('jax_enable_x64', True)"
        )
    return np.dtype(held)
