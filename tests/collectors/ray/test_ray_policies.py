"""Policies in Ray actors: they find what they wrote at the step before, and follow weights of a user's own policy."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import funcollect as fc
from tests.support.cases import mlp
from tests.support.compare import assert_same
from tests.support.policies.own_policies import KINDS, Recording, until
from tests.support.policies.stateful_policies import Count
from tests.support.running import FORKS_OF_RAY, in_soak
from tests.support.workers import multi, ray_collector

pytestmark = FORKS_OF_RAY


EVERY = [(kind, workers) for kind in KINDS for workers in (1, 2)]
CASES = [(Recording, 1), *in_soak(each for each in EVERY if each != (Recording, 1))]


def test_over_ray(ray_cluster: Any) -> None:
    kwargs = {"frames_per_batch": 40, "total_frames": 80, "max_frames_per_traj": 12}
    with fc.RayCollector(["CartPole-v1"] * 2, Count(), **kwargs) as collector:
        for batch in collector:
            later = batch["collector", "traj_ids"] % 2**40 > 1
            assert torch.equal(batch["count"], batch["collector", "step"] + later.long())


@pytest.mark.parametrize(("kind", "workers"), CASES)
def test_weights_of_a_policy_of_ones_own(kind: type[Recording], workers: int, ray_cluster: Any) -> None:
    """New params reach the actors, and the workers in them; a saved run continues with its weights."""
    policy, other, envs = kind(), kind(), ["CartPole-v1"] * 2
    kwargs: dict[str, Any] = {"frames_per_batch": 40}
    if workers > 1:
        kwargs |= {"collector_class": fc.MultiSyncDataCollector, "num_workers_per_collector": workers}
    with ray_collector(envs, policy, **kwargs) as collector:
        policy.params = kind.version(1)
        collector.update_policy_weights_()
        until(collector, 1)
        collector.update_policy_weights_(kind.version(2))
        until(collector, 2)
        policy.params = kind.version(3)
        collector.update_policy_weights_()
        until(collector, 3)
        saved = collector.state_dict()
    with ray_collector(envs, other, **kwargs) as collector:
        collector.load_state_dict(saved)
        until(collector, 3)
        assert float(other.params["layers"][0].weight.max()) == 3


@pytest.mark.evening
def test_statistics_and_a_schedule(ray_cluster: Any) -> None:
    """Both act in actors, and in the workers of actors, as they do in one process."""

    def policy() -> Any:
        stats = fc.running_statistics.init(fc.make_env("CartPole-v1").observation_space)
        return fc.normalized(fc.torch_policy(mlp(4, 2), head=fc.heads.epsilon_greedy(0.1)), stats)

    kwargs: dict[str, Any] = {"frames_per_batch": 40, "total_frames": 120, "update_statistics": True}
    kwargs["exploration"] = {"epsilon": lambda frames: 1 - frames / 100}
    workers = {"collector_class": fc.MultiSyncDataCollector, "num_workers_per_collector": 2}
    for envs, others in ((["CartPole-v1"] * 2, {}), (["CartPole-v1"], workers)):
        here, there = policy(), policy()
        with (
            multi(fc.MultiSyncDataCollector, "serial", create_env_fn=["CartPole-v1"] * 2, policy=here, **kwargs) as one,
            ray_collector(envs, there, sync=True, **kwargs, **others) as two,
        ):
            for batch, other in zip(one, two, strict=True):
                assert_same(batch.flatten(), other.flatten())
        assert int(there.statistics.count) == 120
        assert torch.equal(here.statistics.mean["observation"], there.statistics.mean["observation"])
