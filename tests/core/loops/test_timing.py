"""Calls that are timed, and rollouts of timed loops."""

import pytest

import funcollect as fc
from funcollect.core import api
from funcollect.core.request import Request
from funcollect.core.timing import Delegate, TimedLoops, timed
from tests.support.compare import assert_same
from tests.support.envs.counting import always, make_counting


def test_calls_return_and_raise_as_they_do():
    seconds = {"part": 0.0}
    assert timed(lambda x: 2 * x, "part", seconds)(3) == 6
    first = seconds["part"]
    with pytest.raises(ZeroDivisionError):
        timed(lambda: 1 / 0, "part", seconds)()
    assert seconds["part"] > first > 0


def test_an_accelerator_is_waited_for_before_and_after_each_call():
    events = []
    timed(lambda: events.append("call"), "part", {"part": 0.0}, lambda: events.append("wait"))()
    assert events == ["wait", "call", "wait"]


def test_a_delegate_stands_for_another_object():
    one = Delegate([1, 2], count=lambda value: -1)
    assert isinstance(one, list)
    assert one.index(2) == 1
    assert one.count(1) == -1


@pytest.mark.parametrize("backend", ["host", "torch"])
def test_rollouts_are_the_same_and_counted(backend):
    env, policy = make_counting(backend, {}, {}), always(1)
    loops, wanted, got = TimedLoops(), fc.init(env, policy, seed=0), fc.init(env, policy, seed=0)
    for _ in range(2):
        wanted, one = api.run(env, policy, wanted, Request(length=5))
        got, two = api.run(env, policy, got, Request(length=5), loops=loops)
        assert_same(one, two)
    assert loops.loop == backend
    assert {*loops.seconds} == {"environment", "policy", "recording", "preparation", "delivery"}
    assert min(loops.seconds.values()) >= 0
    assert len(loops) == len([*loops]) == len(api.LOOPS)
    with pytest.raises(KeyError):
        loops["another"]
