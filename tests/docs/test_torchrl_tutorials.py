"""TorchRL's tutorials with our collector in the place of theirs, called by the same line, learn."""

import pytest

import funcollect as fc
from tests.support.running import scaled
from tests.support.tutorials import dqn, ppo

pytestmark = pytest.mark.filterwarnings(  # what TorchRL 0.14 says of its own classes, and of its next version
    "ignore:Creating .* which inherits from WeightUpdaterBase:DeprecationWarning",
    "ignore:The env passed to Collector is missing transforms:FutureWarning",
)


def mean(values):
    return sum(values) / len(values)


@pytest.mark.parametrize("seed", range(scaled(1)))
def test_ppo_learns(seed):
    """Seen over ten seeds: from 6 to 17 steps at least."""
    lengths, evaluations = ppo(fc.SyncDataCollector, batches=10, seed=seed)
    assert mean(lengths[-2:]) > 2 * lengths[0]
    assert mean(evaluations[-2:]) > lengths[0]


@pytest.mark.parametrize("seed", range(scaled(1)))
def test_dqn_learns(seed):
    """Seen over ten seeds: from 24 to a hundred steps, which is all that a batch holds."""
    lengths = dqn(fc.SyncDataCollector, batches=80, seed=seed)
    assert mean(lengths[-20:]) > 2 * mean(lengths[:10])


@pytest.mark.parametrize("loop", [ppo, dqn])
def test_the_loops_are_theirs(loop):
    from torchrl.collectors import Collector

    answer = loop(Collector, batches=2)
    lengths = answer[0] if loop is ppo else answer
    assert all(length > 1 for length in lengths)
