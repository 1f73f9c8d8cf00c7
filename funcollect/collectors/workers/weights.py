"""Sends weights to the workers: each gets the latest version, complete, and none waits for another."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from funcollect.files import Uninterrupted
from funcollect.policies.torch_in_jax import LoweredPolicy
from funcollect.policies.torch_modules.settings import PolicyChanges, unpack
from funcollect.policies.torch_modules.torch_backed import replaced
from funcollect.policies.torch_modules.torch_policy import TorchPolicy
from funcollect.policies.weights import Shapes, check_shapes, shapes_of
from funcollect.processes.pool import Call, WorkerPool
from funcollect.protocols import Policy, is_policy

WITH_WEIGHTS = ("fetch", "adopt", "take_params")  # the calls that bring new weights

# From a worker, a version, and the packed policy if it changed, makes the call by which the worker copies weights.
FetchCall = Callable[[int, int, bytes | None], Call]


class WeightStore:
    """Holds weights until every worker has copied them: the tensors themselves; for other transports copies."""

    def put(self, weights: Mapping[str, Tensor]) -> FetchCall | None:
        """Hold weights for as long as the returned function is alive; None if there is no room now."""
        return lambda worker, version, policy: Call(worker, "adopt", (weights, version, policy))

    def encode_params(self, params: Any) -> Any:
        """The form in which a call holds parameters that are not named weights."""
        return params

    def close(self) -> None:
        """Release the memory."""


class WeightsVersion(NamedTuple):
    """One update."""

    number: int  # the policy's version, unique to this update
    own: bool  # whether the weights are the policy's own
    call: Callable[[int], Call]  # makes the call that sends them to a worker; while it is alive, the store holds them


@dataclass
class _Status:
    wanted: WeightsVersion | None = None  # the worker will act with it; None for the weights of its job
    sent: tuple[WeightsVersion, Call] | None = None  # the version under way, and its call
    copied: int | None = None  # the number of the version that the worker acts with


class Weights:
    """The weights with which each worker acts, and will act.

    A worker copies weights before it acts with them, and gets later ones only after that. So in a tight loop of updates
    the store holds one version per worker, the latest one and one to write, and no process waits. `policy` owns the
    parameters: a `Policy`, a module or a function; None if the workers build their own.
    """

    def __init__(self, pool: WorkerPool, weight_store: WeightStore, policy: Any) -> None:
        self._pool, self._weight_store = pool, weight_store
        known = policy is None or is_policy(policy)
        self._policy: Policy | None = policy if known else TorchPolicy(policy, None, None, None)
        self._shapes = self._shapes_now()
        self._changes = PolicyChanges(self._policy)
        self.version = 0  # of the latest update
        self.own = True  # whether the latest update of all workers had the policy's own weights
        self._latest: WeightsVersion | None = None
        self._status = {worker: _Status() for worker in pool.workers}

    def prepare(self, params: Any) -> None:
        """Raise ValueError for parameters that do not fit the policy of this process, if it has one."""
        if self._policy is not None and params is not None:
            self._policy.prepare(params)

    def update(self, params: Any, workers: Sequence[int], *, loaded: bool = False) -> None:
        """Make these workers act with a copy of `params`, or for None of the policy's own.

        Workers that have built their own policies load them into these if they are `loaded`. TypeError for a policy
        that has changed into one that cannot be sent, ValueError for parameters that do not fit.
        """
        weights: Mapping[str, Tensor] = {}  # by name, if the policy has some in this process
        if self._policy is not None:
            if params is None:
                check_shapes(self._shapes, self._shapes_now())
            self.prepare(params)
            weights = self._policy.state_dict(params)
        own, changed = params is None or loaded, self._changes.packed() is not None
        with self._pool.lock:
            version = self._new(weights, params, self.version + 1, own, loaded)
            self.version = version.number
        if not weights and (changed or params is not None):
            self._send_checked(version, workers)
        with self._pool.lock:
            self._latest = version
            if {*workers} >= {*self._pool.workers}:
                self.own = own
            for worker in workers:
                self._status[worker].wanted = version
        self.send()

    def _send_checked(self, version: WeightsVersion, workers: Sequence[int]) -> None:
        """Send weights that only the workers can check; raise the error of a worker that refuses them."""
        self.flush()
        calls = [self._pool.submit(version.call(worker)) for worker in workers]
        self._pool.await_all(calls)
        for worker, call in zip(workers, calls, strict=True):
            if call.error is None:
                self._status[worker] = _Status(wanted=version, copied=version.number)
        self._pool.finish(calls)

    def _shapes_now(self) -> Shapes:
        """The shapes of a JAX policy's parameters, which must not change; those of other policies may: {}."""
        if (policy := self._policy) is None or policy.backend == "torch" or isinstance(policy, LoweredPolicy):
            return {}
        return shapes_of(policy.params, "jax")

    def _new(self, weights: Mapping[str, Tensor], params: Any, number: int, own: bool, loaded: bool) -> WeightsVersion:
        """The version of these weights, which the weight store holds; if there are none, of `params` in the call."""
        policy = self._changes.sent
        if not weights:
            name, arguments = "adopt" if loaded else "take_params", (self._weight_store.encode_params(params), number)
            return WeightsVersion(number, own, lambda worker: Call(worker, name, (*arguments, policy)))
        while (fetch_call := self._weight_store.put(weights)) is None:
            self._pool.wait()  # updates of single workers may need more room than there is
            self.send()
        return WeightsVersion(number, own, lambda worker: fetch_call(worker, number, policy))

    def send(self) -> None:
        """Send the latest weights to every worker that has copied the ones before."""
        with self._pool.lock:
            for worker, status in self._status.items():
                if status.sent is not None and status.sent[1].done:
                    status.copied, status.sent = status.sent[0].number, None
                wanted = status.wanted
                if status.sent is None and wanted is not None and wanted.number != status.copied:
                    with Uninterrupted():
                        status.sent = wanted, self._pool.submit(wanted.call(worker))

    def sent_to(self, worker: int) -> int:
        """The lowest version of the weights in a rollout that this worker begins now."""
        status = self._status[worker]
        return (status.copied or 0) if status.sent is None else status.sent[0].number

    def set_workers(self, workers: Sequence[int]) -> None:
        """Send weights to these workers from now on; new ones get the latest."""
        with self._pool.lock:
            self._status = {worker: self._status.get(worker) or _Status(wanted=self._latest) for worker in workers}
        self.send()

    def flush(self) -> None:
        """Block until the latest weights have been sent to every worker. Later calls run with them."""
        self.send()
        for status in self._status.values():
            while status.sent is not None and status.sent[0] is not status.wanted:
                self._pool.finish([status.sent[1]])
                self.send()

    def restarted(self, worker: int) -> Sequence[Call]:
        """The calls that the new process of a replaced worker needs first: those with the latest weights."""
        status = self._status[worker]
        if status.sent is not None:
            status.sent[1].resolve()  # the worker that would have answered it has ended
        if status.wanted is None:
            return ()
        status.sent = status.wanted, status.wanted.call(worker)
        return (status.sent[1],)

    @property
    def plain(self) -> dict[str, Any]:
        """The data that `go_on_from` needs beside the states of the workers."""
        own_workers = [status.wanted is None or status.wanted.own for status in self._status.values()]
        return {"policy_version": self.version, "own_weights": self.own, "own_workers": own_workers}

    def go_on_from(self, run: Mapping[str, Any], saved: Mapping[int, Mapping[str, Any]]) -> None:
        """Continue from the states that the workers have loaded. No call with weights is under way then."""
        self.version, self.own, own_workers = run["policy_version"], run["own_weights"], run["own_workers"]
        self._status = {worker: _Status() for worker in saved}
        stored: dict[int, WeightsVersion] = {}
        for status, state, own in zip(self._status.values(), saved.values(), own_workers, strict=True):
            weights, number = state["policy_state_dict"], state["policy_version"]
            if not weights:
                continue
            with self._pool.lock:
                if self._policy is None:  # workers that built their own may have others under the same number
                    status.wanted = self._new({}, weights, number, own, state["own_weights"])
                elif number not in stored:
                    stored[number] = self._new(weights, None, number, own, loaded=False)
            status.wanted, status.copied = stored.get(number, status.wanted), number
        by_version = sorted(zip(saved, own_workers, strict=True), key=lambda each: saved[each[0]]["policy_version"])
        self._latest = self._status[by_version[-1][0]].wanted
        owners = [worker for worker, own in by_version if own]
        if self.own and self._policy is not None and owners and (weights := saved[owners[-1]]["policy_state_dict"]):
            self._policy.load(weights)

    def publish(self, params: Any, version: int, policy: bytes | None, own: bool) -> None:
        """`update` all workers, under the larger run's version number; `own` weights become those of the policy."""
        if policy is not None:
            self._policy = replaced(self._policy, unpack(policy))
            self._changes = PolicyChanges(self._policy, policy)
        self.version = version - 1
        if own and self._policy is not None:
            self._policy.load(params)
            self.update(None, self._pool.workers)
        else:
            self.update(params, self._pool.workers, loaded=own)
