"""An exported program: its placeholders, the shapes it is good for, the layout of its weights, and its evaluation."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx.node import Node, map_aggregate

from funcollect.errors import LoweringError
from funcollect.interop.bridge import to_jax
from funcollect.interop.jax_setup import import_jax
from funcollect.interop.lowering.exporting import FlatModule, export, place_of
from funcollect.interop.lowering.operators import rules
from funcollect.interop.lowering.structure import jax_dtype

Shape = tuple[int, ...]
Layout = tuple[int, ...]  # a permutation of axes

_TRANSPOSES = ("aten.permute.default", "aten.t.default", "aten.transpose.int")
_WHERE = ("device", "layout", "pin_memory", "memory_format", "non_blocking")  # arguments that JAX's arrays do not have


class Placeholder(NamedTuple):
    """What a placeholder of a graph stands for: a parameter by name, a constant, or (neither) the next input."""

    node: Any
    parameter: str | None = None
    constant: Any = None


class LoweredProgram(NamedTuple):
    """A program for inputs of some shapes."""

    exported: ExportedProgram
    slots: list[Placeholder]
    answer: Any  # the treespec of the output

    @property
    def parameters(self) -> dict[str, Any]:
        """The placeholders of parameters and buffers, by name."""
        return {slot.parameter: slot.node for slot in self.slots if slot.parameter is not None}

    def used(self, always: set[str]) -> list[str]:
        """The names of the parameters and buffers that an operator reads, and of those that count in any case."""
        return sorted(name for name, node in self.parameters.items() if node.users or name in always)

    def layouts(self) -> dict[str, Layout]:
        """The permutations of those parameters that are faster in another layout than Torch's.

        Torch keeps weights as [out, in, *kernel]; XLA on the CPU is up to three times as fast with [*kernel, in, out].
        A parameter that is also used in other ways keeps Torch's layout.
        """
        found = {}
        for name, node in self.parameters.items():
            rank = node.meta["val"].ndim
            if rank > 1 and node.users and all(_is_weight(node, user) for user in node.users):
                found[name] = (*range(2, rank), 1, 0)
        return found

    def fits(self, shapes: list[Shape]) -> bool:
        """Whether inputs of these shapes take the way through the module that was exported."""
        bound: dict[str, int] = {}  # the sizes that the symbols of the program take
        inputs = [slot.node.meta["val"] for slot in self.slots if slot.parameter is None and slot.constant is None]
        for value, shape in zip(inputs, shapes, strict=True):
            if len(value.shape) != len(shape):
                return False
            for dimension, size in zip(map(str, value.shape), shape, strict=True):
                if bound.setdefault(dimension, int(dimension) if dimension.isdecimal() else size) != size:
                    return False
        ranges = {str(symbol): limits for symbol, limits in self.exported.range_constraints.items()}
        symbols = [(name, size) for name, size in bound.items() if not name.isdecimal()]
        in_range = all(name in ranges and ranges[name].lower <= size <= ranges[name].upper for name, size in symbols)
        return bool(in_range) and _passes_guards(self.exported, shapes)

    def run(self, values: list[Any]) -> tuple[Any, ...]:
        """The outputs of the graph, evaluated with one value for each slot; LoweringError if an operator fails."""
        jax = import_jax()
        known: dict[Any, Any] = {}
        remaining = iter(values)
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            for node in self.exported.graph.nodes:
                if node.op == "placeholder":
                    known[node] = next(remaining)
                elif node.op == "call_function":
                    known[node] = _called(node, known)
                elif node.op == "output":
                    return tuple(_looked_up(node.args[0], known))
        raise AssertionError("a graph ends with its output")


def _called(node: Any, known: dict[Any, Any]) -> Any:
    """The result of a node, evaluated by its rule from the `known` values of earlier nodes, in Torch's dtype."""
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
    """The arguments of a node, with values in place of nodes, and JAX's dtypes in place of Torch's."""

    def look_up(argument: Any) -> Any:
        if isinstance(argument, Node):
            return known[argument]
        return jax_dtype(argument) if isinstance(argument, torch.dtype) else argument

    return map_aggregate(arguments, look_up)


def _cast(result: Any, like: Any) -> Any:
    """Cast results to the dtypes of `like`, Torch's own results in the export (one, or a tuple)."""
    if isinstance(like, (tuple, list)):
        return tuple(map(_cast, result, like))
    if not isinstance(like, torch.Tensor) or result is None:
        return result
    return import_jax().numpy.asarray(result, jax_dtype(like.dtype))


def inverse(layout: Layout) -> Layout:
    """The permutation that undoes this one."""
    return tuple(layout.index(i) for i in range(len(layout)))


def _is_weight(node: Any, user: Any) -> bool:
    """Whether an operator, the user of a node, takes it as a weight."""
    if str(user.target) in _TRANSPOSES:
        return bool(node.meta["val"].ndim == 2)
    rule = rules().get(str(user.target)) if isinstance(user.target, torch._ops.OpOverload) else None
    given = [user.args[at] for at in rule.weights if at < len(user.args)] if rule else []
    return any(each is node for argument in given for each in (argument if isinstance(argument, list) else [argument]))


def _passes_guards(program: ExportedProgram, shapes: list[Shape]) -> bool:
    """Whether Python's branches on sizes would be the same; False also if that is unknown."""
    try:
        leaves = [torch.empty(shape, device="meta") for shape in shapes]  # the guards ask for their sizes
        names = {"L": {"leaves": leaves}, "max": max, "min": min, "math": math, "torch": torch}
        guards = program._guards_code
        return all(eval(guard, {"__builtins__": {}}, names) for guard in guards)
    except Exception:
        return False  # the module is exported again, for these shapes


def make_program(module: nn.Module, treespec: Any, leaves: list[Tensor]) -> LoweredProgram:
    """The program of a module for inputs like these leaves of a tree; LoweringError if it cannot be lowered."""
    answers: list[Any] = []
    exported = export(FlatModule(module, treespec, answers.append), leaves)
    nodes = [node for node in exported.graph.nodes if node.op == "placeholder"]
    specs = exported.graph_signature.input_specs
    slots = [_slot(node, spec, exported) for node, spec in zip(nodes, specs, strict=True)]
    program = LoweredProgram(exported, slots, answers[-1])
    _trace(program, leaves)
    return program


def _slot(node: Any, spec: Any, exported: ExportedProgram) -> Placeholder:
    """The placeholder of a node by its input spec; LoweringError for anything but tensors."""
    kind = spec.kind.name
    if kind == "USER_INPUT":
        return Placeholder(node)
    if kind in ("PARAMETER", "BUFFER"):
        return Placeholder(node, parameter=spec.target.removeprefix("module."))
    if kind == "CONSTANT_TENSOR":
        return Placeholder(node, constant=import_jax().device_get(to_jax(exported.constants[spec.target], copy=True)))
    raise LoweringError(
        f"the module holds the {kind.lower().replace('_', ' ')} {spec.target!r}, expected tensors alone"
    )


def _trace(program: LoweredProgram, leaves: list[Tensor]) -> None:
    """Trace the program once without computing, so that rules raise their errors now, not at the first call."""
    remaining, values = iter(leaves), []
    for slot in program.slots:
        value = slot.constant
        if value is None:
            tensor = next(remaining) if slot.parameter is None else slot.node.meta["val"]
            if slot.node.users:
                value = import_jax().ShapeDtypeStruct(tuple(tensor.shape), jax_dtype(tensor.dtype))
        values.append(value)
    import_jax().eval_shape(program.run, values)
