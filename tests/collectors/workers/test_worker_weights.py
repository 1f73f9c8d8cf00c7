"""Weights on their way to workers: the latest ones, whole, in order, and not too late.

Those of JAX are in `test_own_weights.py`.
"""

import functools
import itertools

import pytest
import torch

from tests.support.faulty.faulty_workers import Failing, Plain, stumble
from tests.support.running import LOSES_WORKERS, once, scaled
from tests.support.workers import COLLECTORS, TRANSPORTS, by_lane, check_trajectories, multi

SYNC, ASYNC = COLLECTORS
SIZE = 40_000  # numbers: large enough that a copy could be seen half-way


class Checksum(torch.nn.Module):
    """Records the smallest and the largest of its weights, which are all equal in every version."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(SIZE))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, observation):
        extremes = torch.stack([self.weight.min(), self.weight.max(), self.count.float()]).expand(len(observation), 3)
        return {"action": torch.zeros(len(observation), dtype=torch.int64), "extremes": extremes}

    def become(self, version):
        with torch.no_grad():
            self.weight.fill_(version)
            self.count.fill_(version)


def versions_of(batch):
    """The versions in a batch, each shown to be whole."""
    version = batch["collector", "policy_version"]
    assert torch.equal(batch["extremes"], version.unsqueeze(-1).expand(*version.shape, 3).float())
    return sorted(set(version.flatten().tolist()))


@pytest.mark.parametrize(
    ("transport", "how"), once(TRANSPORTS[::-1], [{}, {"prefetch": True}, {"update_at_each_batch": True}])
)
def test_every_row_of_a_synchronous_batch_has_the_weights_set_before(transport, how):
    module, kwargs = Checksum(), {"create_env_fn": ["CartPole-v1"] * 2, "frames_per_batch": 20}
    with multi(SYNC, transport, policy=module, **kwargs, **how) as collector:
        for version, wanted in enumerate([0, 0, 1, 2, 3] if "prefetch" in how else range(5), 1):
            assert versions_of(next(collector)) == [wanted]
            assert collector.stats()["policy_lag"] == (version - 1 - wanted)
            module.become(version)
            if "update_at_each_batch" not in how:
                collector.update_policy_weights_()


@pytest.mark.parametrize("kind", COLLECTORS)
def test_a_tight_loop_of_updates_is_never_read_half_way(kind):
    module = Checksum()
    seen = {0: [0], 1: [0]}
    with multi(kind, create_env_fn=["CartPole-v1"] * 2, policy=module, frames_per_batch=40) as collector:
        for version in itertools.count(1):
            module.become(version)
            collector.update_policy_weights_()
            if version % 10 == 0:
                batch = next(collector)
                versions_of(batch)
                lanes, numbers = (batch["collector", name].flatten() for name in ("lane", "policy_version"))
                for lane in set(lanes.tolist()):
                    (number,) = set(numbers[lanes == lane].tolist())
                    assert number >= seen[lane][-1]
                    seen[lane].append(number)
            if version >= scaled(500) and min(len(set(numbers)) for numbers in seen.values()) > scaled(20):
                break  # however slow one is, each has taken new weights again and again


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_workers_that_make_their_own_policy(transport):
    kwargs = {"create_env_fn": ["CartPole-v1"] * 2, "frames_per_batch": 20, "policy_factory": [Checksum, Checksum]}
    with multi(SYNC, transport, **kwargs) as collector:
        assert versions_of(next(collector)) == [0]
        new = Checksum()
        new.become(1)
        collector.update_policy_weights_(dict(new.state_dict()))
        assert versions_of(next(collector)) == [1]
        with pytest.raises(ValueError, match="params differ from the policy's own:"):
            collector.update_policy_weights_({"count": torch.zeros(())})
        assert versions_of(next(collector)) == [1]


@pytest.mark.parametrize(("transport", "kind"), once(TRANSPORTS, COLLECTORS))
def test_what_was_ready_before_loading_is_not_delivered_after_it(transport, kind):
    kwargs = {"create_env_fn": ["CartPole-v1"] * 2, "frames_per_batch": 40}
    kwargs |= {"prefetch": True} if kind is SYNC else {}
    with multi(kind, transport, policy=Checksum(), **kwargs) as collector:
        next(collector)
        first = collector.state_dict()
        collector.update_policy_weights_()
        for _ in range(6):
            next(collector)
        collector.load_state_dict(first)
        assert collector.stats()["policy_version"] == 0
        for _ in range(6):
            assert set(next(collector)["collector", "policy_version"].flatten().tolist()) == {0}


def seen_by(collector, batches=6):
    """The version that each lane acts with, once every worker has delivered; each is shown to be whole."""
    seen = {}
    while batches or len(seen) < 2:
        batch, batches = next(collector), max(batches - 1, 0)
        versions_of(batch)
        rows = zip(batch["collector", "lane"].flatten(), batch["collector", "policy_version"].flatten(), strict=True)
        seen |= {int(lane): int(version) for lane, version in rows}
    return seen


@pytest.mark.parametrize(("transport", "kind"), once(TRANSPORTS, COLLECTORS))
def test_a_state_is_saved_with_the_latest_weights_and_those_of_each_worker(kind, transport):
    module, kwargs = Checksum(), {"create_env_fn": ["CartPole-v1"] * 2, "frames_per_batch": 40}
    with multi(kind, transport, policy=module, **kwargs) as collector:
        next(collector)
        for version in range(1, 8):
            module.become(version)
            collector.update_policy_weights_(worker_ids=None if version < 7 else [1])
        with pytest.raises(ValueError, match="worker_ids"):
            collector.update_policy_weights_(worker_ids=[2])
        saved = collector.state_dict()
    other = Checksum()
    with multi(kind, transport, policy=other, seed=9, **kwargs) as collector:
        collector.load_state_dict(saved)
        assert (collector.frames, collector.seed) == (saved["frames"], 0)
        assert seen_by(collector) == {0: 6, 1: 7}
        assert float(other.weight.detach()[0]) == 7
        other.become(8)
        collector.update_policy_weights_()
        while seen_by(collector) != {0: 8, 1: 8}:
            pass


@pytest.mark.parametrize(("transport", "given"), once(TRANSPORTS, ["policy", "policy_factory"]))
@LOSES_WORKERS
def test_a_worker_that_is_replaced_after_loading_has_the_weights_that_were_loaded(given, transport, tmp_path):
    def collector_of(*envs):
        policy = {"policy": Checksum()} if given == "policy" else {"policy_factory": Checksum}
        return multi(SYNC, transport, create_env_fn=list(envs), frames_per_batch=40, on_failure="restart", **policy)

    def update(collector, version):
        new = Checksum()
        new.become(version)
        collector.update_policy_weights_(dict(new.state_dict()))

    with collector_of(Plain, Plain) as collector:
        update(collector, 1)
        next(collector)
        saved = collector.state_dict()
    once = str(tmp_path / "once")
    with collector_of(Plain, functools.partial(Failing, stumble, at=50, once=once)) as collector:
        update(collector, 1)
        update(collector, 2)
        next(collector)
        collector.load_state_dict(saved)
        assert seen_by(collector) == {0: 1, 1: 1}
        assert collector.stats()["restarts"] == 1


# How far asynchronous workers may be ahead of the reader: in versions of the weights, and in unread batches.
THREE = {"create_env_fn": ["CartPole-v1"] * 3, "frames_per_batch": 10}


def lags(collector, count, updates):
    """Batches, and the versions that each was behind as it was delivered."""
    found, batches = [], []
    for _ in range(count):
        batches.append(next(collector).clone())
        found.append(collector.get_policy_version() - int(batches[-1]["collector", "policy_version"].min()))
        for _ in range(updates):
            collector.update_policy_weights_()
    return found, batches


@pytest.mark.parametrize(("transport", "bound"), once(TRANSPORTS, [(0, 1), (1, 1), (4, 1), (4, 2), (2, 3)]))
def test_no_batch_is_older_than_the_bound_and_none_is_lost(transport, bound):
    most, updates = bound
    with multi(ASYNC, transport, policy=Checksum(), max_policy_lag=most, **THREE) as collector:
        found, batches = lags(collector, 24, updates)
        assert max(found) <= most
        assert collector.frames == 240
    assert by_lane(batches).keys() == {0, 1, 2}  # each worker had its turn
    check_trajectories(batches)


@pytest.mark.parametrize(("most", "updates", "waiting"), [(3, 1, 3), (100, 0, 6)])
def test_workers_are_not_held_back_needlessly(most, updates, waiting):
    with multi(ASYNC, "serial", policy=Checksum(), max_policy_lag=most, **THREE) as collector:
        lags(collector, 8, updates)
        assert len(collector.run._waiting()) == waiting


@pytest.mark.parametrize(("transport", "most"), once(TRANSPORTS, [1, 4]))
def test_so_many_batches_of_a_worker_wait_unread(most, transport):
    with multi(ASYNC, transport, policy=Checksum(), max_unread=most, **THREE) as collector:
        run, unread = collector.run, []
        for _ in range(6):
            next(collector)
        while min(unread, default=0) < most:  # a late worker has begun fewer when the last batch is read
            run._advance(most)
            run.settle()
            waiting = [each.workers[0] for each in run.ready]
            unread = [waiting.count(worker) for worker in range(3)]
        assert unread == [most] * 3
        assert collector.run.copies == 0


def test_a_saved_run_keeps_to_the_bound(tmp_path):
    with multi(ASYNC, policy=Checksum(), max_policy_lag=2, **THREE) as collector:
        lags(collector, 6, 1)
        collector.save(tmp_path / "run")
        assert max(lags(collector, 6, 1)[0]) <= 2
    with ASYNC.load(tmp_path / "run", THREE["create_env_fn"], Checksum()) as collector:
        assert max(lags(collector, 6, 1)[0]) <= 2


def test_single_workers_get_no_weights_of_their_own():
    refused = pytest.raises(ValueError, match="max_policy_lag is 2, so all workers get the same weights")
    with multi(ASYNC, "serial", policy=Checksum(), max_policy_lag=2, **THREE) as collector, refused:
        collector.update_policy_weights_(worker_ids=[0])
