"""Readers of collectors with workers that raise in their loop, or are interrupted in a notebook."""

import contextlib

import jupyter_client
import pytest

from tests.support.faulty.faulty_workers import Plain, stumble
from tests.support.worker_runs import gone, processes_of, wait_until
from tests.support.workers import COLLECTORS, FOREVER, by_lane, multi


def stumble_over(collector, batches):
    for batch in collector:
        batches.append(batch.clone())
        stumble()


@pytest.mark.parametrize("kind", COLLECTORS)
def test_a_reader_that_raises_in_its_loop_can_go_on(kind):
    with multi(kind, create_env_fn=[Plain] * 2, frames_per_batch=20) as collector:
        batches = []
        for _ in range(3):
            with pytest.raises(ArithmeticError):
                stumble_over(collector, batches)
        pids = processes_of(collector)
    assert len(batches) == 3
    for rows in by_lane(batches).values():
        assert rows["collector", "step"].tolist() == [i % 5 for i in range(len(rows))]
    assert all(map(gone, pids))


@pytest.mark.parametrize("kind", COLLECTORS)
def test_a_reader_that_raises_without_shutdown_leaves_no_process(kind):
    pids = []

    def run():
        collector = multi(kind, create_env_fn=[Plain] * 2, frames_per_batch=20)
        pids.extend(processes_of(collector))
        for _ in collector:
            stumble()

    with contextlib.suppress(ArithmeticError):
        run()
    wait_until(lambda: all(map(gone, pids)))


BUILT = """
import time
import funcollect as fc
from gymnasium.envs.classic_control import CartPoleEnv

class Slow(CartPoleEnv):
    def step(self, action):
        time.sleep(0.02)
        return super().step(action)

collector = fc.{kind}([Slow] * 2, None, frames_per_batch={frames}, seed=0, timeout=1e6, start_timeout=1e6)
pids = [record.handle.pid for record in collector.run.records]
print(*pids)
"""
LOOP = "print('begun', flush=True)\nfor batch in collector: pass"
AFTER = """
try:
    print("usable", next(collector)["collector", "step"].shape[-1])
except fc.errors.ClosedError:
    print("closed")
collector.shutdown()
"""


@contextlib.contextmanager
def kernel():
    """A Jupyter kernel: runs code, and interrupts what runs."""
    manager, client = jupyter_client.manager.start_new_kernel(kernel_name="python3", startup_timeout=FOREVER)
    try:
        yield manager, client
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def said(client, code, at=None):
    """What a cell prints and the name of its exception; `at` is called at its first print."""
    printed, raised = "", None
    request = client.execute(code)
    while True:
        message = client.get_iopub_msg(timeout=None)
        if message["parent_header"].get("msg_id") != request:
            continue
        content = message["content"]
        match message["msg_type"]:
            case "stream":
                printed += content["text"]
                if at is not None:
                    at, _ = None, at()
            case "error":
                raised = content["ename"]
            case "status" if content["execution_state"] == "idle":
                return printed, raised


def test_an_interrupted_cell_stops_at_once_and_leaves_the_collector_usable_or_closed():
    """The kernel signals its whole process group, its workers too."""
    with kernel() as (manager, client):
        for kind in COLLECTORS:
            printed, raised = said(client, BUILT.format(kind=kind.__name__, frames=20))
            assert raised is None, printed
            pids = list(map(int, printed.split()))
            assert said(client, LOOP, at=manager.interrupt_kernel) == ("begun\n", "KeyboardInterrupt")
            printed, raised = said(client, AFTER)
            assert (raised, printed.split()[0] in ("usable", "closed")) == (None, True)
            assert all(map(gone, pids))
