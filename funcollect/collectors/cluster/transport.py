"""Workers in the actors of a Ray cluster: calls are tasks, rollouts and weights go through the object store."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from funcollect.collectors.cluster.actor import ActorSetup, RayWorker
from funcollect.collectors.cluster.batch_assembler import MemoryPool, RayAssembler
from funcollect.collectors.cluster.packed_batch import PackedBatch, PackedLayout, packed
from funcollect.collectors.cluster.resources import RaySession, check_room, ray, resources
from funcollect.collectors.workers.transport import WITH_WEIGHTS, Answer, Call, WorkerExited, WorkerGroup, WorkerHandle

_GROUPS = {"hurry": 1, "look": 1}  # threads of an actor besides the one that works
_TO_CLOSE = 2.0  # seconds that actors have to close their environments
_TO_TELL = 1.0  # seconds within which an actor shows its Python stack
_TO_FETCH = 30.0  # seconds within which an object that is there can be read


class RayHandle:
    """The way to one actor.

    Args:
        actor: its handle.
        job: what it is to do.
        config: the options that it was made with.
        eager: whether it takes new weights before the rollouts that it was sent earlier.
    """

    def __init__(self, actor: Any, job: bytes, config: Mapping[str, Any], *, eager: bool) -> None:
        self._actor = actor
        self._job = job
        self._config = config
        self._eager = eager
        self._sent: deque[tuple[Any, int]] = deque()  # what will be answered in order
        self._hurried: deque[tuple[Any, int]] = deque()  # and what goes before it
        self.there: set[Any] = set()  # of their references those of which Ray has said that they can be read
        self._collects = 0  # rollouts that it has been sent for
        self._packed_layout: PackedLayout | None = None
        self._node_ref = actor.node.options(concurrency_group="look").remote()
        self._gone = ""

    @property
    def label(self) -> str:
        """The actor and its node."""
        return f"actor {self._actor._actor_id.hex()[:12]} on {self._node() or 'no node yet'}"

    def _node(self) -> str:
        if not ray.is_initialized() or not ray.wait([self._node_ref], timeout=0)[0]:
            return ""
        try:
            node: str = ray.get(self._node_ref)
        except ray.exceptions.RayError:
            return ""
        return node

    def send(self, call: Call) -> None:
        """Have it do this after what it was sent before."""
        if self.gone:
            self._gone = self.gone
            return
        args = call.args
        if call.name == "describe":
            args, self._job = (self._job,), b""  # a policy's weights are in it
        if self._eager and call.name in WITH_WEIGHTS and self._collects:  # else it is next as it is
            ref = self._actor.hurry.options(concurrency_group="hurry").remote(call.name, *args)
            self._hurried.append((ref, call.number))
        else:
            self._sent.append((self._actor.do.remote(call.name, *args), call.number))
            self._collects += call.name == "collect"

    @property
    def gone(self) -> str:
        """Why it will not answer any more; empty while it may."""
        return self._gone or ("" if ray.is_initialized() else _NO_RAY)

    def heads(self) -> list[Any]:
        """The references of which one is there as soon as there is something to receive."""
        return [queue[0][0] for queue in (self._hurried, self._sent) if queue]

    def receive(self) -> Answer | WorkerExited | None:
        """The next of its answers, whose arrays are those of the object store."""
        if self.gone:
            return WorkerExited(self.gone)
        for queue in (self._hurried, self._sent):
            if queue and queue[0][0] in self.there:
                ref, number = queue.popleft()
                self.there.remove(ref)
                return self._read(ref, number)
        return None

    def _read(self, ref: Any, number: int) -> Answer | WorkerExited:
        try:
            value = ray.get(ref, timeout=_TO_FETCH)
        except ray.exceptions.RayError as error:
            self._gone = reason_of(error)
            return WorkerExited(self._gone)
        if isinstance(value, tuple) and isinstance(packed_batch := value[0], PackedBatch):
            self._collects -= 1
            self._packed_layout = packed_batch.packed_layout or self._packed_layout
            value = (PackedBatch(self._packed_layout, packed_batch.memory), *value[1:])
        return Answer(number, value)

    def where(self) -> str:
        """Its Python stack; what it waits for, where it has no node yet."""
        if self.gone:
            return ""
        if not self._node():
            return f"(it has not begun: {resources([self._config])})"
        ref = self._actor.stack.options(concurrency_group="look").remote()
        if not ray.wait([ref], timeout=_TO_TELL)[0]:
            return "(it shows no Python stack: its process is stopped, or its interpreter is held)"
        try:
            stack: str = ray.get(ref)
        except ray.exceptions.RayError as error:
            return f"({reason_of(error)})"
        return stack

    def say_close(self) -> Any:
        """Have it close its environment: the reference of its answer; None where it is gone."""
        return None if self.gone else self._actor.do.remote("close")

    def kill(self) -> None:
        """End it at once, whatever it does. Does nothing the second time."""
        self._sent.clear()
        self._hurried.clear()
        if ray.is_initialized():
            ray.kill(self._actor, no_restart=True)
        self._gone = self._gone or "was ended"


_NO_RAY = "is out of reach: Ray was shut down in this process"


def reason_of(error: BaseException) -> str:
    """An error of Ray in a line: what it says of the cause, without its list of what may be behind it."""
    lines = [line.strip() for line in str(error).splitlines() if ": " not in line[:24] or line.startswith("The actor")]
    told, _, _ = " ".join(lines).partition(" Some common causes")
    return f"was lost ({type(error).__name__}: {told[:400]})"


class RayWeightStore:
    """See `funcollect.collectors.workers.transport.WeightStore`: weights are objects, which each node fetches once."""

    def __init__(self) -> None:
        self._slots: dict[int, tuple[PackedLayout | None, Any]] = {}
        self._next = 0

    def put(self, weights: Mapping[str, Tensor], taken: set[int]) -> int:
        """Make an object of them, and let go of those that nobody will ask for any more."""
        self._slots = {slot: held for slot, held in self._slots.items() if slot in taken}
        self._next += 1
        packed_layout, memory = packed({(name,): weight for name, weight in weights.items()})
        self._slots[self._next] = packed_layout, ray.put(memory)
        return self._next

    def call(self, worker: int, slot: int, version: int, policy: bytes | None) -> Call:
        """A message with a reference to them, which Ray resolves on the actor's node."""
        return Call(worker, "fetch", (version, policy, *self._slots[slot]))

    def encode_params(self, params: Any) -> Any:
        """A reference to them."""
        return None if params is None else ray.put(params)

    def restarted(self, worker: int) -> None:
        """Nothing is remembered."""

    def close(self) -> None:
        """Let go of them."""
        self._slots.clear()


