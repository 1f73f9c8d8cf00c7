"""Functions over time refuse frames that do not follow each other in their rows, which gave wrong numbers.

Where `MultiStep` takes what is under ``next`` from later frames, they go by the frames' own ends.
"""

import functools

import jax
import jax.numpy as jnp
import pytest
import torch
from tensordict import TensorDict

import funcollect as fc
from tests.support.envs.jax_counting import counting

WRONG = {
    "time first": lambda batch: batch.transpose(0, 1),
    "shuffled": lambda batch: batch[:, torch.tensor([3, 0, 2, 1, 5, 4, *range(6, batch.shape[1])])],
    "every other step": lambda batch: batch[:, ::2],
}
ELSEWHERE = {
    "time first, flat": lambda batch: batch.transpose(0, 1).reshape(-1),
    "backwards": lambda batch: batch.flip(-1),
    "steps in any order": lambda batch: batch.reshape(-1)[torch.randperm(240, generator=torch.manual_seed(0))],
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
    "flat batches in turn": lambda batch: torch.cat([part.reshape(-1) for part in batch.split(2, -1)]),
    "single steps": lambda batch: batch[:, 3:4],
}
FUNCTIONS = {
    "gae": lambda batch: fc.gae(batch, batch["next", "reward"] + 1, batch["next", "reward"] - 1),
    "MultiStep": fc.MultiStep(0.9, 3),
    "split_trajectories": fc.split_trajectories,
    "scale_rewards": fc.scale_rewards,
}


@pytest.fixture(scope="module", params=[True, False], ids=["restarted", "finished"])
def batch(request):
    given = {"frames_per_batch": 240, "create_env_kwargs": {"num_envs": 4}, "seed": 0}
    with fc.SyncDataCollector("CartPole-v1", None, **given, reset_when_done=request.param) as collector:
        return next(iter(collector))


@pytest.mark.parametrize("change", WRONG | ELSEWHERE)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_frames_out_of_order(name, change, batch):
    if name == "scale_rewards" and change in WRONG:
        return  # it goes by the steps that are elsewhere alone
    where = r"row \[.*\] of the" if change in WRONG else r"(row .* of )?the"
    with pytest.raises(ValueError, match=f"in {where} batch .* time as the last batch dimension"):
        FUNCTIONS[name]((WRONG | ELSEWHERE)[change](batch))


@pytest.mark.parametrize("change", RIGHT)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_frames_in_order(name, change, batch):
    changed = RIGHT[change](batch)
    if name not in ("split_trajectories", "scale_rewards") or ("collector", "mask") not in changed.keys(True):
        FUNCTIONS[name](changed)


def run(frames):
    step, ids, flags = torch.arange(frames), torch.zeros(frames).long(), torch.zeros(frames, 1, dtype=torch.bool)
    moves = {"current_player": step % 2, "next": {"current_player": (step + 1) % 2, "reward": torch.ones(frames, 2)}}
    batch = TensorDict({**moves, "collector": {"traj_ids": ids, "step": step, "lane": ids}}, [frames])
    for name in ("done", "terminated"):
        batch["next", name] = flags
    return batch


SUMMED = {
    "gae": lambda batch: fc.gae(batch, torch.zeros(len(batch), 2), torch.zeros(len(batch), 2), lmbda=1.0)[1],
    "MultiStep": lambda batch: fc.MultiStep(0.9, 5)(batch)["next", "reward"],
    "scale_rewards": lambda batch: fc.scale_rewards(batch)[1].statistics.mean["return"][None],
    "player_trajectories": lambda batch: fc.player_trajectories(batch)["next", "reward"],
}


@pytest.mark.parametrize("name", SUMMED)
def test_no_sum_goes_from_one_run_or_slice_to_another(name):
    """Though the frames on both sides have the same id, and for slices may even be successive steps."""
    wanted, whole = SUMMED[name](run(4)), run(8)
    whole["collector", "is_first"] = torch.arange(8) % 4 == 0
    for batch in (torch.cat([run(4), run(4)]), *([] if name == "scale_rewards" else [whole])):
        assert all(torch.equal(part, wanted) for part in SUMMED[name](batch).split(len(wanted)))


