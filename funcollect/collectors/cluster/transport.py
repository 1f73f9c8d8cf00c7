"""Workers in the actors of a Ray cluster: calls are tasks, rollouts and weights go through the object store."""

from __future__ import annotations

import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from tensordict import TensorDict
from torch import Tensor
from typing_extensions import override

from funcollect.collectors.cluster.actor import PackedBatch, PackedLayout, RayWorker, private_memory
from funcollect.collectors.cluster.resources import RaySession, check_room, ray, resources
from funcollect.collectors.workers.batch_layout import copy_into
from funcollect.collectors.workers.gathering import BatchAssembler, PendingBatch, WorkerGroup
from funcollect.collectors.workers.run import Means
from funcollect.collectors.workers.weights import WITH_WEIGHTS, WeightStore
from funcollect.collectors.workers.worker import Job
from funcollect.errors import WorkerError
from funcollect.processes.child import ChildSetup
from funcollect.processes.layout import MemoryLayout
from funcollect.processes.pool import Answer, Call, Loss, Transport, WorkerHandle
from funcollect.processes.shared_memory import Memory
from funcollect.tree import Path

_GROUPS = {"hurry": 1, "look": 1}  # threads of an actor besides the one that works
_TO_CLOSE = 2.0  # seconds that actors have to close their environments
_TO_REPORT = 1.0  # seconds within which an actor shows its Python stack
_TO_FETCH = 30.0  # seconds within which an object that is there can be read
_MOST_IDLE = 3  # pieces of a size that wait to be written again: fresh memory costs ten times a copy into warm one


class RayHandle(WorkerHandle):
    """The connection to one actor, which was made with the options `config`.

    An `eager` actor takes new weights before the rollouts that it was sent earlier.
    """

    def __init__(self, actor: Any, config: Mapping[str, Any], *, eager: bool) -> None:
        self.actor = actor
        self._config = config
        self._eager = eager
        self._sent: deque[tuple[Any, int]] = deque()  # calls that will be answered in order
        self._hurried: deque[tuple[Any, int]] = deque()  # calls that are answered before those
        self.there: set[Any] = set()  # the references to answers that Ray reports as readable
        self._collects = 0  # rollouts that were asked for and have not arrived
        self._packed_layout: PackedLayout | None = None
        self._signs: int = 0  # of life, as last reported
        self._signs_ref: Any = None  # to the next report, if it was asked for
        self._node_ref = self._look("node")
        self._gone = ""

    def _look(self, name: str) -> Any:
        """A reference to the answer of a method that the actor calls beside its work."""
        return getattr(self.actor, name).options(concurrency_group="look").remote()

    @property
    @override
    def label(self) -> str:
        return f"actor {self.actor._actor_id.hex()[:12]} on {self._node() or 'no node yet'}"

    def _node(self) -> str:
        """The node and the process of the actor; empty until it runs."""
        node = _answer(self._node_ref) if ray.is_initialized() else None
        return node if isinstance(node, str) else ""

    @override
    def send(self, call: Call) -> None:
        self._gone = self.gone
        if self._gone:
            return
        if self._eager and call.name in WITH_WEIGHTS and self._collects:  # else it is next as it is
            ref = self.actor.hurry.options(concurrency_group="hurry").remote(call.name, *call.args)
            self._hurried.append((ref, call.number))
        else:
            self._sent.append((self.actor.do.remote(call.name, *call.args), call.number))
            self._collects += call.name == "collect"

    @property
    def gone(self) -> str:
        """Why the actor will not answer any more; empty while it may."""
        return self._gone or ("" if ray.is_initialized() else "is out of reach: Ray was shut down in this process")

    def heads(self) -> list[Any]:
        """The references to the next answers. One of them is readable once there is something to receive."""
        return [queue[0][0] for queue in (self._hurried, self._sent) if queue]

    @override
    def receive(self) -> Answer | Loss | None:
        if self.gone:
            return Loss(self.gone)
        for queue in (self._hurried, self._sent):
            if queue and queue[0][0] in self.there:
                ref, number = queue.popleft()
                self.there.remove(ref)
                return self._read(ref, number)
        return None

    def _read(self, ref: Any, number: int) -> Answer | Loss:
        """Fetch an answer that Ray has reported as readable."""
        try:
            value = ray.get(ref, timeout=_TO_FETCH)
        except ray.exceptions.RayError as error:
            self._gone = _reason_of(error)
            return Loss(self._gone)
        if isinstance(value, tuple) and isinstance(packed_batch := value[0], PackedBatch):
            self._collects -= 1
            self._packed_layout = packed_batch.packed_layout or self._packed_layout
            value = (PackedBatch(self._packed_layout, packed_batch.memory), *value[1:])
        return Answer(number, value)

    @override
    def signs(self) -> int:
        answer = None if self._signs_ref is None else _answer(self._signs_ref)
        if self._signs_ref is None or answer is not None:
            self._signs_ref = self._look("signs")
        if isinstance(answer, int):  # else its next answer shows that it was lost
            self._signs = answer
        return self._signs

    @override
    def where(self) -> str:
        if self.gone:
            return ""
        if not self._node():
            return f"(it has not begun: {resources([self._config])})"
        stack = _answer(self._look("stack"), _TO_REPORT)
        if stack is None:
            return "(it shows no Python stack: its process is stopped, or its interpreter is held)"
        return stack if isinstance(stack, str) else f"({_reason_of(stack)})"

    @override
    def kill(self) -> None:
        self._sent.clear()
        self._hurried.clear()
        if ray.is_initialized():
            ray.kill(self.actor, no_restart=True)
        self._gone = self._gone or "was ended"


