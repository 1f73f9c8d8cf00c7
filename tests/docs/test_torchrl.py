"""The calls that TorchRL's documents and tutorials make, with only the imports changed, and uses of a batch."""

import itertools

import gymnasium
import pytest
import torch
from tensordict.nn import NormalParamExtractor, TensorDictModule, TensorDictSequential
from torch import nn
from torchrl import envs, modules
from torchrl.data import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement, SliceSampler
from torchrl.envs import GymEnv, ParallelEnv, SerialEnv, TransformedEnv
from torchrl.envs.utils import RandomPolicy
from torchrl.modules import OneHotCategorical, ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import ClipPPOLoss, DQNLoss, SoftUpdate
from torchrl.objectives.value import GAE

import funcollect as fc
from tests.support.cases import LocScale, mlp
from tests.support.compare import bits, digest, leaves
from tests.support.running import SCALE, in_soak, scaled

pytestmark = pytest.mark.filterwarnings(
    "ignore:Exporting a model while:UserWarning",
    "ignore:Creating .* which inherits from WeightUpdaterBase:DeprecationWarning",  # of TorchRL 0.14
    "ignore:The env passed to Collector is missing transforms:FutureWarning",
)
N = 48
KEYS = ("collector", "traj_ids")
MultiSync, MultiaSync = fc.MultiSyncDataCollector, fc.MultiaSyncDataCollector


def make_env():
    return GymEnv("CartPole-v1")


def random_policy(env):
    return RandomPolicy(env.action_spec)


FLAGS = [(*path, flag) for path in ((), ("next",)) for flag in ("done", "terminated", "truncated")]
WANTED = {("action",): ((200, 2), torch.int64), KEYS: ((200,), torch.int64)}
WANTED |= dict.fromkeys([("observation",), ("next", "observation")], ((200, 4), torch.float32))
WANTED |= {("next", "reward"): ((200, 1), torch.float32), **dict.fromkeys(FLAGS, ((200, 1), torch.bool))}


def test_the_tutorial_of_data_collection_and_storage_in_its_order():
    env = make_env()
    env.set_seed(0)
    with fc.SyncDataCollector(env, random_policy(env), frames_per_batch=200, total_frames=-1) as collector:
        data = next(collector)
        assert data.batch_size == (200,)
        for key, (shape, dtype) in WANTED.items():
            assert (tuple(data[key].shape), data[key].dtype) == (shape, dtype), key
        assert (data["action"].sum(-1) == 1).all()
        ids = data[KEYS].tolist()
        assert sorted(set(ids)) == list(range(max(ids) + 1))
        buffer = fc.ReplayBuffer(storage=fc.storages.LazyMemmapStorage(max_size=1000))
        indices = buffer.extend(data)
        assert len(indices) == len(buffer) == collector.frames_per_batch
        sample = buffer.sample(batch_size=30)
        assert sample.batch_size == (30,)
        assert sample.device == torch.device("cpu")
        assert {key for key in WANTED if key in sample.keys(True, True)} == set(WANTED)
        buffer = fc.ReplayBuffer(storage=fc.storages.LazyMemmapStorage(max_size=1000), batch_size=30)
        buffer.extend(data)
        assert [sample.batch_size for sample in itertools.islice(buffer, 3)] == [(30,)] * 3


@pytest.mark.parametrize(("name", "lanes"), [("CartPole-v1", None), ("Pendulum-v1", 2)])
def test_random_policies_of_torchrl(name, lanes):
    for policy_of in (random_policy, lambda env: lambda td: env.rand_action(td)):
        env = GymEnv(name) if lanes is None else SerialEnv(lanes, lambda: GymEnv(name))
        with fc.SyncDataCollector(env, policy_of(env), frames_per_batch=20, total_frames=20) as collector:
            (batch,) = collector
        assert batch.batch_size == ((20,) if lanes is None else (2, 10))
        assert (batch["action"] != batch["action"][..., :1, :]).any()


@pytest.mark.parametrize(
    ("name", "way"), [("CartPole-v1", None), ("torch/CartPole-v1", None), ("gymnax/CartPole-v1", "xla")]
)
def test_a_policy_over_a_single_environment_sees_no_batch_dimension(name, way):
    def third(observation):
        assert observation.ndim == 1
        return (observation[2] > 0).long()

    env = fc.make_env(name)
    policy = fc.tensordict_policy(TensorDictModule(third, ["observation"], ["action"]), compile=way)
    state, batch = fc.rollout(env, policy, fc.init(env, policy, seed=0), 20)
    assert torch.equal(batch["action"], batch["observation"][:, 2].gt(0).long())
    fc.close(state)


def one(frames):
    env = make_env()
    return fc.SyncDataCollector(env, random_policy(env), frames_per_batch=frames, total_frames=-1)


