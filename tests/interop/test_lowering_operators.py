"""Every rule against Torch: its values, its gradients, compositions of layers, and the overloads that need none."""

import jax
import pytest
import torch
from torch import nn

from funcollect.interop.bridge import to_jax, to_torch
from funcollect.interop.lowering import lower_module
from funcollect.interop.lowering.operators import rules
from tests.support.lowering.lowered_modules import POLICIES
from tests.support.lowering.lowered_numerics import TORCH
from tests.support.lowering.lowered_operators import FAMILIES, Expressions, inputs
from tests.support.lowering.lowering_checks import assert_equal, assert_gradients_equal, jax_inputs, jit
from tests.support.lowering.operator_table import PAGE, page
from tests.support.running import SCALE, in_soak

REACHED = {}
DEAR = ("sampling", "factorisation", "solution", "complex", "selection", "convolution", "pooling")


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def family(request):
    torch.manual_seed(0)
    module = Expressions(FAMILIES[request.param]).eval()
    lowered = lower_module(module, inputs(3))
    REACHED[request.param] = operators(lowered)
    return request.param, module, lowered


def operators(lowered):
    nodes = [node for program in lowered._programs for node in program.exported.graph.nodes]
    return {str(node.target) for node in nodes if node.op == "call_function"}


@pytest.mark.filterwarnings("ignore:torch.(cholesky|triangular_solve) is deprecated:UserWarning")
@pytest.mark.filterwarnings("ignore:The reduce argument of torch.scatter:UserWarning")
def test_values_and_gradients(family):
    """At another batch size than that of the export; gradients, and a second export, of some take an evening."""
    name, module, lowered = family
    given = inputs(3 if SCALE == 1 and name in ("factorisation", "indexing") else 5, seed=1)
    with torch.no_grad():
        wanted = module(given)
    if SCALE == 1 and name in DEAR:
        outputs = jit(lowered.apply)(lowered.prepare(), *jax_inputs(given))
    else:
        outputs = assert_gradients_equal(module, lowered, given, rtol=1e-3, atol=1e-4)
    assert_equal(wanted, outputs, rtol=1e-4)


class Rounded(nn.Module):
    """Products with a number, then sums with multiples, which may be fused, then signs."""

    def forward(self, x):
        once = (x * 0.1, -2.3 * x)
        scaled = (torch.add(x, x, alpha=0.3), torch.sub(x, x, alpha=0.3), torch.addcmul(x, x, x, value=0.3))
        return once, scaled, (torch.sign(x), torch.sgn(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_numbers_and_signs_give_the_bits_of_torch(dtype):
    x = torch.cat([torch.randn(500, generator=torch.Generator().manual_seed(0)), torch.tensor([0.0, -0.0, torch.nan])])
    x = x.to(dtype)
    lowered = lower_module(Rounded(), x)
    ours = jax.jit(lowered.apply)(lowered.prepare(), to_jax(x))
    for name, one, two in zip(("once", "scaled", "signs"), ours, Rounded()(x), strict=True):
        for mine, wanted in zip(map(to_torch, one), two, strict=True):
            same = (mine == wanted) & (mine.signbit() == wanted.signbit()) | (mine.isnan() & wanted.isnan())
            other = int((~same).sum())  # a fused product and sum are rounded once
            assert other <= (0 if name != "scaled" else 200 if dtype == torch.float32 else 10), (name, other)


class Products(nn.Module):
    """Products of halves in single precision, which Torch computes on a GPU alone."""

    def forward(self, x, y):
        two = torch.mm(x, y, out_dtype=torch.float32), torch.addmm(y, x, y, out_dtype=torch.float32, beta=2, alpha=0.5)
        return *two, torch.bmm(x[None], y[None], out_dtype=torch.float32)


@pytest.mark.needs("torch>=2.13")  # before, Torch cannot export addmm with another dtype
def test_products_of_halves_in_single_precision():
    x, y = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    lowered = lower_module(Products(), (x, y))
    REACHED["products of halves"] = operators(lowered)
    ours = lowered.apply({}, to_jax(x), to_jax(y))
    product, bias = x.float() @ y.float(), y.float()
    assert_equal((product, product / 2 + 2 * bias, product[None]), ours)


@pytest.mark.needs("torch>=2.13")  # before, some cannot be exported
def test_no_rule_is_out_of_reach():
    """The rules of recurrent modules are reached by the policies and by plain recurrent networks."""
    for name in in_soak(["gru layers", "lstm layers", "gru cell", "lstm cell"]):
        make, example = POLICIES[name]
        REACHED.setdefault(name, operators(lower_module(make().eval(), example(2))))
    for kind in in_soak([nn.RNN, nn.RNNCell]):
        for nonlinearity in ("relu", "tanh"):
            module = kind(5, 6, nonlinearity=nonlinearity).eval()
            REACHED[kind, nonlinearity] = operators(lower_module(module, torch.zeros(2, 5)))
    assert set(REACHED) >= set(FAMILIES), "run the whole file"
    absent = {"aten.cholesky.default"} if TORCH >= (2, 15) else set()
    absent |= {name for name in rules() if SCALE == 1 and name.split(".")[1].startswith(("gru", "lstm", "rnn"))}
    assert set(rules()) - set().union(*REACHED.values()) == absent


def test_the_docs_list_what_is_covered():
    """`python -m tests.support.lowering.operator_table` writes the page again."""
    assert page(PAGE.read_text()) == PAGE.read_text()


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
    *("_unsafe_index.Tensor_hacked_twin", "copy.Dict_Tensor", "einsum.sublist", "index.Tensor_hacked_twin"),
    *("index_put.hacked_twin", "split.default"),
    # The lengths of packed sequences are data, as are the shapes of what is made of them; and where a condition holds.
    *("gru.data", "lstm.data", "rnn_relu.data", "rnn_tanh.data", "where.default"),
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
    assert_equal(module(given), jit(lowered.apply)({}, *jax_inputs(given)))


ENDS = torch.tensor([1.0, -1.0, 0.0, float("nan"), float("inf"), -float("inf"), 2.5, -2.5])
AT_THE_ENDS = {
    "zero": lambda g: (
        g["x"] // 0.0,
        g["x"] // torch.zeros_like(g["x"]),
        torch.div(g["x"], 0.3, rounding_mode="floor"),
    ),
    "nan": lambda g: (torch.threshold(g["x"], 0.5, 9.0), torch.xlogy(torch.zeros_like(g["x"]), g["x"])),
    "bounds": lambda g: (torch.clamp(g["x"] * 0 + 1, g["x"]), torch.clamp(g["x"], max=g["x"].flip(0))),
    "poles": lambda g: torch.digamma(g["x"][:4]),
    "places": lambda g: g["x"].index_select(0, g["i"][0, 0].long() - 99),
    "whole": lambda g: (g["i"].cumsum(-1), g["i"].cumprod(-1), g["i"].to(torch.uint8).cumsum(0), g["b"].cumsum(0)),
    "typed": lambda g: g["i"].cumsum(-1, dtype=torch.float32),
    "apart": lambda g: tuple(torch.cdist(g["y"], g["y"] + 1, p=p) for p in (0.0, float("inf"))),
}


def test_values_at_the_ends_are_torchs():
    integers = torch.tensor([[100, 100, 100], [-100, -100, -100]], dtype=torch.int8)
    given = {"x": ENDS, "y": torch.eye(3), "i": integers, "b": integers > 0}
    module = Expressions(list(AT_THE_ENDS.values()))
    assert_equal(module(given), jit(lower_module(module, given).apply)({}, *jax_inputs(given)))