def _answer(ref: Any, timeout: float = 0) -> Any:
    """A value that arrives within so many seconds, or the error of Ray in its place; None if neither does."""
    if not ray.wait([ref], timeout=timeout)[0]:
        return None
    try:
        return ray.get(ref)
    except ray.exceptions.RayError as error:
        return error


def _reason_of(error: BaseException) -> str:
    """An error of Ray in one line, without its list of common causes."""
    lines = [line.strip() for line in str(error).splitlines() if ": " not in line[:24] or line.startswith("The actor")]
    cause, _, _ = " ".join(lines).partition(" Some common causes")
    return f"was lost ({type(error).__name__}: {cause[:400]})"


class MemoryPool:
    """Memory of this process that batches borrow, and return once no view of it lives."""

    def __init__(self) -> None:
        self._idle: defaultdict[int, list[Memory]] = defaultdict(list)

    def lend(self, size: int) -> Memory:
        """A piece of `size` bytes, not cleared."""
        idle = self._idle[size]
        memory = idle.pop() if idle else private_memory(size)
        lent = np.frombuffer(memory, np.uint8)  # all views refer to this very array
        weakref.finalize(lent, self._take_back, memory).atexit = False
        return lent

    def _take_back(self, memory: Memory) -> None:
        idle = self._idle[len(memory)]
        if len(idle) < _MOST_IDLE:
            idle.append(memory)


class RayAssembler(BatchAssembler):
    """Copies rollouts of actors out of the object store; those of several actors are stacked."""

    def __init__(self, submit: Callable[[Call], Call], group: WorkerGroup, memory_pool: MemoryPool) -> None:
        super().__init__(submit, group)
        self._memory_pool = memory_pool

    @override
    def deliver(self, pending: PendingBatch) -> TensorDict:
        packed_batches: list[PackedBatch] = [call.value[0] for call in pending.calls]
        packed_layout = self._packed_layout(pending.calls, packed_batches)
        memory = self._memory_pool.lend(len(packed_batches) * packed_layout.layout.size)
        np.concatenate([packed_batch.memory for packed_batch in packed_batches], out=memory)
        batch = packed_layout.batch(memory, None if self.group.join is None else len(packed_batches))
        for call in pending.calls:
            call.value = (None, call.value[1])  # so that the object store drops the rollout
        return batch

    def _packed_layout(self, calls: Sequence[Call], packed_batches: Sequence[PackedBatch]) -> PackedLayout:
        """The layout of all these batches; `WorkerError` if they differ."""
        first = packed_batches[0].packed_layout
        assert first is not None
        for call, packed_batch in zip(calls, packed_batches, strict=True):
            if packed_batch.packed_layout != first:
                raise WorkerError(
                    f"worker {call.worker}: its batch has other leaves, shapes or dtypes than that of worker "
                    f"{calls[0].worker}: give all workers equal spaces and policies",
                    call.worker,
                )
        return first


