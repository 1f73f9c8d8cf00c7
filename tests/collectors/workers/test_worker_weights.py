"""Weights on their way to workers: the latest ones, whole, in order, for Torch and for JAX."""

import functools
import itertools

import jax.numpy as jnp
import pytest
import torch

import funcollect as fc
from tests.support.faulty.faulty_workers import Failing, Plain, stumble
from tests.support.running import LOSES_WORKERS, scaled
from tests.support.workers import COLLECTORS, TRANSPORTS, multi

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


def jax_checksum():
    def apply(params, observation):
        extremes = jnp.stack([params["w"].min(), params["w"].max(), params["count"]])
        action = jnp.zeros(observation.shape[0], jnp.int32)
        return {"action": action, "extremes": jnp.broadcast_to(extremes, (observation.shape[0], 3))}

    return fc.jax_policy(apply, {"w": jnp.zeros(SIZE), "count": jnp.zeros(())})


def versions_of(batch):
    """The versions in a batch, each shown to be whole."""
    version = batch["collector", "policy_version"]
    assert torch.equal(batch["extremes"], version.unsqueeze(-1).expand(*version.shape, 3).float())
    return sorted(set(version.flatten().tolist()))


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    ("how", "seen"),
    [({}, [0, 1, 2, 3, 4]), ({"prefetch": True}, [0, 0, 1, 2, 3]), ({"update_at_each_batch": True}, [0, 1, 2, 3, 4])],
)
def test_every_row_of_a_synchronous_batch_has_the_weights_set_before(how, seen, transport):
    """With prefetch those that were set one batch earlier."""
    module, kwargs = Checksum(), {"create_env_fn": ["CartPole-v1"] * 2, "frames_per_batch": 20}
    with multi(SYNC, transport, policy=module, **kwargs, **how) as collector:
        for version, wanted in enumerate(seen, 1):
            assert versions_of(next(collector)) == [wanted]
            assert collector.stats()["policy_lag"] == (version - 1 - wanted)
            module.become(version)
            if "update_at_each_batch" not in how:
                collector.update_policy_weights_()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("kind", COLLECTORS)
def test_weights_of_a_jax_policy_and_of_some_workers(kind, transport):
    with multi(kind, transport, create_env_fn=["CartPole-v1"] * 2, policy=jax_checksum(), frames_per_batch=20) as c:
        c.update_policy_weights_({"w": jnp.full(SIZE, 1.0), "count": jnp.ones(())})
        c.update_policy_weights_({"w": jnp.full(SIZE, 2.0), "count": jnp.full((), 2.0)}, worker_ids=[1])
        seen = {}
        while seen != {0: 1, 1: 2}:  # an asynchronous worker may still act with the weights before, or compile
            batch = next(c)
            for version in versions_of(batch):
                rows = batch["collector", "policy_version"] == version
                seen |= dict.fromkeys(batch["collector", "lane"][rows].tolist(), version)
        for params, match in (({"w": jnp.zeros(3)}, "params differ"), ({}, "params differ")):
            with pytest.raises(ValueError, match=match):
                c.update_policy_weights_(params)
        with pytest.raises(ValueError, match="worker_ids"):
            c.update_policy_weights_(worker_ids=[2])


@pytest.mark.parametrize("kind", COLLECTORS)
def test_a_tight_loop_of_updates_is_never_read_half_way(kind):
    """Versions never go back, and no worker starves."""
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
            if version >= scaled(1000) and min(len(set(numbers)) for numbers in seen.values()) > scaled(20):
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


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_saved_run_goes_on_with_its_weights_in_another_collector(transport):
    module, kwargs = Checksum(), {"create_env_fn": ["CartPole-v1"] * 2, "frames_per_batch": 40}
    with multi(SYNC, transport, policy=module, **kwargs) as collector:
        module.become(1)
        collector.update_policy_weights_()
        before = [batch.clone() for batch in itertools.islice(collector, 2)]
        saved = collector.state_dict()
        assert versions_of(next(collector)) == [1]  # it goes on as if nothing had been asked
    other = Checksum()
    with multi(SYNC, transport, policy=other, seed=9, **kwargs) as collector:
        next(collector)
        collector.load_state_dict(saved)
        assert (collector.frames, collector.seed) == (80, 0)
        after = next(collector)
        assert versions_of(after) == [1]
        assert float(other.weight.detach()[0]) == 1
    ids = {identity for batch in before for identity in batch["collector", "traj_ids"].flatten().tolist()}
    assert not ids & set(after["collector", "traj_ids"].flatten().tolist())


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("kind", "more"), [(SYNC, {"prefetch": True}), (ASYNC, {})])
def test_what_was_ready_before_loading_is_not_delivered_after_it(kind, more, transport):
    kwargs = {"create_env_fn": ["CartPole-v1"] * 2, "frames_per_batch": 40, **more}
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


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("kind", COLLECTORS)
def test_a_state_is_saved_with_the_latest_weights_and_those_of_each_worker(kind, transport):
    module, kwargs = Checksum(), {"create_env_fn": ["CartPole-v1"] * 2, "frames_per_batch": 40}
    with multi(kind, transport, policy=module, **kwargs) as collector:
        next(collector)
        for version in range(1, 8):
            module.become(version)
            collector.update_policy_weights_(worker_ids=None if version < 7 else [1])
        saved = collector.state_dict()
    other = Checksum()
    with multi(kind, transport, policy=other, **kwargs) as collector:
        collector.load_state_dict(saved)
        assert seen_by(collector) == {0: 6, 1: 7}
        assert float(other.weight.detach()[0]) == 7
        other.become(8)
        collector.update_policy_weights_()
        while seen_by(collector) != {0: 8, 1: 8}:
            pass


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("given", ["policy", "policy_factory"])
@LOSES_WORKERS
def test_a_worker_that_is_replaced_after_loading_has_the_weights_that_were_loaded(given, transport, tmp_path):
    def collector_of(*envs):
        policy = {"policy": Checksum()} if given == "policy" else {"policy_factory": Checksum}
        return multi(SYNC, transport, create_env_fn=list(envs), frames_per_batch=40, on_failure="restart", **policy)

    new = [Checksum() for _ in range(3)]
    for version, module in enumerate(new):
        module.become(version)
    with collector_of(Plain, Plain) as collector:
        collector.update_policy_weights_(dict(new[1].state_dict()))
        next(collector)
        saved = collector.state_dict()
    once = str(tmp_path / "once")
    with collector_of(Plain, functools.partial(Failing, stumble, at=50, once=once)) as collector:
        collector.update_policy_weights_(dict(new[1].state_dict()))
        collector.update_policy_weights_(dict(new[2].state_dict()))
        next(collector)
        collector.load_state_dict(saved)
        assert seen_by(collector) == {0: 1, 1: 1}
        assert collector.stats()["restarts"] == 1
