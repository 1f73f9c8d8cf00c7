"""Collectors with workers in this process, in others, and in actors of Ray."""

import pytest

import funcollect as fc
from tests.support.workers import multi, ray_collector, wait_until


@pytest.fixture(scope="module", autouse=True)
def light_processes(sent_by_value):
    """Workers import no test module."""


@pytest.fixture
def ray_cluster_if_marked(request):
    """The cluster, for those cases of a test that are marked `ray`."""
    if request.node.get_closest_marker("ray"):
        request.getfixturevalue("ray_cluster")


def over(transport, kind=fc.MultiSyncDataCollector, **kwargs):
    """A collector over "serial", "processes" or "ray"."""
    if transport == "ray":
        return ray_collector(sync=kind is fc.MultiSyncDataCollector, **kwargs)
    return multi(kind, transport, **kwargs)


def pid_of(collector, worker):
    """The process of a worker, once it lives."""
    handle = collector.run.records[worker].handle
    if not isinstance(collector, fc.RayCollector):
        return handle.pid
    wait_until(lambda: not handle.label.endswith("on no node yet"))
    return int(handle.label.split()[-1])
