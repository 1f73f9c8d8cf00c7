"""Imports Ray, and defines its actors: each holds a worker, which may be a collector with its own workers."""

from __future__ import annotations

import mmap
import os
import sys
import threading
import traceback
from collections.abc import Mapping
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from typing_extensions import override

from funcollect.collectors.sync import RolloutTimes, SyncDataCollector
from funcollect.collectors.worker_collector import WorkerCollector
from funcollect.collectors.workers.worker import Job, Progress, Worker, WorkerInfo, copy_into, turned
from funcollect.core.request import NOWHERE, OwnColumns
from funcollect.processes.child import ChildSetup
from funcollect.processes.memory import Memory, MemoryLayout
from funcollect.processes.serving import Answering
from funcollect.processes.system import SIGNS
from funcollect.tree import Path, flatten, to_batch

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a library reports its use only if its user wants that
try:
    import ray as _ray
except ImportError as error:
    raise ImportError("RayCollector needs Ray, which is not installed: pip install 'funcollect[ray]'") from error

ray: Any = _ray  # half of it is typed


def private_memory(size: int) -> Memory:
    """`size` bytes that only this process has, aligned to a page."""
    return np.frombuffer(mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)


class PackedLayout(NamedTuple):
    """How a batch lies in memory."""

    layout: MemoryLayout
    single: bool | None  # for leaves [T, P, ...]: whether the environment has no batch dimension; None for others

    def batch(self, memory: Memory, count: int | None = None) -> TensorDict:
        """The batch, whose leaves keep `memory` alive; with `count`, as many packed batches, stacked."""
        leaves, first = self.layout.leaves(memory, count), int(count is not None)
        if self.single is not None:
            for path, leaf in leaves.items():
                leaves[path] = leaf.squeeze(first + 1) if self.single else leaf.transpose(first, first + 1)
        return to_batch({path: leaf.data for path, leaf in leaves.items()}, leaves["next", "done"].shape[:-1])


class PackedBatch(NamedTuple):
    """A batch as it is sent: its memory, and its layout, which only a worker's first batch has."""

    packed_layout: PackedLayout | None
    memory: Memory


def worker_of(packed: bytes) -> PackingWorker:
    """The worker for a packed `Job`."""
    job: Job = cloudpickle.loads(packed)
    assert job.kind is not None
    return (NestedWorker if issubclass(job.kind, WorkerCollector) else PackingWorker)(job)


class PackingWorker(Worker):
    """A worker whose rollouts and weights are sent as one array each. Its collector may be of the user's own class.

    Each batch is packed into the same memory, from where it has to be copied before the next one.
    """

    _packed_layout: PackedLayout | None = None  # none before the first batch
    _leaves: Mapping[Path, Tensor]  # views of the memory
    _memory: Memory

    @override
    def collect(self) -> tuple[PackedBatch, tuple[Any, ...]]:
        known = self._packed_layout
        columns = NOWHERE if known is None or known.single is None else self._leaves  # recorded there, without a copy
        batch, report = self.roll_out(columns)
        single = self._single(batch) if known is None else known.single
        leaves = flatten(batch) if single is None else turned(batch, single)
        if known is None:
            self._packed_layout = PackedLayout(MemoryLayout.of(leaves), single)
            self._memory = private_memory(self._packed_layout.layout.size)
            self._leaves = self._packed_layout.layout.leaves(self._memory)
        copy_into(self._leaves, leaves)
        return PackedBatch(self._packed_layout if known is None else None, self._memory), report

    def _single(self, batch: TensorDictBase) -> bool | None:
        """Whether the environment of a rollout has no batch dimension; None for a batch with other dimensions."""
        single = self._runner.env.num_envs is None
        return single if batch.ndim == (1 if single else 2) else None

    @override
    def _rollout(self, columns: OwnColumns) -> TensorDictBase:
        if type(self._collector) is SyncDataCollector:
            return super()._rollout(columns)
        batch: TensorDictBase = next(self._collector)  # with workers, or a class of the user's own
        return batch

    def fetch(self, version: int, policy: bytes | None, layout: MemoryLayout, memory: Memory) -> None:
        """Copy weights, and act with them from now on."""
        leaves = layout.leaves(np.array(memory))  # a copy, since Ray's memory is read-only, and must not be kept
        self.adopt({path[0]: leaf for path, leaf in leaves.items()}, version, policy)


class NestedWorker(PackingWorker):
    """A worker of a larger run that is itself a collector with workers, whose lanes are a shard of that run."""

    def __init__(self, job: Job) -> None:
        collector: WorkerCollector = job.collector()
        self._run = collector.run
        self._counted = (0, 0)  # restarts and lost frames, as last reported
        self._use(collector, job.progress, job.applied)

    @override
    def describe(self) -> WorkerInfo:
        return self._run.info._replace(lanes=sum(self._run.lanes), frames=self._collector.frames_of_batch)

    @override
    def _single(self, batch: TensorDictBase) -> None:
        return None

    @override
    def _report_start(self) -> tuple[Progress, int, int, int]:
        run, (restarts, lost) = self._run, self._counted
        self._counted = run.restarts, run.lost
        progress = run.progress(self._batches, self._frames)
        return progress, run.version, run.restarts - restarts, run.lost - lost

    @override
    def take_params(self, params: Any, version: int, policy: bytes | None, own: bool = False) -> None:
        self._run.weights.publish(params, version, policy, own)

    @override
    def go_on(self, progress: Progress) -> None:
        self._run.go_on(progress)

    @override
    def timer(self, on: bool) -> list[RolloutTimes]:
        return self._run.timers(on)


class RayWorker:
    """The actor. Ray runs `do` in the order of the calls, and the other methods in separate threads."""

    def __init__(self, setup: ChildSetup) -> None:
        sys.path.extend(path for path in setup.path if path not in sys.path)
        setup.apply_anywhere()
        self._answering = Answering(worker_of)
        self._one_at_a_time = threading.Lock()
        self._built = threading.Event()
        self._nothing_urgent = threading.Event()
        self._nothing_urgent.set()

    def do(self, name: str, *args: Any) -> Any:
        """The answer to a call, or a `Failure`. The first one, ``"describe"``, builds the worker."""
        self._nothing_urgent.wait()
        with self._one_at_a_time:
            try:
                return self._answering.answer(name, args)
            finally:
                self._built.set()

    def hurry(self, name: str, *args: Any) -> Any:
        """The answer to a call that overtakes waiting ones; it runs once the rollout under way has ended."""
        self._built.wait()
        self._nothing_urgent.clear()
        with self._one_at_a_time:
            self._nothing_urgent.set()  # calls of `do` wait for the lock from here on
            return self._answering.answer(name, args)

    @staticmethod
    def node() -> str:
        """The node on which it runs."""
        node = ray.get_runtime_context().get_node_id()
        return f"node {ray.util.get_node_ip_address()} ({node[:12]}), process {os.getpid()}"

    @staticmethod
    def signs() -> int:
        """A number that changes whenever the worker shows a sign of life."""
        return int.from_bytes(SIGNS.count.tobytes(), sys.byteorder)

    def stack(self) -> str:
        """The Python stack of every thread."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        frames = sys._current_frames().items()
        parts = [f"Thread {names.get(number)}:\n{''.join(traceback.format_stack(frame))}" for number, frame in frames]
        return "\n".join(parts)
