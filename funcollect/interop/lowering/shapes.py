"""Which input shapes an exported program is good for."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.export import ExportedProgram

Shape = tuple[int, ...]


class _Sizes:
    """Stands for an input where Torch's guards ask for its size."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape

    def size(self) -> Shape:
        return self._shape


def fits(program: ExportedProgram, inputs: list[Any], shapes: list[Shape]) -> bool:
    """Whether inputs of these shapes take the way through the module that was exported.

    Args:
        program: the program.
        inputs: its own inputs, fake tensors, whose sizes are numbers or symbols.
        shapes: of what is to be put in their place.
    """
    if any(len(value.shape) != len(shape) for value, shape in zip(inputs, shapes, strict=True)):
        return False
    bound: dict[str, int] = {}
    for value, shape in zip(inputs, shapes, strict=True):
        for dimension, size in zip(map(str, value.shape), shape, strict=True):
            if bound.setdefault(dimension, int(dimension) if dimension.isdecimal() else size) != size:
                return False
    return _in_range(program, bound) and _guarded(program, shapes)


def _in_range(program: ExportedProgram, bound: dict[str, int]) -> bool:
    ranges = {str(symbol): limits for symbol, limits in program.range_constraints.items()}
    return all(
        name in ranges and bool(ranges[name].lower <= size) and bool(size <= ranges[name].upper)
        for name, size in bound.items()
        if not name.isdecimal()
    )


def _guarded(program: ExportedProgram, shapes: list[Shape]) -> bool:
    """Whether the branches that Python took by sizes would be the same; False also where that is not known."""
    names = {"L": {"leaves": [_Sizes(shape) for shape in shapes]}, "max": max, "min": min, "math": math, "torch": torch}
    try:
        guards = program._guards_code
        return all(eval(guard, {"__builtins__": {}}, names) for guard in guards)
    except Exception:
        return False  # it is exported again, for these shapes
