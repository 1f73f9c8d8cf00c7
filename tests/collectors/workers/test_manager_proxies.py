"""Proxies of a `multiprocessing.Manager` connect in every kind of process that is started."""

import functools
import multiprocessing

import pytest

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


KINDS = {"a process": multi, "an actor of Ray": ray_collector}


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
    env = functools.partial(Counted, steps)
    with KINDS[kind](create_env_fn=[env], policy=None, frames_per_batch=2) as collector:
        next(collector)
    assert steps[0] == 0
