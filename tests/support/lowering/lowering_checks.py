"""A module and its lowered form side by side."""

import math
from functools import partial

import jax
import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase

from funcollect.interop.lowering.exporting import plain

jit = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})  # compiles in half of the time


def as_arguments(inputs):
    return inputs if isinstance(inputs, tuple) else (inputs,)


def jax_inputs(inputs):
    return jax.tree.map(lambda tensor: jax.numpy.asarray(tensor.detach().numpy()), plain(as_arguments(inputs)))


def torch_answer(module, inputs):
    """The module's own answer; of a TensorDictModule its out_keys."""
    inputs = [each.clone() if isinstance(each, TensorDictBase) else each for each in as_arguments(inputs)]
    answer = module(*inputs)
    return plain(answer.select(*module.out_keys) if isinstance(module, TensorDictModuleBase) else answer)


def assert_equal(wanted, got, *, rtol=1e-5, atol=1e-5):
    """Compare structure, shapes, dtypes (up to JAX's 32 bits) and values."""
    theirs, ours = jax.tree.flatten(wanted), jax.tree.flatten(got)
    assert len(theirs[0]) == len(ours[0])
    if isinstance(wanted, dict):
        assert theirs[1] == ours[1]
    for place, (one, two) in enumerate(zip(theirs[0], ours[0], strict=True)):
        one = one.detach().numpy()
        assert two.dtype == jax.dtypes.canonicalize_dtype(one.dtype), place
        np.testing.assert_allclose(np.asarray(two), one, rtol=rtol, atol=atol, err_msg=f"output {place}")


def floats(tree):
    return [leaf for leaf in jax.tree.leaves(tree) if "float" in str(leaf.dtype)]


def weighted(numeric, outputs):
    """A fixed weighted sum of all outputs. Its weights do not amplify the rounding of large outputs."""
    return sum(
        (output * numeric.cos(numeric.arange(math.prod(output.shape)) + place).reshape(output.shape)).sum()
        for place, output in enumerate(floats(outputs))
    )


def torch_gradients(module, inputs):
    """Torch's gradients, by parameter, and of each floating input."""
    leaves = [leaf.requires_grad_() for leaf in floats(plain(as_arguments(inputs)))]
    module.zero_grad()
    weighted(torch, torch_answer(module, inputs)).backward()

    def of(tensor):
        return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad

    return {name: of(param) for name, param in module.named_parameters()}, [of(leaf) for leaf in leaves]


def jax_gradients(lowered, inputs):
    """The same gradients by JAX, those of parameters in Torch's layout, and the outputs."""
    leaves, treedef = jax.tree.flatten(jax_inputs(inputs))
    at = [place for place, leaf in enumerate(leaves) if np.issubdtype(leaf.dtype, np.floating)]

    def loss(params, given):
        full = list(leaves)
        for place, leaf in zip(at, given, strict=True):
            full[place] = leaf
        outputs = lowered.apply(params, *jax.tree.unflatten(treedef, full))
        return weighted(jax.numpy, outputs), outputs

    of_both = jit(jax.grad(loss, (0, 1), has_aux=True))
    (of_params, of_inputs), outputs = of_both(lowered.prepare(), [leaves[place] for place in at])
    return lowered.restore(of_params), of_inputs, outputs


def assert_gradients_equal(module, lowered, inputs, *, rtol=1e-4, atol=1e-5):
    """Compare the gradients of every parameter and every floating input. Returns the outputs of the lowered module."""
    of_params, of_inputs, outputs = jax_gradients(lowered, inputs)
    wanted_params, wanted_inputs = torch_gradients(module, inputs)
    for name, wanted in wanted_params.items():
        np.testing.assert_allclose(of_params[name].numpy(), wanted.numpy(), rtol=rtol, atol=atol, err_msg=name)
    for got, wanted in zip(of_inputs, wanted_inputs, strict=True):
        np.testing.assert_allclose(np.asarray(got), wanted.numpy(), rtol=rtol, atol=atol)
    return outputs
