"""Actors that die, hang or raise, and drivers that are killed: what the reader is told, how soon, and what is left."""

import functools
import os
import signal
import subprocess
import sys

import pytest
import torch

import funcollect as fc
from funcollect.collectors.cluster import transport as ray_transport
from funcollect.processes import pool
from tests.support.faulty.faulty_workers import Failing, Plain, SlowToReturn, die, hold_the_gil, sleep_forever, stumble
from tests.support.running import FORKS_OF_RAY, LOSES_WORKERS, ROOT, SCALE, in_soak, scaled
from tests.support.worker_runs import check_trajectories, descendants, gone, run_out, wait_until
from tests.support.workers import FOREVER, HangClock, ray_collector

pytestmark = [pytest.mark.usefixtures("ray_cluster"), FORKS_OF_RAY]


def pid_of(collector, worker):
    """Of an actor, once it lives."""
    handle = collector.run.records[worker].handle
    wait_until(lambda: not handle.label.endswith("on no node yet"))
    return int(handle.label.split()[-1])


def test_too_few_resources_are_told_at_once(ray_cluster):
    wait_until(lambda: ray_cluster.available_resources().get("CPU") == 8)  # other tests' actors have gone
    asked = r"no room for collector 2 of 3: asked for \[3 x \(4 CPU\)\]; the cluster: \[.* has 8 CPU.*\], free: 8"
    with pytest.raises(fc.WorkerError, match=asked):
        ray_collector(Plain, frames_per_batch=10, num_collectors=3, remote_configs={"num_cpus": 4})


@pytest.mark.evening
def test_resources_that_others_hold_are_reported_after_the_start_timeout(ray_cluster):
    with ray_collector(Plain, frames_per_batch=10, remote_configs={"num_cpus": 5}):
        wait_until(lambda: ray_cluster.available_resources().get("CPU") == 3)
        message = r"(?s)actor .* on no node yet.*start_timeout=0.5.*not begun: asked for \[1 x \(4 CPU\)\].*free: 3 CPU"
        with pytest.raises(fc.WorkerError, match=message):
            ray_collector(Plain, frames_per_batch=10, remote_configs={"num_cpus": 4}, start_timeout=0.5)


def test_an_actor_that_is_killed_ends_the_run():
    collector = ray_collector([Plain] * 2, frames_per_batch=16)
    next(collector)
    pids = [pid_of(collector, worker) for worker in range(2)]
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(fc.WorkerError, match=r"worker 1 \(actor \w+ on node [\d.]+ .*was lost \(ActorDiedError"):
        run_out(collector)
    wait_until(lambda: all(map(gone, pids)))
    with pytest.raises(fc.ClosedError):
        next(collector)


FAULTS = [(stumble, "in stumble")]
FAULTS += in_soak([(hold_the_gil, "interpreter is held"), (sleep_forever, "in sleep_forever")])


@pytest.mark.parametrize(("act", "shown"), FAULTS)
def test_an_exception_and_a_hang_come_with_their_traceback(act, shown, tmp_path, monkeypatch):
    begun = tmp_path / "begun"
    clock = HangClock(begun, shown)
    monkeypatch.setattr(pool, "time", clock)
    if act is sleep_forever:
        monkeypatch.setattr(ray_transport, "_TO_REPORT", FOREVER)
    made = [Plain, functools.partial(Failing, act, at=20, once=str(begun))]
    with ray_collector(made, frames_per_batch=16, timeout=1.0) as collector:
        clock.collector = None if act is stumble else collector
        with pytest.raises(fc.WorkerError, match="worker 1, lane 1" if act is stumble else "timeout=1") as raised:
            run_out(collector)
        assert shown in raised.value.traceback
        assert (raised.value.worker, raised.value.lane) == (1, 1 if act is stumble else None)
        assert isinstance(raised.value.__cause__, fc.EnvError if act is stumble else type(None))


@pytest.mark.evening
def test_a_failure_of_a_worker_in_an_actor():
    made = [Plain, functools.partial(Failing, stumble, at=20)]
    kwargs = {"collector_class": fc.MultiSyncDataCollector, "num_workers_per_collector": 2}
    with (
        ray_collector(made, frames_per_batch=16, **kwargs) as collector,
        pytest.raises(fc.WorkerError, match=r"worker 1, lane [23].*ArithmeticError") as raised,
    ):
        run_out(collector)
    assert "in stumble" in raised.value.traceback


