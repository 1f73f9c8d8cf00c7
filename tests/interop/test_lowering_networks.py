"""Networks with complex numbers, linear algebra, bags or grids answer and learn in JAX as in Torch."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import torch
from torch import nn

import funcollect as fc
from funcollect.interop.lowering import lower_module
from tests.support.lowering.lowered_modules import NETWORKS, Spectral
from tests.support.lowering.lowered_numerics import QUANTILES
from tests.support.lowering.lowering_checks import assert_equal, assert_gradients_equal, jax_inputs, torch_answer


def made(name):
    torch.manual_seed(0)
    make, inputs = NETWORKS[name]
    return make().eval(), inputs


@pytest.mark.parametrize("name", NETWORKS)
def test_outputs_and_gradients_equal_torchs(name):
    module, inputs = made(name)
    lowered = lower_module(module, inputs(3))
    given = inputs(5)
    with torch.no_grad():
        wanted = torch_answer(module, given)
    if any(parameter.is_complex() for parameter in module.parameters()):
        outputs = jax.jit(lowered.apply)(lowered.prepare(), *jax_inputs(given))
    else:
        outputs = assert_gradients_equal(module, lowered, given, rtol=1e-3, atol=1e-4)
    assert_equal(wanted, outputs, rtol=1e-4, atol=1e-4)


def test_gradients_by_complex_parameters_are_the_conjugates_of_torchs():
    """JAX's convention: the step downhill is along the conjugate of the gradient."""
    torch.manual_seed(0)
    module, x = Spectral(), torch.randn(2, 3, 16)
    params, apply = fc.lower(module, x)
    module(x).square().sum().backward()
    gradients = jax.grad(lambda params: (apply(params, x.numpy()) ** 2).sum())(params)
    np.testing.assert_allclose(
        gradients["weight"], module.weight.grad.conj().resolve_conj().numpy(), rtol=1e-3, atol=1e-3
    )


class Singular(nn.Module):
    def forward(self, x):
        info = torch.linalg.inv_ex(x).info, torch.linalg.solve_ex(x, x).info, torch.linalg.lu_factor_ex(x).info
        return torch.linalg.inv(x), torch.linalg.cholesky_ex(x).info > 0, *info


def test_singular_matrices_have_no_finite_inverse():
    """Torch would raise an error here; `info` reports the failure as in Torch."""
    x = torch.stack([torch.eye(3), torch.zeros(3, 3), torch.diag(torch.tensor([1.0, 0.0, 2.0]))])
    params, apply = fc.lower(Singular(), x)
    inverse, failed, *info = jax.jit(apply)(params, x.numpy())
    assert np.isfinite(inverse[0]).all()
    assert not np.isfinite(inverse[1]).any()
    assert failed.tolist() == [False, True, True]
    assert [each.tolist() for each in info] == [torch.linalg.inv_ex(x).info.tolist()] * 3


class Picks(nn.Module):
    def forward(self, x):
        whole = x.median(), x.nanmedian(), x.quantile(0.3), x.nanquantile(0.3)
        lines = x.median(-1), x.cummax(-1), x.cummin(-1), x.kthvalue(1)
        return whole, [tuple(each) for each in lines], x.nanmedian(-1).values


@pytest.mark.needs("torch>=2.13")  # before, quantiles cannot be exported
@pytest.mark.parametrize(
    "rows", [[[2.0]], [[1.0, 1.0, 1.0, 1.0]], [[torch.nan, 2.0, torch.nan]], [[torch.inf, -torch.inf, 0.0, torch.inf]]]
)
def test_single_equal_missing_and_infinite_elements(rows):
    x = torch.tensor(rows)
    with jax.enable_x64(not QUANTILES):
        params, apply = fc.lower(Picks(), x)
        ours = jax.tree.leaves(apply(params, x.numpy()))
    wanted = jax.tree.leaves(Picks()(x))
    for place, (one, two) in enumerate(zip(ours, wanted, strict=True)):
        if np.issubdtype(one.dtype, np.floating):
            np.testing.assert_array_equal(one, two.numpy(), err_msg=str(place))


class Empty(nn.Module):
    def forward(self, x):
        square = x.new_zeros(2, 0, 0)
        values = torch.linalg.det(square), torch.linalg.inv(square), torch.linalg.matrix_exp(square), x.median()
        return *values, torch.linalg.pinv(x), tuple(x.T.cummax(0)), torch.linalg.matrix_rank(x)


def test_empty_arrays():
    x = torch.zeros(0, 4)
    params, apply = fc.lower(Empty(), x)
    assert_equal(Empty()(x), apply(params, x.numpy()))


class Far(nn.Module):
    def forward(self, image, grid):
        modes = [(mode, padding) for mode in ("bilinear", "nearest", "bicubic") for padding in ("border", "zeros")]
        return [nn.functional.grid_sample(image, grid, *each, align_corners=False) for each in modes]


def test_places_on_corners_and_far_away():
    nan, inf = torch.nan, torch.inf
    places = [[1e3, -1e3], [-1.0, 1.0], [1.0, -1.0], [0.2, -1.0], [nan, 0.0], [inf, 0.0], [0.0, -inf]]
    given = torch.randn(1, 2, 4, 5), torch.tensor([[places]])
    params, apply = fc.lower(Far(), given)
    assert_equal(Far()(*given), apply(params, *jax_inputs(given)))
