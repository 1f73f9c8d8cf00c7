"""Modules lowered from Torch to JAX answer, learn and change as in Torch."""

import itertools
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import gymnasium
import jax
import numpy as np
import pytest
import torch
from stable_baselines3.common.policies import ActorCriticPolicy
from tensordict import TensorDict
from torch import nn
from torchrl.modules import DuelingCnnDQNet, GRUModule, LSTMModule, NoisyLinear

import funcollect as fc
from funcollect.interop.lowering import lower_module
from tests.support.lowering.lowered_modules import NETWORKS, POLICIES, NatureCNN, Spectral, mlp, tensordict, vectors
from tests.support.lowering.lowered_numerics import QUANTILES
from tests.support.lowering.lowering_checks import assert_equal, assert_gradients_equal, jax_inputs, jit, torch_answer
from tests.support.running import SCALE, in_soak


class Deterministic(nn.Module):
    """An SB3 policy's forward without sampling: (actions, values, log-probabilities)."""

    def __init__(self, policy):
        super().__init__()
        self.policy = policy

    def forward(self, observation):
        return self.policy(observation, deterministic=True)


def actor_critic(action_space):
    space = gymnasium.spaces.Box(-1.0, 1.0, (5,))
    return Deterministic(ActorCriticPolicy(space, action_space, lambda _: 1e-3))


def dueling():
    """Call a lazy module of TorchRL once, which creates its parameters."""
    network = DuelingCnnDQNet(4, cnn_kwargs={"num_cells": [8, 8, 8]}, mlp_kwargs={"num_cells": 16, "depth": 1})
    network(torch.zeros(1, 4, 84, 84))
    return network


def flags(n):
    return torch.arange(n)[:, None] % 3 == 0


LIBRARIES = {
    "torchrl DuelingCnnDQNet": (dueling, vectors(4, 84, 84)),
    "torchrl LSTMModule": (
        lambda: LSTMModule(5, 6, in_key="observation", out_key="features"),
        tensordict(
            observation=vectors(5), recurrent_state_h=vectors(1, 6), recurrent_state_c=vectors(1, 6), is_init=flags
        ),
    ),
    "torchrl GRUModule": (
        lambda: GRUModule(5, 6, in_key="observation", out_key="features"),
        tensordict(observation=vectors(5), recurrent_state=vectors(1, 6), is_init=flags),
    ),
    "torchrl NoisyLinear": (lambda: nn.Sequential(NoisyLinear(5, 16), nn.ReLU(), NoisyLinear(16, 3)), vectors(5)),
    "sb3 ActorCriticPolicy, discrete": (lambda: actor_critic(gymnasium.spaces.Discrete(3)), vectors(5)),
    "sb3 ActorCriticPolicy, box": (lambda: actor_critic(gymnasium.spaces.Box(-1.0, 1.0, (2,))), vectors(5)),
}


BATCH_SIZES = (1, 2, 7, 64) if SCALE > 1 else (1, 7)  # a module may be exported anew for each
OF_SIZES = ("lstm cell", "tensordict sequential")
CONVOLUTIONS = ("cnn", "impala", "ConvNet", "CNN", "Cnn", "image")

# One of each kind; the rules of all operators are compared in `test_lowering_operators`.
LEARNING = ["nature cnn", "lstm cell", "transformer", "tensordict sequential", "torchrl LSTMModule"]
LEARNING += ["sb3 ActorCriticPolicy, discrete", *in_soak(["mlp tanh", "impala", "gru cell", "gru layers"])]
LEARNING += in_soak(["lstm both ways", "image and vector", *(name for name in LIBRARIES if name not in LEARNING)])
SPECIAL = ("rotary embedding", "whitened")  # `test_gradients_by_complex_parameters_...` has the spectral one


def tolerance(name):
    return 1e-4 if any(part in name for part in CONVOLUTIONS) else 1e-5


def made(make):
    torch.manual_seed(0)
    return make().eval()


@cache
def lowered_with(name):
    make, inputs = (POLICIES | LIBRARIES)[name]
    module = made(make)
    return module, inputs, lower_module(module, inputs(1 if name == "lstm cell" else 7))  # which is not baked in


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")
@pytest.mark.parametrize(
    "name", [*OF_SIZES, *in_soak(name for name in {**POLICIES, **LIBRARIES} if name not in OF_SIZES)]
)
def test_outputs_equal_the_modules(name):
    module, inputs, lowered = lowered_with(name)
    apply, params = jax.jit(lowered.apply), lowered.prepare()
    for batch_size in BATCH_SIZES:
        given = inputs(batch_size)
        with torch.no_grad():
            wanted = torch_answer(module, given)
        assert_equal(wanted, apply(params, *jax_inputs(given)), rtol=0, atol=tolerance(name))


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")
@pytest.mark.parametrize("name", LEARNING)
def test_outputs_and_gradients_equal_torchs(name):
    (module, inputs, lowered), atol = lowered_with(name), tolerance(name)
    given = inputs(3)
    wanted = torch_answer(module, given)
    outputs = assert_gradients_equal(module, lowered, given, rtol=1e-3, atol=10 * atol)
    assert_equal(wanted, outputs, rtol=0, atol=atol)


