"""The class of the Ray actors: each holds a worker, or a collector with workers of its own, and answers calls."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
from tensordict import TensorDictBase
from typing_extensions import override

from funcollect.collectors.cluster.jobs import RayJob
from funcollect.collectors.cluster.nested_worker import NestedWorker
from funcollect.collectors.cluster.packed_batch import PackedBatch, Packer
from funcollect.collectors.cluster.resources import ray
from funcollect.collectors.sync import SyncDataCollector
from funcollect.collectors.worker_collector import WorkerCollector
from funcollect.collectors.workers.threads import limit_threads
from funcollect.collectors.workers.worker import RolloutReport, Worker, WorkerInfo, failure_of
from funcollect.core.request import OwnColumns


class ActorSetup(NamedTuple):
    """The settings of an actor's process."""

    path: list[str]
    num_threads: int
    accelerators: bool  # whether JAX may see accelerators


class ClassWorker(Worker):
    """A worker whose runner may be of the user's own class, which collects in its own way."""

    @override
    def _rollout(self, columns: OwnColumns) -> TensorDictBase:
        if type(self._runner) is SyncDataCollector:
            return super()._rollout(columns)
        assert isinstance(self._runner, SyncDataCollector)
        return next(self._runner)


def built(job: RayJob) -> Worker | NestedWorker:
    """The worker that a job describes."""
    if not issubclass(job.kind, WorkerCollector):
        return ClassWorker(job)
    collector = job.collector()
    assert isinstance(collector, WorkerCollector)
    return NestedWorker(job.progress, collector)


class RayWorker:
    """The actor. Ray runs `do` in the order of the calls, `hurry` and `stack` in threads of their own."""

    def __init__(self, setup: ActorSetup) -> None:
        sys.path.extend(path for path in setup.path if path not in sys.path)
        limit_threads(setup.num_threads, accelerators=setup.accelerators)
        self._worker: Worker | NestedWorker | None = None
        self._info: WorkerInfo | None = None
        self._packer = Packer()
        self._one_at_a_time = threading.Lock()
        self._built = threading.Event()
        self._urgent: deque[tuple[Future[Any], Callable[[], Any]]] = deque()

    def do(self, name: str, *args: Any) -> Any:
        """The answer to a call, or a `Failure`."""
        with self._one_at_a_time:
            self._do_urgent()
            return self._answer(name, args)

    def hurry(self, name: str, *args: Any) -> Any:
        """The answer to a call that goes before the waiting ones, once the rollout under way has ended."""
        self._built.wait()
        answer: Future[Any] = Future()
        self._urgent.append((answer, lambda: self._answer(name, args)))
        with self._one_at_a_time:
            self._do_urgent()
        return answer.result()

    def _do_urgent(self) -> None:
        while self._urgent:
            answer, act = self._urgent.popleft()
            answer.set_result(act())

    def _answer(self, name: str, args: tuple[Any, ...]) -> Any:
        try:
            return self._call(name, args)
        except BaseException as error:
            return failure_of(error) if self._worker is None else self._worker.failure(error)

    def _call(self, name: str, args: tuple[Any, ...]) -> Any:
        if name == "describe":
            try:
                self._worker = built(cloudpickle.loads(args[0]))
            finally:
                self._built.set()
            self._info = self._worker.describe()
            return self._info
        if name == "close" and self._worker is None:
            return None
        assert self._worker is not None
        if name == "collect":
            return self._collect(self._worker)
        if name == "fetch":
            version, policy, packed_layout, memory = args
            leaves = packed_layout.leaves(np.array(memory))  # a copy: what Ray shares is not written, nor kept
            return self._worker.adopt({path[0]: leaf for path, leaf in leaves.items()}, version, policy)
        return getattr(self._worker, name)(*args)

    def _collect(self, worker: Worker | NestedWorker) -> tuple[PackedBatch, RolloutReport]:
        assert self._info is not None
        batch, report = worker.collect(self._packer.columns)
        own = isinstance(worker, Worker) and batch.ndim == (1 if self._info.num_envs is None else 2)
        return self._packer.pack(batch, self._info.num_envs is None if own else None), report

    @staticmethod
    def node() -> str:
        """The node on which it runs."""
        context = ray.get_runtime_context()
        return f"node {ray.util.get_node_ip_address()} ({context.get_node_id()[:12]}), process {os.getpid()}"

    def stack(self) -> str:
        """The Python stack of every thread."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        frames = sys._current_frames().items()
        parts = [f"Thread {names.get(number)}:\n{''.join(traceback.format_stack(frame))}" for number, frame in frames]
        return "\n".join(parts)
