"""`RayCollector` on a cluster of one machine: shapes, bits, weights, collectors that come and go, checkpoints."""

import itertools
import os
import pathlib
from collections import Counter

import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn

import funcollect as fc
from tests.collectors.test_saving import actor, assert_all_same, trained
from tests.support.cases import mlp
from tests.support.compare import assert_same
from tests.support.faulty.faulty_workers import BadInit, Plain, Wide
from tests.support.policies import Count
from tests.support.running import FORKS_OF_RAY, STORE, in_soak, scaled
from tests.support.workers import by_lane, multi, policy_for, ray_collector

SYNC, MULTI, MULTIA = fc.SyncDataCollector, fc.MultiSyncDataCollector, fc.MultiaSyncDataCollector
NESTED = {"collector_class": MULTI, "num_workers_per_collector": 2}
pytestmark = [pytest.mark.usefixtures("ray_cluster"), FORKS_OF_RAY]

# What of [N, K, P, T] with N = K = P = 2 a batch of 48 frames has, and whether its lanes are in it always.
SHAPES = {
    (SYNC, True, None): (2, 24), (SYNC, True, 2): (2, 2, 12),
    (SYNC, False, None): (48,), (SYNC, False, 2): (2, 24),
    (MULTI, True, None): (2, 2, 12), (MULTI, True, 2): (2, 2, 2, 6),
    (MULTI, False, None): (2, 24), (MULTI, False, 2): (2, 2, 12),
    (MULTIA, True, None): (2, 24), (MULTIA, True, 2): (2, 2, 12),
    (MULTIA, False, None): (48,), (MULTIA, False, 2): (2, 24),
}  # fmt: skip


@pytest.mark.evening  # `make test` has the bits of one run in tests/test_frozen.py
@pytest.mark.parametrize(("kind", "sync", "num_envs"), SHAPES)
def test_shapes_and_the_data_of_the_serial_transport(kind, sync, num_envs):
    workers = 1 if kind is SYNC else 2
    policy = policy_for("CartPole-v1", "torch_mlp", num_envs or 1)
    kwargs = {"policy": policy, "create_env_kwargs": {"num_envs": num_envs}, "frames_per_batch": 48}
    of_actors = {"collector_class": kind, "num_workers_per_collector": workers, "num_collectors": 2}
    with ray_collector("CartPole-v1", sync=sync, **of_actors, **kwargs) as collector:
        batches = [batch.clone() for batch in itertools.islice(collector, 4)]
        assert collector.frames_of_batch == 48
    assert {batch.batch_size for batch in batches} == {SHAPES[kind, sync, num_envs]}
    assert not batches[0].is_locked
    with multi(MULTI, "serial", create_env_fn=["CartPole-v1"] * 2 * workers, **kwargs) as collector:
        wanted = [batch.clone() for batch in itertools.islice(collector, 16)]
    if sync and kind is not MULTIA:
        for one, two in zip(batches, wanted, strict=False):
            assert_same(one.flatten(0, 1) if kind is MULTI else one, two)
    whole = by_lane(wanted)
    for lane, rows in by_lane(batches).items():
        assert_same(rows, whole[lane][: len(rows)])


@pytest.mark.evening
@pytest.mark.needs("torchrl")
def test_torchrl_documented_call():
    from torchrl.envs.libs.gym import GymEnv

    from funcollect import RayCollector
    from funcollect import SyncDataCollector as Collector

    env_maker = lambda: GymEnv("Pendulum-v1", device="cpu")  # noqa: E731
    policy = TensorDictModule(nn.Linear(3, 1), in_keys=["observation"], out_keys=["action"])
    distributed_collector = RayCollector(
        create_env_fn=[env_maker], policy=policy, collector_class=Collector, max_frames_per_traj=50,
        init_random_frames=-1, reset_at_each_iter=-False, num_collectors=1, total_frames=10000, frames_per_batch=200,
        collector_kwargs={"device": "cpu", "storing_device": "cpu"},
    )  # fmt: skip
    with distributed_collector:
        batches = [data["collector", "step"].clone() for data in distributed_collector]
    assert [batch.shape for batch in batches] == [(200,)] * 50
    assert torch.cat(batches).tolist() == [*range(50)] * 200


def versions(batch):
    return set(batch["collector", "policy_version"].flatten().tolist())


class Doubled(SYNC):
    def __init__(self, *args, factor, **kwargs):
        super().__init__(*args, **kwargs)
        self.factor = factor

    def rollout(self):
        batch = super().rollout()
        batch["next", "reward"] *= self.factor
        return batch


