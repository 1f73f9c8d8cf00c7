"""What cannot be lowered says why, where it stands, and what to do."""

import jax
import numpy as np
import pytest
import torch
from torch import nn

import funcollect as fc
from funcollect.interop.lowering import lower_module
from tests.support.lowering.lowered_modules import POLICIES

X = torch.zeros(3, 4)
ROWS = np.zeros((3, 4), np.float32)


class Branches(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


class Loops(nn.Module):
    def forward(self, x):
        for _ in range(int(x.abs().max())):
            x = x * 0.5
        return x


class ReadsANumber(nn.Module):
    def forward(self, x):
        return x * x.max().item()


class ReadsBits(nn.Module):
    def forward(self, x):
        return x.long().view(torch.int32)


class Selects(nn.Module):
    def forward(self, x):
        return x[x > 0]


class Draws(nn.Module):
    def forward(self, x):
        return x + torch.randn_like(x)


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        return x * self.count


class WritesItsInput(nn.Module):
    def forward(self, x):
        return x.add_(1)


class Doubles(nn.Module):
    def forward(self, x):
        return (x.double() * 2).sum(-1)


class Decomposes(nn.Module):
    def forward(self, x):
        return torch.linalg.eigvals(x.T @ x).abs()


class Factorises(nn.Module):
    """Torch checks the result, which is an effect; the operator itself has no rule."""

    def forward(self, x):
        return torch.linalg.ldl_factor(x.T @ x)[0]


class LeastSquares(nn.Module):
    def forward(self, x):
        return torch.linalg.lstsq(x, x).solution


class Prints(nn.Module):
    def forward(self, x):
        torch.ops.aten._print("a row")
        return x + 1


class Attends(nn.Module):
    """A module of transformers on a mask of which it is not said whether it is causal."""

    def __init__(self, make, masks):
        super().__init__()
        self.module, self.masks = make().eval(), masks

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(len(x))
        others = [] if isinstance(self.module, nn.TransformerEncoder) else [x]
        return self.module(x, *others, **dict.fromkeys(self.masks, mask))


def encoder():
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8), 1, enable_nested_tensor=False)


def decoder():
    return nn.TransformerDecoder(nn.TransformerDecoderLayer(4, 2, 8), 1)


class Adds(nn.Module):
    def __init__(self, value, *, as_buffer):
        super().__init__()
        self.value = value
        if as_buffer:
            del self.value
            self.register_buffer("value", torch.tensor(value))

    def forward(self, x):
        return x + self.value


