"""Runs of collectors with workers: their processes, their trajectories, and waiting for what they do."""

import os
import time

from tests.support.workers import by_lane


def processes_of(collector):
    """The process numbers of a collector's workers."""
    return [record.handle.pid for record in collector.run.records]


def gone(pid):
    """Whether a process has ended and was reaped."""
    return not os.path.exists(f"/proc/{pid}")


def run_out(collector):
    """Take batches until the collector raises."""
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