@pytest.mark.parametrize("name", [*SPECIAL, *in_soak(name for name in NETWORKS if name not in SPECIAL)])
def test_networks_of_complex_numbers_linear_algebra_bags_or_grids_equal_torchs(name):
    module, inputs = made(NETWORKS[name][0]), NETWORKS[name][1]
    lowered, given = lower_module(module, inputs(3)), inputs(5)
    with torch.no_grad():
        wanted = torch_answer(module, given)
    if any(parameter.is_complex() for parameter in module.parameters()):
        outputs = jit(lowered.apply)(lowered.prepare(), *jax_inputs(given))
    else:
        outputs = assert_gradients_equal(module, lowered, given, rtol=1e-3, atol=1e-4)
    assert_equal(wanted, outputs, rtol=1e-4, atol=1e-4)


def test_gradients_by_complex_parameters_are_the_conjugates_of_torchs():
    """JAX's convention: the step downhill is along the conjugate of the gradient."""
    module, x = made(Spectral), torch.randn(2, 3, 16)
    params, apply = fc.lower(module, x)
    squares = module(x).square().sum()
    squares.backward()
    found, gradient = jit(jax.value_and_grad(lambda params: (apply(params, x.numpy()) ** 2).sum()))(params)
    np.testing.assert_allclose(found, squares.item(), rtol=1e-4)
    wanted = module.weight.grad.conj().resolve_conj().numpy()
    np.testing.assert_allclose(gradient["weight"], wanted, rtol=1e-3, atol=1e-3)


class Singular(nn.Module):
    def forward(self, x):
        info = torch.linalg.inv_ex(x).info, torch.linalg.solve_ex(x, x).info, torch.linalg.lu_factor_ex(x).info
        return torch.linalg.inv(x), torch.linalg.cholesky_ex(x).info > 0, *info


def test_singular_matrices_have_no_finite_inverse():
    """Torch would raise an error here; `info` reports the failure as in Torch."""
    x = torch.stack([torch.eye(3), torch.zeros(3, 3), torch.diag(torch.tensor([1.0, 0.0, 2.0]))])
    params, apply = fc.lower(Singular(), x)
    inverse, failed, *info = jit(apply)(params, x.numpy())
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
    "rows",
    [
        [[torch.nan, 2.0, torch.nan]],
        *in_soak([[[2.0]], [[1.0, 1.0, 1.0, 1.0]], [[torch.inf, -torch.inf, 0.0, torch.inf]]]),
    ],
)
def test_single_equal_missing_and_infinite_elements(rows):
    x = torch.tensor(rows)
    with jax.enable_x64(not QUANTILES):
        params, apply = fc.lower(Picks(), x)
        ours = jax.tree.leaves(jit(apply)(params, x.numpy()))
    for place, (one, two) in enumerate(zip(ours, jax.tree.leaves(Picks()(x)), strict=True)):
        if np.issubdtype(one.dtype, np.floating):
            np.testing.assert_array_equal(one, two.numpy(), err_msg=str(place))


class Empty(nn.Module):
    def forward(self, x):
        square = x.new_zeros(2, 0, 0)
        values = torch.linalg.det(square), torch.linalg.inv(square), torch.linalg.matrix_exp(square), x.median()
        return *values, torch.linalg.pinv(x), tuple(x.T.cummax(0)), torch.linalg.matrix_rank(x)


class Far(nn.Module):
    PLACES = ([1e3, -1e3], [-1.0, 1.0], [1.0, -1.0], [0.2, -1.0], [torch.nan, 0.0], [torch.inf, 0.0], [0.0, -torch.inf])

    def forward(self, image, grid):
        ways = itertools.product(("bilinear", "nearest", *in_soak(["bicubic"])), ("border", "zeros"))
        return [nn.functional.grid_sample(image, grid, *way, align_corners=False) for way in ways]