TWO = {"total_frames": -1, "cat_results": "stack", "frames_per_batch": 2 * N}
FOUR = TWO | {"frames_per_batch": 4 * N}
SLICED = {  # a collector, and the shape of its batch; one live environment stands for all workers: each builds its own
    "one": (lambda: one(N), (N,)),
    "live": (lambda: MultiSync([make_env()] * 2, None, **TWO), (2, N)),
    "live, in Gymnasium": (lambda: MultiSync([gymnasium.make("HalfCheetah-v5")] * 2, None, **TWO), (2, N)),
    "live serial": (lambda: MultiSync([SerialEnv(2, make_env)] * 2, None, **FOUR), (2, 2, N)),
    "live parallel": (lambda: MultiSync([ParallelEnv(2, make_env)] * 2, None, **FOUR), (2, 2, N)),
    "parallel": (lambda: fc.SyncDataCollector(ParallelEnv(2, make_env), None, frames_per_batch=2 * N), (2, N)),
    "async": (lambda: MultiaSync([make_env] * 2, None, frames_per_batch=N, total_frames=-1), (N,)),
}


@pytest.mark.parametrize("case", [*SLICED] if SCALE > 1 else [*SLICED][:2])
def test_slices(case):
    make, shape = SLICED[case]
    storage, sampler = fc.LazyTensorStorage(4 * N, ndim=len(shape)), fc.SliceSampler(num_slices=4, trajectory_key=KEYS)
    buffer = fc.ReplayBuffer(storage=storage, sampler=sampler, batch_size=16)
    with make() as collector:
        data = next(collector)
        buffer.extend(data)
        assert data.batch_size == shape
        assert len(shape) == 1 or (data["observation"][0] != data["observation"][1]).any()
    slices = buffer.sample().reshape(4, 4)
    ids, steps = slices[KEYS], slices["collector", "step"]
    assert (ids == ids[:, :1]).all()
    assert torch.equal(steps, steps[:, :1] + torch.arange(4))


@pytest.mark.parametrize("frames", [0, 60, *in_soak([50, 101])])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # of TorchRL about its next version
@pytest.mark.filterwarnings("ignore:init_random_frames .* is not exactly a multiple:UserWarning")
def test_as_many_frames_are_random_as_in_torchrls_collector(frames):
    from torchrl.collectors import Collector

    def right(td):
        return td.set("action", torch.ones(td.batch_size, dtype=torch.int64))

    def counted(kind, **kwargs):
        env = GymEnv("CartPole-v1", categorical_action_encoding=True)
        collector = kind(env, right, frames_per_batch=50, total_frames=300, init_random_frames=frames, **kwargs)
        random = sum(batch.numel() for batch in collector if not batch["action"].all())
        collector.shutdown()
        return random

    assert counted(fc.SyncDataCollector) == counted(Collector, trust_policy=True) == -(-frames // 50) * 50


def actor_of(net, distribution, keys=("logits",), **kwargs):
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
    sampler = SliceSampler(slice_len=8, traj_key=KEYS)
    ndim = batches[0].batch_dims
    buffer = ReplayBuffer(storage=LazyTensorStorage(900, ndim=ndim), sampler=sampler, batch_size=64)
    for batch in batches:
        buffer.extend(batch)
    assert [digest(batch) for batch in batches] == before
    frames = {}
    for batch in batches:
        for frame in batch.reshape(-1):
            frames[int(frame[KEYS]), int(frame["collector", "step"])] = frame
    for _ in range(5):
        sample = buffer.sample()
        ids, steps = sample[KEYS].reshape(8, 8), sample["collector", "step"].reshape(8, 8)
        assert (ids == ids[:, :1]).all()
        assert (steps == steps[:, :1] + torch.arange(8)).all()
        assert len(ids[:, 0].unique()) > 3
        for row in sample:
            stored = frames[int(row[KEYS]), int(row["collector", "step"])]
            for path in leaves(stored).keys() - {("next", "truncated"), ("next", "done")}:  # the sampler's to mark
                assert bits(row[path]) == bits(stored[path]), path


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
        values = (critic.module(batch[path]) for path in ("observation", ("next", "observation")))
        torch.testing.assert_close(batch["advantage"], fc.gae(batch, *values)[0], rtol=0, atol=1e-4)
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


def test_our_own_head_feeds_the_loss_of_a_torchrl_actor():
    """The same network under `heads.categorical`: the log-probabilities are those that TorchRL recomputes."""
    net = mlp(4, 2)
    batch = next(collector(fc.torch_policy(net, head=fc.heads.categorical), 3))
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
    check_loss(ClipPPOLoss(actor, with_advantages(batch, 3)), batch)


# TorchRL's tutorials of PPO and DQN with our collector in the place of theirs, called by the same line.


def mean_length(batch):
    return batch.numel() / max(int(batch["next", "done"].sum()), 1)


def pendulum():
    transforms = envs.Compose(envs.ObservationNorm(in_keys=["observation"]), envs.DoubleToFloat(), envs.StepCounter())
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
    env = TransformedEnv(GymEnv("CartPole-v1"), envs.StepCounter())
    env.set_seed(seed)
    network = modules.MLP(in_features=4, out_features=env.action_spec.shape[-1], num_cells=[64, 64])
    scores = TensorDictModule(network, ["observation"], ["action_value"])
    value = TensorDictSequential(scores, modules.QValueModule(spec=env.action_spec))
    exploration = modules.EGreedyModule(env.action_spec, annealing_num_steps=5_000, eps_init=0.5)
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
