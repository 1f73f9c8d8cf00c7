"""Calls that are timed, and rollouts of timed loops."""

import pytest

import funcollect as fc
from funcollect.core import api
from funcollect.core.loops.eager import Clock
from funcollect.core.request import Request
from funcollect.core.timing import TimedLoops
from tests.support.compare import assert_same
from tests.support.envs.counting import always, make_counting


def test_an_accelerator_is_waited_for_before_and_after_each_call():
    events = []
    clock = Clock(lambda: events.append("wait"))
    assert clock.timed("part", lambda x: events.append("call") or 2 * x)(3) == 6
    first = clock.seconds["part"]
    with pytest.raises(ZeroDivisionError):
        clock.timed("part", lambda: 1 / 0)()
    assert events == ["wait", "call", "wait", "wait", "wait"]
    assert clock.seconds["part"] > first > 0


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