HERE = "test_lowering.py"
REFUSED = {
    "a branch on data": (Branches(), "control flow depends on data", "x if x.sum() > 0 else -x", "torch.where"),
    "a loop on data": (Loops(), HERE, "int(x.abs().max())"),
    "a number read": (ReadsANumber(), HERE, "x.max().item()"),
    "a shape from data": (Selects(), "shape depends on data", "x[x > 0]"),
    "random numbers": (Draws(), "draws random numbers", "torch.randn_like(x)", "take the noise as an input"),
    "a written buffer": (Counts(), "writes the buffer 'count'", "return the new value"),
    "a written input": (WritesItsInput(), "writes the user input"),
    "double precision": (Doubles(), "float64", "x.double()", ".float()", "jax_enable_x64"),
    "bits of wide integers": (
        ReadsBits(),
        "aten.view.dtype reads bits of torch.int64",
        ".view(torch.int32)",
        "cast with",
    ),
    "a missing operator": (Decomposes(), "no rule for aten.linalg_eig", "eigvals(x.T @ x)", "concepts/lowering.md"),
    "a missing operator that Torch checks": (
        nn.Sequential(Factorises()),
        "no rule for aten.linalg_ldl_factor_ex",
        "'0' (Factorises)",
        "ldl_factor(x.T @ x)",
    ),
    "least squares": (LeastSquares(), "aten.linalg_lstsq.default", "shape depends on data", "lstsq(x, x)"),
    "an effect": (nn.Sequential(Prints()), "aten._print.default has a side effect", "'0' (Prints)"),
    "an encoder's mask": (Attends(encoder, ["mask"]), "compares a mask", HERE, "pass is_causal= as True or False"),
    "a decoder's mask": (Attends(decoder, ["tgt_mask"]), "compares a mask", HERE, "pass tgt_is_causal="),
    "a transformer's masks": (
        Attends(lambda: nn.Transformer(4, 2, 1, 1, 8, batch_first=True), ["src_mask", "tgt_mask"]),
        "compares a mask",
        "pass src_is_causal= and tgt_is_causal= as True or False",
    ),
    "dropout": (nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).train(), "'1' (Dropout)", "module.eval()"),
    "batch norm": (nn.Sequential(nn.BatchNorm1d(4)).train(), "writes the buffer '0.", "module.eval()"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_as_it_is_lowered(case, capfd):
    module, *parts = REFUSED[case]
    with pytest.raises(fc.LoweringError) as caught:
        fc.lower(module, X)
    assert [part for part in parts if part not in str(caught.value)] == [], str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_a_missing_operator_inside_a_submodule_is_placed():
    with pytest.raises(fc.LoweringError, match=rf"'1\.0' \(Decomposes\), .*{HERE}:\d+: return torch.linalg.eigvals"):
        fc.lower(nn.Sequential(nn.Linear(4, 4), nn.Sequential(Decomposes())), X)


def test_dropout_between_recurrent_layers_in_training_mode():
    with pytest.raises(fc.LoweringError, match=r"call module\.eval\(\) first"):
        fc.lower(nn.GRU(4, 4, 2, dropout=0.5).train(), torch.zeros(2, 3, 4))


def test_dropout_in_attention_in_training_mode():
    module = POLICIES["transformer"][0]().train()
    with pytest.raises(fc.LoweringError, match=r"call module\.eval\(\) first"):
        fc.lower(module, torch.zeros(2, 6, 5))


@pytest.mark.parametrize("value", [2**40, -(2**31) - 1])
def test_an_integer_that_32_bits_do_not_hold(value):
    index = torch.zeros(3, dtype=torch.int64)
    for module in (Adds(value, as_buffer=False), Adds(value, as_buffer=True)):
        with pytest.raises((fc.LoweringError, fc.BridgeError), match=rf"{value}|[Oo]verflow|out of bounds"):
            fc.lower(module, index)


def test_mode_changed_after_lowering():
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).eval()
    lowered = lower_module(module, X)
    module.train()
    assert lowered.apply(lowered.prepare(), ROWS).shape == (3, 4)  # as it was lowered
    with pytest.raises(fc.LoweringError, match="went from training to evaluation mode, or back"):
        lowered.apply(lowered.prepare(), ROWS[:1])


def test_examples():
    with pytest.raises(TypeError, match=r"example holds \['ndarray'\], expected tensors"):
        fc.lower(nn.Linear(4, 2), ROWS)
    with pytest.raises(TypeError, match=r"module is builtin_function_or_method, expected a torch\.nn\.Module"):
        fc.lower(torch.tanh, X)
    with pytest.raises(fc.LoweringError, match=r"lowered: torch\.export raised an error, at [^ ]+: [^:]"):
        fc.lower(nn.Linear(5, 2), X)


def test_inputs_of_another_kind():
    params, apply = fc.lower(nn.Linear(4, 2), X)
    with pytest.raises(TypeError, match=r"the inputs are \['0', '1'\], expected \['0'\]"):
        apply(params, ROWS, ROWS)
    with pytest.raises(TypeError, match=r"input 0 is int32, expected float32"):
        apply(params, ROWS.astype(np.int32))
    with pytest.raises(fc.LoweringError, match="Linear cannot be lowered"):
        jax.jit(apply)(params, np.zeros((3, 5), np.float32))


def test_params_that_lack_one():
    lowered = lower_module(nn.Linear(4, 2), X)
    with pytest.raises(KeyError, match=r"params lack \['bias'\]"):
        lowered.prepare({"weight": torch.zeros(2, 4)})