@functools.cache
def traced_batch():
    env = counting(4)
    policy = fc.random_policy(env)
    state = fc.traced.init(env, policy, None, key=jax.random.PRNGKey(0))
    return fc.traced.rollout(env, policy, None, state, 4)[1]


ON_ARRAYS = {
    "gae": lambda batch: fc.gae(batch, batch["next"]["reward"], batch["next"]["reward"]),
    "scale_rewards": fc.scale_rewards,
    "episode_stats": fc.traced.episode_stats,
    "deliver": fc.deliver,
    "jax_ring": lambda batch: fc.jax_ring.extend(fc.jax_ring.init(traced_batch(), steps=8), batch),
}


@pytest.mark.parametrize("name", ON_ARRAYS)
def test_lanes_first_and_batches_of_several_runs_in_jax(name):
    batch = traced_batch()
    ON_ARRAYS[name](batch)
    with pytest.raises(ValueError, match=r"arrays \[4, 4\], expected time first: pass \[T, P\]"):
        ON_ARRAYS[name](jax.tree.map(lambda leaf: leaf.swapaxes(0, 1), batch))
    if name in ("gae", "scale_rewards", "episode_stats"):
        several = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), batch)
        with pytest.raises(ValueError, match=r"expected \[T, P\]"):
            ON_ARRAYS[name](several)
        jax.jit(jax.vmap(lambda each: ON_ARRAYS[name](each)[0]))(several)


def test_gae_within_jit_of_a_batch_that_is_closed_over():
    batch = traced_batch()
    value = batch["next"]["reward"] / 2
    compiled = jax.jit(lambda value: fc.gae(batch, value, value)[0])(value)
    assert jnp.allclose(compiled, fc.gae(batch, value, value)[0], atol=1e-6)


SUMS = fc.MultiStep(gamma=0.9, n_steps=3)
CUTS = [{}, {"split_trajs": True}, {"set_truncated": True}, {"max_frames_per_traj": 9}]


def batches(**kwargs):
    env = fc.make_env("CartPole-v1", num_envs=4)
    with fc.SyncDataCollector(env, None, frames_per_batch=100, total_frames=400, seed=0, **kwargs) as collector:
        return [batch.clone() for batch in collector]


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_episodes_are_those_of_single_steps(cut):
    stats = [None, None]
    for pair in zip(batches(**cut), batches(**cut, postproc=SUMS), strict=True):
        stats = [fc.episode_stats(each, one) for each, one in zip(pair, stats, strict=True)]
        for name in ("returns", "lengths", "traj_ids", "lanes", "terminated"):
            assert torch.equal(*(getattr(each, name) for each in stats)), name
        assert stats[0].open_returns.keys() == stats[1].open_returns.keys()
    assert len(stats[0])


def test_trajectories_slices_and_scaled_rewards_are_those_of_single_steps():
    def found(batch):
        split = fc.split_trajectories(batch)
        variance = fc.scale_rewards(batch)[1].statistics.variance["return"]
        storage, sampler = fc.LazyTensorStorage(100, ndim=2), fc.SliceSampler(slice_len=4)
        generator = torch.Generator().manual_seed(0)
        buffer = fc.ReplayBuffer(storage=storage, sampler=sampler, batch_size=80, generator=generator)
        buffer.extend(batch)
        return [split["observation"], split["collector", "mask"], variance, buffer.sample()["observation"]]

    batch = batches()[0]
    for one, two in zip(found(batch), found(SUMS(batch)), strict=True):
        assert torch.equal(one, two)


def test_rewards_are_summed_once():
    summed = SUMS(batches()[0])
    value = torch.zeros(*summed.shape, 1)
    sampler = fc.MultiStepSampler(gamma=0.9, n_steps=3)
    buffer = fc.ReplayBuffer(storage=fc.LazyTensorStorage(100, ndim=2), sampler=sampler, batch_size=8)
    buffer.extend(summed)
    for call in (lambda: SUMS(summed), lambda: fc.gae(summed, value, value), buffer.sample):
        with pytest.raises(ValueError, match=r"sums of several rewards.*expected single rewards.*either MultiStep or"):
            call()
