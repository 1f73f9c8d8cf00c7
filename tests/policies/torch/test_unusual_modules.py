"""Modules that Torch makes otherwise than most: programs of TorchScript, and layers without parameters yet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn

import funcollect as fc
from tests.support import cases

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning", "ignore:Lazy modules:UserWarning")
envs = pytest.mark.parametrize("name", ["CartPole-v1", "torch/CartPole-v1", "gymnax/CartPole-v1"])


def collected(policy: Any, name: str) -> Any:
    env = fc.make_env(name, num_envs=2)
    state, batch = fc.rollout(env, policy, fc.init(env, policy, seed=0), 4)
    fc.close(state)
    return batch


@envs
def test_a_program_of_torchscript_acts_as_the_module_that_it_was_made_from(name: str) -> None:
    module = cases.mlp(4, 2)
    programs = [torch.jit.script(module), torch.jit.trace(module, torch.zeros(2, 4))]
    wanted, *found = (collected(fc.torch_policy(each, head=fc.heads.categorical), name) for each in (module, *programs))
    for batch in found:
        assert torch.equal(batch["action"], wanted["action"])
    if name.startswith("gymnax"):
        plan = fc.explain(fc.make_env(name, num_envs=2), fc.torch_policy(programs[0], head=fc.heads.categorical))
        assert "TorchScript" in str(plan)


class Best(nn.Module):
    def forward(self, scores: torch.Tensor) -> torch.Tensor:
        return scores.argmax(-1)


def on_tensordict(net: nn.Module) -> Any:
    return TensorDictModule(nn.Sequential(net, Best()), ["observation"], ["action"])


LAZY: dict[str, Callable[[nn.Module], Any]] = {
    "module": lambda net: fc.torch_policy(net, head=fc.heads.categorical),
    "function": lambda net: fc.torch_policy(lambda x: net(x), head=fc.heads.categorical),
    "tensordict": lambda net: fc.tensordict_policy(on_tensordict(net)),
}


@envs
@pytest.mark.parametrize("kind", LAZY)
def test_init_makes_the_parameters_of_lazy_layers(kind: str, name: str) -> None:
    net = nn.Sequential(nn.LazyLinear(8), nn.Dropout(0.0), nn.LazyLinear(2))
    batch = collected(LAZY[kind](net), name)
    again = collected(LAZY[kind](net), name)
    assert [*net[0].weight.shape] == [8, 4]
    assert net.training
    assert torch.equal(batch["action"], again["action"])


def test_lazy_layers_are_not_sent_to_workers() -> None:
    with pytest.raises(ValueError, match=r"policy has lazy layers, .* with parameters: call the module once"):
        fc.MultiSyncDataCollector(["CartPole-v1"], nn.LazyLinear(2), frames_per_batch=8, total_frames=8)
