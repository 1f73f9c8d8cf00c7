"""Actors that lack resources or fail, and drivers that are killed: what the reader is told, and what is left.

What actors have in common with other workers is tested in `tests/collectors/workers/test_worker_faults.py`.
"""

import functools
import os
import subprocess
import sys

import pytest

import funcollect as fc
from tests.support.faulty.faulty_workers import Failing, Plain, die, stumble
from tests.support.running import FORKS_OF_RAY, ROOT
from tests.support.workers import descendants, gone, ray_collector, run_out, wait_until

pytestmark = [pytest.mark.usefixtures("ray_cluster"), FORKS_OF_RAY]
NESTED = {"collector_class": fc.MultiSyncDataCollector, "num_workers_per_collector": 2, "frames_per_batch": 16}


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


@pytest.mark.evening
def test_a_failure_of_a_worker_in_an_actor():
    with ray_collector([Plain, functools.partial(Failing, stumble, at=20)], **NESTED) as collector:
        with pytest.raises(fc.WorkerError, match=r"worker 1, lane [23].*ArithmeticError") as raised:
            run_out(collector)
        assert "in stumble" in raised.value.traceback


@pytest.mark.evening
def test_workers_in_an_actor_that_are_replaced_are_counted(tmp_path):
    made = functools.partial(Failing, die, at=20, once=str(tmp_path / "died"))
    with ray_collector(made, on_failure="restart", **NESTED) as collector:
        while not collector.stats()["restarts"]:
            next(collector)
        stats = collector.stats()
    assert (stats["restarts"], stats["lost_frames"]) == (1, 8)


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
    code = DRIVER.format(root=str(ROOT), address=ray_cluster.get_runtime_context().gcs_address)
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
    kwargs = dict(frames_per_batch=10, ray_init_config=CONFIG, timeout=1e6, start_timeout=1e6)
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
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    run = subprocess.run([sys.executable, "-c", OWN], capture_output=True, text=True, env=env)
    assert run.stdout.splitlines() == ["ray_init_config is given", "False"], run.stderr
