"""The operators that are covered, by the name ATen gives them.

A rule takes what the operator takes, with JAX arrays for tensors and JAX dtypes for Torch's dtypes, and returns what
the operator returns. Devices, layouts and memory formats are removed before the call. `evaluate` casts each result to
the dtype that Torch gives it, so a rule need not.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

FAMILIES = {
    "elementwise": "Arithmetic, functions of one or two arrays, comparisons, logic, choice, bits",
    "activation": "Activations and softmax",
    "complex": "Complex numbers, Fourier transforms",
    "linear": "Products of matrices and vectors, distances, attention",
    "matrices": "Factorisations, determinants, matrix functions, inverses, ranks, linear systems",
    "windows": "Convolutions and pooling",
    "normalisation": "Normalisation",
    "recurrent": "Recurrent cells and layers",
    "reduction": "Reductions, scans, sorting, medians, running extremes, modes",
    "indexing": "Indexing, gathering, scattering",
    "sampling": "Images sampled at the points of a grid",
    "shape": "Shapes, joining, padding, constants, casts",
}  # each is a module of `operators`, with its title in the docs


class Rule(NamedTuple):
    """How one operator is evaluated.

    Attributes:
        evaluate: the function.
        weights: the positions of arguments that are weights. If they are parameters, they are laid out for speed.
        family: the module of `operators` that has the rule.
    """

    evaluate: Callable[..., Any]
    weights: tuple[int, ...]
    family: str


_RULES: dict[str, Rule] = {}


def operator(names: str, weights: tuple[int, ...] = ()) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as the rule for these operators of ATen; see `register` for the names."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        register(function.__module__, {names: function}, weights)
        return function

    return decorate


def register(module: str, table: Mapping[str, Callable[..., Any]], weights: tuple[int, ...] = ()) -> None:
    """Register functions, such as JAX's own, as rules.

    Args:
        module: the name of the module that registers them, one of `operators`.
        table: functions by the operators that they evaluate. Operators are separated by spaces, and the overloads of
            one by bars: ``"add.Tensor|Scalar dot"`` means `add.Tensor`, `add.Scalar` and `dot.default`.
        weights: the positions of arguments that are weights.
    """
    for names, function in table.items():
        for name in _overloads(names):
            if name in _RULES:
                raise ValueError(f"{name} has a rule already: keep one")
            _RULES[name] = Rule(function, weights, module.rpartition(".")[2])


def _overloads(names: str) -> Iterator[str]:
    for each in names.split():
        name, _, overloads = each.partition(".")
        for overload in overloads.split("|") if overloads else ["default"]:
            yield f"aten.{name}.{overload}"


@cache
def rules() -> dict[str, Rule]:
    """Every rule by its operator's name; imports JAX."""
    for family in FAMILIES:
        importlib.import_module(f"{__package__}.operators.{family}")
    return _RULES
