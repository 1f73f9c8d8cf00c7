"""What cannot be lowered says why, where it stands, and what to do."""

from functools import partial

import jax
import numpy as np
import pytest
import torch
from torch import nn

import funcollect as fc
from funcollect.interop.lowering import lower_module

X = torch.zeros(3, 4)
ROWS = np.zeros((3, 4), np.float32)


def loops(x):
    for _ in range(int(x.abs().max())):
        x = x * 0.5
    return x


def prints(x):
    torch.ops.aten._print("a row")
    return x + 1


WRONG = {  # apart from the words of the errors, which show these lines
    "branch": lambda x: x if x.sum() > 0 else -x,
    "number": lambda x: x * x.max().item(),
    "bits": lambda x: x.long().view(torch.int32),
    "selection": lambda x: x[x > 0],
    "draw": lambda x: x + torch.randn_like(x),
    "written": lambda x: x.add_(1),
    "doubles": lambda x: (x.double() * 2).sum(-1),
    "eigenvalues": lambda x: torch.linalg.eigvals(x.T @ x).abs(),
    "factors": lambda x: torch.linalg.ldl_factor(x.T @ x)[0],  # Torch checks the result, which is an effect
    "least squares": lambda x: torch.linalg.lstsq(x, x).solution,
    "loop": loops,
    "print": prints,
}


class Does(nn.Module):
    def __init__(self, function):
        super().__init__()
        function.__code__ = function.__code__.replace(co_name="forward")  # Torch shows lines of functions of this name
        self.function = function

    def forward(self, x):
        return self.function(x)


def does(name):
    return Does(WRONG[name])


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        return x * self.count


class Attends(nn.Module):
    """A module of transformers on a mask of which it is not said whether it is causal."""

    def __init__(self, make, masks):
        super().__init__()
        self.module, self.masks = make().eval(), masks

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(len(x))
        others = [] if isinstance(self.module, nn.TransformerEncoder) else [x]
        return self.module(x, *others, **dict.fromkeys(self.masks, mask))


encoder = partial(nn.TransformerEncoder, nn.TransformerEncoderLayer(4, 2, 8), 1, enable_nested_tensor=False)
decoder = partial(nn.TransformerDecoder, nn.TransformerDecoderLayer(4, 2, 8), 1)
both = partial(nn.Transformer, 4, 2, 1, 1, 8, batch_first=True)
HERE = "test_lowering.py"
REFUSED = {
    "a branch on data": (does("branch"), "control flow depends on data", "x if x.sum() > 0 else -x", "torch.where"),
    "a loop on data": (does("loop"), HERE, "int(x.abs().max())"),
    "a number read": (does("number"), HERE, "x.max().item()"),
    "a shape from data": (does("selection"), "shape depends on data", "x[x > 0]"),
    "random numbers": (does("draw"), "draws random numbers", "torch.randn_like(x)", "take the noise as an input"),
    "a written buffer": (Counts(), "writes the buffer 'count'", "return the new value"),
    "a written input": (does("written"), "writes the user input"),
    "double precision": (does("doubles"), "float64", "x.double()", ".float()", "jax_enable_x64"),
    "bits of wide integers": (does("bits"), "aten.view.dtype reads bits of torch.int64", "view(torch.int32)"),
    "a missing operator": (does("eigenvalues"), "no rule for aten.linalg_eig", "eigvals(x.T @ x)", "pts/lowering.md"),
    "one that Torch checks": (does("factors"), "no rule for aten.linalg_ldl_factor_ex", "ldl_factor(x.T @ x)"),
    "least squares": (does("least squares"), "aten.linalg_lstsq.default", "shape depends on data", "lstsq(x, x)"),
    "an effect": (nn.Sequential(does("print")), "aten._print.default has a side effect", "'0' (Does)"),
    "an encoder's mask": (Attends(encoder, ["mask"]), "compares a mask", HERE, "pass is_causal= as True or False"),
    "a decoder's mask": (Attends(decoder, ["tgt_mask"]), "compares a mask", HERE, "pass tgt_is_causal="),
    "a transformer's masks": (Attends(both, ["src_mask", "tgt_mask"]), "pass src_is_causal= and tgt_is_causal="),
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


def test_dropout_between_recurrent_layers_in_training_mode():
    with pytest.raises(fc.LoweringError, match=r"call module\.eval\(\) first"):
        fc.lower(nn.GRU(4, 4, 2, dropout=0.5), torch.zeros(2, 3, 4))


@pytest.mark.parametrize("value", [2**40, -(2**31) - 1])
def test_an_integer_that_32_bits_do_not_hold(value):
    index = torch.zeros(3, dtype=torch.int64)
    buffered = Does(lambda x: x + buffered.value)
    buffered.register_buffer("value", torch.tensor(value))
    for module in (Does(lambda x: x + value), buffered):
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
    with pytest.raises(KeyError, match=r"params lack \['bias'\]"):
        lower_module(nn.Linear(4, 2), X).prepare({"weight": torch.zeros(2, 4)})
