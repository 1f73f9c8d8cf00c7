"""`check_collector` passes the collector of this process; `tests/collectors/workers` does so for the others."""

import pytest

import funcollect as fc
from tests.support.cases import mlp
from tests.support.check_collector import COLLECTOR_CHECKS, check_collector
from tests.support.faulty.faulty_envs import Walk
from tests.support.running import scaled

NAMES = [check.__name__ for check in COLLECTOR_CHECKS]


def policy():
    return fc.torch_policy(mlp(2, 3), head=fc.heads.categorical)


# One row per layout.
GOOD = {
    "single": {"create_env_fn": Walk},
    "batch": {"create_env_fn": Walk, "create_env_kwargs": {"num_envs": 3}},
    "torch": {"create_env_fn": "torch/CartPole-v1", "frames_per_batch": 30},
    "a limit and random frames": {"create_env_fn": Walk, "max_frames_per_traj": 5, "init_random_frames": 10},
}


@pytest.mark.parametrize("name", GOOD)
def test_a_good_collector_passes_every_check(name):
    kwargs = {"frames_per_batch": 40, **GOOD[name]}
    if kwargs["create_env_fn"] is Walk:
        kwargs["policy"] = policy()
    assert check_collector(fc.SyncDataCollector, batches=scaled(3), **kwargs).passed == tuple(NAMES)


class NumbersNoTrajectories(fc.SyncDataCollector):
    def __next__(self):
        batch = super().__next__()
        batch["collector", "traj_ids"].zero_()
        return batch


def test_a_fault_is_caught():
    with pytest.raises(fc.CheckError, match="fails 'trajectories'"):
        check_collector(NumbersNoTrajectories, create_env_fn=Walk, policy=policy(), frames_per_batch=40)
