"""Checks of arguments that several layers take."""

from __future__ import annotations

from typing import Any

import numpy as np


def check_positive(name: str, value: Any) -> None:
    """Raise unless `value` is a positive int."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} is {value!r}, expected a positive int: pass for example {name}=128")
    if value < 1:
        raise ValueError(f"{name} is {value}, expected at least 1: pass for example {name}=128")


def check_num_envs(num_envs: Any) -> None:
    """Raise ValueError unless `num_envs` is a positive int, or None."""
    if num_envs is not None and (isinstance(num_envs, bool) or not isinstance(num_envs, int) or num_envs < 1):
        raise ValueError(f"num_envs is {num_envs!r}, expected a positive int, or None for no batch dimension")
