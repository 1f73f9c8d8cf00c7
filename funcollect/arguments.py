"""Checks of arguments that several layers take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


def check_positive(name: str, value: Any, example: int = 128) -> None:
    """Raise unless `value` is a positive int."""
    _check_int(name, value, "a positive int", least=1, example=example)


def check_count(name: str, value: Any) -> None:
    """Raise unless `value` is an int that is not negative."""
    _check_int(name, value, "an int of at least 0", least=0, example=0)


def _check_int(name: str, value: Any, wanted: str, *, least: int, example: int) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} is {value!r}, expected {wanted}: pass for example {name}={example}")
    if value < least:
        raise ValueError(f"{name} is {value}, expected at least {least}: pass for example {name}={example}")


def check_not_given(where: str, kwargs: Mapping[str, Any], reasons: Mapping[str, str]) -> None:
    """Raise ValueError for a keyword argument that has a reason why it is not the caller's to set."""
    for name in kwargs:
        if name in reasons:
            raise ValueError(f"{name} cannot be given to {where} ({reasons[name]}): leave it out")


def check_num_envs(num_envs: Any) -> None:
    """Raise ValueError unless `num_envs` is a positive int, or None."""
    if num_envs is not None and (isinstance(num_envs, bool) or not isinstance(num_envs, int) or num_envs < 1):
        raise ValueError(f"num_envs is {num_envs!r}, expected a positive int, or None for no batch dimension")
