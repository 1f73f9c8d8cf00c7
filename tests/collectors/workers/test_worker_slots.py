"""Slots of shared memory: kept batches, slow readers, and nothing that is left behind."""

import itertools
import os
import threading
import warnings

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from gymnasium.envs.classic_control import CartPoleEnv
from tensordict import TensorDict

import funcollect as fc
from tests.support.compare import assert_same
from tests.support.faulty.faulty_workers import Held, Plain
from tests.support.running import once, scaled
from tests.support.workers import COLLECTORS, check_trajectories, gone, held, multi, processes_of, wait_until

SYNC, ASYNC = COLLECTORS
TWO = {"create_env_fn": ["CartPole-v1"] * 2}


@pytest.mark.parametrize("kind", COLLECTORS)
def test_batches_that_are_all_kept_are_all_right(kind):
    with multi(kind, **TWO, frames_per_batch=40) as collector:
        with pytest.warns(UserWarning, match="keeps every batch") as caught:
            batches = list(itertools.islice(collector, 50))
        copies = collector.stats()["copies"]
    assert [warning.filename for warning in caught] == [__file__]
    assert copies >= 50 - 2 * (3 - 1)
    check_trajectories(batches)
    if kind is SYNC:
        with multi(kind, "serial", **TWO, frames_per_batch=40) as collector:
            for one, two in zip(batches, collector, strict=False):
                assert_same(one, two)


def shown(kept):
    """The bytes that a view shows."""
    if isinstance(kept, TensorDict):
        return [shown(leaf) for leaf in kept.values(True, True)]
    if isinstance(kept, torch.UntypedStorage):
        kept = torch.empty(0, dtype=torch.uint8).set_(kept)
    return np.asarray(kept.detach() if isinstance(kept, torch.Tensor) else kept).tobytes()


VIEWS = (
    lambda batch: batch["observation"][..., 1:],
    lambda batch: batch["observation"].reshape(-1),
    lambda batch: batch["next", "done"].view(torch.uint8),
    lambda batch: batch["observation"].numpy(),
    lambda batch: batch[0],
    lambda batch: batch["observation"].untyped_storage(),
    lambda batch: jnp.from_dlpack(batch["observation"].reshape(-1)),
    lambda batch: batch["next", "reward"].requires_grad_().expand(3, *batch["next", "reward"].shape),
)


def lent(assembler):
    return {number for number, slot in enumerate(assembler._slots) if slot.lent}


def test_a_slot_is_not_written_while_any_view_of_it_lives():
    with multi(SYNC, **TWO, frames_per_batch=40) as collector:
        for number, view in enumerate(VIEWS):
            kept = view(next(collector))
            before = shown(kept)
            (assembler,) = collector.run.assemblers.values()
            (slot,) = lent(assembler)
            for _ in range(6):
                next(collector)
            assert lent(assembler) == {slot}, number
            assert shown(kept) == before, number
            del kept
            next(collector)
            assert lent(assembler) == set(), number
        assert collector.stats()["copies"] == 0


def test_what_is_done_in_place_to_one_leaf_does_not_hinder_the_gradients_of_another():
    with multi(SYNC, **TWO, frames_per_batch=40) as collector:
        batch = next(collector)
        value = torch.nn.Linear(4, 1)
        loss = value(batch["observation"]).sum()
        batch["next", "reward"].mul_(0.1)
        loss.backward()
    assert torch.allclose(value.weight.grad, batch["observation"].sum((0, 1)))


def test_a_batch_that_is_given_to_another_process_takes_its_memory_along():
    with multi(SYNC, **TWO, frames_per_batch=40) as collector:
        given = next(collector)
        given["observation"].share_memory_()  # as a queue of torch.multiprocessing does
        before = given.clone()
        for _ in range(6):
            next(collector)
        assert_same(given, before)
        del given
        rest = [next(collector).clone() for _ in range(6)]
        assert collector.stats()["copies"] == 0
    with multi(SYNC, "serial", **TWO, frames_per_batch=40) as collector:
        for one, two in zip(rest, itertools.islice(collector, 7, None), strict=False):
            assert_same(one, two)


def test_batches_stay_after_shutdown():
    with multi(SYNC, **TWO, frames_per_batch=40) as collector:
        batch = next(collector)
        before = batch.clone()
    assert_same(batch, before)
    batch["observation"].zero_()


