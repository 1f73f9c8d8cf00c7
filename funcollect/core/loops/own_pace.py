"""The loop over simulators that do not wait for each other: each lane makes the steps of a rollout at its own pace.

The policy is called for all lanes whenever some have answered; what it says of the others, for their last observations,
is dropped. So all calls have the same rows as those of the loop in step, and the data are the same, whoever is late.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor, nn
from typing_extensions import override

from funcollect.core.loops import eager
from funcollect.core.loops.eager import timed
from funcollect.core.loops.host import HostStepper
from funcollect.core.request import Request, Rollout
from funcollect.core.state import CollectorState
from funcollect.envs.host.host_env import NOT_RECORDED, bad_outcome, check_outcome
from funcollect.errors import PolicyError
from funcollect.keys import Noise, random_words
from funcollect.policies.base import device_of, select_program
from funcollect.policies.torch_modules.torch_backed import TorchPolicyState
from funcollect.processes.system import SIGNS
from funcollect.protocols import Actor, ActorInputs, Columns, HostEnv, Outcome, PacedSimulators, Policy
from funcollect.specs import assemble
from funcollect.tree import moved, select

MEND = "make the environment with wait='all'"


def run(env: HostEnv, policy: Policy, state: CollectorState, request: Request) -> Rollout:
    """Implement `funcollect.rollout` over simulators: in step, unless these answer one by one."""
    state.env_state.check()
    apart = state.env_state.simulation.least_ready and request.length > 1 and request.reset_when_done
    if apart and state.steps_made >= request.random_steps:
        return eager.Opened(OwnPaceStepper(env, policy, state, request), random_words).run()
    return eager.run(HostStepper, env, policy, state, request)


class OwnPaceStepper(HostStepper):
    """Sends the lanes that are ready, and records the outcomes of those that have answered."""

    def __init__(self, env: HostEnv, policy: Policy, state: CollectorState, request: Request) -> None:
        super().__init__(env, policy, state, request)
        _check(policy, policy.noise(env.action_spec))
        live: PacedSimulators = self._simulators
        self._send, self._receive = timed("environment", live.send_some), timed("environment", live.receive_some)
        self._seen = {path: rows.copy() for path, rows in self._rows.items()}  # that the policy reads
        shown = self._seen if policy.backend == "jax" else {k: torch.from_numpy(rows) for k, rows in self._seen.items()}
        self.observation = assemble(env.observation_space, shown)
        self._infos = [[None] * state.num_lanes for _ in range(request.length * len(self._info_keys))]
        self._flags: Any = (self._terminated, self._truncated)
        self.small = False  # nobody continues it

    @override
    def bind(self, inputs: ActorInputs) -> Actor:
        return LanesActor(self.policy, inputs)

    @override
    def make_steps(self, act: Callable[..., Any], restart: Callable[[Any], None]) -> None:
        length, made, under_way = self.request.length, np.zeros(len(self._lanes), np.int64), 0
        least, ready = self.state.env_state.simulation.least_ready, [*self._lanes]
        while ready or under_way:
            SIGNS.count[0] += 1
            if ready:
                self._look(made[ready], ready)
                action = act((made, ready))
                self._send(ready, (action if getattr(action, "is_cpu", True) else action.cpu())[ready])
                under_way += len(ready)
            lanes, outcome = self._receive(min(least, under_way))
            under_way -= len(lanes)
            if begun := self._record(made, lanes, outcome):
                restart(begun)
            made[lanes] += 1
            ready = [lane for lane in lanes if made[lane] < length]

    def _look(self, steps: Any, lanes: Sequence[int]) -> None:
        """Record the observations of lanes that are ready, and show them to the policy."""
        for column, rows in self.roots:
            column[steps, lanes] = rows[lanes]
        for path, seen in self._seen.items():
            seen[lanes] = self._rows[path][lanes]

    def _record(self, made: Any, lanes: Sequence[int], outcome: Outcome) -> list[int]:
        """Record an outcome; return the lanes that began another episode."""
        steps = made[lanes]
        self._outcome = outcome
        check_outcome(outcome, lanes)
        for store, rows in self._nexts:
            store[steps, lanes] = rows[lanes]
        reward, terminated, truncated, info = outcome
        try:
            self._reward[steps, lanes] = reward
            ends = np.array((terminated, truncated), bool)
            if self._limit is not None:
                ends[1] |= self._limit.reached(made)[lanes]
            for store, flags in zip(self._flags, ends, strict=True):
                store[steps, lanes] = flags
        except NOT_RECORDED as error:
            raise bad_outcome(outcome, lanes) from error
        for number, values in enumerate(info):
            for step, lane, value in zip(steps, lanes, values, strict=True):
                self._infos[number * self.request.length + step][lane] = value
        over = ends.any(0)
        ended: list[int] = np.array(lanes)[over].tolist()
        if not ended:
            return []
        self.ended = True
        if self.request.compact_obs:
            self._keep(steps[over], ended)
        timed("environment", self._simulation.restart)(ended)
        if self._limit is not None:
            self._limit.restart(steps[over], ended)
        return ended

    @override
    def deliver(self, outputs: Columns) -> tuple[dict[str, Tensor], TensorDict]:
        length = self.request.length
        for number, key in enumerate(self._info_keys):
            self._values[key] = [np.array(row) for row in self._infos[number * length : (number + 1) * length]]
        if self._final:  # in the order in which the loop in step would have kept them
            steps, lanes = (np.concatenate([each[part] for each in self._final]) for part in (0, 1))
            order = np.lexsort((lanes, steps))
            rows = [np.concatenate(each)[order] for each in zip(*(rows for *_, rows in self._final), strict=True)]
            self._final = [(steps[order], lanes[order], rows)]
        return super().deliver(outputs)


class LanesActor(Actor):
    """A policy of which each lane is at a step of its own: one call of all lanes each time, as for a single step."""

    def __init__(self, policy: Policy, inputs: ActorInputs) -> None:
        self._policy, self._inputs, self._state = policy, inputs, inputs.policy_state
        self._remembers = policy.remembers(inputs.policy_state)
        self._every, self._columns = torch.arange(inputs.num_envs), Columns()
        self._actor: Any = None

    @override
    def act(self, t: Any) -> Any:
        """The action [P, ...] for the pair of the steps [P] and the lanes that make theirs; the other rows are void."""
        made, lanes = t
        inputs = self._inputs
        steps = torch.from_numpy(made).clamp(max=inputs.length - 1)
        noise = None if inputs.noise is None else inputs.noise[steps, self._every][None]
        once = inputs._replace(policy_state=self._state, noise=noise, length=1)
        if self._actor is None or not self._actor.again(once):
            self._actor = self._policy.actor(once)
        with self._actor.running():
            action = self._actor.act(0)
            state, outputs = self._actor.finish()
        self._advance(state, lanes)
        for path, rows in outputs.items():
            if path not in self._columns:
                self._columns[path] = rows.new_empty(inputs.length, *rows.shape[1:])
            self._columns[path][steps[lanes], lanes] = rows[0, lanes]
        return action

    def _advance(self, state: Any, lanes: Sequence[int]) -> None:
        """Take the next state of these lanes, and keep that of the others."""
        if isinstance(state, TorchPolicyState) and not torch.equal(state.generator, self._state.generator):
            raise PolicyError(
                "the policy draws from Torch's generator, so that its data would depend on which lanes answer first, "
                f"expected noise of its head: leave a head to sample, or {MEND}"
            )
        if self._remembers:
            self._state = _of_lanes(self._policy, self._mask(lanes), state, self._state)

    def _mask(self, lanes: Sequence[int]) -> Tensor:
        mask = torch.zeros(len(self._every), dtype=torch.bool)
        mask[lanes] = True
        return mask

    @override
    def restart(self, lanes: Any) -> None:
        self._state = _of_lanes(self._policy, self._mask(lanes), self._inputs.initial_state, self._state)

    @override
    def finish(self) -> tuple[Any, Columns]:
        return self._state, self._columns


def _of_lanes(policy: Policy, mask: Tensor, chosen: Any, other: Any) -> Any:
    """A policy's state: the lanes of the mask [P] from `chosen`, the rest from `other`."""
    if isinstance(chosen, TorchPolicyState):
        held = [(each.recurrent, each.carried) for each in (chosen, other)]
        place = next((place for place in map(device_of, held) if place.type != "cpu"), torch.device("cpu"))
        recurrent, carried = select(mask.to(place), *moved(held, place))
        return other._replace(recurrent=recurrent, carried=carried)
    return select_program()(mask.numpy(), chosen, other) if policy.backend == "jax" else select(mask, chosen, other)


def _check(policy: Policy, noise: Noise | None) -> None:
    """Raise PolicyError for a policy whose data would depend on which lanes answer first."""
    if noise is not None and noise.kind == "key":
        raise PolicyError(
            "the policy takes `key`, that of the first lane, which may be at another step than the others, expected "
            f"noise of each lane: take `keys`, or a head, or {MEND}"
        )
    module = getattr(policy, "module", None)
    for part in module.modules() if isinstance(module, nn.Module) else ():
        if isinstance(part, nn.modules.batchnorm._BatchNorm) and part.training:
            raise PolicyError(
                f"the policy has a {type(part).__name__} in training mode, whose answers depend on all lanes, expected "
                f"lanes apart: call module.eval(), or {MEND}"
            )
