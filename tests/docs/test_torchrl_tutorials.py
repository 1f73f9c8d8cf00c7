"""TorchRL's tutorials of PPO and DQN with our collector in the place of theirs, called by the same line."""

import pytest
import torch
from tensordict.nn import NormalParamExtractor, TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.data import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.envs import Compose, DoubleToFloat, GymEnv, ObservationNorm, StepCounter, TransformedEnv
from torchrl.modules import MLP, EGreedyModule, ProbabilisticActor, QValueModule, TanhNormal, ValueOperator
from torchrl.objectives import ClipPPOLoss, DQNLoss, SoftUpdate
from torchrl.objectives.value import GAE

import funcollect as fc
from tests.support.running import scaled

pytestmark = pytest.mark.filterwarnings(  # what TorchRL 0.14 says of its own classes, and of its next version
    "ignore:Creating .* which inherits from WeightUpdaterBase:DeprecationWarning",
    "ignore:The env passed to Collector is missing transforms:FutureWarning",
)


def mean_length(batch):
    return batch.numel() / max(int(batch["next", "done"].sum()), 1)


def pendulum():
    transforms = Compose(ObservationNorm(in_keys=["observation"]), DoubleToFloat(), StepCounter())
    env = TransformedEnv(GymEnv("InvertedDoublePendulum-v5"), transforms)
    env.transform[0].init_stats(num_iter=500, reduce_dim=0, cat_dim=0)
    return env


def ppo(make_collector, *, batches, seed=0):
    """PPO on 1,000 frames at a time; returns the mean episode length of each batch."""
    torch.manual_seed(seed)
    env = pendulum()
    env.set_seed(seed)
    actions = env.action_spec

    def net(outputs):
        return nn.Sequential(nn.Linear(9, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))

    answer = nn.Sequential(net(2 * actions.shape[-1]), NormalParamExtractor())
    actor = ProbabilisticActor(
        TensorDictModule(answer, ["observation"], ["loc", "scale"]),
        spec=actions,
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        distribution_kwargs={"low": actions.space.low, "high": actions.space.high},
        return_log_prob=True,
    )
    critic = ValueOperator(net(1), in_keys=["observation"])
    advantage = GAE(gamma=0.99, lmbda=0.95, value_network=critic, average_gae=True)
    loss = ClipPPOLoss(actor, critic, clip_epsilon=0.2, entropy_coeff=1e-4, critic_coeff=1.0)
    optimizer = torch.optim.Adam(loss.parameters(), lr=1e-3)
    buffer = ReplayBuffer(storage=LazyTensorStorage(1_000), sampler=SamplerWithoutReplacement(), batch_size=125)
    lengths = []
    collector = make_collector(env, actor, frames_per_batch=1_000, total_frames=1_000 * batches)
    for batch in collector:
        lengths.append(mean_length(batch))
        for _ in range(10):
            advantage(batch)
            buffer.extend(batch.reshape(-1))
            for _ in range(8):
                terms = loss(buffer.sample())
                (terms["loss_objective"] + terms["loss_critic"] + terms["loss_entropy"]).backward()
                nn.utils.clip_grad_norm_(loss.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    collector.shutdown()
    return lengths


def dqn(make_collector, *, batches, seed=0):
    """Deep Q-learning on CartPole, of 100 frames at a time; returns the mean episode length of each batch."""
    torch.manual_seed(seed)
    env = TransformedEnv(GymEnv("CartPole-v1"), StepCounter())
    env.set_seed(seed)
    network = MLP(in_features=4, out_features=env.action_spec.shape[-1], num_cells=[64, 64])
    scores = TensorDictModule(network, ["observation"], ["action_value"])
    value = TensorDictSequential(scores, QValueModule(spec=env.action_spec))
    exploration = EGreedyModule(env.action_spec, annealing_num_steps=5_000, eps_init=0.5)
    loss = DQNLoss(value, action_space=env.action_spec, delay_value=True)
    target = SoftUpdate(loss, eps=0.99)
    optimizer = torch.optim.Adam(loss.parameters(), lr=2e-3)
    buffer = ReplayBuffer(storage=LazyTensorStorage(100_000), batch_size=128)
    lengths, policy = [], TensorDictSequential(value, exploration)
    frames = {"frames_per_batch": 100, "total_frames": 100 * batches, "init_random_frames": 1_000}
    collector = make_collector(env, policy, **frames)
    for batch in collector:
        lengths.append(mean_length(batch))
        buffer.extend(batch)
        if len(buffer) > 1_000:
            for _ in range(10):
                loss(buffer.sample())["loss"].backward()
                optimizer.step()
                optimizer.zero_grad()
                target.step()
            exploration.step(batch.numel())
    collector.shutdown()
    return lengths


def mean(values):
    return sum(values) / len(values)


@pytest.mark.parametrize(("loop", "batches"), [(ppo, 1), (dqn, 12)])
def test_the_loops_run(loop, batches):
    assert all(length > 1 for length in loop(fc.SyncDataCollector, batches=batches))


@pytest.mark.evening
@pytest.mark.parametrize("seed", range(scaled(1)))
def test_ppo_learns(seed):
    """Seen over ten seeds: from 6 to 17 steps at least."""
    lengths = ppo(fc.SyncDataCollector, batches=10, seed=seed)
    assert mean(lengths[-2:]) > 2 * lengths[0]


@pytest.mark.evening
@pytest.mark.parametrize("seed", range(scaled(1)))
def test_dqn_learns(seed):
    """Seen over ten seeds: from 24 to a hundred steps, which is all that a batch holds."""
    lengths = dqn(fc.SyncDataCollector, batches=80, seed=seed)
    assert mean(lengths[-20:]) > 2 * mean(lengths[:10])


@pytest.mark.evening
@pytest.mark.parametrize("loop", [ppo, dqn])
def test_the_loops_are_theirs(loop):
    from torchrl.collectors import Collector

    assert all(length > 1 for length in loop(Collector, batches=2))
