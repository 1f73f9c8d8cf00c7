"""Sends weights to the workers: each gets the latest version, complete, and none waits for another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from funcollect.collectors.workers.pool import WorkerPool
from funcollect.collectors.workers.transport import Call, WeightStore
from funcollect.policies.torch_in_jax import LoweredPolicy
from funcollect.policies.torch_modules.sending import PolicyChanges, unpack
from funcollect.policies.torch_modules.torch_backed import replaced
from funcollect.policies.torch_modules.torch_policy import TorchPolicy
from funcollect.policies.weights import Shapes, check_shapes, shapes_of
from funcollect.protocols import Policy, is_policy


@dataclass(frozen=True, eq=False)
class WeightsVersion:
    """One update: weights in a slot of the weight store, or parameters that travel in the call itself."""

    number: int  # the policy's version
    slot: int | None = None
    params: Any = None  # the parameters in the call; None for the policy's own
    own: bool = True  # whether they are the policy's own
    loaded: bool = False  # whether `params` come from a state dict and were the policy's own when they were saved
    policy: bytes | None = None  # the packed module or function, if it has changed since the workers were built


def share_weights(saved: Sequence[Any]) -> None:
    """Make equal weights in the states of runners one object, which a file holds once."""
    firsts: dict[int, Mapping[str, Tensor]] = {}
    for state in saved:
        own = state["policy_state_dict"]
        first = firsts.setdefault(state["policy_version"], own)
        if first.keys() == own.keys() and all(torch.equal(first[name], own[name]) for name in own):
            state["policy_state_dict"] = first


class Weights:
    """The weights that each worker acts with, and those that it will act with.

    A worker copies weights before it acts with them, and gets later ones only after that. So a tight loop of updates
    needs one slot per worker, one for the latest version and one to write, and no process waits.

    `policy` owns the parameters: a `Policy`, a module or a function; None if the workers build their own.
    """

    def __init__(self, pool: WorkerPool, weight_store: WeightStore, policy: Any) -> None:
        self._pool = pool
        self._weight_store = weight_store
        own = policy is None or is_policy(policy)
        self._policy: Policy | None = policy if own else TorchPolicy(policy, None, None, None)
        self._shapes = self._shapes_now()
        self._changes = PolicyChanges(self._policy)
        self.version = 0  # of the latest update
        self.own = True  # whether the latest update of all workers had the policy's own weights
        self._refusal: BaseException | None = None  # the error of a worker that kept its previous weights
        self._latest: WeightsVersion | None = None
        count = len(pool.records)
        self._wanted: list[WeightsVersion | None] = [None] * count
        self._under_way: list[tuple[WeightsVersion, Call] | None] = [None] * count
        self._taken: list[WeightsVersion | None] = [None] * count

    def update(self, params: Any, workers: Sequence[int]) -> None:
        """Make these workers act with a copy of `params`, or for None of the policy's own.

        Raises:
            TypeError: for a policy that has changed into one that cannot be sent.
            ValueError: for parameters that do not fit the policy.
        """
        weights, policy = self._named(params), self._changes.packed()
        with self._pool.lock:
            slot = None if weights is None else self._write(weights, workers)
            self.version, own = self.version + 1, params is None
            if {*workers} >= {*self._pool.workers}:
                self.own = own
            sent = self._weight_store.encode_params(params) if slot is None else None
            version = WeightsVersion(self.version, slot, sent, own, policy=policy)
            self._latest = version
            for worker in workers:
                self._wanted[worker] = version
        self.send()
        if slot is None and (params is not None or policy is not None):  # only the workers can check whether it fits
            while any(self._under_way[worker] is not None for worker in workers):
                self._pool.wait()
                self.send()
            refusal, self._refusal = self._refusal, None
            if refusal is not None:
                raise refusal

    def _named(self, params: Any) -> Mapping[str, Tensor] | None:
        """The weights by name; None if the policy has none in this process."""
        if self._policy is None:
            return None
        if params is None:
            check_shapes(self._shapes, self._shapes_now())
        else:
            self._policy.prepare(params)
        return self._policy.state_dict(params) or None

    def _shapes_now(self) -> Shapes:
        """The shapes of a JAX policy's parameters, which have to stay as its workers got them.

        Empty for other policies: if these change their structure, workers get the new module or policy.
        """
        policy = self._policy
        if policy is None or policy.backend == "torch" or isinstance(policy, LoweredPolicy):
            return {}
        return shapes_of(policy.params, "jax")

    def _write(self, weights: Mapping[str, Tensor], workers: Sequence[int]) -> int:
        """Write weights for these workers into a free slot; return the slot."""
        while (slot := self._weight_store.put(weights, self._slots_in_use(workers))) is None:
            self._pool.wait()  # updates of single workers may need more slots than there are
        return slot

    def _slots_in_use(self, workers: Sequence[int]) -> set[int]:
        """The slots that may still be read once these workers want another one."""
        wanted = [version for worker, version in enumerate(self._wanted) if worker not in workers]
        under_way = [each[0] for each in self._under_way if each is not None and not each[1].done]
        some = len(workers) < len(self._pool.workers)
        kept = [*wanted, *under_way, *((*self._wanted, self._latest) if some else ())]
        return {version.slot for version in kept if version is not None and version.slot is not None}

    def send(self) -> None:
        """Send the latest weights to every worker that has copied the ones before."""
        with self._pool.lock:
            for worker, wanted in enumerate(self._wanted):
                sent = self._under_way[worker]
                if sent is not None and sent[1].done:
                    self._under_way[worker] = None
                    self._took(worker, *sent)
                    sent = None
                if sent is None and wanted is not None and wanted is not self._taken[worker]:
                    self._under_way[worker] = (wanted, self._pool.submit(self._call(worker, wanted)))

    def _took(self, worker: int, version: WeightsVersion, call: Call) -> None:
        """Record the answer of a worker that was sent weights."""
        if call.error is None:
            self._taken[worker] = version
            return
        if self._wanted[worker] is version:
            self._wanted[worker] = self._taken[worker]
        self._refusal = call.error

    def _call(self, worker: int, version: WeightsVersion) -> Call:
        """The call that brings a worker these weights."""
        if version.slot is not None:
            return self._weight_store.call(worker, version.slot, version.number, version.policy)
        name = "adopt" if version.loaded else "take_params"
        return Call(worker, name, (version.params, version.number, version.policy))

    def join(self, worker: int) -> None:
        """Make a worker that was added act with the latest weights."""
        with self._pool.lock:
            for column in (self._wanted, self._under_way, self._taken):
                column.extend([None] * (worker + 1 - len(column)))
            self._wanted[worker] = self._latest
        self.send()

    def leave(self, worker: int) -> None:
        """Forget a worker."""
        with self._pool.lock:
            self._wanted[worker] = self._under_way[worker] = self._taken[worker] = None

    def flush(self) -> None:
        """Block until the latest weights have been sent to every worker. Later calls run with them."""
        self.send()
        for worker, wanted in enumerate(self._wanted):
            while (sent := self._under_way[worker]) is not None and sent[0] is not wanted:
                self._pool.finish([sent[1]])
                self.send()

    def restarted(self, worker: int) -> Sequence[Call]:
        """The calls that the new process of a replaced worker needs first: those with the latest weights."""
        self._weight_store.restarted(worker)
        if (sent := self._under_way[worker]) is not None:
            sent[1].resolve()  # the worker that would have answered it has ended
        wanted = self._wanted[worker]
        if wanted is None:
            return ()
        call = self._call(worker, wanted)
        self._under_way[worker] = (wanted, call)
        return (call,)

    def _replace(self, policy: bytes | None) -> None:
        """Continue with a packed policy from the larger run; None for the present one."""
        if policy is not None:
            self._policy = replaced(self._policy, unpack(policy))
            self._changes = PolicyChanges(self._policy, policy)

    def own_workers(self) -> list[bool]:
        """Whether each worker at work acts with the policy's own weights, as they were at its latest update."""
        return [(wanted := self._wanted[worker]) is None or wanted.own for worker in self._pool.workers]

    def go_on_from(
        self, version: int, saved: Mapping[int, Mapping[str, Any]], *, own: bool, own_workers: Sequence[bool]
    ) -> None:
        """Continue from the states that the workers have loaded. No call with weights is under way then.

        `own` and `own_workers` are what they were when the run was saved.
        """
        self.version, self.own = version, own
        self._under_way = [None] * len(self._wanted)
        self._wanted = [None] * len(self._wanted)
        for (worker, state), its_own in zip(saved.items(), own_workers, strict=True):
            if weights := state["policy_state_dict"]:
                self._wanted[worker] = self._saved_version(worker, state, weights, own=its_own)
        self._taken = list(self._wanted)

        def version_of(worker: int) -> int:
            return int(saved[worker]["policy_version"])

        self._latest = self._wanted[max(saved, key=version_of)]
        with_own = [worker for worker, its_own in zip(saved, own_workers, strict=True) if its_own]
        weights = saved[max(with_own, key=version_of)]["policy_state_dict"] if with_own else None
        if own and self._policy is not None and weights:
            self._policy.load(weights)

    def _saved_version(self, worker: int, state: Mapping[str, Any], weights: Any, *, own: bool) -> WeightsVersion:
        number = state["policy_version"]
        if self._policy is None:
            return WeightsVersion(number, params=weights, loaded=state["own_weights"], policy=self._changes.sent)
        for other in self._wanted[:worker]:
            if other is not None and other.number == number:
                return other
        with self._pool.lock:
            return WeightsVersion(number, self._write(weights, [worker]), own=own, policy=self._changes.sent)

    def publish(self, params: Any, version: int, policy: bytes | None = None) -> None:
        """`update` for all workers, under the larger run's version number."""
        self._replace(policy)
        self.version = version - 1
        self.update(params, self._pool.workers)

    def adopt(self, weights: Mapping[str, Tensor], version: int, policy: bytes | None = None) -> None:
        """Make all workers act with these as the policy's own weights, under the larger run's version number."""
        self._replace(policy)
        if self._policy is not None:
            self._policy.load(weights)
            self.publish(None, version)
            return
        self.version, self.own = version, True
        self._latest = WeightsVersion(version, params=weights, loaded=True, policy=self._changes.sent)
        with self._pool.lock:
            for worker in self._pool.workers:
                self._wanted[worker] = self._latest
        self.send()
