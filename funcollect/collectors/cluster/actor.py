"""The class of the Ray actors: each holds a worker, or a collector with its own workers, and answers calls."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import traceback
from collections.abc import Mapping
from functools import cached_property
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
from tensordict import TensorDictBase
from torch import Tensor
from typing_extensions import override

from funcollect.collectors.cluster.packed_batch import PackedBatch, Packer
from funcollect.collectors.cluster.resources import ray
from funcollect.collectors.sync import RolloutTimes, SyncDataCollector
from funcollect.collectors.worker_collector import WorkerCollector
from funcollect.collectors.workers.batch_layout import PackedLayout
from funcollect.collectors.workers.worker import EnvCalls, Progress, RolloutReport, Worker, WorkerBase, WorkerInfo
from funcollect.core.request import OwnColumns
from funcollect.errors import WorkerError
from funcollect.interop.settings import FrameworkSettings
from funcollect.processes.child import limit_threads
from funcollect.processes.failures import Failure
from funcollect.processes.life import SIGNS
from funcollect.processes.serving import Answering
from funcollect.processes.shared_memory import Memory


class ActorSetup(NamedTuple):
    """The settings of an actor's process."""

    path: list[str]
    num_threads: int
    accelerators: bool  # whether JAX may see accelerators
    frameworks: FrameworkSettings
    authkey: bytes  # by which proxies of `multiprocessing.Manager` connect


def worker_of(packed: bytes) -> PackingWorker:
    """The worker for a packed `RayJob`."""
    job = cloudpickle.loads(packed)
    if issubclass(job.kind, WorkerCollector):
        return NestedWorker(job.progress, job.collector(), job.applied)
    return ClassWorker(job)


class PackingWorker(WorkerBase):
    """A worker whose rollouts and weights are sent as one array each."""

    @cached_property
    def _packer(self) -> Packer:
        return Packer()

    def _single(self, batch: TensorDictBase) -> bool | None:
        """Whether the environment of a rollout has no batch dimension; None for a batch of another kind."""
        return None

    @override
    def collect(self) -> tuple[PackedBatch, RolloutReport]:
        batch, report = self.roll_out(self._packer.columns)
        return self._packer.pack(batch, self._single(batch)), report

    def fetch(self, version: int, policy: bytes | None, packed_layout: PackedLayout, memory: Memory) -> None:
        """Copy weights, and act with them from now on."""
        leaves = packed_layout.leaves(np.array(memory))  # a copy: what Ray shares is not written, nor kept
        self.adopt({path[0]: leaf for path, leaf in leaves.items()}, version, policy)


class ClassWorker(PackingWorker, Worker):
    """A worker whose runner may be of the user's own class, which collects in its own way."""

    @override
    def _single(self, batch: TensorDictBase) -> bool | None:
        single = self._runner.env.num_envs is None
        return single if batch.ndim == (1 if single else 2) else None

    @override
    def _rollout(self, columns: OwnColumns) -> TensorDictBase:
        if type(self._runner) is SyncDataCollector:
            return super()._rollout(columns)
        assert isinstance(self._runner, SyncDataCollector)
        return next(self._runner)


class NestedWorker(PackingWorker):
    """A worker of a larger run that is itself a collector with workers, whose lanes are a shard of that run."""

    def __init__(self, progress: Progress, collector: WorkerCollector, applied: EnvCalls = ()) -> None:
        self._run = collector.run
        self._counted = (0, 0)  # restarts and lost frames, as last reported
        super().__init__(progress, collector, applied)

    @override
    def describe(self) -> WorkerInfo:
        return self._run.info._replace(lanes=sum(self._run.lanes), frames=self._collector.frames_of_batch)

    @override
    def _rollout(self, columns: OwnColumns) -> TensorDictBase:
        return next(self._collector)

    @override
    def _standing(self) -> tuple[Progress, int]:
        return self._run.progress(self._batches, self._frames), self._run.gathering.version

    @override
    def _losses(self) -> tuple[int, int]:
        (restarts, lost), self._counted = self._counted, (self._run.restarts, self._run.lost)
        return self._run.restarts - restarts, self._run.lost - lost

    @override
    def adopt(self, weights: Mapping[str, Tensor], version: int, policy: bytes | None = None) -> None:
        self._run.weights.adopt(weights, version, policy)

    @override
    def take_params(self, params: Any, version: int, policy: bytes | None = None) -> None:
        self._run.weights.publish(params, version, policy)

    @override
    def go_on(self, progress: Progress) -> None:
        self._run.go_on(progress)

    @override
    def start_timer(self) -> None:
        self._run.start_timers()

    @override
    def stop_timer(self) -> list[RolloutTimes]:
        return self._run.stop_timers()

    @override
    def failure(self, error: BaseException) -> Failure:
        failure = Failure.of(error)
        return failure._replace(lane=error.lane) if isinstance(error, WorkerError) else failure


class RayWorker:
    """The actor. Ray runs `do` in the order of the calls, and the other methods in separate threads."""

    def __init__(self, setup: ActorSetup) -> None:
        sys.path.extend(path for path in setup.path if path not in sys.path)
        limit_threads(setup.num_threads, accelerators=setup.accelerators)
        setup.frameworks.apply()
        multiprocessing.current_process().authkey = setup.authkey
        self._answering = Answering(worker_of)
        self._one_at_a_time = threading.Lock()
        self._built = threading.Event()
        self._nothing_urgent = threading.Event()
        self._nothing_urgent.set()

    def do(self, name: str, *args: Any) -> Any:
        """The answer to a call, or a `Failure`."""
        self._nothing_urgent.wait()
        with self._one_at_a_time:
            return self._answer(name, args)

    def hurry(self, name: str, *args: Any) -> Any:
        """The answer to a call that goes before the waiting ones, once the rollout under way has ended."""
        self._built.wait()
        self._nothing_urgent.clear()
        with self._one_at_a_time:
            self._nothing_urgent.set()  # calls of `do` wait for the lock from here on
            return self._answer(name, args)

    def _answer(self, name: str, args: tuple[Any, ...]) -> Any:
        """The answer to a call; a `Failure` if it raised. The first one, ``"describe"``, builds the worker."""
        if name == "close":
            return self._answering.close()
        try:
            return self._answering.answer(name, args)
        finally:
            self._built.set()

    @staticmethod
    def node() -> str:
        """The node on which it runs."""
        context = ray.get_runtime_context()
        return f"node {ray.util.get_node_ip_address()} ({context.get_node_id()[:12]}), process {os.getpid()}"

    @staticmethod
    def signs() -> int:
        """A number that has changed if it has shown a sign of life."""
        return SIGNS.shown

    def stack(self) -> str:
        """The Python stack of every thread."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        frames = sys._current_frames().items()
        parts = [f"Thread {names.get(number)}:\n{''.join(traceback.format_stack(frame))}" for number, frame in frames]
        return "\n".join(parts)
