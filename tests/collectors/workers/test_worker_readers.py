"""Readers that are interrupted, or fill a buffer from a thread."""

import contextlib
import os
import signal
import threading

import pytest
import torch

import funcollect as fc
from tests.support.compare import assert_same
from tests.support.faulty.faulty_workers import Plain
from tests.support.running import once
from tests.support.workers import COLLECTORS, TRANSPORTS, multi, wait_until


class Buffer(list):
    """The batches that it was given; the one of number `fail_at` is too many."""

    def __init__(self, fail_at=None):
        self.fail_at = fail_at

    def extend(self, batch):
        if len(self) == self.fail_at:
            raise ArithmeticError("full")
        self.append(batch.clone())

    def wait_for(self, count):
        wait_until(lambda: len(self) >= count)


def made(kind, transport, **kwargs):
    kwargs = {"create_env_fn": [Plain] * 2, "policy": None, "frames_per_batch": 16} | kwargs
    return fc.SyncDataCollector(**kwargs) if kind is fc.SyncDataCollector else multi(kind, transport, **kwargs)


@pytest.mark.parametrize(("kind", "transport"), [(fc.SyncDataCollector, ""), *once(COLLECTORS, TRANSPORTS)])
def test_a_buffer_is_filled_paused_and_filled_on(kind, transport):
    buffer = Buffer()
    with made(kind, transport) as collector:
        with pytest.raises(RuntimeError, match="start"):
            collector.pause()
        with pytest.raises(TypeError, match="start has no buffer"):
            collector.start()
        collector.start(buffer)
        buffer.wait_for(3)
        for version in range(1, 20):
            collector.update_policy_weights_()
            assert collector.stats()["policy_version"] == version
        collector.pause()
        count = len(buffer)
        mine = next(collector)
        assert len(buffer) == count
        assert collector.frames == (count + 1) * mine.numel()
        assert collector.state_dict()["frames"] == collector.frames
        collector.resume()
        buffer.wait_for(count + 8)
        for taken in (
            collector.state_dict,
            lambda: next(collector), collector.rollout, collector.reset,
            lambda: collector.set_seed(0), lambda: collector.load_state_dict({}),
        ):  # fmt: skip
            with pytest.raises(RuntimeError, match="pause"):
                taken()
        with pytest.raises(RuntimeError, match="already"):
            collector.start(buffer)
    assert buffer[-1]["collector", "policy_version"].max() == 19
    assert not any(thread.name == "funcollect filler" for thread in threading.enumerate())


def test_neither_state_nor_batch_is_taken_between_two_batches_of_the_thread():
    statistics = fc.running_statistics.init(fc.make_env(Plain).observation_space)
    policy = fc.normalized(fc.torch_policy(torch.nn.Linear(2, 2), head=fc.heads.categorical), statistics)
    extending, taken = threading.Event(), threading.Event()

    class Slow:
        def extend(self, batch):
            extending.set()
            taken.wait()

    with made(fc.SyncDataCollector, "", policy=policy, update_statistics=True) as collector:
        collector.start(Slow())
        extending.wait()
        try:
            for take in (collector.state_dict, collector.next):
                with pytest.raises(RuntimeError, match="pause"):
                    take()
            assert policy.statistics.count == 0
        finally:
            taken.set()


def test_an_interrupt_while_the_next_rollout_begins_loses_no_batch(monkeypatch):
    def interrupt():
        raise KeyboardInterrupt

    with made(COLLECTORS[0], "serial", prefetch=True) as one, made(COLLECTORS[0], "serial", prefetch=True) as other:
        wanted = [next(one).clone() for _ in range(3)]
        got = [next(other).clone()]
        monkeypatch.setattr(other.run.weights, "flush", interrupt)
        with pytest.raises(KeyboardInterrupt):
            next(other)
        monkeypatch.undo()
        got += [next(other).clone() for _ in range(2)]
    assert_same(got, wanted)


def test_a_block_of_a_pause_resumes_at_its_end_also_after_an_exception_and_after_the_collectors_end():
    buffer = Buffer()
    with made(fc.MultiSyncDataCollector, "serial") as collector:
        collector.start(buffer)
        for error in ((), (KeyError,)):
            with contextlib.suppress(KeyError), collector.pause():
                with collector.pause():  # which was not begun here
                    count = len(buffer)
                next(collector)
                assert len(buffer) == count
                for each in error:
                    raise each
            buffer.wait_for(count + 1)
        with collector.pause():
            collector.shutdown()


def fill_until_it_fails(collector, buffer, kill=None):
    """Start, kill this worker once there is a batch, and wait for the end of the thread."""
    collector.start(buffer)
    if kill is not None:
        buffer.wait_for(1)
        os.kill(collector.run.records[kill].handle.pid, signal.SIGKILL)
    collector._filler.thread.join()


CALLS = ["join", "is_running", "stats", "update_policy_weights_", "pause", "__next__", "shutdown", "exit"]


@pytest.mark.parametrize("call", CALLS)
def test_an_exception_in_the_buffer_is_raised_by_the_next_call(call):
    collector = made(fc.MultiaSyncDataCollector, "serial")
    with pytest.warns(RuntimeWarning, match="no longer filled, ArithmeticError: full"):
        fill_until_it_fails(collector, Buffer(fail_at=1))
    with pytest.raises(ArithmeticError, match="full"):
        collector.__exit__(None, None, None) if call == "exit" else getattr(collector, call)()
    if call == "join":
        with pytest.raises(ArithmeticError, match="full"):
            collector.join()
    if call not in ("shutdown", "exit"):
        next(collector)
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
