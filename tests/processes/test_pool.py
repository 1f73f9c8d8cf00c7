"""The kernel of workers, over a transport of this process: answers, refusals, losses, replacement, newcomers."""

from types import SimpleNamespace

import pytest

from funcollect.errors import WorkerError
from funcollect.processes.pool import FailurePolicy, WorkerPool
from funcollect.processes.serving import InProcessTransport, Served


class Counter(Served):
    """Adds to a number. It refuses to add 0, and fails at a negative number."""

    def __init__(self, packed):
        self.sum = int(packed)
        if self.sum < 0:
            raise ArithmeticError("began below 0")
        Counter.built.append(self.sum)

    def describe(self):
        return f"from {self.sum}"

    def add(self, number):
        if number == 0:
            raise ValueError("adds nothing")
        if number < 0 and self.sum == 5:
            raise ArithmeticError("subtracts from 5")
        self.sum += number
        return self.sum

    def close(self):
        Counter.closed += 1


def job(start):
    return SimpleNamespace(place=0, pack=str(start).encode)


class Counters(WorkerPool):
    """A replacement begins where the lost counter was after its last answer, and one more."""

    def _answered(self, record, call, value):
        if call.name == "add":
            record.progress, record.failures = value, 0
        return value

    def _refusal(self, record, call, failure):
        error = failure.error()
        return error if isinstance(error, ValueError) else None

    def _error(self, worker, loss):
        return WorkerError(self._words(worker, loss), worker, traceback=loss.traceback)

    def _continued(self, worker, pending):
        return job(self.records[worker].progress + 1), ()


def counters(*starts, on_failure="raise"):
    Counter.built, Counter.closed = [], 0  # the numbers that they began with, and how many were closed
    made = Counters(InProcessTransport(Counter), [*map(job, starts)], FailurePolicy(1, 1, on_failure))
    assert made.described == [f"from {start}" for start in starts]
    return made


def test_calls_are_answered_in_order_and_a_refused_one_harms_nothing():
    pool = counters(1, 2)
    calls = [pool.call(worker, "add", number) for number in (10, 0, 20) for worker in (1, 0)]
    with pytest.raises(ValueError, match="adds nothing"):
        pool.finish(calls)
    assert [call.value for call in calls] == [12, 11, None, None, 32, 31]
    assert pool.call_each("add", [1, 2]) == [32, 34]
    pool.stop()
    pool.stop()
    assert Counter.closed == 2


def test_a_loss_ends_all_workers():
    pool = counters(1, 5)
    with pytest.raises(WorkerError, match="worker 1: raised ArithmeticError: subtracts from 5") as raised:
        pool.call_all("add", -1)
    assert "in add" in raised.value.traceback
    assert isinstance(raised.value.__cause__, ArithmeticError)
    assert (pool.closed, Counter.closed) == (True, 2)


def test_a_replacement_answers_the_calls_that_wait():
    pool = counters(4, 1, on_failure="restart")
    calls = [pool.call(0, "add", number) for number in (1, -2, 3)]
    with pytest.warns(RuntimeWarning, match="worker 0: raised .*: subtracts from 5; another takes its place"):
        assert pool.finish(calls) == [5, 4, 7]
    assert (pool.restarts, Counter.built) == (1, [4, 1, 6])
    assert pool.call_all("add", 1) == [8, 2]


def test_a_newcomer_that_fails_ends_alone():
    pool = counters(1)
    added, failed = pool.start([job(2), job(-1)], newcomers=True)
    with pytest.raises(WorkerError, match="worker 2: raised ArithmeticError: began below 0"):
        pool.finish([added, failed])
    assert (added.value, pool.workers) == ("from 2", [0, 1])
    pool.retire(1)
    assert pool.call_all("add", 1) == [2]
