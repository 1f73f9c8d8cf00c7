"""A cluster of three nodes by Ray's own utility: nodes that are lost with what lies on them, and nodes that join.

And whether a cluster has room, told from what its nodes have.
"""

import types

import pytest
import torch

import funcollect as fc
from funcollect.collectors.cluster import transport
from tests.support.faulty.faulty_workers import Plain
from tests.support.running import FORKS_OF_RAY, LOSES_WORKERS
from tests.support.workers import by_lane, check_trajectories, ray_collector, run_out

pytestmark = FORKS_OF_RAY
NODE = {"num_cpus": 1, "object_store_memory": 100 << 20}
HEALTH = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 1000,
    "health_check_failure_threshold": 5,
    "health_check_timeout_ms": 600_000,  # a killed node refuses the check at once, a slow one takes its time
}


@pytest.fixture(scope="module")
def cluster():
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    cluster.add_node(num_cpus=0, object_store_memory=200 << 20, include_dashboard=False, _system_config=HEALTH)
    nodes = [cluster.add_node(**NODE, resources={"first": 1}), cluster.add_node(**NODE)]
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster, nodes
    ray.shutdown()
    cluster.shutdown()


@pytest.mark.evening
@LOSES_WORKERS
def test_nodes_are_lost_and_join(cluster):
    cluster, nodes = cluster
    policy = fc.torch_policy(torch.nn.Linear(2, 2), head=fc.heads.categorical)
    with ray_collector([Plain] * 2, policy, frames_per_batch=10, on_failure="restart") as collector:
        batches = [next(collector).clone() for _ in range(4)]
        collector.update_policy_weights_()
        cluster.add_node(**NODE)
        assert collector.add_collectors([Plain]) == [2]
        while 2 not in by_lane(batches):
            batches.append(next(collector).clone())
        lost = collector.run.records[0].handle.label
        (victim,) = [node for node in nodes if node.node_id[:12] in lost]
        cluster.remove_node(victim, allow_graceful=False)
        cluster.add_node(**NODE)
        while not collector.stats()["restarts"]:
            batches.append(next(collector).clone())
        after = len(batches)
        while len(batches) == after or by_lane(batches[after:]).keys() != {0, 1, 2}:
            batches.append(next(collector).clone())
        assert collector.run.records[0].handle.label != lost
    check_trajectories(batches)


@pytest.mark.evening
def test_rollouts_that_were_on_a_lost_node(cluster):
    cluster, _ = cluster
    import ray

    node = cluster.add_node(num_cpus=1, object_store_memory=100 << 20, resources={"last": 1})
    collector = ray_collector(Plain, frames_per_batch=20_000, remote_configs={"resources": {"last": 1}})
    batch = next(collector)
    assert batch.numel() == 20_000
    (ready, _), *_ = collector.run.records[0].handle._sent
    ray.wait([ready], fetch_local=False)
    cluster.remove_node(node, allow_graceful=False)
    with pytest.raises(fc.WorkerError, match=r"worker 0 \(actor .*\): was lost \((Object|ActorDied|ActorUnavailable)"):
        run_out(collector)


HALVES = [{"num_cpus": 3}, {"num_cpus": 2, "num_gpus": 1}]
# Nodes, actors, and the first actor that fits nowhere.
CASES = {
    "a larger one first": ([{"CPU": 6}, {"CPU": 4}], [{"num_cpus": 4}, {"num_cpus": 3}, {"num_cpus": 3}], None),
    "a node that another needs": ([{"CPU": 4, "GPU": 1}, {"CPU": 3}], HALVES, None),
    "tenths": ([{"CPU": 0.3}], [{"num_cpus": 0.1}] * 3, None),
    "nothing": ([{"CPU": 1}], [{"num_cpus": 0}] * 3, None),
    "too many": ([{"CPU": 8}], [{"num_cpus": 4}] * 3, 2),
    "none is split": ([{"CPU": 4}] * 2, [{"num_cpus": 3}] * 3, 2),
    "beside smaller ones": ([{"CPU": 4}], [{"num_cpus": 1}, {"num_cpus": 1}, {"num_cpus": 3}], 2),
    "of a kind that no node has": ([{"CPU": 4}], [{"num_cpus": 1}] * 2 + [{"resources": {"x": 1}}], 2),
}


def check_room(monkeypatch, nodes, configs, *others):
    listed = [{"Alive": True, "NodeManagerAddress": "here", "Resources": node} for node in nodes]
    stand_in = types.SimpleNamespace(nodes=lambda: listed, available_resources=dict)
    monkeypatch.setattr(transport, "ray", stand_in)
    transport.check_room(configs, *others)


@pytest.mark.parametrize("name", CASES)
def test_the_first_that_fits_nowhere_is_told(name, monkeypatch):
    nodes, configs, worker = CASES[name]
    if worker is None:
        check_room(monkeypatch, nodes, configs, 0)
        return
    with pytest.raises(fc.WorkerError, match=f"no room for collector {worker} of 3") as raised:
        check_room(monkeypatch, nodes, configs, 0)
    assert raised.value.worker == worker


def test_actors_that_are_there_count(monkeypatch):
    with pytest.raises(fc.WorkerError, match=r"no room for collector 1 of 2: asked for .*here has 4 CPU"):
        check_room(monkeypatch, [{"CPU": 4}], [{"num_cpus": 1}], 1, [{"num_cpus": 4}])
