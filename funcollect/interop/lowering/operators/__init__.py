"""The operators that are covered, by the name ATen gives them: each module of this folder has a `TABLE` of rules.

A rule takes the operator's arguments, with JAX arrays for tensors and JAX dtypes for Torch's dtypes, and returns what
the operator returns. Devices, layouts and memory formats are removed before the call, and each result is cast to the
dtype that Torch gives it after it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

FAMILIES = ("elementwise", "linear", "layers", "reduction", "shape")  # the modules of this folder


class Rule(NamedTuple):
    """How one operator is evaluated."""

    evaluate: Callable[..., Any]
    weights: tuple[int, ...] = ()  # the positions of arguments that are weights, whose parameters are transposed
    family: str = ""  # the module of this folder that has the rule


# Operators are separated by spaces, and the overloads of one by bars: "add.Tensor|Scalar dot" means `add.Tensor`,
# `add.Scalar` and `dot.default`.
Table = dict[str, Callable[..., Any] | Rule]


@cache
def rules() -> dict[str, Rule]:
    """Every rule by its operator's name; imports JAX."""
    found: dict[str, Rule] = {}
    for family in FAMILIES:
        table: Table = importlib.import_module(f"{__name__}.{family}").TABLE
        for names, given in table.items():
            rule = (given if isinstance(given, Rule) else Rule(given))._replace(family=family)
            for each in names.split():
                name, _, overloads = each.partition(".")
                for overload in (overloads or "default").split("|"):
                    if found.setdefault(f"aten.{name}.{overload}", rule) is not rule:
                        raise ValueError(f"aten.{name}.{overload} has a rule already: keep one")
    return found
