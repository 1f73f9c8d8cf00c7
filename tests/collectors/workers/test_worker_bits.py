"""Processes collect, bit for bit, what the workers collect in the reader's own process."""

import itertools

import pytest

from tests.support.compare import assert_same
from tests.support.running import SCALE, scaled
from tests.support.workers import TRANSPORTS, multi, policy_for

NAMES = ("CartPole-v1", "torch/CartPole-v1", "gymnax/CartPole-v1")
KINDS = ("torch_mlp", "jax_mlp")
MATRIX = list(itertools.product(NAMES, KINDS, (1, 2, 3)))
FEW = [("CartPole-v1", "jax_mlp", 2), ("torch/CartPole-v1", "torch_mlp", 3), ("gymnax/CartPole-v1", "jax_mlp", 1)]


@pytest.mark.parametrize(("name", "kind", "workers"), FEW if SCALE == 1 else MATRIX)
def test_processes_equal_the_serial_transport(name, kind, workers):
    runs = []
    for transport in TRANSPORTS:
        made = {"create_env_fn": [name] * workers, "create_env_kwargs": {"num_envs": 2}}
        with multi(transport=transport, policy=policy_for(name, kind, 2), frames_per_batch=40 * workers, **made) as c:
            runs.append([batch.clone() for batch in itertools.islice(c, scaled(2))])
    for one, two in zip(*runs, strict=True):
        assert_same(one, two)