def begin_at_fifty_and_return_what_cannot_be_sent(lane):
    lane.unwrapped.total = 50
    return (each for each in ())


def test_a_class_of_the_users_own_weights_before_each_batch_and_calls():
    module = nn.Linear(2, 2)
    nn.init.zeros_(module.weight)
    module.bias.data = torch.tensor([1.0, 0.0])
    policy = fc.torch_policy(module, head=fc.heads.greedy)
    kwargs = {"collector_class": Doubled, "collector_kwargs": [{"factor": 2.0}, {"factor": 3.0}], "sync": True}
    with ray_collector(Plain, policy, frames_per_batch=20, update_after_each_batch=True, **kwargs) as collector:
        batch = next(collector)
        assert batch["next", "reward"].amax((1, 2)).tolist() == [2.0, 3.0]
        assert (versions(batch), batch["action"].max()) == ({0}, 0)
        module.bias.data = torch.tensor([0.0, 1.0])
        batch = next(collector)
        assert (versions(batch), batch["action"].min()) == ({1}, 1)
        assert collector.stats()["policy_version"] == 1
        saved = collector.state_dict()
        assert [each["run"]["frames"] for each in saved] == [40, 40]
        ahead = torch.stack([next(collector)["collector", "traj_ids"] for _ in range(2)])
        collector.load_state_dict(saved)
        assert (collector.frames, versions(next(collector))) == (40, {2})
        assert collector.set_seed(3, static_seed=True) == 3
        fresh = next(collector)["collector", "traj_ids"]
        assert not {*fresh.flatten().tolist()} & {*ahead.flatten().tolist()}
        mask = torch.tensor([True, False])
        collector.reset(mask)
        with pytest.raises(ValueError, match=r"expected bool \(2,\)"):
            collector.reset(mask[:1])
        with pytest.raises(TypeError, match="the result of function cannot be sent"):
            collector.apply(begin_at_fifty_and_return_what_cannot_be_sent)
        assert collector.apply(lambda lane: lane.unwrapped.total) == [50, 50]
    collector.shutdown()
    with pytest.raises(fc.ClosedError):
        next(collector)


