"""Whether a cluster has room, told from what its nodes have."""

import types

import pytest

import funcollect as fc
from funcollect.collectors.cluster import transport

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
