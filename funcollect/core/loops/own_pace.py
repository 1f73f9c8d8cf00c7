"""The loop over simulators that do not wait for each other: each lane makes the steps of a rollout at its own pace.

The policy is called for all lanes whenever some have answered; what it says of the others, for their last observations,
is dropped. So all calls have the same rows as those of the loop in step, and the data are the same, whoever is late.

Where one call moves all lanes, none can wait at the end of a rollout: the rows that it is ahead open the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDict
from torch import Tensor, nn
from typing_extensions import override

from funcollect.core.loops import eager
from funcollect.core.loops.eager import timed
from funcollect.core.loops.host import HostStepper
from funcollect.core.request import Request, Rollout, head_of
from funcollect.core.state import CollectorState
from funcollect.envs.host.host_env import NOT_RECORDED, bad_outcome, check_outcome
from funcollect.errors import EnvError, PolicyError
from funcollect.keys import Noise, Purpose, draw_ahead, random_words
from funcollect.policies.by_group import GroupPolicy, select_state
from funcollect.policies.checks import NoDraws, no_draws
from funcollect.policies.random_policy import RandomActor, put_random, random_noise
from funcollect.policies.torch_modules.torch_backed import TorchBacked
from funcollect.processes.system import SIGNS
from funcollect.protocols import Actor, ActorInputs, Columns, HostEnv, Outcome, Policy
from funcollect.specs import assemble
from funcollect.tree import Path

MEND = "make the environment with wait='all'"


class Carried(NamedTuple):
    """The rows that lanes have made beyond the last rollout."""

    ahead: npt.NDArray[np.int64]  # [P], how many of each lane are whole
    memory: Sequence[npt.NDArray[Any]]  # a stepper's, each [k, P, ...]
    outputs: Columns  # the policy's, each [k, P, ...]


def run(env: HostEnv, policy: Policy, state: CollectorState, request: Request) -> Rollout:
    """Implement `funcollect.rollout` over simulators: in step, unless these answer one by one."""
    state.env_state.check()
    live = state.env_state.simulation
    if live.most_ahead and (request.compact_obs or not request.reset_when_done):
        raise EnvError(
            f"{env} moves all lanes together, so that some run ahead of a rollout, expected next observations in the "
            "batch, and lanes that begin other episodes: leave compact_obs out, and evaluate in another environment"
        )
    if live.most_ahead or (live.least_ready and request.length > 1 and request.reset_when_done):
        return eager.Opened(OwnPaceStepper(env, policy, state, request), random_words).run()
    return eager.run(HostStepper, env, policy, state, request)


class OwnPaceStepper(HostStepper):
    """Sends the lanes that are ready, and records the outcomes of those that have answered."""

    def __init__(self, env: HostEnv, policy: Policy, state: CollectorState, request: Request) -> None:
        super().__init__(env, policy, state, replace(request, random_steps=0))
        self._random_left = request.random_steps - state.steps_made
        _check(policy, policy.noise(env.action_spec))
        live, lanes = state.env_state.simulation, state.num_lanes
        self._send = timed("environment", live.simulators.send_some)
        self._receive = timed("environment", live.simulators.receive_some)
        self._seen = {path: rows.copy() for path, rows in self._rows.items()}  # that the policy reads
        shown = self._seen if policy.backend == "jax" else {k: torch.from_numpy(rows) for k, rows in self._seen.items()}
        self.observation = assemble(env.observation_space, shown)
        self.small = False  # nobody continues it
        self._most, self._carried = request.length + live.most_ahead, live.carried
        self.fresh, self._waits = self._carried is None, not live.most_ahead
        roots, nexts = ([store for store, _ in pairs] for pairs in (self.roots, self._nexts))
        self._delivered = own = [self._terminated, self._truncated, self._reward, *roots, *nexts]
        if not self._waits:
            own = [np.zeros((self._most, *each.shape[1:]), each.dtype) for each in self._delivered]
            self._terminated, self._truncated, self._reward = own[:3]
            self.roots = [*zip(own[3:], (row for _, row in self.roots), strict=False)]
            self._nexts = [*zip(own[3 + len(roots) :], (row for _, row in self._nexts), strict=True)]
        self._infos = np.full((self._most, lanes, len(self._info_keys)), None, object)
        self._versions = np.full((self._most, lanes), state.policy_version)
        self._memory, self._made = [*own, self._infos, self._versions], np.zeros(lanes, np.int64)

    @override
    def bind(self, inputs: ActorInputs) -> Actor:
        def drawn(noise: Noise | None, purpose: Purpose) -> Tensor | None:
            if noise is None:
                return None
            state = self.state
            return draw_ahead(noise, state.key, state.lane_ids, state.steps_made, self._most, purpose)

        noise = inputs.noise if self._waits else drawn(self.policy.noise(inputs.spec), Purpose.NOISE)
        early = drawn(random_noise(inputs.spec), Purpose.RANDOM_ACTION) if self._random_left > 0 else None
        held = self._carried.outputs if self._carried else {}
        given = inputs._replace(noise=noise, length=self._most)
        return LanesActor(self.policy, given, held, early, self._random_left)

    @override
    def begin(self) -> None:
        super().begin()
        if self._carried is None:
            return
        self._made += self._carried.ahead
        for own, rows in zip(self._memory, self._carried.memory, strict=True):
            own[: len(rows)] = rows
        if self._limit is not None:
            for t, over in enumerate(self._terminated | self._truncated):
                self._limit.restart(t, (over & (t < self._made)).nonzero()[0])

    @override
    def make_steps(self, act: Callable[..., Any], restart: Callable[[Any], None]) -> None:
        length, made, live = self.request.length, self._made, self._simulators
        least, under_way, ready = self._simulation.least_ready, 0, [*self._lanes]
        while (made < length).any():
            SIGNS.count[0] += 1
            if not self._waits:
                ready = [lane for lane in self._lanes if lane not in live.busy]
                if made.max() >= self._most:
                    raise EnvError(
                        f"lane {made.argmax()} is {self._most - length} steps ahead of a lane that begins many "
                        "episodes, as many as max_carry allows: pass more to make_env, or make longer rollouts"
                    )
            action = None
            if ready:
                self._look(made[ready], ready)
                action = act((made, ready))
                action = (action if getattr(action, "is_cpu", True) else action.cpu())[ready]
            if ready or not self._waits:
                self._send(ready, action)
            under_way += len(ready)
            lanes, outcome = self._receive(min(least, under_way))
            under_way -= len(lanes)
            if lanes and (begun := self._record(made, lanes, outcome)):
                restart(begun)
            made[lanes] += 1
            ready = [lane for lane in lanes if made[lane] < length]

    def _look(self, steps: Any, lanes: Sequence[int]) -> None:
        """Record the observations of lanes that are ready, and show them to the policy."""
        self._versions[steps, lanes] = self.state.policy_version
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
            self._terminated[steps, lanes], self._truncated[steps, lanes] = ends
        except NOT_RECORDED as error:
            raise bad_outcome(outcome, lanes) from error
        for number, values in enumerate(info):
            for step, lane, value in zip(steps, lanes, values, strict=True):
                self._infos[step, lane, number] = value
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
            self._values[key] = [np.array([*row]) for row in self._infos[:length, :, number]]
        if self._final:  # in the order in which the loop in step would have kept them
            steps, lanes = (np.concatenate([each[part] for each in self._final]) for part in (0, 1))
            order = np.lexsort((lanes, steps))
            rows = [np.concatenate(each)[order] for each in zip(*(rows for *_, rows in self._final), strict=True)]
            self._final = [(steps[order], lanes[order], rows)]
        if self._waits:
            return super().deliver(outputs)
        for store, own in zip(self._delivered, self._memory, strict=False):
            store[...] = own[:length]
        beyond, self.ended = slice(length, int(self._made.max()) + 1), True
        self._simulation.carried = Carried(
            self._made - length,
            [each[beyond].copy() for each in self._memory],
            {path: column[beyond].clone() for path, column in outputs.items()},
        )
        counters, batch = super().deliver({path: column[:length] for path, column in outputs.items()})
        self.page.numbers[3] = self._versions[:length].T
        return counters, batch


class LanesActor(Actor):
    """A policy of which each lane is at a step of its own: one call of all lanes each time, as for a single step."""

    def __init__(
        self, policy: Policy, inputs: ActorInputs, held: Columns, early: Tensor | None, random_left: int
    ) -> None:
        self._policy, self._inputs, self._state = policy, inputs, inputs.policy_state
        self._early, self._random_left = early, random_left
        self._remembers = policy.remembers(inputs.policy_state)
        self._every, self._columns = torch.arange(inputs.num_envs), Columns()
        self._actor: Any = None
        self._draws: NoDraws | None = no_draws()  # for the first call
        for path, rows in held.items():
            self._column(path, rows)[: len(rows)] = rows

    def _column(self, path: Path, rows: Tensor) -> Tensor:
        """The memory [T, P, ...] of an output, of which `rows` are [k, P, ...]."""
        if path not in self._columns:
            self._columns[path] = rows.new_empty(self._inputs.length, *rows.shape[1:])
        return self._columns[path]

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
            with self._draws or nullcontext():
                action = self._actor.act(0)
            state, outputs = self._actor.finish()
        self._draws = None
        if self._early is not None and (random := steps < self._random_left).any():
            drawn = RandomActor(once._replace(noise=self._early[steps, self._every][None]))
            drawn.act(0)
            put_random(outputs, drawn, head_of(self._policy), inputs.spec, (0, random))
            action = outputs["action",][0]
        self._advance(state, lanes)
        for path, rows in outputs.items():
            self._column(path, rows)[steps[lanes], lanes] = rows[0, lanes]
        return action

    def _advance(self, state: Any, lanes: Sequence[int]) -> None:
        """Take the next state of these lanes, and keep that of the others."""
        if self._remembers:
            self._state = select_state(self._policy, self._mask(lanes), state, self._state)

    def _mask(self, lanes: Sequence[int]) -> Tensor:
        mask = torch.zeros(len(self._every), dtype=torch.bool)
        mask[lanes] = True
        return mask

    @override
    def restart(self, lanes: Any) -> None:
        self._state = select_state(self._policy, self._mask(lanes), self._inputs.initial_state, self._state)

    @override
    def finish(self) -> tuple[Any, Columns]:
        return self._state, self._columns


def _check(policy: Policy, noise: Noise | None) -> None:
    """Raise PolicyError for a policy whose data would depend on which lanes answer first."""
    if noise is not None and noise.kind == "key":
        raise PolicyError(
            "the policy takes `key`, that of the first lane, which may be at another step than the others, expected "
            f"noise of each lane: take `keys`, or a head, or {MEND}"
        )
    for each in policy.policies.values() if isinstance(policy, GroupPolicy) else ():
        _check(each, None)
    module = policy.module if isinstance(policy, TorchBacked) else None
    for part in module.modules() if isinstance(module, nn.Module) else ():
        if isinstance(part, nn.modules.batchnorm._BatchNorm) and part.training:
            raise PolicyError(
                f"the policy has a {type(part).__name__} in training mode, whose answers depend on all lanes, expected "
                f"lanes apart: call module.eval(), or {MEND}"
            )
