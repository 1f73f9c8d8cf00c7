"""Collectors with workers, built over each transport, and what their batches are compared by."""

import functools

import torch

import funcollect as fc
from tests.support.cases import POLICIES, make_env
from tests.support.counting import Counting

TRANSPORTS = ("serial", "processes")
COLLECTORS = (fc.MultiSyncDataCollector, fc.MultiaSyncDataCollector)


def multi(kind=fc.MultiSyncDataCollector, transport="processes", **kwargs):
    """A collector; `timeout` short enough that a fault fails a test and not the whole run."""
    return kind(**({"timeout": 60.0, "start_timeout": 120.0, "seed": 0} | kwargs), in_process=transport == "serial")


def ray_collector(create_env_fn, policy=None, **kwargs):
    """A `RayCollector` whose faults fail a test and not the whole run."""
    return fc.RayCollector(create_env_fn, policy, **({"timeout": 60.0, "start_timeout": 120.0, "seed": 0} | kwargs))


def counting_workers(*workers, batched=True):
    """A factory for each worker; each of `workers` lists the `Counting` arguments of its lanes."""
    count = len(workers[0])
    return [
        functools.partial(_counting, w * count, tuple(tuple(lane.items()) for lane in lanes), batched)
        for w, lanes in enumerate(workers)
    ]


def _counting(first, lanes, batched):
    factories = [functools.partial(Counting, first + i, **dict(lane)) for i, lane in enumerate(lanes)]
    return fc.make_env(factories if batched else factories[0])


def policy_for(name, kind, num_envs):
    """A policy of one of the kinds of `cases`, for an environment of this name."""
    return POLICIES[kind](make_env(name, num_envs))


def by_lane(batches):
    """The rows of each lane over all batches, in the order of delivery: [N]."""
    flat = torch.cat([batch.reshape(-1).clone() for batch in batches])
    lanes = flat["collector", "lane"]
    order = torch.stack([flat["collector", "traj_ids"], flat["collector", "step"]])
    assert order.shape[1] == len(lanes)
    return {lane: flat[lanes == lane] for lane in sorted(set(lanes.tolist()))}