class RayWeightStore(WeightStore):
    """Weights as objects of Ray's store, which each node fetches once."""

    @override
    def put(self, weights: Mapping[str, Tensor]) -> tuple[MemoryLayout, Any]:
        leaves: dict[Path, Tensor] = {(name,): weight for name, weight in weights.items()}
        layout = MemoryLayout.of(leaves)
        memory = private_memory(layout.size)
        copy_into(layout.leaves(memory), leaves)
        return layout, ray.put(memory)

    @override
    def call(self, worker: int, held: tuple[MemoryLayout, Any], version: int, policy: bytes | None) -> Call:
        return Call(worker, "fetch", (version, policy, *held))

    @override
    def encode_params(self, params: Any) -> Any:
        return None if params is None else ray.put(params)


class RayTransport(Transport):
    """Starts workers as actors of a Ray cluster, each with the options of Ray that its `Job` has.

    `init` is for `ray.init`, if Ray does not run in this process; `eager` is that of each `RayHandle`.
    """

    def __init__(self, init: Mapping[str, Any] | None, *, num_threads: int, accelerators: bool, eager: bool) -> None:
        self._session = RaySession(init)
        self._num_threads, self._accelerators = num_threads, accelerators
        self._eager = eager

    @override
    def check_room(self, jobs: Sequence[Job], first: int, present: Sequence[Job]) -> None:
        check_room([job.config for job in jobs], first, [job.config for job in present])

    @override
    def start(self, job: Job) -> RayHandle:
        kind = ray.remote(**job.config, max_restarts=0, max_task_retries=0, concurrency_groups=_GROUPS)(RayWorker)
        setup = ChildSetup.like_this(num_threads=self._num_threads, accelerators=self._accelerators)
        actor = kind.remote(setup._replace(environ={}))  # its machine has its own
        return RayHandle(actor, job.config, eager=self._eager)

    @override
    def ready(self, handles: Mapping[int, WorkerHandle], timeout: float) -> Iterable[int]:
        own = {worker: handle for worker, handle in handles.items() if isinstance(handle, RayHandle)}
        if gone := [worker for worker, handle in own.items() if handle.gone]:
            return gone
        heads = {ref: worker for worker, handle in own.items() for ref in handle.heads()}
        if not heads:
            time.sleep(timeout)
            return ()
        there, _ = ray.wait(list(heads), num_returns=1 if timeout else len(heads), timeout=timeout)
        for ref in there:
            own[heads[ref]].there.add(ref)
        return dict.fromkeys(heads[ref] for ref in there)

    @override
    def close(self, handles: Sequence[WorkerHandle]) -> None:
        own = [handle for handle in handles if isinstance(handle, RayHandle)]
        answers = [handle.actor.do.remote("close") for handle in own if not handle.gone]
        if answers:
            ray.wait(answers, num_returns=len(answers), timeout=_TO_CLOSE)
        for handle in own:
            handle.kill()

    @override
    def leave(self) -> None:
        self._session.release()


def over_ray(init: Mapping[str, Any] | None, *, num_threads: int, accelerators: bool, eager: bool) -> Means:
    """Workers in actors, see `RayTransport`."""
    of_single_ones = MemoryPool()

    def assembler(submit: Callable[[Call], Call], group: WorkerGroup) -> RayAssembler:
        alone = group.join is None  # stacked batches have another size, and their memory is freed with the assembler
        return RayAssembler(submit, group, of_single_ones if alone else MemoryPool())

    transport = RayTransport(init, num_threads=num_threads, accelerators=accelerators, eager=eager)
    return Means(transport, assembler, RayWeightStore())
