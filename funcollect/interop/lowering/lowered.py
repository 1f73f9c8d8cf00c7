"""A Torch module as a JAX function of its parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from funcollect.errors import LoweringError
from funcollect.interop.bridge import to_jax, to_torch
from funcollect.interop.jax_setup import import_jax
from funcollect.interop.lowering.program import Layout, LoweredProgram, Placeholder, Shape, inverse, make_program
from funcollect.interop.lowering.structure import jax_dtype, leaves_of, paths_of
from funcollect.tree import flatten


class Lowered:
    """A Torch module as a pair of functions, `prepare` and `apply`; see `lower_module`.

    A program is exported for the example, and another one when `apply` is traced with input shapes that take another
    way through the module (a batch of one, another rank, a branch on a size).
    """

    def __init__(self, module: nn.Module, example: tuple[Any, ...]) -> None:
        self.module = module
        self.modes = modes_of(module)
        leaves, self._treespec = leaves_of(example)
        self._paths = paths_of(example)
        self._kinds = [(leaf.dtype, leaf.device) for leaf in leaves]
        self._programs = [make_program(module, self._treespec, leaves)]
        self.names = self._programs[0].used({name for name, _ in module.named_parameters()})
        self._layouts = self._programs[0].layouts()

    def prepare(self, params: Any = None) -> dict[str, Any]:
        """Copy Torch parameters into JAX's fastest layout, once for each version of the weights.

        Args:
            params: tensors by dotted name, or nested as the submodules are (a TensorDict, too); None for the module's
                current ones.

        Returns:
            Arrays by dotted name: every parameter, and the buffers that the forward reads. Weights of linear layers
            are transposed to [in, out], those of convolutions to [*kernel, in, out].

        Raises:
            KeyError: for a parameter that is not among `params`.
            BridgeError: for values that JAX cannot hold.
        """
        if params is None:
            own = (self.module.named_parameters, self.module.named_buffers)
            given = {name: tensor for named in own for name, tensor in named(remove_duplicate=False)}
        else:
            given = {".".join(path): leaf for path, leaf in flatten(params).items()}
        if absent := [name for name in self.names if name not in given]:
            raise KeyError(f"params lack {absent}, expected {self.names}: pass the whole state of the module")
        laid_out = {name: given[name].detach().permute(self._layout(name, given[name])) for name in self.names}
        return to_jax(laid_out, copy=True)  # type: ignore[no-any-return]

    def _layout(self, name: str, array: Any) -> Layout:
        return self._layouts.get(name, tuple(range(array.ndim)))

    def lay_out(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Do the same as `prepare` inside a traced function, from arrays in Torch's layout; returns copies."""
        jnp = import_jax().numpy
        return {name: jnp.copy(jnp.transpose(arrays[name], self._layout(name, arrays[name]))) for name in self.names}

    def restore(self, params: Mapping[str, Any]) -> dict[str, Tensor]:
        """Copy arrays that are laid out as `prepare` returns them, gradients too, into Torch's layout."""
        pairs = params.items()
        return {name: to_torch(array, copy=True).permute(inverse(self._layout(name, array))) for name, array in pairs}

    def apply(self, params: Mapping[str, Any], *inputs: Any) -> Any:
        """The module's output for these inputs, as a pure function: for use in `jit`, `grad`, `vmap`, `scan`.

        Args:
            params: what `prepare` returned.
            *inputs: arrays, nested as the example is, with dicts for TensorDicts; of any shapes that the module takes.

        Returns:
            Arrays, nested as the module's output is, with dicts for TensorDicts.

        Raises:
            TypeError: for inputs of another structure or other dtypes than the example's.
            LoweringError: if the module cannot be lowered for these shapes.
        """
        leaves = self._checked(inputs)
        program = self._program_for([leaf.shape for leaf in leaves])
        remaining = iter(leaves)
        values = [self._value(slot, params, remaining) for slot in program.slots]
        return program.answer.unflatten(program.run(values))

    def _checked(self, inputs: tuple[Any, ...]) -> list[Any]:
        """The leaves of the inputs as JAX arrays; TypeError if structure or dtypes differ from the example's."""
        if (paths := paths_of(inputs)) != self._paths:
            raise TypeError(
                f"the inputs are {paths}, expected {self._paths}, as the example's: pass the same structure"
            )
        leaves = list(map(import_jax().numpy.asarray, leaves_of(inputs)[0]))
        for path, leaf, (dtype, _) in zip(paths, leaves, self._kinds, strict=True):
            if leaf.dtype != jax_dtype(dtype):
                raise TypeError(
                    f"input {path} is {leaf.dtype}, expected {jax_dtype(dtype)}, as the example's: cast it, or lower "
                    "the module with an example of that dtype"
                )
        return leaves

    def _value(self, slot: Placeholder, params: Mapping[str, Any], inputs: Any) -> Any:
        """The value of a placeholder: a parameter in Torch's layout, a constant, or the next of the `inputs`."""
        if slot.parameter is None:
            return next(inputs) if slot.constant is None else slot.constant
        if slot.parameter not in params:
            return None  # no operator of the example's program reads it
        layout = self._layouts.get(slot.parameter)
        array = params[slot.parameter]
        return array if layout is None else import_jax().numpy.transpose(array, inverse(layout))

    def _program_for(self, shapes: list[Shape]) -> LoweredProgram:
        """The first program that fits these input shapes; exported now if there is none."""
        for program in self._programs:
            if program.fits(shapes):
                return program
        if modes_of(self.module) != self.modes:
            raise LoweringError(
                f"{type(self.module).__name__} went from training to evaluation mode, or back, after it was lowered, "
                "and these input shapes are new: lower it again"
            )
        kinds = zip(shapes, self._kinds, strict=True)
        leaves = [torch.zeros(shape, dtype=dtype, device=device) for shape, (dtype, device) in kinds]
        self._programs.append(make_program(self.module, self._treespec, leaves))
        return self._programs[-1]


def modes_of(module: nn.Module) -> tuple[bool, ...]:
    """Whether each submodule is in training mode."""
    return tuple(each.training for each in module.modules())


def lower_module(module: nn.Module, example: Any) -> Lowered:
    """Lower a Torch module whose weights will change; for arguments and errors, see `lower`."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"module is {type(module).__name__}, expected a torch.nn.Module: wrap the function in one")
    inputs = example if isinstance(example, tuple) and not hasattr(example, "_fields") else (example,)
    leaves = leaves_of(inputs)[0]
    wrong = [type(leaf).__name__ for leaf in leaves if not isinstance(leaf, Tensor)]
    if wrong or not leaves:
        raise TypeError(
            f"example holds {wrong or 'nothing'}, expected tensors: pass the module's inputs, and fix other "
            "arguments in a module around it"
        )
    return Lowered(module, inputs)


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
    lowered = lower_module(module, example)
    return lowered.prepare(), lowered.apply
