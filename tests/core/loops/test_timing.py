"""Calls that are timed, and rollouts of timed loops."""

import pytest

import funcollect as fc
from funcollect.core import api
from funcollect.core.request import Request
from funcollect.core.timing.stopwatch import Delegate, Stopwatch, overhead
from funcollect.core.timing.timed_loops import TimedLoops
from tests.support.compare import assert_same
from tests.support.envs.counting import always, make_counting


def test_calls_return_and_raise_as_they_do():
    stopwatch = Stopwatch()
    double = stopwatch.timed("part", lambda x: 2 * x)
    fail = stopwatch.timed("part", lambda: 1 / 0)
    assert double(3) == 6
    with pytest.raises(ZeroDivisionError):
        fail()
    assert stopwatch.calls == {"part": 2}
    assert stopwatch.seconds["part"] > 0


def test_an_accelerator_is_waited_for_before_and_after_each_call():
    events = []
    call = Stopwatch(lambda: events.append("wait")).timed("part", lambda: events.append("call"))
    call()
    assert events == ["wait", "call", "wait"]


def test_a_delegate_stands_for_another_object():
    one = Delegate([1, 2], count=lambda value: -1)
    assert isinstance(one, list)
    assert one.index(2) == 1
    assert one.count(1) == -1


def test_timing_costs_something():
    cost = overhead()
    assert 0 <= cost.counted <= cost.whole


@pytest.mark.parametrize("backend", ["host", "torch"])
def test_rollouts_are_the_same_and_counted(backend):
    env, policy = make_counting(backend, {}, {}), always(1)
    loops, wanted, got = TimedLoops(), fc.init(env, policy, seed=0), fc.init(env, policy, seed=0)
    for _ in range(2):
        wanted, one = api.run(env, policy, wanted, Request(length=5))
        got, two = api.run(env, policy, got, Request(length=5), loops=loops)
        assert_same(one, two)
    parts, cost = loops.parts()
    assert loops.loop == backend
    assert {*parts} == {"environment", "policy", "recording", "preparation", "delivery"}
    assert min(parts.values()) >= 0
    assert cost > 0
    assert not loops.waits
    assert len(loops) == len([*loops]) == len(api.LOOPS)
    with pytest.raises(KeyError):
        loops["another"]