class Shared(nn.Module):
    """A table for the input that is the output layer, too."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(6, 4)
        self.out = nn.Linear(4, 6, bias=False)
        self.out.weight = self.table.weight

    def forward(self, index):
        return self.out(self.table(index))


class BySize(nn.Module):
    def forward(self, x):
        if x.shape[0] == 1:
            return x + 1
        if x.shape[0] % 2 == 0:
            return x * 2
        return x.flip(0) if x.shape[0] > 8 else x - 1


class Norms(nn.Module):
    def forward(self, x, y):
        norms = [torch.linalg.vector_norm(x, order, dim) for order in (2, 3) for dim in (None, [], -1)]
        return *norms, torch.cdist(x, y), torch.cdist(x, y, p=3.0), torch.dist(x, y), x.std(0)


class Places(nn.Module):
    """Structs of Torch, which come out as tuples."""

    def forward(self, x):
        return {"max": x.max(-1), "others": [x.topk(2), x.sort(-1)]}


NAN = torch.tensor([[1.0, 2.0], [torch.nan, 3.0]])


@pytest.mark.parametrize(("make", "example", "given"), [
    (Empty, torch.zeros(0, 4), [torch.zeros(0, 4)]),
    (
        Far,
        (torch.zeros(1, 2, 4, 5), torch.zeros(1, 1, 7, 2)),
        [(torch.randn(1, 2, 4, 5), torch.tensor([[Far.PLACES]]))],
    ),
    (Shared, torch.arange(6), [torch.arange(6)]),
    (BySize, torch.zeros(4, 3), [torch.randn(size, 3) for size in (1, 2, 3, 5, 11, 12, 1)]),
    (Places, torch.zeros(2, 4), [torch.randn(3, 4)]),
    (Norms, (NAN, torch.zeros(2, 2)), [(NAN, torch.zeros(2, 2))]),
], ids=lambda each: getattr(each, "__name__", ""))  # fmt: skip
def test_small_modules(make, example, given):
    module = made(make)
    lowered = lower_module(module, example)
    for each in given:
        outputs = jit(lowered.apply)(lowered.prepare(), *jax_inputs(each))
        assert_equal(torch_answer(module, each), outputs)
    assert type(outputs) is not dict or type(outputs["max"]) is tuple


class Blocked(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(3, 3) for _ in range(3))

    def forward(self, x):
        with torch.no_grad():
            target = self.one(x) ** 2
        return target * self.two(x) + self.two(x).detach() * self.three(x)


def test_blocked_gradients_stay_blocked():
    module = made(Blocked)
    assert_gradients_equal(module, lower_module(module, torch.zeros(2, 3)), torch.randn(4, 3))


def test_the_public_pair_under_vmap_and_scan_for_another_rank_and_with_copied_parameters():
    module, x = made(lambda: mlp(nn.Tanh)), torch.randn(4, 3, 5)
    params, apply = fc.lower(module, torch.zeros(2, 5))
    assert set(params) == {name for name, _ in module.named_parameters()}
    assert params["0.weight"].shape == (5, 32)
    wanted = module(x)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(7)
    by_vmap = jax.vmap(jax.vmap(apply, (None, 0)), (None, 0))(params, x.numpy())
    by_scan = jax.lax.scan(lambda carry, row: (carry, apply(params, row)), 0, x.numpy())[1]
    for got in (by_vmap, by_scan, apply(params, x.numpy())):
        assert_equal(wanted, got)


def test_other_parameters_and_their_way_back():
    module, other = made(NatureCNN), made(lambda: NatureCNN(actions=6))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.1)
    lowered, x = lower_module(module, torch.zeros(2, 4, 84, 84)), torch.rand(2, 4, 84, 84)
    apply = jit(lowered.apply)
    for params in (dict(other.named_parameters()), TensorDict.from_module(other), other.state_dict()):
        prepared = lowered.prepare(params)
        assert_equal(other(x), apply(prepared, x.numpy()), atol=1e-4)
    for name, tensor in lowered.restore(prepared).items():
        assert torch.equal(tensor, other.state_dict()[name])


class Ranked(nn.Module):
    def forward(self, x):
        return x * x.ndim


def test_threads_that_lower_at_the_same_time_get_their_own_programs():
    lowered, shapes = lower_module(Ranked(), torch.zeros(3)), [(3,) * rank for rank in range(2, 6)]
    with ThreadPoolExecutor(4) as pool:
        answers = pool.map(lambda shape: lowered.apply({}, np.ones(shape, np.float32)), shapes)
        assert [(answer.shape, float(answer.max())) for answer in answers] == [(shape, len(shape)) for shape in shapes]


def test_lowering_leaves_torch_as_it_was():
    def settings():
        return torch.is_grad_enabled(), torch.backends.mha.get_fastpath_enabled(), torch.get_rng_state().tolist()

    module = made(lambda: nn.TransformerEncoderLayer(8, 2, 8, batch_first=True))
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    flags, own = [each.training for each in module.modules()], settings()
    with torch.no_grad():
        lower_module(module, torch.zeros(2, 6, 8))
    assert [each.training for each in module.modules()] == flags
    assert settings() == own
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())


class Wide(nn.Module):
    """float64 and int64 from inputs, parameters, constants, and operators that make their own."""

    def __init__(self):
        super().__init__()
        self.table, self.cell = nn.Embedding(7, 3), nn.GRUCell(3, 4)
        self.register_buffer("offset", torch.tensor(2**40))

    def forward(self, index, x):
        hidden = self.cell(self.table(index), x)
        best = hidden.max(-1)
        counts = [index.sum() + self.offset, index.cumsum(0), torch.arange(len(index)), best.indices, (x > 0).sum()]
        numbers = [hidden, best.values, hidden.std(-1), (x > 0).double().mean(), index / 3, torch.full_like(x, 1 / 3)]
        return counts + numbers


def test_64_bits_where_jax_has_them():
    module = made(lambda: Wide().double())
    given = torch.tensor([1, 5, 3]), torch.randn(3, 4, dtype=torch.float64)
    with jax.enable_x64(True):
        lowered = lower_module(module, given)
        assert_equal(module(*given), jax.jit(lowered.apply)(lowered.prepare(), *jax_inputs(given)), rtol=0, atol=1e-14)
