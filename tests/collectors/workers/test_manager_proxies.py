"""Proxies of a `multiprocessing.Manager` connect in every kind of process that is started."""

import functools
import multiprocessing

import pytest

import funcollect as fc
from tests.support.faulty.faulty_workers import Plain
from tests.support.running import AN_EVENING_OVER_RAY, FORKS_OF_RAY
from tests.support.workers import multi, ray_collector

pytestmark = FORKS_OF_RAY


class Counted(Plain):
    """Writes its steps into a list of the manager's."""

    def __init__(self, steps):
        super().__init__()
        self.log = steps

    def step(self, action):
        self.log.append(self.steps)
        return super().step(action)


def in_a_collector(make, env):
    with make(create_env_fn=[env], policy=None, frames_per_batch=2) as collector:
        next(collector)


def in_lane_workers(env):
    made = fc.make_env(env, num_envs=2, num_workers=1)
    policy = fc.random_policy(made)
    state, _ = fc.rollout(made, policy, fc.init(made, policy, seed=0), 2)
    fc.close(state)


def in_an_evaluator(env):
    with fc.Evaluator(env, episodes=1, seed=0) as evaluator:
        evaluator.submit()
        evaluator.wait()


KINDS = {
    "a worker": functools.partial(in_a_collector, multi),
    "an actor of Ray": functools.partial(in_a_collector, ray_collector),
    "lanes over processes": in_lane_workers,
    "an evaluator": in_an_evaluator,
}


@pytest.fixture(scope="module")
def manager():
    with multiprocessing.get_context("spawn").Manager() as manager:
        yield manager


@pytest.mark.parametrize(
    "kind", [pytest.param(each, marks=AN_EVENING_OVER_RAY if "Ray" in each else ()) for each in KINDS]
)
def test_an_environment_uses_a_proxy(kind, manager, request):
    if "Ray" in kind:
        request.getfixturevalue("ray_cluster")
    steps = manager.list()
    KINDS[kind](functools.partial(Counted, steps))
    assert steps[0] == 0
