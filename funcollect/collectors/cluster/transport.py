"""Workers in the actors of a Ray cluster: calls are tasks, rollouts and weights go through the object store."""

from __future__ import annotations

import itertools
import threading
import time
import warnings
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from tensordict import TensorDict
from torch import Tensor
from typing_extensions import override

from funcollect.collectors.cluster.actor import PackedBatch, PackedLayout, RayWorker, private_memory, ray
from funcollect.collectors.workers.gathering import BatchAssembler, Means, PendingBatch, WorkerGroup
from funcollect.collectors.workers.weights import WITH_WEIGHTS, FetchCall, WeightStore
from funcollect.collectors.workers.worker import Job, copy_into
from funcollect.errors import WorkerError
from funcollect.processes.child import ChildSetup
from funcollect.processes.memory import Memory, MemoryLayout
from funcollect.processes.pool import Call, Loss, Transport, WorkerHandle
from funcollect.tree import Path

_GROUPS = {"hurry": 1, "look": 1}  # threads of an actor besides the one that works
_TO_CLOSE = 2.0  # seconds that actors have to close their environments
_TO_REPORT = 1.0  # seconds within which an actor shows its Python stack
_TO_FETCH = 30.0  # seconds within which an object that is there can be read
_MOST_IDLE = 3  # pieces of one size that are kept for reuse: a copy into fresh memory takes ten times as long


class RayHandle(WorkerHandle):
    """The connection to one actor with these options; an `eager` one takes new weights before earlier calls."""

    def __init__(self, actor: Any, config: Mapping[str, Any], *, eager: bool) -> None:
        self.actor, self._config, self._eager = actor, config, eager
        self._sent: deque[tuple[Any, Call]] = deque()  # calls that will be answered in order
        self._hurried: deque[tuple[Any, Call]] = deque()  # calls that are answered before those
        self.readable: set[Any] = set()  # the references to answers that Ray reports as readable
        self._packed_layout: PackedLayout | None = None
        self._signs: int = 0  # of life, as last reported
        self._signs_ref, self._node_ref = self._look("signs"), self._look("node")  # to the next sign, and the node
        self._gone = ""  # the cached result of `gone`

    def _look(self, name: str) -> Any:
        """A reference to the answer of a method that the actor calls beside its work."""
        return getattr(self.actor, name).options(concurrency_group="look").remote()

    @property
    @override
    def label(self) -> str:
        return f"actor {self.actor._actor_id.hex()[:12]} on {self._node or 'no node yet'}"

    @property
    def _node(self) -> str:
        node = _answer(self._node_ref) if ray.is_initialized() else None
        return node if isinstance(node, str) else ""

    @override
    def send(self, call: Call) -> None:
        self._gone = self.gone
        if self._gone:
            return
        if self._eager and call.name in WITH_WEIGHTS and any(sent.name == "collect" for _, sent in self._sent):
            ref = self.actor.hurry.options(concurrency_group="hurry").remote(call.name, *call.args)
            self._hurried.append((ref, call))
        else:
            self._sent.append((self.actor.do.remote(call.name, *call.args), call))

    @property
    def gone(self) -> str:
        """Why the actor will not answer any more; empty while it may."""
        return self._gone or ("" if ray.is_initialized() else "is out of reach: Ray was shut down in this process")

    def heads(self) -> list[Any]:
        """The references to the next answers. One of them is readable once there is something to receive."""
        return [queue[0][0] for queue in (self._hurried, self._sent) if queue]

    @override
    def receive(self) -> tuple[int, Any] | Loss | None:
        if self.gone:
            return Loss(self.gone)
        queue = next((each for each in (self._hurried, self._sent) if each and each[0][0] in self.readable), None)
        if queue is None:
            return None
        ref, call = queue.popleft()
        self.readable.remove(ref)
        try:
            value = ray.get(ref, timeout=_TO_FETCH)
        except ray.exceptions.RayError as error:
            self._gone = _reason_of(error)
            return Loss(self._gone)
        if isinstance(value, tuple) and isinstance(packed_batch := value[0], PackedBatch):
            self._packed_layout = packed_batch.packed_layout or self._packed_layout
            value = (PackedBatch(self._packed_layout, packed_batch.memory), *value[1:])
        return call.number, value

    @override
    def signs(self) -> int:
        if (answer := _answer(self._signs_ref)) is not None:
            self._signs_ref = self._look("signs")
        if isinstance(answer, int):  # else its next answer shows that it was lost
            self._signs = answer
        return self._signs

    @override
    def where(self) -> str:
        if self.gone:
            return ""
        if not self._node:
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
    """The value, or Ray's error, that arrives within so many seconds; None if neither does."""
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
    """Memory of this process that batches borrow, and return once no view of it is alive."""

    def __init__(self) -> None:
        self._idle: defaultdict[int, deque[Memory]] = defaultdict(lambda: deque(maxlen=_MOST_IDLE))

    def lend(self, size: int) -> Memory:
        """A piece of `size` bytes, not cleared."""
        idle = self._idle[size]
        memory = idle.pop() if idle else private_memory(size)
        lent = np.frombuffer(memory, np.uint8)  # all views refer to this very array
        weakref.finalize(lent, idle.append, memory).atexit = False
        return lent


