"""An exported program, with what each of its placeholders stands for."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.export import ExportedProgram

from funcollect.errors import LoweringError
from funcollect.interop.bridge import to_jax
from funcollect.interop.jax_setup import import_jax
from funcollect.interop.lowering.dtypes import jax_dtype
from funcollect.interop.lowering.evaluate import evaluate
from funcollect.interop.lowering.exporting import FlatModule, export


class Placeholder(NamedTuple):
    """What a placeholder of a graph stands for: a parameter by name, a constant, or (neither) the next input."""

    node: Any
    parameter: str | None = None
    constant: Any = None

    @property
    def is_input(self) -> bool:
        """Whether it is neither."""
        return self.parameter is None and self.constant is None


class LoweredProgram(NamedTuple):
    """A program for inputs of some shapes."""

    exported: ExportedProgram
    slots: list[Placeholder]
    answer: Any  # the treespec of the output

    @property
    def graph(self) -> Any:
        """The operators."""
        return self.exported.graph

    @property
    def inputs(self) -> list[Any]:
        """Fake tensors, whose sizes are numbers or symbols."""
        return [slot.node.meta["val"] for slot in self.slots if slot.is_input]

    @property
    def parameters(self) -> dict[str, Any]:
        """The placeholders of parameters and buffers, by name."""
        return {slot.parameter: slot.node for slot in self.slots if slot.parameter is not None}

    def used(self, always: set[str]) -> list[str]:
        """The parameters and buffers that an operator reads, and those that count as used in any case."""
        return sorted(name for name, node in self.parameters.items() if node.users or name in always)


def make_program(module: nn.Module, treespec: Any, leaves: list[Tensor]) -> LoweredProgram:
    """The program of a module for inputs like these leaves of a tree.

    Raises:
        LoweringError: for a module that cannot be lowered.
    """
    answers: list[Any] = []
    exported = export(FlatModule(module, treespec, answers.append), leaves)
    nodes = [node for node in exported.graph.nodes if node.op == "placeholder"]
    specs = exported.graph_signature.input_specs
    slots = [_slot(node, spec, exported) for node, spec in zip(nodes, specs, strict=True)]
    program = LoweredProgram(exported, slots, answers[-1])
    _try(program, leaves)
    return program


def _slot(node: Any, spec: Any, exported: ExportedProgram) -> Placeholder:
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


def _try(program: LoweredProgram, leaves: list[Tensor]) -> None:
    """Trace it, so that what a rule refuses is refused as the module is lowered."""
    jax = import_jax()
    remaining = iter(leaves)

    def stand_in(slot: Placeholder) -> Any:
        if slot.constant is not None:
            return slot.constant
        tensor = next(remaining) if slot.is_input else slot.node.meta["val"]
        return jax.ShapeDtypeStruct(tuple(tensor.shape), jax_dtype(tensor.dtype)) if slot.node.users else None

    jax.eval_shape(lambda values: evaluate(program.graph, values), list(map(stand_in, program.slots)))
