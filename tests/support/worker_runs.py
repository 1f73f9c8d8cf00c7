"""Runs of collectors with workers: their processes, their trajectories, and waiting for what they do."""

import gc
import os
import threading
import time
from pathlib import Path

from tests.support.workers import by_lane


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
        ids, steps = rows["collector", "traj_ids"].tolist(), rows["collector", "step"].tolist()
        used = set()
        for i, (identity, step) in enumerate(zip(ids, steps, strict=True)):
            if i and identity == ids[i - 1]:
                assert step == steps[i - 1] + 1
            else:
                assert step == 0
                assert identity not in used
                used.add(identity)


def wait_until(condition):
    """Wait until the condition holds; pytest's own limit ends it, and shows the condition."""
    while not condition():
        time.sleep(0.001)  # nothing else: processes of idle priority have to proceed, too
