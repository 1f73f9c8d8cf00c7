"""Methods, keywords and names of TorchRL's collectors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import funcollect as fc


def test_their_names_since_0_14() -> None:
    assert fc.Collector is fc.SyncDataCollector
    assert fc.MultiSyncCollector is fc.MultiSyncDataCollector
    assert fc.MultiAsyncCollector is fc.MultiaSyncDataCollector


def of(kind: str, policy: Any = None, workers: int = 2, **kwargs: Any) -> Any:
    kwargs = {"frames_per_batch": 20, "total_frames": 60} | kwargs
    if kind == "one process":
        return fc.SyncDataCollector("CartPole-v1", policy, **kwargs)
    made = fc.MultiSyncDataCollector if kind == "sync" else fc.MultiaSyncDataCollector
    return made(["CartPole-v1"] * workers, policy, in_process=True, **kwargs)


KINDS = ["one process", "sync", "async"]
each_kind = pytest.mark.parametrize("kind", KINDS)


@each_kind
@pytest.mark.parametrize("name", ["backend", "num_collectors", "sync"])
def test_arguments_that_choose_another_class_are_refused_by_name(kind: str, name: str) -> None:
    with pytest.raises(TypeError, match=rf"no argument {name} \(.*MultiSyncDataCollector"):
        of(kind, **{name: 2})
    with pytest.raises(TypeError, match=r"\['frame_skip'\] are unknown, expected some of "):
        of(kind, frame_skip=2)


@each_kind
def test_a_run_by_their_methods(kind: str) -> None:
    collector = of(kind)
    assert collector.is_running()
    assert collector.get_policy_version() == 0
    assert collector.next().numel() == 20
    collector.update_policy_weights_()
    assert collector.get_policy_version() == 1
    assert [batch.numel() for batch in collector.iterator()] == [20, 20]
    assert collector.next() is None
    assert not collector.is_running()
    collector.shutdown(timeout=10.0)
    other = of(kind)
    other.async_shutdown(timeout=1.0)
    assert not other.is_running()


@each_kind
def test_the_last_frame_of_each_lane_is_truncated_and_the_episodes_go_on(kind: str) -> None:
    lanes: dict[str, Any] = {"create_env_kwargs": {"num_envs": 2}, "workers": 1 if kind == "async" else 2}
    runs, lengths = [], []
    for set_truncated in (False, True):
        with of(kind, set_truncated=set_truncated, total_frames=400, seed=0, **lanes) as collector:
            runs.append([batch.clone() for batch in collector])
        stats, found = None, []
        for batch in runs[-1]:
            stats = fc.episode_stats(batch, stats)
            found += stats.lengths.tolist()
        lengths.append(found)
    assert lengths[0] == lengths[1]
    assert max(lengths[0]) > 10
    for plain, cut in zip(*runs, strict=True):
        assert cut["next", "truncated"][..., -1, 0].all()
        assert cut["next", "done"][..., -1, 0].all()
        assert torch.equal(plain["observation"], cut["observation"])
        assert torch.equal(plain["next", "terminated"], cut["next", "terminated"])


def linear(bias: float) -> nn.Linear:
    module = nn.Linear(4, 2)
    with torch.no_grad():
        module.weight.zero_()
        module.bias.copy_(torch.tensor([0.0, bias]))
    return module


@each_kind
@pytest.mark.parametrize("named", [False, True])
def test_weights_of_a_module(kind: str, named: bool) -> None:
    module, other = linear(-1.0), linear(1.0)
    policy = fc.torch_policy(module, head=fc.heads.greedy)
    with of(kind, policy, total_frames=-1) as collector:
        for given, action in ((other, 1), (module, 0)):
            collector.update_policy_weights_(**({"policy_or_weights": given} if named else {"params": given}))
            version = collector.get_policy_version()
            while (batch := next(collector))["collector", "policy_version"].min() < version:
                pass
            assert (batch["action"] == action).all()


def test_devices_in_a_list_fill_storing_device() -> None:
    cpu = torch.device("cpu")
    for device in ("cpu", ["cpu", "cpu"]):
        with of("sync", device=device) as collector:
            assert collector.storing_device == cpu
    with pytest.raises(TypeError, match=r"storing_device is \['cpu', 'cpu'\], expected one device"):
        of("sync", storing_device=["cpu", "cpu"])
