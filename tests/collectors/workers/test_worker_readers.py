"""Readers that raise in their loop, are interrupted in a notebook, or fill a buffer from a thread."""

import contextlib
import os
import signal
import threading

import jupyter_client
import pytest

import funcollect as fc
from tests.support.faulty.faulty_workers import Plain, stumble
from tests.support.worker_runs import gone, processes_of, wait_until
from tests.support.workers import COLLECTORS, FOREVER, TRANSPORTS, by_lane, multi


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


class Buffer:
    """Counts what it is given; lets a test wait for so many batches."""

    def __init__(self, fail_at=None):
        self.batches = []
        self.fail_at = fail_at
        self.grown = threading.Condition()

    def extend(self, batch):
        if len(self.batches) == self.fail_at:
            raise ArithmeticError("full")
        with self.grown:
            self.batches.append(batch.clone())
            self.grown.notify_all()

    def wait_for(self, count):
        with self.grown:
            assert self.grown.wait_for(lambda: len(self.batches) >= count)


def made(kind, transport, **kwargs):
    return multi(kind, transport, **({"create_env_fn": [Plain] * 2, "policy": None, "frames_per_batch": 16} | kwargs))


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("kind", COLLECTORS)
def test_a_buffer_is_filled_paused_and_filled_on(kind, transport):
    buffer = Buffer()
    with made(kind, transport) as collector:
        with pytest.raises(RuntimeError, match="start"):
            collector.pause()
        collector.start(buffer)
        buffer.wait_for(3)
        for version in range(1, 20):
            collector.update_policy_weights_()
            assert collector.stats()["policy_version"] == version
        collector.pause()
        count = len(buffer.batches)
        mine = next(collector)
        assert len(buffer.batches) == count
        assert collector.frames == (count + 1) * mine.numel()
        assert collector.state_dict()["frames"] == collector.frames
        collector.resume()
        buffer.wait_for(count + 8)
        for taken in (
            lambda: next(collector), collector.rollout, collector.reset, collector.state_dict,
            lambda: collector.set_seed(0), lambda: collector.load_state_dict({}),
        ):  # fmt: skip
            with pytest.raises(RuntimeError, match="pause"):
                taken()
        with pytest.raises(RuntimeError, match="already"):
            collector.start(buffer)
    assert buffer.batches[-1]["collector", "policy_version"].max() == 19


def test_a_block_of_a_pause_resumes_at_its_end_also_after_an_exception_and_after_the_collectors_end():
    buffer = Buffer()
    with made(fc.MultiSyncDataCollector, "serial") as collector:
        collector.start(buffer)
        for error in ((), (KeyError,)):
            with contextlib.suppress(KeyError), collector.pause():
                with collector.pause():  # which was not begun here
                    count = len(buffer.batches)
                next(collector)
                assert len(buffer.batches) == count
                for each in error:
                    raise each
            buffer.wait_for(count + 1)
        with collector.pause():
            collector.shutdown()


@pytest.mark.parametrize("kind", COLLECTORS)
def test_a_run_ends_and_its_thread_with_it(kind):
    buffer = Buffer()
    with made(kind, "processes", total_frames=160) as collector:
        collector.start(buffer)
        collector.join()
        assert sum(batch.numel() for batch in buffer.batches) == collector.frames == 160
    with pytest.raises(TypeError, match="extend"):
        made(kind, "serial").start(3)


def fill_until_it_fails(collector, buffer, kill=None):
    """Start, kill this worker once there is a batch, and wait for the end of the thread."""
    collector.start(buffer)
    if kill is not None:
        buffer.wait_for(1)
        os.kill(collector.run.records[kill].handle.pid, signal.SIGKILL)
    collector._filler.thread.join()


@pytest.mark.parametrize("kind", COLLECTORS)
def test_an_exception_in_the_buffer_surfaces_in_the_caller(kind):
    with made(kind, "processes") as collector:
        with pytest.warns(RuntimeWarning, match="no longer filled, ArithmeticError: full"):
            fill_until_it_fails(collector, Buffer(fail_at=2))
        with pytest.raises(ArithmeticError, match="full"):
            collector.join()
        next(collector)


NEXT_CALLS = {
    "stats": lambda collector: collector.stats(),
    "shutdown": lambda collector: collector.shutdown(),
    "exit": lambda collector: collector.__exit__(None, None, None),
    "update": lambda collector: collector.update_policy_weights_(),
    "pause": lambda collector: collector.pause(),
    "next": next,
}


@pytest.mark.parametrize("call", NEXT_CALLS)
def test_an_exception_in_the_buffer_is_raised_by_the_next_call(call):
    collector = made(fc.MultiaSyncDataCollector, "serial")
    with pytest.warns(RuntimeWarning, match="no longer filled"):
        fill_until_it_fails(collector, Buffer(fail_at=1))
    with pytest.raises(ArithmeticError, match="full"):
        NEXT_CALLS[call](collector)
    collector.shutdown()
    with pytest.raises(fc.errors.ClosedError):
        next(collector)


def test_an_exception_in_the_buffer_hides_no_other_one():
    collector = made(fc.MultiaSyncDataCollector, "serial")
    with pytest.warns(RuntimeWarning, match="no longer filled"):
        fill_until_it_fails(collector, Buffer(fail_at=1))
    with pytest.raises(KeyError, match="mine"), collector:
        raise KeyError("mine")
    with pytest.raises(ArithmeticError, match="full"):
        collector.stats()


def test_a_workers_failure_surfaces_in_the_caller():
    collector = made(fc.MultiSyncDataCollector, "processes")
    with pytest.warns(RuntimeWarning, match="no longer filled, WorkerError: worker 1"):
        fill_until_it_fails(collector, Buffer(), kill=1)
    with pytest.raises(fc.errors.WorkerError, match="worker 1"):
        collector.join()
    with pytest.raises(fc.errors.ClosedError):
        collector.pause()
