"""Collectors with workers, built over each transport: their processes, and what their batches are compared by."""

import gc
import os
import threading
import time
from pathlib import Path

import torch

import funcollect as fc
from tests.support.cases import POLICIES, make_env
from tests.support.check_collector import expect_used_once, lanes_of
from tests.support.faulty.faulty_workers import wait_until as wait_until

TRANSPORTS = ("serial", "processes")
COLLECTORS = (fc.MultiSyncDataCollector, fc.MultiaSyncDataCollector)
FOREVER = 1e6  # seconds: no test depends on how fast the machine is, and pytest's own limit shows what is stuck
_PATIENT = {"timeout": FOREVER, "start_timeout": FOREVER, "seed": 0}


def multi(kind=fc.MultiSyncDataCollector, transport="processes", **kwargs):
    """A collector that waits for its workers however slow the machine is."""
    return kind(**(_PATIENT | kwargs), in_process=transport == "serial")


def ray_collector(create_env_fn, policy=None, **kwargs):
    return fc.RayCollector(create_env_fn, policy, **(_PATIENT | kwargs))


class HangClock:
    """The clock by which a collector of two notices that worker 1 hangs. It stands still until that is so.

    From then on it runs for as long as worker 0 owes no answer, and by a tenth of a second for each of its rollouts.
    So a `timeout` of half a second ends the call that hangs and no other, however slow the machine is.

    Args:
        begun: a file that exists as soon as worker 1 is about to hang.
        shown: the words in worker 1's stack once it hangs.
    """

    sleep = staticmethod(time.sleep)

    def __init__(self, begun, shown):
        self.collector = None  # set by the test
        self._begun, self._shown = begun, shown
        self._now, self._tasks = 0.0, -1

    def monotonic(self):
        if self.collector is not None and self._begun.exists():
            self._run(self.collector.run)
        return self._now

    def _run(self, pool):
        other, hanging = pool.records
        if pool.restarts or (other.calls and other.tasks == self._tasks):
            return
        if self._shown in hanging.handle.where():
            self._tasks = other.tasks
            self._now += 0.1


def policy_for(name, kind, num_envs):
    return POLICIES[kind](make_env(name, num_envs))


def by_lane(batches):
    """The rows of each lane over all batches, in the order of delivery: [N]."""
    return {lane: rows[0] for lane, rows in lanes_of(batches).items()}


def processes_of(collector):
    return [record.handle.pid for record in collector.run.records]


def children_of(pid):
    """The numbers of the processes that the threads of a process have started."""
    listed = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    return [*map(int, " ".join(listed).split())]


def descendants(pid):
    return [each for child in children_of(pid) for each in (child, *descendants(child))]


def held():
    """File descriptors, threads and child processes of this process."""
    gc.collect()
    return len(os.listdir("/proc/self/fd")), threading.active_count(), len(children_of(os.getpid()))


def gone(pid):
    return not os.path.exists(f"/proc/{pid}")


def run_out(collector):
    while True:
        next(collector)


def check_trajectories(batches):
    """Within each lane, steps follow each other; a new trajectory begins at 0 under an id that was not used before."""
    for rows in by_lane(batches).values():
        ids, steps = rows["collector", "traj_ids"], rows["collector", "step"]
        assert steps[0] == 0
        assert torch.equal(steps[1:], torch.where(ids.diff() == 0, steps[:-1] + 1, 0))
        expect_used_once(ids.unique_consecutive().tolist())
