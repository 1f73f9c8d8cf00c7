"""Torch modules as JAX functions of their parameters: exported, and evaluated operator by operator."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import optree
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx.node import Node, map_aggregate

from funcollect.errors import LoweringError
from funcollect.interop.bridge import to_jax, to_torch
from funcollect.interop.jax_setup import import_jax
from funcollect.interop.lowering.exporting import FlatModule, export, is_check, jax_dtype, leaves_of, place_of
from funcollect.interop.lowering.operators import rules
from funcollect.tree import NAMESPACE, flatten

__all__ = ["Lowered", "lower", "lower_module"]

Shape = tuple[int, ...]
Layout = tuple[int, ...]  # a permutation of axes

_TRANSPOSES = ("aten.permute.default", "aten.t.default", "aten.transpose.int")
_WHERE = ("device", "layout", "pin_memory", "memory_format", "non_blocking")  # arguments that JAX's arrays do not have


class LoweredProgram:
    """A module exported for inputs like the `leaves` of a tree; LoweringError if it cannot be lowered."""

    def __init__(self, module: nn.Module, treespec: Any, leaves: list[Tensor]) -> None:
        output_specs: list[Any] = []
        self.exported = exported = export(FlatModule(module, treespec, output_specs.append), leaves)
        self.output_spec = output_specs[-1]  # a treespec
        self.parameters: dict[str, Any] = {}  # the placeholders of parameters and buffers, by name
        self._inputs: list[Any] = []  # the placeholders of inputs
        self._constants: dict[Any, Any] = {}  # the arrays of all other placeholders
        nodes = [node for node in exported.graph.nodes if node.op == "placeholder"]
        for node, spec in zip(nodes, exported.graph_signature.input_specs, strict=True):
            kind = spec.kind.name
            if kind == "USER_INPUT":
                self._inputs.append(node)
            elif kind in ("PARAMETER", "BUFFER"):
                self.parameters[spec.target.removeprefix("module.")] = node
            elif kind == "CONSTANT_TENSOR":
                self._constants[node] = import_jax().device_get(to_jax(exported.constants[spec.target], copy=True))
            elif kind == "TOKEN":
                self._constants[node] = None
            else:
                what = f"the {kind.lower().replace('_', ' ')} {spec.target!r}"
                raise LoweringError(f"the module holds {what}, expected tensors")

        def like(tensor: Any) -> Any:
            return import_jax().ShapeDtypeStruct(tuple(tensor.shape), jax_dtype(tensor.dtype))

        params = {name: like(node.meta["val"]) for name, node in self.parameters.items() if node.users}
        # So that rules raise their errors now, not at the first call.
        import_jax().eval_shape(self.run, params, [*map(like, leaves)])

    def layouts(self) -> dict[str, Layout]:
        """The permutation of each parameter: one only used as a weight [out, in, *kernel] becomes [*kernel, in, out].

        XLA on the CPU is up to three times as fast with these.
        """
        found = {}
        for name, node in self.parameters.items():
            rank, users = node.meta["val"].ndim, node.users
            transposed = rank > 1 and users and all(_is_weight(node, user) for user in users)
            found[name] = (*range(2, rank), 1, 0) if transposed else tuple(range(rank))
        return found

    def fits(self, shapes: list[Shape]) -> bool:
        """Whether inputs of these shapes take the path through the module that was exported."""
        sizes: dict[str, int] = {}  # by symbol of the program, or by its digits for a fixed size
        for node, shape in zip(self._inputs, shapes, strict=True):
            exported_shape = node.meta["val"].shape
            if len(exported_shape) != len(shape):
                return False
            for dimension, size in zip(map(str, exported_shape), shape, strict=True):
                if sizes.setdefault(dimension, int(dimension) if dimension.isdecimal() else size) != size:
                    return False
        ranges = {str(symbol): limits for symbol, limits in self.exported.range_constraints.items()}
        symbols = [(name, size) for name, size in sizes.items() if not name.isdecimal()]
        in_range = all(name in ranges and ranges[name].lower <= size <= ranges[name].upper for name, size in symbols)
        return bool(in_range) and _passes_guards(self.exported, shapes)

    def run(self, params: Mapping[str, Any], inputs: list[Any]) -> tuple[Any, ...]:
        """The outputs for parameters by name, in Torch's layout, and inputs; LoweringError if an operator fails."""
        jax = import_jax()
        known = self._constants | {node: params.get(name) for name, node in self.parameters.items()}
        known |= dict(zip(self._inputs, inputs, strict=True))
        *nodes, output = self.exported.graph.nodes
        specs = self.exported.graph_signature.output_specs
        outputs = [node for node, spec in zip(output.args[0], specs, strict=True) if spec.kind.name != "TOKEN"]
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            for node in nodes:
                if node.op == "call_function":
                    known[node] = _called(node, known)
            return tuple(_looked_up(outputs, known))


