"""What other processes get: JAX's and Torch's settings that change numbers, and a script's own functions."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import cloudpickle
import torch

_OF_JAX = (
    *("jax_enable_x64", "jax_threefry_partitionable", "jax_default_prng_impl"),
    *("jax_default_matmul_precision", "jax_numpy_dtype_promotion", "jax_numpy_rank_promotion"),
)


class FrameworkSettings(NamedTuple):
    """The settings of one process."""

    jax: Mapping[str, Any]  # by name, bool, str or None; empty if JAX is not imported
    default_dtype: torch.dtype
    matmul_precision: str
    deterministic: tuple[bool, bool]  # whether Torch uses deterministic algorithms, and only warns where it has none

    @classmethod
    def current(cls) -> Self:
        """Those of the current process."""
        values = sys.modules["jax"].config.values if "jax" in sys.modules else {}
        return cls(
            {name: getattr(values[name], "value", values[name]) for name in _OF_JAX if name in values},
            torch.get_default_dtype(),
            torch.get_float32_matmul_precision(),
            (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        )

    def apply(self) -> None:
        """Take them over in the current process. JAX, if it is not imported yet, reads its own from the environment."""
        for name, value in self.jax.items():
            if "jax" in sys.modules:
                sys.modules["jax"].config.update(name, value)
            elif value is not None:
                os.environ[name.upper()] = str(value)
            else:
                os.environ.pop(name.upper(), None)
        torch.set_default_dtype(self.default_dtype)
        torch.set_float32_matmul_precision(self.matmul_precision)
        torch.use_deterministic_algorithms(self.deterministic[0], warn_only=self.deterministic[1])


def send_main_by_value() -> None:
    """Have cloudpickle send a script's functions and classes by value, also from a spawned process.

    `multiprocessing` calls the script ``__mp_main__`` there, a name by which no other process could find them.
    """
    if main := sys.modules.get("__mp_main__"):
        cloudpickle.register_pickle_by_value(main)
