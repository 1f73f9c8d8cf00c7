from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import InteractionType, TensorDictModule, TensorDictSequential
from torch import Tensor, nn
from torchrl.modules import NormalParamExtractor, ProbabilisticActor, TanhNormal, ValueOperator

import funcollect as fc
from funcollect.policies.as_policy import as_policy
from funcollect.policies.random_policy import RandomPolicy
from funcollect.policies.tensordict_modules.tensordict_policy import TensorDictPolicy
from funcollect.policies.torch_modules.torch_policy import TorchPolicy
from tests.support.compare import assert_same


def collect(policy: Any, length: int = 30, env: Any = "CartPole-v1", seed: int = 1, **options: Any) -> TensorDict:
    env = fc.make_env(env, **({"num_envs": 3} if isinstance(env, str) else {}))
    with fc.SyncDataCollector(env, policy, frames_per_batch=3 * length, seed=seed, **options) as collector:
        return next(collector)


def push(x: Tensor) -> Tensor:
    return (x[..., 2] > 0).long()


def test_a_tensordict_module_reads_its_in_keys_and_writes_its_out_keys() -> None:
    module = TensorDictModule(
        lambda x: (push(x), x * 2), in_keys=["observation"], out_keys=["action", ("extra", "twice")]
    )
    for name in ("CartPole-v1", "torch/CartPole-v1"):
        batch = collect(module, env=name)
        assert torch.equal(batch["action"], push(batch["observation"]))
        assert torch.equal(batch["extra", "twice"], batch["observation"] * 2)


def test_a_sequence_records_what_every_part_writes() -> None:
    linear = nn.Linear(4, 2)
    sequence = TensorDictSequential(
        TensorDictModule(linear, ["observation"], ["scores"]),
        TensorDictModule(lambda scores: scores.argmax(-1), ["scores"], ["action"]),
        ValueOperator(nn.Linear(4, 1)),
    )
    batch = collect(sequence)
    torch.testing.assert_close(batch["scores"], linear(batch["observation"]).detach())
    assert torch.equal(batch["action"], batch["scores"].argmax(-1))
    assert batch["state_value"].shape == (3, 30, 1)


def by_name_td(td: Any) -> Any:
    return td.set("action", push(td["observation"]))


def by_name_tensordict(tensordict: Any, *, scale: float = 1.0) -> Any:
    return tensordict.set("action", push(tensordict["observation"] * scale))


def by_annotation(batch: TensorDictBase) -> TensorDictBase:
    return batch.set("action", push(batch["observation"]))


def by_evaluated_annotation(batch: Any) -> Any:
    return batch.set("action", push(batch["observation"]))


by_evaluated_annotation.__annotations__["batch"] = TensorDict


class ModuleOfTd(nn.Module):
    def forward(self, tensordict: Any) -> Any:
        return TensorDict({"action": push(tensordict["observation"])}, tensordict.batch_size)


class CallableOfTd:
    def __call__(self, td: Any) -> Any:
        return td.set("action", push(td["observation"]))


CALLABLES = [by_name_td, by_name_tensordict, by_annotation, by_evaluated_annotation, ModuleOfTd(), CallableOfTd()]


@pytest.mark.parametrize("policy", CALLABLES, ids=lambda each: getattr(each, "__name__", type(each).__name__))
def test_callables_on_a_tensordict_are_known_by_their_argument(policy: Any) -> None:
    batch = collect(policy)
    assert torch.equal(batch["action"], push(batch["observation"]))


def test_other_policies_become_what_they_are() -> None:
    env = fc.make_env("CartPole-v1")
    own = fc.torch_policy(nn.Linear(4, 2))
    assert as_policy(own, env) is own
    assert isinstance(as_policy(None, env), RandomPolicy)
    assert isinstance(as_policy(nn.Linear(4, 2), env), TorchPolicy)
    assert isinstance(as_policy(push, env), TorchPolicy)
    assert isinstance(as_policy(by_name_td, env), TensorDictPolicy)
    for wrong in (3, "random", nn.Linear):
        with pytest.raises(TypeError, match=r"expected an? "):
            as_policy(wrong, env)


def actor(default: InteractionType = InteractionType.DETERMINISTIC) -> ProbabilisticActor:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(3, 2), NormalParamExtractor())
    return ProbabilisticActor(
        TensorDictModule(network, ["observation"], ["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        distribution_kwargs={"low": -2.0, "high": 2.0},
        return_log_prob=True,
        default_interaction_type=default,
    )


PENDULUM = {"env": "Pendulum-v1"}


@pytest.mark.parametrize("name", ["Pendulum-v1", "torch/Pendulum-v1"])
def test_an_actor_of_torchrl_samples_and_is_recorded(name: str) -> None:
    batch = collect(actor(), env=name)
    wanted = TanhNormal(batch["loc"], batch["scale"], low=-2.0, high=2.0).log_prob(batch["action"])
    inside = batch["action"][..., 0].abs() < 1.9  # nearer to a bound, an action says too little about what was drawn
    assert inside.sum() > 60
    torch.testing.assert_close(batch["action_log_prob"][inside], wanted[inside], rtol=1e-3, atol=1e-4)
    assert batch["action"].shape == (3, 30, 1)
    assert len(batch["action"].unique()) == 90


@pytest.mark.parametrize("default", [InteractionType.RANDOM, InteractionType.DETERMINISTIC])
def test_the_interaction_type_follows_the_exploration_type(default: InteractionType) -> None:
    mode = collect(actor(default), exploration_type=fc.ExplorationType.DETERMINISTIC, **PENDULUM)
    torch.testing.assert_close(mode["action"], 2 * mode["loc"].tanh(), rtol=1e-4, atol=1e-4)
    drawn = collect(actor(default), exploration_type=fc.ExplorationType.RANDOM, **PENDULUM)
    assert (drawn["action"] - 2 * drawn["loc"].tanh()).abs().mean() > 0.1


class Overwriting(nn.Module):
    """Writes into its input and into a buffer that it hands out."""

    def __init__(self) -> None:
        super().__init__()
        self.out = torch.zeros(3, dtype=torch.long)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.out.copy_(push(tensordict["observation"]))
        tensordict["observation"].zero_()
        tensordict["observation"] = tensordict["observation"] + 5
        return tensordict.set("action", self.out).set("_hidden", self.out * 2)


@pytest.mark.parametrize("name", ["CartPole-v1", "torch/CartPole-v1"])
def test_a_module_that_overwrites_what_it_was_given_corrupts_nothing(name: str) -> None:
    batch = collect(Overwriting(), env=name)
    assert_same(batch, collect(push, env=name))
