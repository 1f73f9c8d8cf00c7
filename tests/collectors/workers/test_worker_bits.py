"""Processes collect, bit for bit, what the workers collect in the reader's own process."""

import itertools

import pytest

from tests.support.compare import assert_same
from tests.support.running import in_soak, scaled
from tests.support.workers import TRANSPORTS, multi, policy_for

CASES = [
    ("CartPole-v1", "torch_mlp", 2),
    ("CartPole-v1", "jax_mlp", 1),
    ("CartPole-v1", "tensordict_actor", 2),
    ("CartPole-v1", "torch_recurrent", 2),
    ("HalfCheetah-v5", "torch_normal", 2),
    ("torch/CartPole-v1", "torch_mlp", 3),
    ("torch/Pendulum-v1", "jax_mlp", 2),
    ("envpool/CartPole-v1", "torch_mlp", 2),
]
NAMES = ("CartPole-v1", "torch/CartPole-v1", "gymnax/CartPole-v1")
MORE = in_soak(each for each in itertools.product(NAMES, ("torch_mlp", "jax_mlp"), (1, 2, 3)) if each not in CASES)


@pytest.mark.parametrize(("name", "kind", "workers"), CASES + MORE)
def test_processes_equal_the_serial_transport(name, kind, workers):
    runs = []
    for transport in TRANSPORTS:
        made = {"create_env_fn": [name] * workers, "create_env_kwargs": {"num_envs": 2}}
        with multi(transport=transport, policy=policy_for(name, kind, 2), frames_per_batch=40 * workers, **made) as c:
            runs.append([batch.clone() for batch in itertools.islice(c, scaled(3))])
    for one, two in zip(*runs, strict=True):
        assert_same(one, two)
