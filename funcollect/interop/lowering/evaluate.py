"""Evaluates an exported graph in `jax.numpy`, on arrays or on values inside a traced function."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx.node import Node, map_aggregate

from funcollect.errors import LoweringError
from funcollect.interop.jax_setup import import_jax
from funcollect.interop.lowering.dtypes import jax_dtype
from funcollect.interop.lowering.places import place_of
from funcollect.interop.lowering.registry import rules

_WHERE = ("device", "layout", "pin_memory", "memory_format", "non_blocking")  # arguments that JAX's arrays do not have


def evaluate(graph: Any, values: list[Any]) -> tuple[Any, ...]:
    """The outputs of a graph whose placeholders have these values.

    Raises:
        LoweringError: for an operator that JAX refuses, with its place in the module.
    """
    jax = import_jax()
    known: dict[Any, Any] = {}
    remaining = iter(values)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for node in graph.nodes:
            if node.op == "placeholder":
                known[node] = next(remaining)
            elif node.op == "call_function":
                known[node] = _called(node, known)
            elif node.op == "output":
                return tuple(_looked_up(node.args[0], known))
    raise AssertionError("a graph ends with its output")


def _called(node: Any, known: dict[Any, Any]) -> Any:
    arguments = _looked_up(node.args, known)
    options = {name: value for name, value in _looked_up(node.kwargs, known).items() if name not in _WHERE}
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.target(*arguments, **options)  # a function of Python's on sizes, or an item of a tuple
    try:
        result = rules()[str(node.target)].evaluate(*arguments, **options)
    except Exception as error:
        raise LoweringError(f"{node.target} failed, at {place_of(node)}: {error}") from error
    return _cast(result, node.meta.get("val"))


def _looked_up(arguments: Any, known: dict[Any, Any]) -> Any:
    def look_up(argument: Any) -> Any:
        if isinstance(argument, Node):
            return known[argument]
        return jax_dtype(argument) if isinstance(argument, torch.dtype) else argument

    return map_aggregate(arguments, look_up)


def _cast(result: Any, like: Any) -> Any:
    """Cast results to the dtypes that Torch has there."""
    if isinstance(like, (tuple, list)):
        return tuple(map(_cast, result, like))
    if not isinstance(like, torch.Tensor) or result is None:
        return result
    return import_jax().numpy.asarray(result, jax_dtype(like.dtype))
