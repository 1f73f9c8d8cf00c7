"""The operators that are covered, by the name ATen gives them.

A rule takes the operator's arguments, with JAX arrays for tensors and JAX dtypes for Torch's dtypes, and returns what
the operator returns. Devices, layouts and memory formats are removed before the call. `LoweredProgram.run` casts each
result to the dtype that Torch gives it, so a rule need not.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

# The modules of this folder.
FAMILIES = (
    *("elementwise", "activation", "complex", "linear", "matrices", "windows"),
    *("normalisation", "recurrent", "reduction", "indexing", "sampling", "shape"),
)


class Rule(NamedTuple):
    """How one operator is evaluated."""

    evaluate: Callable[..., Any]
    weights: tuple[int, ...]  # the positions of arguments that are weights: parameters there are laid out for speed
    family: str  # the module of this folder that has the rule


Table = dict[str, Callable[..., Any]]  # rules by the names of operators, see `register`

_RULES: dict[str, Rule] = {}


def operator(names: str, weights: tuple[int, ...] = ()) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as the rule for these operators of ATen; see `register` for the arguments."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        register(function.__module__, names, function, weights)
        return function

    return decorate


def register(module: str, names: str, function: Callable[..., Any], weights: tuple[int, ...] = ()) -> None:
    """Register a rule of one of the modules.

    Operators are separated by spaces, and the overloads of one by bars: ``"add.Tensor|Scalar dot"`` means `add.Tensor`,
    `add.Scalar` and `dot.default`. `weights` holds the positions of arguments that are weights.
    """
    for each in names.split():
        name, _, overloads = each.partition(".")
        for overload in (overloads or "default").split("|"):
            target = f"aten.{name}.{overload}"
            if target in _RULES:
                raise ValueError(f"{target} has a rule already: keep one")
            _RULES[target] = Rule(function, weights, module.rpartition(".")[2])


@cache
def rules() -> dict[str, Rule]:
    """Every rule by its operator's name: those that modules register, and those of their tables; imports JAX."""
    for family in FAMILIES:
        module = importlib.import_module(f"{__name__}.{family}")
        for names, function in getattr(module, "TABLE", {}).items():
            register(module.__name__, names, function)
    return _RULES
