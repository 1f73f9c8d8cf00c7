"""An operator that the docs list is covered in every overload that a module can call."""

from __future__ import annotations

import torch

from funcollect.interop.lowering import lower_module
from funcollect.interop.lowering.registry import rules
from tests.support.lowering.lowered_numerics import TORCH
from tests.support.lowering.lowered_operators import Expressions, inputs
from tests.support.lowering.lowering_checks import assert_equal, jax_inputs

aten = torch.ops.aten
CALLS = {
    "arange.default": lambda g: aten.arange.default(6) + g["x"],
    "arange.start": lambda g: aten.arange.start(2, 8) + g["x"],
    "floor_divide.Scalar": lambda g: aten.floor_divide.Scalar(g["x"], 0.3),
    "max.other": lambda g: aten.max.other(g["x"], g["y"]),
    "min.other": lambda g: aten.min.other(g["x"], g["y"]),
    "repeat_interleave.self_Tensor": lambda g: aten.repeat_interleave.self_Tensor(
        g["x"], torch.tensor([1, 0, 2, 1, 1, 3]), 1, output_size=8
    ),
    "split.sizes": lambda g: aten.split.sizes(g["x"], [2, 4], 1),
    "std.default": lambda g: aten.std.default(g["x"], False),
    "std.dim": lambda g: aten.std.dim(g["x"], [1], False),
    "std_mean.default": lambda g: aten.std_mean.default(g["x"]),
    "std_mean.dim": lambda g: aten.std_mean.dim(g["x"], [0], keepdim=True),
    "var.default": lambda g: aten.var.default(g["x"]),
    "var.dim": lambda g: aten.var.dim(g["x"], [1]),
    "var_mean.default": lambda g: aten.var_mean.default(g["x"], False),
    "var_mean.dim": lambda g: aten.var_mean.dim(g["x"], [1]),
}  # without a rule: Torch replaces them by other operators as a module is exported

CANNOT_APPEAR = {
    # Python's `torch` never calls these, which are TorchScript's own.
    "_unsafe_index.Tensor_hacked_twin",
    "copy.Dict_Tensor",
    "einsum.sublist",
    "index.Tensor_hacked_twin",
    "index_put.hacked_twin",
    "split.default",
    # The lengths of packed sequences are data, and so are the shapes of everything made from them.
    "gru.data",
    "lstm.data",
    "rnn_relu.data",
    "rnn_tanh.data",
    # So is the shape of the places where a condition holds.
    "where.default",
    # Torch itself cannot export it: its decomposition takes the dtype for a number.
    "baddbmm.dtype",
}


REMOVED = {"cholesky"} if TORCH >= (2, 15) else set()


def overloads():
    """The overloads of documented operators that only compute tensors: no output arguments, named axes, generators."""
    for name in sorted({rule.split(".")[1] for rule in rules()} - {"sym_size"} - REMOVED):
        packet = getattr(aten, name)
        for kind in packet.overloads():
            schema = getattr(packet, kind)._schema
            computes = not schema.is_mutable and any("Tensor" in str(each.type) for each in schema.returns)
            named = "Dimname" in str(schema) or "name" in kind.lower()  # Torch 2.11 writes the type as str
            if computes and not named and "Generator" not in str(schema):
                yield f"{name}.{kind}"


def test_every_overload_has_a_rule_or_is_replaced():
    ruled = {name.removeprefix("aten.") for name in rules()}
    assert sorted(set(overloads()) - ruled - set(CALLS) - CANNOT_APPEAR) == []
    assert sorted(ruled & (set(CALLS) | CANNOT_APPEAR)) == []


def test_those_without_a_rule_give_torchs_values():
    module, given = Expressions(list(CALLS.values())), inputs(4, seed=1)
    lowered = lower_module(module, inputs(3))
    assert_equal(module(given), lowered.apply({}, *jax_inputs(given)))