def test_nothing_is_dropped_for_a_slow_reader():
    with multi(ASYNC, create_env_fn=[Plain] * 4, frames_per_batch=8) as collector:
        batches, lanes = [], set()
        while len(batches) < scaled(40) or len(lanes) < 4:  # a busy machine may let one of them wait for long
            batches.append(next(collector).clone())
            lanes.add(batches[-1]["collector", "lane"][0].item())
            waiting = ([call.name for call in record.calls] for record in collector.run.records)
            assert all(names.count("collect") <= 2 for names in waiting)
            if len(batches) % 4 == 0:
                wait_until(lambda: collector.run.poll() or not any(m.calls for m in collector.run.records))
    check_trajectories(batches)


def test_a_fast_worker_does_not_wait_for_a_slow_one(tmp_path):
    file = tmp_path / "go on"
    with multi(ASYNC, create_env_fn=[Plain, lambda: Held(file)], frames_per_batch=8) as collector:
        assert all(next(collector)["collector", "lane"][0] == 0 for _ in range(30))
        file.touch()
        while next(collector)["collector", "lane"][0] != 1:
            pass


@pytest.mark.parametrize(("kind", "how"), once(COLLECTORS, ["shut down", "dropped"]))
def test_collectors_leave_nothing_behind(kind, how):
    def cycle():
        collector = multi(kind, create_env_fn=[Plain] * 2, frames_per_batch=16)
        pids = processes_of(collector)
        collector.update_policy_weights_()
        next(collector)
        if how == "shut down":
            collector.shutdown()
        del collector
        assert all(map(gone, pids))

    cycle()
    before = held()
    for _ in range(scaled(3)):
        cycle()
    assert held() == before


def test_memory_stays_flat():
    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20

    with multi(SYNC, create_env_fn=[Plain] * 2, frames_per_batch=64) as collector:
        for _ in range(50):
            next(collector)
        before = resident()
        for _ in range(scaled(200)):
            next(collector)
        assert resident() - before < 8


def test_a_collector_forked_with_its_process_is_not_ended_by_the_copy():
    with multi(SYNC, create_env_fn=[Plain] * 2, frames_per_batch=16) as collector:
        next(collector)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python and JAX warn of forks beside threads
            pid = os.fork()
        if not pid:
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        next(collector)


def test_bad_arguments_fail_before_any_worker_starts():
    live = CartPoleEnv()  # without a spec, from which others could be built
    before = held()
    for changes, error, match in (
        ({"create_env_fn": "CartPole-v1"}, TypeError, "num_workers"),
        ({"create_env_fn": []}, ValueError, "entries"),
        ({"create_env_fn": [live, live]}, ValueError, "same live environment"),
        ({"num_workers": 3}, ValueError, "2 entries, expected 3"),
        ({"frames_per_batch": [3, 0]}, ValueError, "frames_per_batch is 0"),
        ({"policy_device": ["cpu"]}, ValueError, "1 entries for 2 workers"),
        ({"policy": threading.Lock()}, TypeError, "cannot be sent"),
    ):
        with pytest.raises(error, match=match):
            multi(SYNC, **(TWO | {"frames_per_batch": 10} | changes))
    assert held() == before


def test_environments_with_other_spaces_are_refused():
    for env, match in (("Acrobot-v1", "worker 1"), (lambda: fc.make_env("CartPole-v1", num_envs=2), "num_envs")):
        with pytest.raises(fc.errors.WorkerError, match=match):
            multi(SYNC, create_env_fn=["CartPole-v1", env], frames_per_batch=10)


def test_a_reset_of_some_lanes_and_a_seed():
    with multi(SYNC, **TWO, create_env_kwargs={"num_envs": 2}, frames_per_batch=20) as one:
        first = next(one).clone()
        one.reset(torch.tensor([False, True, False, False]))
        second = next(one)
        fresh = second["collector", "step"][:, :, 0] == 0
        assert bool(fresh[0, 1])
        kept = first["next", "observation"][:, :, -1]
        stays = ~first["next", "done"][:, :, -1, 0] & ~fresh
        assert torch.equal(second["observation"][:, :, 0][stays], kept[stays])
        with pytest.raises(ValueError, match="mask"):
            one.reset(torch.ones(3, dtype=torch.bool))
        for mask in ([True] * 4, np.ones(4, bool)):
            one.reset(mask)
            assert not next(one)["collector", "step"][:, :, 0].any()
        assert one.set_seed(7) == fc.SyncDataCollector(["CartPole-v1"] * 4, frames_per_batch=4).set_seed(7)
        assert one.set_seed(7, static_seed=True) == 7