@pytest.mark.parametrize("interval", [2, *in_soak([None])])
def test_weights_and_memory_of_asynchronous_batches(interval):
    """With an interval each collector is sent weights in time; without one only those that were sent to it act."""
    policy = fc.torch_policy(nn.Linear(2, 2), head=fc.heads.categorical)
    limit = {} if interval is None else {"max_weight_update_interval": interval}
    with ray_collector([Plain] * 2, policy, frames_per_batch=10, **limit) as collector:
        batches = [next(collector).clone() for _ in range(24)]
        if interval is None:
            assert set().union(*map(versions, batches)) == {0}
            collector.update_policy_weights_(worker_ids=1)
            while 1 not in versions(batch := next(collector)):
                batches.append(batch.clone())
            assert set(batch["collector", "lane"].tolist()) == {1}
            return
        sent = collector.get_policy_version()
        counts = Counter(batch["collector", "lane"][0].item() for batch in batches)
        fewest, most = (sum((count - late) // interval for count in counts.values()) for late in (1, 0))
        assert fewest <= sent <= most
        while any(rows["collector", "policy_version"].max() < sent for rows in by_lane(batches).values()):
            batches.append(next(collector).clone())
        kept = [next(collector) for _ in range(8)]  # each in memory of its own
        batches += [batch.clone() for batch in kept]
        assert len({place_of(batch) for batch in kept}) == 8
        del kept
        places = set()
        for _ in range(20):
            batches.append((batch := next(collector)).clone())
            places.add(place_of(batch))
            batch["observation"].zero_()
        assert len(places) <= 4
        assert collector.stats()["copies"] == 0
    for rows in by_lane(batches).values():
        assert rows["collector", "policy_version"].tolist() == sorted(rows["collector", "policy_version"].tolist())
        assert rows["collector", "step"].tolist() == [i % 5 for i in range(len(rows))]


def place_of(batch):
    return batch["observation"].untyped_storage().data_ptr()


def test_weights_by_collector_statistics_beside_weights_sent_in_time_and_one_state_for_all():
    policy = fc.torch_policy(nn.Linear(2, 2), head=fc.heads.categorical)
    with ray_collector([Plain] * 2, policy, sync=True, frames_per_batch=10, max_weight_update_interval=2) as collector:
        next(collector)
        collector.update_policy_weights_({0: policy.params})
        seen = [next(collector)["collector", "policy_version"][:, 0].tolist() for _ in range(3)]
    assert seen == [[1, 0], [1, 2], [3, 2]]
    policy = fc.normalized(policy, fc.running_statistics.init(fc.make_env(Plain).observation_space))
    both = {"update_statistics": True, "update_after_each_batch": True, "trajs_per_batch": 3, "max_frames_per_traj": 9}
    with ray_collector([Plain], policy, frames_per_batch=4, **both) as collector:
        assert [len(next(collector)) for _ in range(2)] == [15, 15]
        (saved,) = collector.state_dict()
    with ray_collector([Plain] * 2, policy, sync=True, frames_per_batch=10) as collector:
        collector.load_state_dict(saved)  # one for all
        assert versions(next(collector)) == {saved["policy_version"]}


def test_collectors_come_and_go():
    policy = fc.torch_policy(nn.Linear(2, 2), head=fc.heads.categorical)
    with ray_collector([Plain], policy, frames_per_batch=10) as collector:
        batches = [next(collector).clone() for _ in range(3)]
        collector.update_policy_weights_()
        assert collector.add_collectors([Plain]) == [1]
        assert collector.num_collectors == 2
        while 1 not in by_lane(batches):
            batches.append(next(collector).clone())
        assert versions(batches[-1]) == {1}
        with pytest.raises(fc.WorkerError, match=r"worker 2 \(actor .* on (no )?node .*stumbled.*the others continue"):
            collector.add_collectors([BadInit])
        with pytest.raises(fc.WorkerError, match=r"no room for collector 3.*asked for \[1 x \(90 CPU\)\]"):
            collector.add_collectors(Plain, remote_configs={"num_cpus": 90})
        collector.remove_collectors(0)
        batches += [next(collector).clone() for _ in range(4)]  # what was in line, two batches of each
        late = [next(collector).clone() for _ in range(3)]
        assert by_lane(late).keys() == {1}
        batches += late
        with pytest.raises(ValueError, match=r"expected numbers of \[1\]"):
            collector.remove_collectors(0)
        with pytest.raises(ValueError, match="expected one to stay"):
            collector.remove_collectors(1)
    rows = by_lane(batches)
    for lane, first in ((0, 0), (1, 1 << 40)):
        assert rows[lane]["collector", "step"].tolist() == [i % 5 for i in range(len(rows[lane]))]
        assert rows[lane]["collector", "traj_ids"].tolist() == [first + i // 5 for i in range(len(rows[lane]))]


@pytest.mark.evening
def test_newcomers_have_the_weights_that_were_loaded():
    """Not those of the last update, which came after what was loaded had been saved."""
    policy = fc.torch_policy(nn.Linear(2, 2), head=fc.heads.categorical)
    with ray_collector([Plain], policy, frames_per_batch=10) as collector:
        saved = collector.state_dict()
        collector.update_policy_weights_()
        collector.load_state_dict(saved)
        collector.add_collectors([Plain])
        while 1 not in (batch := next(collector))["collector", "lane"]:
            pass
        assert versions(batch) == {0}
        collector.remove_collectors(0)
        with pytest.raises(ValueError, match=r"places \[\[0, 1\]\] .*these have \[\[1, 1\]\].*used twice"):
            collector.load_state_dict(saved)


@pytest.mark.evening
def test_newcomers_have_the_seed_that_was_set_and_devices_of_their_own():
    def make():
        torch.manual_seed(0)
        return fc.torch_policy(nn.Linear(4, 2), head=fc.heads.categorical)

    own = {"policy_factory": [make, make], "storing_device": ["cpu", "meta"], "device": ["cpu"] * 2}
    with ray_collector("CartPole-v1", frames_per_batch=10, **own) as collector:
        assert collector.num_collectors == 2
        assert collector.set_seed(7, static_seed=True) == 7
        with pytest.raises(ValueError, match="policy_factory lists those of the first collectors: pass a policy"):
            collector.add_collectors("CartPole-v1")
        collector.add_collectors("CartPole-v1", policy=make())
        first = {}
        while first.keys() != {0, 1, 2}:
            batch = next(collector)
            first.setdefault(*collector.run.gathered, batch)
    assert [first[worker].device for worker in range(3)] == [torch.device("cpu"), torch.device("meta"), None]
    with fc.SyncDataCollector("CartPole-v1", make(), frames_per_batch=10, seed=7, shard=fc.Shard(2, 2)) as collector:
        assert_same(first[2], next(collector))


@pytest.mark.evening
def test_a_synchronous_run_grows_and_shrinks():
    with ray_collector(Plain, sync=True, prefetch=True, frames_per_batch=10) as collector:
        shapes = [next(collector).shape]
        collector.add_collectors([Plain])
        assert collector.frames_of_batch == 20
        batches = [next(collector).clone() for _ in range(2)]
        collector.remove_collectors(0)
        batches += [next(collector).clone() for _ in range(2)]
        shapes += [batch.shape for batch in batches]
    assert shapes == [(1, 10), (1, 10), (2, 10), (2, 10), (1, 10)]
    assert batches[-1]["collector", "lane"].unique().tolist() == [1]


def resident(process):
    """MiB of a process that are its own."""
    with open(f"/proc/{process}/statm") as file:
        _, whole, shared, *_ = map(int, file.read().split())
    return (whole - shared) * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.mark.evening
def test_memory_stays_flat(ray_cluster):
    """More goes through the object store than it holds; neither it nor a process keeps any."""
    with ray_collector([Wide], frames_per_batch=8) as collector:
        processes = [os.getpid(), int(collector.run.records[0].handle.label.split()[-1])]
        batches = scaled(200)
        for index, _ in enumerate(itertools.islice(collector, batches)):
            if index == batches // 10:
                before = [resident(process) for process in processes]
        assert collector.frames * Wide.SIZE > 2 * STORE
        after = [resident(process) for process in processes]
    assert all(late < early + 20 for early, late in zip(before, after, strict=True)), (before, after)
    spilled = pathlib.Path(ray_cluster._private.worker.global_worker.node.get_session_dir_path())
    assert not [*spilled.glob("ray_spilled_objects*/*")]


@pytest.mark.parametrize("nested", [True, *in_soak([False])])
def test_a_saved_run_continues_bit_for_bit(nested, tmp_path):
    policy, own = actor(), NESTED if nested else {}
    sources = [lambda: fc.make_env("CartPole-v1", num_envs=2)] * (1 if nested else 2)
    with ray_collector(sources, policy, frames_per_batch=80, sync=True, prefetch=True, **own) as collector:
        trained(collector, policy, range(3))
        collector.save(tmp_path / "run")
        wanted = trained(collector, policy, range(7, 10))
        collector.restore(tmp_path / "run")  # with the weights that the workers had
        assert collector.frames == 3 * 80
        assert_all_same(wanted, trained(collector, policy, range(7, 10)))
        with pytest.raises(ValueError, match="this is a SyncDataCollector: use that class"):
            fc.SyncDataCollector.load(tmp_path / "run", sources[0], policy)
        collector._set(collector_kwargs={"set_truncated": True})  # as that of another run
        with pytest.raises(ValueError, match=r"collector_kwargs are .*set_truncated.*, but .* in the saved run"):
            collector.restore(tmp_path / "run")


def test_a_policy_finds_what_it_wrote_at_the_step_before():
    kwargs = {"frames_per_batch": 40, "total_frames": 80, "max_frames_per_traj": 12}
    with ray_collector(["CartPole-v1"], Count(), **kwargs) as collector:
        for batch in collector:
            later = batch["collector", "traj_ids"] % 2**40 > 0
            assert batch.names[-1] == "time"
            assert torch.equal(batch["count"], batch["collector", "step"] + later.long())


@pytest.mark.evening
@pytest.mark.parametrize(("envs", "own"), [(["CartPole-v1"] * 2, {}), (["CartPole-v1"], NESTED)])
def test_statistics_and_a_schedule(envs, own):

    def policy():
        stats = fc.running_statistics.init(fc.make_env("CartPole-v1").observation_space)
        return fc.normalized(fc.torch_policy(mlp(4, 2), head=fc.heads.epsilon_greedy(0.1)), stats)

    kwargs = {"frames_per_batch": 40, "total_frames": 120, "update_statistics": True}
    kwargs["exploration"] = {"epsilon": lambda frames: 1 - frames / 100}
    here, there = policy(), policy()
    with (
        multi(MULTI, "serial", create_env_fn=["CartPole-v1"] * 2, policy=here, **kwargs) as one,
        ray_collector(envs, there, sync=True, **kwargs, **own) as two,
    ):
        for batch, other in zip(one, two, strict=True):
            assert_same(batch.flatten(), other.flatten())
    assert int(there.statistics.count) == 120
    assert torch.equal(here.statistics.mean["observation"], there.statistics.mean["observation"])