@pytest.mark.evening
def test_workers_in_an_actor_that_are_replaced_are_counted(tmp_path):
    made = functools.partial(Failing, die, at=20, once=str(tmp_path / "died"))
    kwargs = {"collector_class": fc.MultiSyncDataCollector, "num_workers_per_collector": 2, "on_failure": "restart"}
    with ray_collector(made, frames_per_batch=16, **kwargs) as collector:
        while not collector.stats()["restarts"]:
            next(collector)
        stats = collector.stats()
    assert (stats["restarts"], stats["lost_frames"]) == (1, 8)


@pytest.mark.evening
@LOSES_WORKERS
def test_an_actor_that_is_killed_as_it_returns_is_built_once_a_process(tmp_path):
    log = tmp_path / "builds"
    made = [functools.partial(SlowToReturn, log, times=2), Plain]
    with ray_collector(made, frames_per_batch=16, on_failure="restart", sync=True) as collector:
        check_trajectories([next(collector).clone() for _ in range(4)])
        assert collector.stats()["restarts"] == 2
    assert log.stat().st_size == 3


@pytest.mark.parametrize("sync", [True, False] if SCALE > 1 else [False])
@LOSES_WORKERS
def test_actors_killed_at_random_moments(sync):
    """Every batch is whole, with the latest weights; ids are used once; each lane goes on."""
    generator = torch.Generator().manual_seed(0)
    policy = fc.torch_policy(torch.nn.Linear(4, 2), head=fc.heads.categorical)
    kwargs = {"create_env_kwargs": {"num_envs": 2}, "frames_per_batch": 200, "on_failure": "restart", "sync": sync}
    kills = scaled(1)
    with ray_collector(["CartPole-v1"] * 2, policy, **kwargs) as collector:
        batches = []
        for kill in range(kills):
            collector.update_policy_weights_()
            batches += [next(collector).clone() for _ in range(int(torch.randint(1, 6, (), generator=generator)))]
            os.kill(pid_of(collector, int(torch.randint(2, (), generator=generator))), signal.SIGKILL)
            while collector.stats()["restarts"] == kill:
                batches.append(next(collector).clone())
        lanes: set[int] = set()  # that act with the latest weights; a rollout under way may have had others
        while lanes != {0, 1, 2, 3}:
            batches.append(next(collector).clone())
            collected = batches[-1]["collector"]
            lanes |= set(collected["lane"][collected["policy_version"] == kills].tolist())
        stats = collector.stats()
    assert stats["restarts"] == kills
    assert stats["lost_frames"] > 0
    check_trajectories(batches)


DRIVER = """
import sys
sys.path.insert(0, {root!r})
import ray
ray.init(address={address!r}, log_to_driver=False)
import funcollect as fc
from tests.support.faulty.faulty_workers import *
kwargs = dict(frames_per_batch=16, timeout=1e6, start_timeout=1e6, collector_class=fc.MultiSyncDataCollector)
collector = fc.RayCollector([lambda: Failing(hold_the_gil, at=40)], **kwargs)
next(collector)
print(*[record.handle.label.split()[-1] for record in collector.run.records], flush=True)
while True:
    next(collector)
"""


@pytest.mark.evening
def test_no_actor_outlives_its_driver(ray_cluster):
    address = ray_cluster.get_runtime_context().gcs_address
    code = DRIVER.format(root=str(ROOT), address=address)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as driver:
        (actor,) = map(int, driver.stdout.readline().split())
        processes = [actor, *descendants(actor)]
        assert len(processes) >= 3  # the actor, the server of its workers and a worker
        driver.kill()
    wait_until(lambda: all(map(gone, processes)))


OWN = """
import funcollect as fc, ray
if __name__ == "__main__":
    CONFIG = dict(address="local", num_cpus=2, object_store_memory=100 << 20)
    kwargs = dict(frames_per_batch=10, ray_init_config=CONFIG)
    kwargs |= dict(timeout=1e6, start_timeout=1e6)
    one, two = (fc.RayCollector("CartPole-v1", **kwargs) for _ in range(2))
    one.shutdown()
    next(two)
    try:
        fc.RayCollector("CartPole-v1", frames_per_batch=10, ray_init_config={"num_cpus": 3})
    except ValueError as error:
        print(str(error)[:24])
    two.shutdown()
    print(ray.is_initialized())
"""


@pytest.mark.evening
def test_a_cluster_that_collectors_start_ends_with_the_last_of_them():
    run = subprocess.run([sys.executable, "-c", OWN], capture_output=True, text=True, env=_without_address())
    assert run.stdout.splitlines() == ["ray_init_config is given", "False"], run.stderr


def _without_address():
    return {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
