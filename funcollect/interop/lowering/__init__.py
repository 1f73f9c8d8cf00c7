"""Torch modules as JAX functions."""

from funcollect.interop.lowering.lowered import Lowered, lower, lower_module

__all__ = ["Lowered", "lower", "lower_module"]
