"""Contestants on a Ray cluster: our collector, TorchRL's, RLlib's runners, and processes without Ray as the limit."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.contestants.peers import Batches
from benchmarks.contestants.worker_peers import ours, torchrl_actor, torchrl_env
from benchmarks.harness.runner import AbsentError

ROOT = Path(__file__).parents[2]
RLLIB = ROOT / ".venv-rllib" / "bin" / "python"
os.environ.update(RAY_worker_niceness="0", RAY_USAGE_STATS_ENABLED="0", RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0")


def cluster(workers: int) -> dict[str, Any]:
    """Arguments of `ray.init` for a cluster on this machine, with a CPU for every worker."""
    return {
        "address": "local",
        "num_cpus": workers,
        "object_store_memory": 256 << 20,
        "include_dashboard": False,
        "log_to_driver": False,
        "logging_level": "error",
    }


def our_actors(name: str, workers: int, length: int, *, sync: bool) -> Batches:
    """Our `RayCollector`; a batch of the synchronous one has the frames of all actors."""
    import ray

    init = None if ray.is_initialized() else cluster(workers)
    return ours("RayCollector", name, workers, length, sync=sync, ray_init_config=init)


def torchrl_actors(name: str, workers: int, length: int, *, sync: bool) -> Batches:
    """TorchRL's `RayCollector`, which collects nothing if `total_frames` is -1."""
    from torchrl.collectors import Collector
    from torchrl.collectors.distributed import RayCollector

    return Batches(
        RayCollector(
            [partial(torchrl_env, name)] * workers,
            torchrl_actor(name),
            frames_per_batch=length * workers if sync else length,
            total_frames=sys.maxsize,
            collector_class=Collector,
            collector_kwargs=[{"auto_register_policy_transforms": False} for _ in range(workers)],
            sync=sync,
            ray_init_config=cluster(workers),
            remote_configs={"num_cpus": 1},
        )
    )


class RLlib:
    """RLlib's `EnvRunner`s, in their own virtual environment; each samples once per run.

    Attributes:
        seconds: from a running cluster to the first samples.

    Raises:
        AbsentError: where that environment is missing, or they do not run.
    """

    def __init__(self, workers: int, length: int) -> None:
        if not RLLIB.exists():
            raise AbsentError("is not installed: make rllib")
        command = [str(RLLIB), "-m", "benchmarks.contestants.rllib_runners", str(workers), str(length)]
        self._runners = subprocess.Popen(
            command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        self.seconds = float(self._told())

    def run(self) -> int:
        assert self._runners.stdin is not None
        print(file=self._runners.stdin, flush=True)
        return int(self._told())

    def _told(self) -> str:
        assert self._runners.stdout is not None
        line = self._runners.stdout.readline()
        if not line:
            raise AbsentError(f"its process ended with {self._runners.wait()}")
        return line

    def close(self) -> None:
        self._runners.communicate()


def processes(name: str, workers: int, length: int) -> Batches:
    """The same number of processes, without Ray."""
    return ours("MultiSyncDataCollector", name, workers, length)


def contestants(name: str, workers: int, length: int) -> dict[str, Callable[[], Any]]:
    """Return the contestants of one cell."""
    work = (name, workers, length)
    made: dict[str, Callable[[], Any]] = {
        "funcollect sync": partial(our_actors, *work, sync=True),
        "funcollect async": partial(our_actors, *work, sync=False),
        "processes": partial(processes, *work),
        "torchrl sync": partial(torchrl_actors, *work, sync=True),
        "torchrl async": partial(torchrl_actors, *work, sync=False),
    }
    return made | ({"rllib": partial(RLlib, workers, length)} if name == "CartPole-v1" else {})
