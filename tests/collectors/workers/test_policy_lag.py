"""How far asynchronous workers may be ahead of the reader: in versions of the weights, and in unread batches."""

import pytest
import torch
from torch import nn

import funcollect as fc
from tests.support.workers import TRANSPORTS, multi

ASYNC = fc.MultiaSyncDataCollector
RUN = {"create_env_fn": ["CartPole-v1"] * 3, "frames_per_batch": 10}


def linear():
    return fc.torch_policy(nn.Linear(4, 2), head=fc.heads.categorical)


def lags(collector, batches, updates):
    """The versions that each batch was behind as it was delivered, and the frames of each lane in order."""
    found, rows = [], {}
    for _ in range(batches):
        batch = next(collector)
        found.append(collector.get_policy_version() - int(batch["collector", "policy_version"].min()))
        rows.setdefault(int(batch["collector", "lane"][0]), []).append(batch["collector"].clone())
        for _ in range(updates):
            collector.update_policy_weights_()
    return found, {lane: torch.cat(each) for lane, each in rows.items()}


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("most", "updates"), [(0, 1), (1, 1), (4, 1), (4, 2), (2, 3)])
def test_no_batch_is_older_than_the_bound_and_none_is_lost(most, updates, transport):
    with multi(ASYNC, transport, policy=linear(), max_policy_lag=most, **RUN) as collector:
        found, rows = lags(collector, 24, updates)
        assert max(found) <= most
        assert collector.frames == 240
    assert len(rows) == 3  # each worker had its turn
    for each in rows.values():
        same = each["traj_ids"][1:] == each["traj_ids"][:-1]
        assert (each["step"][1:] == torch.where(same, each["step"][:-1] + 1, 0)).all()


@pytest.mark.parametrize(("most", "updates", "waiting"), [(3, 1, 3), (100, 0, 6)])
def test_workers_are_not_held_back_needlessly(most, updates, waiting):
    with multi(ASYNC, "serial", policy=linear(), max_policy_lag=most, **RUN) as collector:
        lags(collector, 8, updates)
        assert len(collector.run._waiting()) == waiting


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("most", [1, 4])
def test_so_many_batches_of_a_worker_wait_unread(most, transport):
    with multi(ASYNC, transport, policy=linear(), max_unread=most, **RUN) as collector:
        run, unread = collector.run, []
        for _ in range(6):
            next(collector)
        while min(unread, default=0) < most:  # a late worker has begun fewer when the last batch is read
            run._go_on(most)
            run.settle()
            waiting = [each.workers[0] for each in run.ready]
            unread = [waiting.count(worker) for worker in range(3)]
        assert unread == [most] * 3
        assert collector.run.copies == 0


def test_a_saved_run_keeps_to_the_bound(tmp_path):
    with multi(ASYNC, policy=linear(), max_policy_lag=2, **RUN) as collector:
        lags(collector, 6, 1)
        collector.save(tmp_path / "run")
        assert max(lags(collector, 6, 1)[0]) <= 2
    with ASYNC.load(tmp_path / "run", RUN["create_env_fn"], linear()) as collector:
        assert max(lags(collector, 6, 1)[0]) <= 2


def test_single_workers_get_no_weights_of_their_own():
    refused = pytest.raises(ValueError, match="max_policy_lag is 2, so all workers get the same weights")
    with multi(ASYNC, "serial", policy=linear(), max_policy_lag=2, **RUN) as collector, refused:
        collector.update_policy_weights_(worker_ids=[0])