class RayTransport:
    """See `funcollect.collectors.workers.transport.Transport`.

    Args:
        configs: of each actor, the options that Ray takes.
        init: for `ray.init`, where Ray does not run in this process.
        num_threads: of each worker.
        accelerators: whether JAX in an actor may see any.
        eager: whether actors take new weights before the rollouts that they were sent earlier.
    """

    patient = True

    def __init__(
        self,
        configs: Sequence[Mapping[str, Any]],
        init: Mapping[str, Any] | None,
        *,
        num_threads: int,
        accelerators: bool,
        eager: bool,
    ) -> None:
        self._configs: dict[int, Mapping[str, Any]] = {}  # by worker
        self._session = RaySession(init)
        try:
            self.expect(configs, 0, ())
        except BaseException:
            self._session.release()
            raise
        self._setup = (num_threads, accelerators)
        self._eager = eager
        self._memory_pool = MemoryPool()

    def expect(self, configs: Sequence[Mapping[str, Any]], first: int, present: Sequence[int]) -> None:
        """Let the next workers have actors with these options.

        Args:
            configs: what Ray takes.
            first: the index of the first of them.
            present: the workers that are at work.

        Raises:
            WorkerError: where the cluster has no place for them beside these.
        """
        check_room(configs, first, [self._configs[worker] for worker in present])
        self._configs |= dict(enumerate(configs, first))

    def start(self, worker: int, job: bytes) -> RayHandle:
        """A handle to a new actor, which has no node yet."""
        config = self._configs[worker]
        kind = ray.remote(**config, max_restarts=0, max_task_retries=0, concurrency_groups=_GROUPS)(RayWorker)
        return RayHandle(kind.remote(ActorSetup([*sys.path], *self._setup)), job, config, eager=self._eager)

    def ready(self, handles: Mapping[int, WorkerHandle], timeout: float) -> Iterable[int]:
        """Those that have an answer, or whose actor is gone: asked of Ray for all at once."""
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

    def close(self, handles: Sequence[WorkerHandle]) -> None:
        """Let the actors close their environments; kill those that take too long."""
        own = [handle for handle in handles if isinstance(handle, RayHandle)]
        told = [ref for handle in own if (ref := handle.say_close()) is not None]
        if told:
            ray.wait(told, num_returns=len(told), timeout=_TO_CLOSE)
        for handle in own:
            handle.kill()

    def leave(self) -> None:
        """End what this process has started of Ray, unless another collector uses it."""
        self._session.release()

    def assembler(self, submit: Callable[[Call], Call], group: WorkerGroup) -> RayAssembler:
        """An assembler for these actors."""
        alone = group.join is None  # a stack has a size of its own, whose memory goes with its assembler
        return RayAssembler(submit, group, self._memory_pool if alone else MemoryPool())

    def weight_store(self, workers: int) -> RayWeightStore:
        """A weight store."""
        return RayWeightStore()
