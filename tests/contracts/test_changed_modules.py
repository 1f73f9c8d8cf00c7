"""A module acts as it is at a rollout, over workers as it was at the last update, however it was changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import funcollect as fc
from tests.support.policies.changing import CHANGES, TENSOR_CHANGES, Net, TensorNet, expected
from tests.support.running import SCALE, in_soak

LOOPS: dict[str, tuple[str, Any]] = {
    "host": ("CartPole-v1", None),
    "host, one call of XLA": ("CartPole-v1", "xla"),
    "host, compiled": ("CartPole-v1", "inductor"),
    "torch": ("torch/CartPole-v1", None),
    "fused": ("gymnax/CartPole-v1", "xla"),
    "crossing": ("gymnax/CartPole-v1", "eager"),
}
CHANGES_OF_A_PROGRAM = 3  # a fourth one is refused, since each compiles again
ALL = slice(None)
# Each change takes seconds in these, and over Ray: `make soak` makes all of them, `make test` a few.
COMPILED = ("host, one call of XLA", "host, compiled", "fused")
NOT_LOWERED = {"a spectral norm": "writes the buffer"}  # changes after which the network cannot become a program


def assert_acts(net: Any, batch: Any, what: str) -> None:
    torch.testing.assert_close(batch["logits"], expected(net, batch), rtol=1e-4, atol=1e-5, msg=f"after {what}")
    assert torch.equal(batch["action"], batch["logits"].argmax(-1)), what


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")  # Inductor's import
@pytest.mark.filterwarnings("ignore:Net writes its buffers .*weight.0._u:UserWarning")  # as a spectral norm does
@pytest.mark.parametrize("loop", LOOPS)
def test_every_change_acts_at_the_next_rollout(loop: str) -> None:
    name, compiler = LOOPS[loop]
    torch.manual_seed(0)
    net, env = Net(), fc.make_env(name, num_envs=4)
    some = slice(2, None, 24 if compiler == "inductor" else 6) if loop in COMPILED and SCALE == 1 else ALL
    for number, (what, change) in enumerate([*CHANGES.items()][some]):
        if number % CHANGES_OF_A_PROGRAM == 0:
            policy = fc.torch_policy(net, compile=compiler)
            state, batch = fc.rollout(env, policy, fc.init(env, policy, seed=0), 3)
        change(net)
        last = expected(net, batch)
        assert not torch.allclose(last, batch["logits"]), f"{what} has no effect"
        if compiler == "xla" and what in NOT_LOWERED:
            with pytest.raises(fc.LoweringError, match=NOT_LOWERED[what]):
                fc.rollout(env, policy, state, 3)
            net.eval()
        state, batch = fc.rollout(env, policy, state, 3)
        assert_acts(net, batch, what)
    fc.close(state)


@pytest.mark.parametrize("loop", ["host", "torch", "crossing"])
def test_tensors_that_are_no_parameters_act_as_they_are(loop: str) -> None:
    name, compiler = LOOPS[loop]
    net, env = TensorNet(), fc.make_env(name, num_envs=4)
    policy = fc.torch_policy(net, compile=compiler)
    state, batch = fc.rollout(env, policy, fc.init(env, policy, seed=0), 3)
    for what, change in TENSOR_CHANGES.items():
        change(net)
        assert not torch.allclose(expected(net, batch), batch["logits"]), f"{what} has no effect"
        state, batch = fc.rollout(env, policy, state, 3)
        assert_acts(net, batch, what)
    fc.close(state)


def run_changes(net: Any, collector: Any, update: bool, some: slice = ALL) -> None:
    """Each change on top of the others, in one collector."""
    batch = next(collector)
    for what, change in [*(TENSOR_CHANGES | CHANGES).items()][some]:
        change(net)
        assert not torch.allclose(expected(net, batch), batch["logits"]), f"{what} has no effect"
        if update:
            collector.update_policy_weights_()
        version = collector.stats()["policy_version"]
        while (batch := next(collector))["collector", "policy_version"].flatten()[-1] != version:
            pass
        assert_acts(net, batch, what)


COLLECTORS: dict[str, Any] = {
    "one process": lambda net: fc.SyncDataCollector("CartPole-v1", net, frames_per_batch=4, total_frames=-1),
    "sync": lambda net: fc.MultiSyncDataCollector(["CartPole-v1"] * 2, net, frames_per_batch=8, total_frames=-1),
    "async": lambda net: fc.MultiaSyncDataCollector(["CartPole-v1"] * 2, net, frames_per_batch=4, total_frames=-1),
    "in this process": lambda net: fc.MultiSyncDataCollector(
        ["CartPole-v1"] * 2, net, frames_per_batch=8, total_frames=-1, in_process=True
    ),
}


@pytest.mark.parametrize("kind", COLLECTORS)
def test_every_change_reaches_every_collector(kind: str) -> None:
    torch.manual_seed(0)
    net = TensorNet()
    with COLLECTORS[kind](fc.torch_policy(net)) as collector:
        run_changes(net, collector, update=kind != "one process")


@pytest.mark.parametrize("workers", [*in_soak([1]), 2])
def test_every_change_reaches_actors(ray_cluster: Any, workers: int) -> None:
    torch.manual_seed(0)
    net = TensorNet()
    kwargs: dict[str, Any] = {"frames_per_batch": 8, "total_frames": -1, "sync": True}
    if workers == 2:
        kwargs |= {"collector_class": fc.MultiSyncDataCollector, "num_workers_per_collector": 2}
    with fc.RayCollector(["CartPole-v1"] * 2, fc.torch_policy(net), **kwargs) as collector:
        run_changes(net, collector, update=True, some=ALL if SCALE > 1 else slice(workers, None, 3))
