"""The calls that TorchRL's documents make, with only the imports changed; each in a test of its own."""

import itertools

import gymnasium
import pytest
import torch
from tensordict.nn import TensorDictModule
from torchrl.envs import GymEnv, ParallelEnv, SerialEnv
from torchrl.envs.utils import RandomPolicy

import funcollect as fc
from tests.support.running import SCALE, in_soak

pytestmark = pytest.mark.filterwarnings("ignore:Exporting a model while:UserWarning")
N = 48
KEYS = ("collector", "traj_ids")
MultiSync, MultiaSync = fc.MultiSyncDataCollector, fc.MultiaSyncDataCollector
LazyTensorStorage, SliceSampler = fc.storages.LazyTensorStorage, fc.samplers.SliceSampler


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
    env = GymEnv(name) if lanes is None else SerialEnv(lanes, lambda: GymEnv(name))
    for policy in (random_policy(env), lambda td, env=env: env.rand_action(td)):
        with fc.SyncDataCollector(env, policy, frames_per_batch=20, total_frames=20) as collector:
            (batch,) = collector
        assert batch.batch_size == ((20,) if lanes is None else (2, 10))
        assert (batch["action"] != batch["action"][..., :1, :]).any()
        env = GymEnv(name) if lanes is None else SerialEnv(lanes, lambda: GymEnv(name))


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


# Collectors and replay buffers.


def one(frames, **kwargs):
    env = make_env()
    return fc.SyncDataCollector(env, random_policy(env), frames_per_batch=frames, total_frames=-1, **kwargs)


def collected(collector, storage, **options):
    buffer = fc.ReplayBuffer(storage=storage, batch_size=16, **options)
    with collector:
        data = next(collector).clone()
        buffer.extend(data)
    return data, buffer.sample()


def test_any_collector_flat():
    data, sample = collected(one(N), LazyTensorStorage(N), transform=lambda data: data.reshape(-1))
    assert (data.batch_size, sample.batch_size) == ((N,), (16,))


STACKED = {"total_frames": -1, "cat_results": "stack"}
FOUR = STACKED | {"frames_per_batch": 4 * N}
SLICED = {  # a collector, and the shape of its batch
    "one": (lambda: one(N), (N,)),
    "async": (lambda: MultiaSync([make_env] * 2, None, frames_per_batch=N, total_frames=-1), (N,)),
    "workers": (lambda: MultiSync([make_env] * 2, None, frames_per_batch=2 * N, **STACKED), (2, N)),
    "parallel": (lambda: fc.SyncDataCollector(ParallelEnv(2, make_env), None, frames_per_batch=2 * N), (2, N)),
    # One live environment stands for all workers: each builds its own.
    "each parallel": (lambda: MultiSync([ParallelEnv(2, make_env)] * 2, None, **FOUR), (2, 2, N)),
}


@pytest.mark.parametrize("case", [*SLICED] if SCALE > 1 else [*SLICED][:2])
def test_slices(case):
    make, shape = SLICED[case]
    storage = LazyTensorStorage(4 * N, ndim=len(shape))
    data, sample = collected(make(), storage, sampler=SliceSampler(num_slices=4, trajectory_key=KEYS))
    assert data.batch_size == shape
    assert len(shape) == 1 or (data["observation"][0] != data["observation"][1]).any()
    slices = sample.reshape(4, 4)
    ids, steps = slices[KEYS], slices["collector", "step"]
    assert (ids == ids[:, :1]).all()
    assert torch.equal(steps, steps[:, :1] + torch.arange(4))


LIVE = {
    "GymEnv": make_env,
    "SerialEnv": lambda: SerialEnv(2, make_env),
    "gymnasium": lambda: gymnasium.make("HalfCheetah-v5"),
}


@pytest.mark.parametrize("kind", ["GymEnv", *in_soak(["SerialEnv", "gymnasium"])])
def test_other_live_environments_for_several_workers(kind):
    env = LIVE[kind]()
    with MultiSync([env] * 2, None, frames_per_batch=40, total_frames=80, cat_results="stack") as collector:
        for batch in collector:
            assert batch.batch_size[0] == 2
            assert (batch["observation"][0] != batch["observation"][1]).any()


@pytest.mark.parametrize("frames", [0, 50, 60, 101])
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
