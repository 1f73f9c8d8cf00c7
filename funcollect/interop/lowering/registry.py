"""The operators that are covered, by the name ATen gives them.

A rule takes what the operator takes, with JAX arrays for tensors and JAX dtypes for Torch's, and answers with what it
answers. Devices, layouts and memory formats are taken away before. `evaluate` casts each answer to the dtype that Torch
gives it, so a rule need not.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

FAMILIES = {
    "elementwise": "Arithmetic, functions of one or two arrays",
    "comparison": "Comparisons, logic, choice, bits",
    "activation": "Activations and softmax",
    "complex": "Complex numbers, Fourier transforms",
    "linear": "Products of matrices and vectors, distances",
    "factorisation": "Factorisations, determinants, matrix functions",
    "solution": "Inverses, ranks, linear systems",
    "convolution": "Convolutions",
    "pooling": "Pooling",
    "normalisation": "Normalisation",
    "recurrent": "Recurrent cells and layers",
    "attention": "Attention",
    "reduction": "Reductions, scans, sorting",
    "selection": "Medians, running extremes, modes",
    "indexing": "Indexing, gathering, scattering",
    "sampling": "Images at the places of a grid",
    "shape": "Shapes, joining, padding",
    "creation": "Constants and casts",
}  # a module of `operators` each, with its title in the docs


class Rule(NamedTuple):
    """How one operator is evaluated."""

    evaluate: Callable[..., Any]
    weights: tuple[int, ...]  # the arguments that are weights, laid out for speed where they are parameters
    family: str


_RULES: dict[str, Rule] = {}


def operator(*names: str, weights: tuple[int, ...] = ()) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as the rule for ``aten.<name>``, for each name."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        for name in names:
            register_as(name, function, function.__module__, weights)
        return function

    return register


def register_as(name: str, function: Callable[..., Any], module: str, weights: tuple[int, ...] = ()) -> None:
    """Register a function, such as one of JAX's own, as the rule for ``aten.<name>``."""
    qualified = f"aten.{name}"
    if qualified in _RULES:
        raise ValueError(f"{qualified} has a rule already: keep one")
    _RULES[qualified] = Rule(function, weights, module.rpartition(".")[2])


@cache
def rules() -> dict[str, Rule]:
    """Every rule by its operator's name; imports JAX."""
    for family in FAMILIES:
        importlib.import_module(f"{__package__}.operators.{family}")
    return _RULES
