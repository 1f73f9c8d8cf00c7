"""The layout of each parameter that is fastest where it is used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from funcollect.interop.lowering.registry import rules

Layout = tuple[int, ...]
_TRANSPOSES = ("aten.permute.default", "aten.t.default", "aten.transpose.int")


def layouts(parameters: Mapping[str, Any]) -> dict[str, Layout]:
    """By parameter the permutation in which it is kept; those that stay as they are are left out.

    Torch keeps weights as [out, in, *kernel], XLA on the CPU is up to three times as fast with [*kernel, in, out]. A
    parameter that is used in other ways, too, stays as it is.

    Args:
        parameters: the placeholders of a graph, by name.
    """
    found = {}
    for name, node in parameters.items():
        rank = node.meta["val"].ndim
        if rank > 1 and node.users and all(_as_weight(user, node) for user in node.users):
            found[name] = (*range(2, rank), 1, 0)
    return found


def inverse(layout: Layout) -> Layout:
    """The permutation that takes the one back."""
    return tuple(layout.index(i) for i in range(len(layout)))


def _as_weight(user: Any, node: Any) -> bool:
    """Whether the operator takes the node where it wants a weight."""
    if str(user.target) in _TRANSPOSES:
        return bool(node.meta["val"].ndim == 2)
    rule = rules().get(str(user.target)) if isinstance(user.target, torch._ops.OpOverload) else None
    positions = rule.weights if rule else ()
    return any(at in positions and _holds(argument, node) for at, argument in enumerate(user.args))


def _holds(argument: Any, node: Any) -> bool:
    return argument is node or (isinstance(argument, (list, tuple)) and any(each is node for each in argument))
