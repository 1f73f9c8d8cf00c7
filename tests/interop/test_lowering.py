"""Policies lowered from Torch to JAX answer, learn and change as the modules do."""

from __future__ import annotations

from functools import cache

import jax
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import nn

import funcollect as fc
from funcollect.interop.lowering import lower_module
from tests.support.lowering.lowered_libraries import LIBRARIES
from tests.support.lowering.lowered_modules import POLICIES, NatureCNN, mlp
from tests.support.lowering.lowering_checks import assert_equal, assert_gradients_equal, jax_inputs, torch_answer
from tests.support.running import SCALE, in_soak

BATCH_SIZES = (1, 2, 7, 64) if SCALE > 1 else (1, 7)  # a module may be exported anew for each
CONVOLUTIONS = ("cnn", "impala", "ConvNet", "CNN", "Cnn", "image")


LEARNING = [  # one of each kind
    *("mlp tanh", "nature cnn", "impala", "gru cell", "lstm cell", "gru layers", "lstm both ways", "transformer"),
    *("image and vector", "tensordict sequential", "torchrl DuelingCnnDQNet", "torchrl LSTMModule"),
    *("torchrl GRUModule", "torchrl NoisyLinear", "sb3 ActorCriticPolicy, discrete"),
]


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
    "name", [*LEARNING, *in_soak(name for name in {**POLICIES, **LIBRARIES} if name not in LEARNING)]
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
def test_gradients_equal_torchs(name):
    module, inputs, lowered = lowered_with(name)
    assert_gradients_equal(module, lowered, inputs(3), rtol=1e-3, atol=10 * tolerance(name))


def test_the_public_pair():
    module = made(lambda: mlp(nn.Tanh))
    params, apply = fc.lower(module, torch.zeros(1, 5))
    assert set(params) == {name for name, _ in module.named_parameters()}
    assert params["0.weight"].shape == (5, 32)
    assert_equal(module(torch.ones(3, 5)), apply(params, np.ones((3, 5), np.float32)))


def test_one_trace_over_many_weight_updates():
    module = made(lambda: nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3)))
    lowered, x = lower_module(module, torch.zeros(2, 5)), torch.randn(4, 5)
    traces = []

    @jax.jit
    def apply(params, x):
        traces.append(1)
        return lowered.apply(params, x)

    optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
    for update in range(100):
        optimizer.zero_grad()
        module(x).square().mean().backward()
        optimizer.step()
        module[1].running_mean += 0.01
        if update % 33 == 0:
            assert_equal(module(x), apply(lowered.prepare(), x.numpy()), rtol=1e-4)
        else:
            apply(lowered.prepare(), x.numpy())
    assert len(traces) == 1


def test_under_vmap_scan_and_another_rank():
    module = made(lambda: mlp(nn.Tanh))
    lowered, x = lower_module(module, torch.zeros(2, 5)), torch.randn(4, 3, 5)
    params, wanted = lowered.prepare(), module(x)
    by_vmap = jax.vmap(jax.vmap(lowered.apply, (None, 0)), (None, 0))(params, x.numpy())
    by_scan = jax.lax.scan(lambda carry, row: (carry, lowered.apply(params, row)), 0, x.numpy())[1]
    for got in (by_vmap, by_scan, lowered.apply(params, x.numpy())):
        assert_equal(wanted, got)


def test_other_parameters_and_their_way_back():
    module, other = made(NatureCNN), made(lambda: NatureCNN(actions=6))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.1)
    lowered, x = lower_module(module, torch.zeros(2, 4, 84, 84)), torch.rand(2, 4, 84, 84)
    for params in (dict(other.named_parameters()), TensorDict.from_module(other), other.state_dict()):
        prepared = lowered.prepare(params)
        assert_equal(other(x), lowered.apply(prepared, x.numpy()), atol=1e-4)
    for name, tensor in lowered.restore(prepared).items():
        assert torch.equal(tensor, other.state_dict()[name])


def test_prepared_parameters_are_copies():
    module = nn.Linear(3, 2)
    lowered = lower_module(module, torch.zeros(1, 3))
    params = lowered.prepare()
    with torch.no_grad():
        module.weight.fill_(7)
        module.bias.fill_(7)
    assert not any((np.asarray(array) == 7).any() for array in params.values())


class Shared(nn.Module):
    """A table for the input that is the output layer, too."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(6, 4)
        self.out = nn.Linear(4, 6, bias=False)
        self.out.weight = self.table.weight

    def forward(self, index):
        return self.out(self.table(index))


def test_a_shared_parameter():
    module, index = made(Shared), torch.arange(6)
    lowered = lower_module(module, index)
    assert_equal(module(index), lowered.apply(lowered.prepare(), np.arange(6, dtype=np.int32)))


class BySize(nn.Module):
    """Python branches on the batch size."""

    def forward(self, x):
        if x.shape[0] == 1:
            return x + 1
        if x.shape[0] % 2 == 0:
            return x * 2
        return x.flip(0) if x.shape[0] > 8 else x - 1


def test_a_branch_by_size_is_taken_for_each_size():
    module = BySize()
    lowered = lower_module(module, torch.zeros(4, 3))
    for batch_size in (1, 2, 3, 5, 11, 12, 1):
        x = torch.randn(batch_size, 3)
        assert_equal(module(x), lowered.apply({}, x.numpy()))


class Blocked(nn.Module):
    """Parts without gradients, by each of Torch's ways."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(3, 3) for _ in range(3))

    def forward(self, x):
        with torch.no_grad():
            target = self.one(x) ** 2
        return target * self.two(x) + self.two(x).detach() * self.three(x)


def test_blocked_gradients_stay_blocked():
    module = made(Blocked)
    lowered = lower_module(module, torch.zeros(2, 3))
    assert_gradients_equal(module, lowered, torch.randn(4, 3))


def test_lowering_leaves_torch_as_it_was():
    module = made(lambda: POLICIES["transformer"][0]().train())
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    flags = [each.training for each in module.modules()]
    settings = (torch.is_grad_enabled(), torch.backends.mha.get_fastpath_enabled(), torch.get_rng_state().tolist())
    with torch.no_grad():
        lower_module(module, torch.zeros(2, 6, 5))
    assert [each.training for each in module.modules()] == flags
    assert settings == (
        torch.is_grad_enabled(), torch.backends.mha.get_fastpath_enabled(), torch.get_rng_state().tolist()
    )  # fmt: skip
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())


class Places(nn.Module):
    def forward(self, x):
        return {"max": x.max(-1), "others": [x.topk(2), x.sort(-1)]}


def test_structs_of_torch_come_out_as_tuples():
    params, apply = fc.lower(Places(), torch.zeros(2, 4))
    x = torch.randn(3, 4)
    outputs = jax.jit(apply)(params, jax_inputs(x)[0])
    assert type(outputs["max"]) is tuple
    for ours, wanted in zip(jax.tree.leaves(outputs), [*x.max(-1), *x.topk(2), *x.sort(-1)], strict=True):
        assert np.array_equal(ours, wanted)


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
