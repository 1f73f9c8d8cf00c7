"""Functions over time refuse frames that do not follow each other in their rows, which gave wrong numbers."""

import jax.numpy as jnp
import pytest
import torch

import funcollect as fc

WRONG = {
    "time first": lambda batch: batch.transpose(0, 1),
    "shuffled": lambda batch: batch[:, torch.tensor([3, 0, 2, 1, 5, 4, *range(6, batch.shape[1])])],
    "every other step": lambda batch: batch[:, ::2],
}
RIGHT = {
    "as it is": lambda batch: batch,
    "one row": lambda batch: batch.reshape(1, -1),
    "flat": lambda batch: batch.reshape(-1),
    "more dimensions": lambda batch: batch.reshape(2, 2, -1),
    "some lanes": lambda batch: batch[[2, 0]],
    "a part": lambda batch: batch[:, 5:20],
    "trajectories": lambda batch: fc.split_trajectories(batch),
    "two runs": lambda batch: torch.cat([batch, batch.clone()], -1),
}
FUNCTIONS = {
    "gae": lambda batch: fc.gae(batch, batch["next", "reward"] + 1, batch["next", "reward"] - 1),
    "MultiStep": fc.MultiStep(0.9, 3),
    "split_trajectories": fc.split_trajectories,
}


@pytest.fixture(scope="module", params=[True, False], ids=["restarted", "finished"])
def batch(request):
    given = {"frames_per_batch": 240, "create_env_kwargs": {"num_envs": 4}, "seed": 0}
    with fc.SyncDataCollector("CartPole-v1", None, **given, reset_when_done=request.param) as collector:
        return next(iter(collector))


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG.keys())
@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS.keys())
def test_frames_out_of_order(function, change, batch):
    with pytest.raises(ValueError, match=r"in row \[.*\] of the batch .* time as the last batch dimension"):
        function(change(batch))


@pytest.mark.parametrize("change", RIGHT.values(), ids=RIGHT.keys())
@pytest.mark.parametrize("name", FUNCTIONS)
def test_frames_in_order(name, change, batch):
    changed = change(batch)
    if name != "split_trajectories" or ("collector", "mask") not in changed.keys(True):
        FUNCTIONS[name](changed)


def test_lanes_first_in_jax():
    env = fc.make_env("torch/CartPole-v1", num_envs=4)
    policy = fc.random_policy(env)
    batch = fc.rollout(env, policy, fc.init(env, policy, seed=0), 6)[1]
    keys = [("next", name) for name in ("reward", "done", "terminated")] + [("collector", "lane")]
    arrays = {"next": {}, "collector": {}}
    for first, last in keys:
        arrays[first][last] = jnp.asarray(batch[first, last].reshape(4, 6).numpy())
    zeros = jnp.zeros((4, 6))
    with pytest.raises(ValueError, match=r"arrays \[4, 6\] the lane changes, expected time there: pass \[T, P\]"):
        fc.gae(arrays, zeros, zeros)