def _called(node: Any, known: dict[Any, Any]) -> Any:
    """The result of a node, evaluated by its rule from the `known` values of earlier nodes, in Torch's dtype."""
    if is_check(node):
        return None, None  # stands for the token and the result of an effect
    arguments = _looked_up(node.args, known)
    options = {name: value for name, value in _looked_up(node.kwargs, known).items() if name not in _WHERE}
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.target(*arguments, **options)  # a Python function on sizes, or an item of a tuple
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


def _inverse(layout: Layout) -> Layout:
    return tuple(layout.index(i) for i in range(len(layout)))


def _is_weight(node: Any, user: Any) -> bool:
    if str(user.target) in _TRANSPOSES:
        return bool(node.meta["val"].ndim == 2)
    rule = rules().get(str(user.target)) if isinstance(user.target, torch._ops.OpOverload) else None
    weights = [user.args[at] for at in rule.weights if at < len(user.args)] if rule else []
    return any(one is node for weight in weights for one in (weight if isinstance(weight, list) else [weight]))


def _passes_guards(program: ExportedProgram, shapes: list[Shape]) -> bool:
    """Whether Python's branches on sizes would be the same; False also if that is unknown."""
    try:
        leaves = [torch.empty(shape, device="meta") for shape in shapes]  # the guards ask for their sizes
        names = {"L": {"leaves": leaves}, "max": max, "min": min, "math": math, "torch": torch}
        guards = program._guards_code
        return all(eval(guard, {"__builtins__": {}}, names) for guard in guards)
    except Exception:
        return False  # the module is exported again, for these shapes


