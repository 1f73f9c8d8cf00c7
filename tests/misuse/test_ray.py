"""What `RayCollector` says of bad arguments, before it starts anything."""

import pytest
from gymnasium.envs.classic_control import CartPoleEnv

import funcollect as fc

CASES = {
    "class": ({"collector_class": dict}, TypeError, r"collector_class is .*expected SyncDataCollector"),
    "workers without a class": ({"num_workers_per_collector": 2}, ValueError, "SyncDataCollector has no workers"),
    "lists that differ": (
        {"create_env_fn": ["CartPole-v1"] * 2, "collector_kwargs": [{}]},
        ValueError,
        r"'create_env_fn': 2, 'collector_kwargs': 1",
    ),
    "a number that differs": ({"create_env_fn": ["CartPole-v1"] * 2, "num_collectors": 3}, ValueError, "differ"),
    "none": ({"create_env_fn": []}, ValueError, "or are 0"),
    "a keyword of the run": (
        {"collector_kwargs": {"frames_per_batch": 3}},
        ValueError,
        "give it to RayCollector itself",
    ),
    "a keyword of nobody": ({"collector_kwargs": {"policy_device": "cup"}}, ValueError, "policy_device is 'cup'"),
    "a slip of the pen": (
        {"collector_kwargs": {"reset_when_don": 1}},
        TypeError,
        r"\['reset_when_don'\], which Sync.* lacks",
    ),
    "a keyword of another class": ({"collector_kwargs": {"cat_results": 0}}, TypeError, "pass another collector_class"),
    "a live environment": (
        {"create_env_fn": CartPoleEnv(), "num_collectors": 2},
        ValueError,
        "same live environment",
    ),
    "a live environment for nested workers": (
        {
            "create_env_fn": CartPoleEnv(),
            "collector_class": fc.MultiSyncDataCollector,
            "num_workers_per_collector": 2,
        },
        ValueError,
        "same live environment",
    ),
    "devices": ({"create_env_fn": ["CartPole-v1"] * 2, "policy_device": ["cpu"] * 3}, ValueError, "'policy_device': 3"),
    "name": ({"remote_configs": {"name": "actor"}}, ValueError, "would find its name taken"),
    "lifetime": ({"remote_configs": {"lifetime": "detached"}}, ValueError, "an actor ends with its collector"),
    "frames": ({"frames_per_batch": [10, 10], "sync": True}, TypeError, "expected a positive int"),
    "interval": ({"max_weight_update_interval": 1.5}, TypeError, "expected an int: pass -1 for no limit"),
    "sync": ({"sync": 1}, TypeError, "sync is 1, expected a bool"),
    "prefetch": ({"prefetch": True}, ValueError, "prefetch is for sync=True"),
    "storing devices": (
        {"sync": True, "num_collectors": 2, "storing_device": ["cpu", "meta"]},
        ValueError,
        "expected one for sync=True",
    ),
    "a keyword of TorchRL's": (
        {"trust_policy": True},
        TypeError,
        r"no argument trust_policy \(policies need no trust\)",
    ),
    "in_process": ({"in_process": True}, TypeError, r"no argument in_process \(MultiSyncDataCollector has it\)"),
}


@pytest.mark.parametrize("name", CASES)
def test_bad_arguments(name):
    kwargs, error, message = CASES[name]
    with pytest.raises(error, match=message):
        fc.RayCollector(**({"create_env_fn": "CartPole-v1", "frames_per_batch": 10} | kwargs))
    import sys

    assert "ray" not in sys.modules or not sys.modules["ray"].is_initialized()
