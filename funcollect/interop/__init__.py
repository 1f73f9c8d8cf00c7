"""Passes arrays between JAX and Torch."""

from funcollect.interop.bridge import to_jax, to_torch

__all__ = ["to_jax", "to_torch"]