class Lowered:
    """A Torch module, whose weights may change, as a pair of functions, `prepare` and `apply`; see `lower`.

    A program is exported for the example, and another one when `apply` is traced with input shapes that take another
    path through the module (a batch of one, another rank, a branch on a size).
    """

    def __init__(self, module: nn.Module, example: Any) -> None:
        if not isinstance(module, nn.Module):
            raise TypeError(f"module is {type(module).__name__}, expected a torch.nn.Module: wrap the function in one")
        inputs = example if isinstance(example, tuple) and not hasattr(example, "_fields") else (example,)
        leaves, self._treespec = leaves_of(inputs)
        wrong = [type(leaf).__name__ for leaf in leaves if not isinstance(leaf, Tensor)]
        if wrong or not leaves:
            what = f"example holds {wrong or 'nothing'}, expected tensors"
            raise TypeError(f"{what}: pass the module's inputs, and fix others in a module around it")
        self.module, self._paths = module, _paths_of(inputs)
        self.modes = [part.training for part in module.modules()]
        self._kinds = [(leaf.dtype, leaf.device) for leaf in leaves]
        self._programs = [LoweredProgram(module, self._treespec, leaves)]
        trainable, placeholders = {name for name, _ in module.named_parameters()}, self._programs[0].parameters
        self.names = sorted(name for name, node in placeholders.items() if node.users or name in trainable)
        self._layouts = self._programs[0].layouts()

    def prepare(self, params: Any = None) -> dict[str, Any]:
        """Copy parameters, once for each version of the weights, to the params that `lower` returns.

        `params` are tensors by dotted name, or nested as the submodules are (a TensorDict, too); None for the module's
        current ones. KeyError if one is absent; BridgeError for values that JAX cannot hold.
        """
        if params is None:
            registries = (self.module.named_parameters, self.module.named_buffers)
            tensors = {name: tensor for named in registries for name, tensor in named(remove_duplicate=False)}
        else:
            tensors = {".".join(path): leaf for path, leaf in flatten(params).items()}
        if absent := [name for name in self.names if name not in tensors]:
            raise KeyError(f"params lack {absent}, expected {self.names}: pass the whole state of the module")
        laid_out = {name: tensors[name].detach().permute(self._layouts[name]) for name in self.names}
        return to_jax(laid_out, copy=True)  # type: ignore[no-any-return]

    def lay_out(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Do the same as `prepare` inside a traced function, from arrays in Torch's layout; returns copies."""
        jnp = import_jax().numpy
        return {name: jnp.copy(jnp.transpose(arrays[name], self._layouts[name])) for name in self.names}

    def restore(self, params: Mapping[str, Any]) -> dict[str, Tensor]:
        """Copy arrays laid out as `prepare` returns them, such as gradients, to tensors in Torch's layout."""
        inverse = {name: _inverse(layout) for name, layout in self._layouts.items()}
        return {name: to_torch(array, copy=True).permute(inverse[name]) for name, array in params.items()}

    def apply(self, params: Mapping[str, Any], *inputs: Any) -> Any:
        """The module's output for arrays nested as the example is, of any shapes: a pure function, see `lower`.

        TypeError for inputs of another structure or other dtypes than the example's; LoweringError if the module cannot
        be lowered for these shapes.
        """
        leaves = self._checked(inputs)
        program = self._program_for([leaf.shape for leaf in leaves])
        transpose, read = import_jax().numpy.transpose, program.parameters.keys() & params.keys()
        in_torch_layout = {name: transpose(params[name], _inverse(self._layouts[name])) for name in sorted(read)}
        return program.output_spec.unflatten(program.run(in_torch_layout, leaves))

    def _checked(self, inputs: tuple[Any, ...]) -> list[Any]:
        """The leaves of the inputs as JAX arrays; TypeError if structure or dtypes differ from the example's."""
        if (paths := _paths_of(inputs)) != self._paths:
            raise TypeError(f"the inputs are {paths}, expected {self._paths}, as the example's: pass those")
        leaves = list(map(import_jax().numpy.asarray, leaves_of(inputs)[0]))
        for path, leaf, (dtype, _) in zip(paths, leaves, self._kinds, strict=True):
            if leaf.dtype != jax_dtype(dtype):
                raise TypeError(
                    f"input {path} is {leaf.dtype}, expected {jax_dtype(dtype)}, as the example's: cast it, or lower "
                    "the module with an example of that dtype"
                )
        return leaves

    def _program_for(self, shapes: list[Shape]) -> LoweredProgram:
        """The first program that fits these input shapes; exported now if there is none."""
        for program in self._programs:
            if program.fits(shapes):
                return program
        if [part.training for part in self.module.modules()] != self.modes:
            raise LoweringError(
                f"{type(self.module).__name__} went from training to evaluation mode, or back, after it was lowered, "
                "and these input shapes are new: lower it again"
            )
        kinds = zip(shapes, self._kinds, strict=True)
        leaves = [torch.zeros(shape, dtype=dtype, device=device) for shape, (dtype, device) in kinds]
        self._programs.append(program := LoweredProgram(self.module, self._treespec, leaves))
        return program  # another thread may have appended a later one


def _paths_of(tree: Any) -> list[str]:
    """The path of each leaf, as text; equal for a TensorDict and for a dict with the same keys."""
    return [".".join(map(str, path)) or "the input" for path in optree.tree_paths(tree, namespace=NAMESPACE)]


lower_module = Lowered


def lower(module: nn.Module, example: Any) -> tuple[dict[str, Any], Callable[..., Any]]:
    """Lower a Torch module to a JAX function of its parameters.

    The module's graph, by `torch.export`, is evaluated in `jax.numpy` wherever `apply` is called: inside the caller's
    `jit`, `grad`, `vmap` or `scan`, with any batch size. It stays in the mode, training or evaluation, that the module
    is in when it is lowered.

    Args:
        module: a module, which may be a `TensorDictModule`.
        example: an input of the module: a tensor, dict or TensorDict; a tuple of these for several arguments. Only
            its structure and dtypes matter, not its values and sizes.

    Returns:
        The params, and ``apply(params, *inputs)``. The params are arrays by Torch's dotted names: every parameter, and
        the buffers that the forward reads. Weights of linear and convolutional layers are transposed for speed, so
        change params by an optimizer, not by name. `apply` returns the module's output with dicts for TensorDicts; for
        a `TensorDictModule` it returns the ``out_keys``. 64-bit integers have 32 bits where JAX has: the module must
        not compute with larger numbers.

    Raises:
        TypeError: for an example that does not hold tensors, or something that is no module.
        LoweringError: for a module that cannot be lowered, with the reason and the place in the module: a missing
            operator, control flow that depends on data, random numbers, a buffer that it writes, or float64 under
            32-bit JAX.

    >>> import jax, torch
    >>> params, apply = lower(torch.nn.Linear(4, 2), torch.zeros(1, 4))
    >>> {name: array.shape for name, array in params.items()}
    {'bias': (2,), 'weight': (4, 2)}
    >>> jax.jit(apply)(params, jax.numpy.ones((3, 4))).shape
    (3, 2)
    """
    lowered = Lowered(module, example)
    return lowered.prepare(), lowered.apply