class RayAssembler(BatchAssembler):
    """Copies rollouts of actors out of the object store; those of several actors are stacked."""

    def __init__(self, submit: Callable[[Call], Call], group: WorkerGroup, *, single_pool: MemoryPool) -> None:
        super().__init__(submit, group)
        # Stacked batches have another size, and their memory is freed with this object.
        self._memory_pool = single_pool if group.join is None else MemoryPool()

    @override
    def deliver(self, pending: PendingBatch) -> TensorDict:
        layouts, memories = zip(*(call.value[0] for call in pending.calls), strict=True)
        packed_layout: PackedLayout = layouts[0]
        for call, layout in zip(pending.calls, layouts, strict=True):
            if layout != packed_layout:
                what = f"its batch has other leaves, shapes or dtypes than that of worker {pending.calls[0].worker}"
                mend = "give all workers equal spaces and policies"
                raise WorkerError(f"worker {call.worker}: {what}: {mend}", call.worker)
        memory = self._memory_pool.lend(len(memories) * packed_layout.layout.size)
        np.concatenate(memories, out=memory)
        batch = packed_layout.batch(memory, None if self.group.join is None else len(memories))
        for call in pending.calls:
            call.value = (None, call.value[1])  # lets the object store free the rollout
        return batch


class RayWeightStore(WeightStore):
    """Weights as objects of Ray's store, which each node fetches once."""

    @override
    def put(self, weights: Mapping[str, Tensor]) -> FetchCall:
        leaves: dict[Path, Tensor] = {(name,): weight for name, weight in weights.items()}
        layout = MemoryLayout.of(leaves)
        memory = private_memory(layout.size)
        copy_into(layout.leaves(memory), leaves)
        held = ray.put(memory)
        return lambda worker, version, policy: Call(worker, "fetch", (version, policy, layout, held))

    @override
    def encode_params(self, params: Any) -> Any:
        return None if params is None else ray.put(params)


class RayTransport(Transport):
    """Starts workers as actors of a Ray cluster, each with the options of Ray that its `Job` has.

    `init` is for `ray.init`; None uses a running cluster, or else starts one, which ends with the last transport that
    uses it. ValueError if Ray runs in this process, and was not started with this `init`.
    """

    _lock = threading.Lock()
    _users = 0  # transports that use the cluster that the first one started
    _init: Mapping[str, Any] | None = None

    def __init__(self, init: Mapping[str, Any] | None, *, num_threads: int, accelerators: bool, eager: bool) -> None:
        with RayTransport._lock:
            started = not ray.is_initialized()
            if started:
                with warnings.catch_warnings():  # JAX warns of forks; those of Ray become other programs at once
                    warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)
                    ray.init(**{"include_dashboard": False, "logging_level": "warning", **(init or {})})
                RayTransport._users, RayTransport._init = 0, init
            self._counted = started or RayTransport._users > 0  # otherwise the user has started Ray
            if init is not None and not (self._counted and init == RayTransport._init):
                mend = "leave it out, or call ray.shutdown() before"
                raise ValueError(f"ray_init_config is given, but Ray runs in this process already: {mend}")
            RayTransport._users += self._counted
        self._num_threads, self._accelerators, self._eager = num_threads, accelerators, eager

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
    def ready(self, handles: Mapping[int, Any], timeout: float) -> Iterable[int]:
        if gone := [worker for worker, handle in handles.items() if handle.gone]:
            return gone
        heads = {ref: worker for worker, handle in handles.items() for ref in handle.heads()}
        if not heads:
            time.sleep(timeout)
            return ()
        readable, _ = ray.wait(list(heads), num_returns=1 if timeout else len(heads), timeout=timeout)
        for ref in readable:
            handles[heads[ref]].readable.add(ref)
        return dict.fromkeys(heads[ref] for ref in readable)

    @override
    def close(self, handles: Sequence[Any]) -> None:
        answers = [handle.actor.do.remote("close") for handle in handles if not handle.gone]
        if answers:
            ray.wait(answers, num_returns=len(answers), timeout=_TO_CLOSE)
        super().close(handles)

    @override
    def leave(self) -> None:
        with RayTransport._lock:
            RayTransport._users -= self._counted
            if self._counted and RayTransport._users == 0 and ray.is_initialized():
                ray.shutdown()
            self._counted = False


