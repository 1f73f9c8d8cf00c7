"""What TorchRL's users do with a batch: replay it, and learn from it, as it is."""

import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.data import LazyTensorStorage, ReplayBuffer, SliceSampler
from torchrl.modules import OneHotCategorical, ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

import funcollect as fc
from tests.support.cases import LocScale, mlp
from tests.support.compare import bits, digest, leaves

TRAJECTORIES = ("collector", "traj_ids")


def actor_of(net, distribution, keys=("logits",), **kwargs):
    """TorchRL's actor over a network; its log-probabilities are recorded."""
    module = TensorDictModule(net, ["observation"], [*keys])
    kwargs |= {"return_log_prob": True, "log_prob_key": "action_log_prob"}
    return ProbabilisticActor(module, in_keys=[*keys], distribution_class=distribution, **kwargs)


def collector(policy, num_envs, one_hot=False, frames=600):
    env = fc.make_env("CartPole-v1", num_envs=num_envs, one_hot=one_hot)
    return fc.SyncDataCollector(env, policy, frames_per_batch=frames, total_frames=3 * frames, seed=0)


@pytest.mark.parametrize("num_envs", [None, 3])
def test_slices_of_trajectories_from_a_replay_buffer(num_envs):
    batches = list(collector(None, num_envs, frames=300))
    before = [digest(batch) for batch in batches]
    sampler = SliceSampler(slice_len=8, traj_key=TRAJECTORIES)
    ndim = batches[0].batch_dims
    buffer = ReplayBuffer(storage=LazyTensorStorage(900, ndim=ndim), sampler=sampler, batch_size=64)
    for batch in batches:
        buffer.extend(batch)
    assert [digest(batch) for batch in batches] == before
    frames = {}
    for batch in batches:
        for frame in batch.reshape(-1):
            frames[int(frame[TRAJECTORIES]), int(frame["collector", "step"])] = frame
    for _ in range(5):
        sample = buffer.sample()
        ids, steps = sample[TRAJECTORIES].reshape(8, 8), sample["collector", "step"].reshape(8, 8)
        assert (ids == ids[:, :1]).all()
        assert (steps == steps[:, :1] + torch.arange(8)).all()
        assert len(ids[:, 0].unique()) > 3
        for row in sample:
            stored = frames[int(row[TRAJECTORIES]), int(row["collector", "step"])]
            for path in leaves(stored).keys() - {("next", "truncated"), ("next", "done")}:  # the sampler's to mark
                assert bits(row[path]) == bits(stored[path]), path


def plain_gae(batch, value, following, gamma, lmbda):
    """Schulman et al. (2016), one frame after another: terminated cuts the value, done cuts the sum."""
    reward, done, terminated = (batch["next", key].double() for key in ("reward", "done", "terminated"))
    delta = reward + gamma * following * (1 - terminated) - value
    advantage = torch.zeros_like(delta)
    for t in reversed(range(batch.shape[-1])):
        later = advantage[..., t + 1, :] if t + 1 < batch.shape[-1] else 0.0
        advantage[..., t, :] = delta[..., t, :] + gamma * lmbda * (1 - done[..., t, :]) * later
    return advantage


def with_advantages(batch, inputs):
    """A critic, by which TorchRL's GAE has added advantages to the batch."""
    critic = ValueOperator(mlp(inputs, 1, seed=1), in_keys=["observation"])
    GAE(gamma=0.99, lmbda=0.95, value_network=critic)(batch)
    return critic


@pytest.mark.parametrize(("one_hot", "num_envs"), [(True, None), (False, 3)])
def test_advantages_and_the_clipped_loss(one_hot, num_envs):
    actor = actor_of(mlp(4, 2), OneHotCategorical if one_hot else torch.distributions.Categorical)
    batch = next(collector(actor, num_envs, one_hot))
    own = {path: bits(leaf) for path, leaf in leaves(batch).items()}
    critic = with_advantages(batch, 4)
    after = leaves(batch)
    assert all(bits(after[path]) == own[path] for path in own)
    with torch.no_grad():
        value, following = (critic.module(batch[path]).double() for path in ("observation", ("next", "observation")))
    assert torch.allclose(batch["advantage"].double(), plain_gae(batch, value, following, 0.99, 0.95), atol=1e-4)
    check_loss(ClipPPOLoss(actor, critic), batch)


def check_loss(loss, batch):
    """The actor that collected is the one that learns: its ratios are 1, every frame counts, gradients flow."""
    answer = loss(batch.reshape(-1))
    assert abs(float(answer["kl_approx"])) < 1e-5
    assert float(answer["clip_fraction"]) == 0
    assert float(answer["ESS"]) == pytest.approx(1, rel=1e-4)  # as a share of all frames
    sum(answer[key] for key in ("loss_objective", "loss_critic", "loss_entropy")).backward()
    assert all(parameter.grad is not None for parameter in loss.parameters())
    assert all(bool(parameter.grad.isfinite().all()) for parameter in loss.parameters())


@pytest.mark.parametrize("num_envs", [None, 3])
def test_our_own_head_feeds_the_loss_of_a_torchrl_actor(num_envs):
    """The same network under `heads.categorical`: the log-probabilities are those that TorchRL recomputes."""
    net = mlp(4, 2)
    batch = next(collector(fc.torch_policy(net, head=fc.heads.categorical), num_envs))
    critic = with_advantages(batch, 4)
    check_loss(ClipPPOLoss(actor_of(net, torch.distributions.Categorical), critic), batch)


@pytest.mark.parametrize("kind", ["actor", "head"])
def test_continuous_actions_feed_the_loss(kind):
    net = nn.Sequential(mlp(3, 2), LocScale())
    bounds = {"low": torch.tensor([-2.0]), "high": torch.tensor([2.0])}
    actor = actor_of(net, TanhNormal, ("loc", "scale"), distribution_kwargs=bounds)
    env = fc.make_env("Pendulum-v1", num_envs=3, max_episode_steps=50)
    policy = actor if kind == "actor" else fc.torch_policy(net, head=fc.heads.tanh_normal)
    batch = next(fc.SyncDataCollector(env, policy, frames_per_batch=600, seed=0))
    critic = with_advantages(batch, 3)
    check_loss(ClipPPOLoss(actor, critic), batch)