def over_ray(init: Mapping[str, Any] | None, **options: Any) -> Means:
    """Workers in actors; see `RayTransport`."""
    transport = RayTransport(init, **options)
    return Means(transport, partial(RayAssembler, single_pool=MemoryPool()), RayWeightStore())


def _demand(config: Mapping[str, Any]) -> dict[str, float]:
    """The resources that an actor with these options asks for, by Ray's names."""
    named = {"CPU": config.get("num_cpus"), "GPU": config.get("num_gpus"), "memory": config.get("memory")}
    return {name: amount for name, amount in (named | dict(config.get("resources") or {})).items() if amount}


def resources(configs: Sequence[Mapping[str, Any]]) -> str:
    """The resources that actors with these options request, and those of the cluster, for error messages."""
    counts = Counter(_words(_demand(config)) for config in configs)
    asked = "; ".join(f"{count} x ({words})" for words, count in counts.items())
    nodes = "; ".join(f"{node['NodeManagerAddress']} has {_words(node['Resources'])}" for node in _alive())
    return f"asked for [{asked}]; the cluster: [{nodes}], free: {_words(ray.available_resources())}"


def check_room(configs: Sequence[Mapping[str, Any]], first: int, taken: Sequence[Mapping[str, Any]] = ()) -> None:
    """Raise WorkerError if the cluster is too small for these actors beside those that are `taken`.

    Actors that are refused fit nowhere, however Ray places them. Others may still have to wait for other jobs.
    """
    wanted = [_units(_demand(config)) for config in (*taken, *configs)]
    nodes, refused = [_units(node["Resources"]) for node in _alive()], set[int]()
    for name in {name for asked in wanted for name in asked}:  # demands that exceed what all nodes hold of a resource
        room, sums = sum(node[name] for node in nodes), itertools.accumulate(asked[name] for asked in wanted)
        refused |= {index for index, total in enumerate(sums) if total > room and wanted[index][name]}
    for asked in filter(None, wanted):  # or the number of nodes that fit them
        places = sum(min(node[name] // amount for name, amount in asked.items()) for node in nodes)
        refused.update([index for index, other in enumerate(wanted) if asked <= other][places:])
    if newcomers := [index for index in refused if index >= len(taken)]:
        worker = first + min(newcomers) - len(taken)
        what = f"the cluster has no room for collector {worker} of {first + len(configs)}: {resources(configs)}"
        mend = "use fewer collectors, ask for less by remote_configs, or let the cluster grow before"
        raise WorkerError(f"{what}: {mend} (ray.autoscaler.sdk.request_resources)", worker)


def _units(amounts: Mapping[str, float]) -> Counter[str]:
    """Resources in Ray's integer units, so that ten tenths are one."""
    return +Counter({name: round(amount * 10_000) for name, amount in amounts.items()})


def _alive() -> list[Mapping[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def _words(amounts: Mapping[str, float]) -> str:
    """Amounts of resources in words, without those that Ray adds itself."""
    shown = {name: amount for name, amount in amounts.items() if ":" not in name and name != "object_store_memory"}
    return ", ".join(f"{amount:g} {name}" for name, amount in sorted(shown.items())) or "nothing"
