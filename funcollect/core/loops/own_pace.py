"""The loop over simulators that do not wait for each other: each lane makes the steps of a rollout at its own pace.

Whenever some lanes have answered, the policy is called for all lanes; its outputs for the others, which repeat their
last observation, are dropped. So all calls have the same rows as in `host`, and the data are the same, whoever is late.

Where one call steps all lanes, no lane can wait at the end of a rollout: the rows that it is ahead open the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from copy import copy
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDict
from torch import Tensor, nn
from typing_extensions import override

from funcollect.core.loops import eager
from funcollect.core.loops.host import HostStepper
from funcollect.core.request import EXPLORATION, Request, Rollout, outputs_of_random
from funcollect.core.state import CollectorState
from funcollect.envs.host.host_env import NOT_RECORDED, bad_info, bad_outcome, check_outcome
from funcollect.errors import EnvError, PolicyError
from funcollect.keys import Noise, Purpose, draw_ahead, random_words
from funcollect.policies.by_group import GroupPolicy
from funcollect.policies.by_player import select_state
from funcollect.policies.checks import NoDraws
from funcollect.policies.numerics import TORCH
from funcollect.policies.random_policy import RandomActor, put_random, random_noise
from funcollect.policies.torch_modules.torch_backed import TorchBacked
from funcollect.processes.system import SIGNS
from funcollect.protocols import Actor, ActorInputs, Columns, HostEnv, Outcome, Policy
from funcollect.specs import assemble
from funcollect.tree import Path, as_path

MEND = "make the environment with wait='all'"
_SHARED = 64  # the most calls of a policy that share an actor


class Carried(NamedTuple):
    """The rows that lanes have made beyond the last rollout."""

    ahead: npt.NDArray[np.int64]  # [P], the number of each lane's whole rows
    memory: Sequence[npt.NDArray[Any]]  # of the stepper, each [k, P, ...]
    outputs: Columns  # of the policy, each [k, P, ...]
    explored: tuple[str, ...]  # the names of the exploration, whose columns are the last of `memory`
    begun: npt.NDArray[np.bool_]  # [P], lanes that were reset since, whose rows are dropped

    def without(self, lanes: npt.NDArray[np.bool_]) -> Carried:
        """The rows of the other lanes, after a reset of these [P]."""
        return self._replace(ahead=np.where(lanes, 0, self.ahead), begun=self.begun | lanes)


def run(env: HostEnv, policy: Policy, state: CollectorState, request: Request) -> Rollout:
    """Implement `funcollect.rollout` over simulators: with all lanes in step, unless they answer one by one."""
    state.env_state.check()
    live = state.env_state.simulation
    if live.most_ahead and (request.compact_obs or not request.reset_when_done):
        what = f"{env} moves all lanes together, so that some run ahead of a rollout, expected next observations"
        raise EnvError(f"{what}, and lanes that restart: leave compact_obs out, and evaluate in another environment")
    if live.most_ahead or (live.least_ready and request.length > 1 and request.reset_when_done):
        return eager.Opened(OwnPaceStepper(env, policy, state, request), random_words).run()
    return eager.run(HostStepper, env, policy, state, request)


class OwnPaceStepper(HostStepper):
    """Sends actions to the lanes that are ready, and records the outcomes of those that have answered."""

    def __init__(self, env: HostEnv, policy: Policy, state: CollectorState, request: Request) -> None:
        super().__init__(env, policy, state, replace(request, random_steps=0))
        self._random_left = request.random_steps - state.steps_made
        _check_lanes_apart(policy, policy.noise(env.action_spec))
        live, lanes = state.env_state.simulation, state.num_lanes
        self._send = eager.timed("environment", live.simulators.send_some)
        self._receive = eager.timed("environment", live.simulators.receive_some)
        self._seen = {path: rows.copy() for path, rows in self._rows.items()}  # what the policy reads
        shown = self._seen if policy.backend == "jax" else {k: torch.from_numpy(rows) for k, rows in self._seen.items()}
        self.observation = assemble(env.observation_space, shown)
        self.small = False  # another stepper makes the next rollout
        self._most, self._carried = request.length + live.most_ahead, live.carried
        self.fresh, self._waits = self._carried is None, not live.most_ahead
        roots, nexts = ([store for store, _ in pairs] for pairs in (self.roots, self._nexts))
        self._delivered = columns = [self._terminated, self._truncated, self._reward, *roots, *nexts]
        if not self._waits:  # then lanes may make more rows than the batch has
            columns = [np.zeros((self._most, *column.shape[1:]), column.dtype) for column in self._delivered]
            self._terminated, self._truncated, self._reward = columns[:3]
            self.roots = [*zip(columns[3:], (row for _, row in self.roots), strict=False)]
            self._nexts = [*zip(columns[3 + len(roots) :], (row for _, row in self._nexts), strict=True)]
        self._infos = np.full((self._most, lanes, len(self._info_keys)), None, object)
        self._versions = np.full((self._most, lanes), state.policy_version)
        values = {} if self._waits else request.exploration
        self._explored = {
            name: (np.zeros((self._most, lanes), np.float32), np.broadcast_to(np.asarray(value, np.float32), lanes))
            for name, value in values.items()
        }  # by name: the column, and its row in this rollout
        explored = [column for column, _ in self._explored.values()]
        self._memory, self._made = [*columns, self._infos, self._versions, *explored], np.zeros(lanes, np.int64)  # rows

    @override
    def bind(self, inputs: ActorInputs) -> Actor:
        of_run, noise = (self.state.key, self.state.lane_ids, self.state.steps_made, self._most), inputs.noise
        if not self._waits and (own := self.policy.noise(inputs.spec)):
            noise = draw_ahead(own, *of_run, Purpose.NOISE)
        early = None
        if self._random_left > 0:
            early = draw_ahead(random_noise(inputs.spec), *of_run, Purpose.RANDOM_ACTION)
        carried = self._carried.outputs if self._carried else {}
        inputs = inputs._replace(noise=noise, length=self._most)
        actor = LanesActor(self.policy, inputs, carried, early, self._random_left, self.request.length)
        if self._carried:
            actor.restart(self._carried.begun.nonzero()[0])
        return actor

    @override
    def begin(self) -> None:
        if self._carried:
            _check_same("exploration", self._carried.explored, self._explored)
        super().begin()
        if self._carried is None:
            return
        self._made += self._carried.ahead
        for column, rows in zip(self._memory, self._carried.memory, strict=True):
            column[: len(rows)] = rows
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
                    what = f"lane {made.argmax()} is {self._most - length} steps ahead of a lane that begins episodes"
                    raise EnvError(f"{what}, as many as max_carry allows: pass more to make_env, or a longer rollout")
            action = None
            if ready:
                self._look(made[ready], ready)
                action = act((made, ready))
                action = (action.numpy(force=True) if isinstance(action, Tensor) else action)[ready]
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
        """Record the observations of lanes that are ready at these steps, and show them to the policy."""
        for (column, rows), seen in zip(self.roots, self._seen.values(), strict=True):
            column[steps, lanes] = seen[lanes] = rows[lanes]
        if not self._waits:
            self._versions[steps, lanes] = self.state.policy_version
        for column, rows in self._explored.values():
            column[steps, lanes] = rows[lanes]

    def _record(self, made: Any, lanes: Sequence[int], outcome: Outcome) -> list[int]:
        """Record the outcome of lanes, at the steps `made` [P] of each; return those that began another episode."""
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
            self._terminated[steps, lanes], self._truncated[steps, lanes] = ends  # over those of rows that were dropped
        except NOT_RECORDED as error:
            raise bad_outcome(outcome, lanes) from error
        for number, values in enumerate(info):
            for step, lane, value in zip(steps, lanes, values, strict=True):
                self._infos[step, lane, number] = copy(value)  # whose memory the next step may write
        if not (over := ends.any(0)).any():
            return []
        ended: list[int] = np.array(lanes)[over].tolist()
        self.ended = True
        if self.request.compact_obs:
            self._keep_final(steps[over], ended)
        eager.timed("environment", self._simulation.restart)(ended)
        if self._limit is not None:
            self._limit.restart(steps[over], ended)
        return ended

    @override
    def deliver(self, outputs: Columns) -> tuple[dict[str, Tensor], TensorDict]:
        length = self.request.length
        for number, key in enumerate(self._info_keys):
            infos = self._infos[:length, :, number]
            try:
                self._values[key] = [np.array([*row]) for row in infos]
            except ValueError as error:
                raise bad_info(key, infos[0, 0], error) from error
        if self._final:  # sort them as `host` would have kept them
            steps, lanes = (np.concatenate([final[part] for final in self._final]) for part in (0, 1))
            order = np.lexsort((lanes, steps))
            rows = [np.concatenate(leaf)[order] for leaf in zip(*(rows for *_, rows in self._final), strict=True)]
            self._final = [(steps[order], lanes[order], rows)]
        if self._waits:
            return super().deliver(outputs)
        for store, column in zip(self._delivered, self._memory, strict=False):
            store[...] = column[:length]
        beyond, self.ended = slice(length, int(self._made.max()) + 1), True
        memory = [column[beyond].copy() for column in self._memory]
        kept = {path: column[beyond].clone() for path, column in outputs.items()}
        begun = np.zeros(len(self._made), bool)
        self._simulation.carried = Carried(self._made - length, memory, kept, tuple(self._explored), begun)
        delivered = {path: column[:length] for path, column in outputs.items()}
        for name, (column, _) in self._explored.items():
            delivered[(*EXPLORATION, name)] = torch.from_numpy(column[:length].copy())
        counters, batch = super().deliver(delivered)
        self.page.numbers[3] = self._versions[:length].T
        return counters, batch


class LanesActor(Actor):
    """Acts for lanes that are each at their own step, by calls of the policy for all lanes, as for single steps.

    If the policy has no recurrent state, as many calls as every lane is sure to need share an actor: its work at the
    end, such as log-probabilities and checks, is then done for all of these calls at once.
    """

    def __init__(
        self, policy: Policy, inputs: ActorInputs, carried: Columns, early: Tensor | None, random_left: int, length: int
    ) -> None:
        self._policy, self._inputs, self._state, self._carried = policy, inputs, inputs.policy_state, carried
        self._early, self._random_left, self._length = early, random_left, length
        self._remembers, self._begun = policy.remembers(inputs.policy_state), np.zeros(inputs.num_envs, bool)
        self._every, self._columns = np.arange(inputs.num_envs), Columns()
        self._drawn = None if inputs.noise is None else inputs.noise.numpy()  # [T, P, ...]
        self._actors: dict[int, Any] = {}  # by the number of calls that share one
        self._actor: Any = None  # for the current calls
        self._running = ExitStack()  # holds its `running`
        self._noise: Any = None  # of these [k, P, ...]; each row is written before its call
        self._calls: list[tuple[Any, Sequence[int]]] = []  # those already made: the steps, and the lanes that made them
        self._draws: NoDraws | None = None  # checks that the first call draws from no generator of Torch
        for path, rows in carried.items():
            self._column(path, rows)[: len(rows)] = rows

    def _column(self, path: Path, rows: Tensor) -> Tensor:
        """The memory [T, P, ...] of an output with rows like `rows` [k, P, ...]."""
        if path not in self._columns:
            self._columns[path] = rows.new_empty(self._inputs.length, *rows.shape[1:])
        return self._columns[path]

    @override
    @contextmanager
    def running(self) -> Iterator[None]:
        with self._running:
            yield

    def _open(self, made: Any, noise: Any) -> None:
        """Bind the policy to the next calls; `noise` [P, ...] is for the first of them."""
        shared = self._actors and not self._remembers and self._early is None and self._actors[1].reads_late
        most = min(_SHARED, self._length - int(made.min())) if shared else 1
        self._count = count = 1 << most.bit_length() - 1
        self._noise = None if noise is None else np.broadcast_to(noise, (count, *noise.shape)).copy()
        shown = None if noise is None else torch.from_numpy(self._noise)
        inputs = self._inputs._replace(policy_state=self._state, noise=shown, length=count)
        if count not in self._actors or not self._actors[count].again(inputs):
            self._actors[count] = self._policy.actor(inputs)
        self._actor = self._actors[count]
        self._running.enter_context(self._actor.running())

    @override
    def act(self, t: Any) -> Any:
        """The actions [P, ...], valid only in the lanes that act; `t` is a pair: the steps [P], and these lanes."""
        made, lanes = t
        steps = np.minimum(made, self._inputs.length - 1)
        noise = None if self._drawn is None else self._drawn[steps, self._every]
        if not (number := len(self._calls)):
            self._draws = None if self._actors else NoDraws()  # type: ignore[no-untyped-call]  # for the first call
            self._open(made, noise)
            if self._begun.any():  # which the actor does not know from the state, such as `is_init`
                self._actor.restart(torch.from_numpy(self._begun.copy()))
                self._begun[lanes] = False
        elif noise is not None:
            self._noise[number] = noise
        self._calls.append((steps[lanes], lanes))
        with self._draws or nullcontext():
            action = self._actor.act(number)
        if len(self._calls) < self._count:
            return action
        state, outputs = self._actor.finish()
        self._running.close()
        if self._early is not None and (random := torch.from_numpy(steps < self._random_left)).any():
            drawn = RandomActor(self._inputs._replace(noise=self._early[steps, self._every][None], length=1))
            drawn.act(0)
            found = outputs_of_random(TORCH, self._policy, self._inputs.spec, drawn.actions, drawn.log_prob)
            put_random(outputs, found, (0, random))
            action = outputs["action",][0]
        self._keep(outputs)
        if self._remembers:
            self._select(lanes, state)
        return action

    def _keep(self, outputs: Columns) -> None:
        """Write the outputs of the calls to the steps that they were made for, in the lanes that acted."""
        if self._carried:
            _check_same("outputs", self._carried, outputs)
        steps, lanes = (torch.from_numpy(np.concatenate(parts)) for parts in zip(*self._calls, strict=True))
        calls = torch.arange(len(self._calls)).repeat_interleave(torch.tensor([len(made) for made, _ in self._calls]))
        for path, rows in outputs.items():
            self._column(path, rows)[steps, lanes] = rows[calls, lanes]
        self._calls.clear()

    def _select(self, lanes: Sequence[int], chosen: Any) -> None:
        """Take the recurrent state of these lanes from `chosen`."""
        mask = np.zeros(len(self._every), bool)
        mask[lanes] = True
        self._state = select_state(self._policy, torch.from_numpy(mask), chosen, self._state)

    @override
    def restart(self, lanes: Any) -> None:
        if self._remembers:
            self._begun[lanes] = True
            self._select(lanes, self._inputs.initial_state)

    @override
    def finish(self) -> tuple[Any, Columns]:
        return self._state, self._columns


def _check_same(what: str, carried: Collection[Any], own: Collection[Any]) -> None:
    """Raise PolicyError if the carried rows have other `what`, by name, than those of this policy."""
    if {*carried} != {*own}:
        found, wanted = (sorted(map(".".join, map(as_path, names))) for names in (carried, own))
        rule = f"lanes have run ahead by rows of a policy with the {what} {found}, expected {wanted}, as this one has"
        raise PolicyError(f"{rule}: begin new episodes with funcollect.recover(env, state)")


def _check_lanes_apart(policy: Policy, noise: Noise | None) -> None:
    """Raise PolicyError for a policy whose data would depend on which lanes answer first."""
    if noise is not None and noise.kind == "key":
        what = "the policy takes `key`, that of the first lane, which may be at another step than the others"
        raise PolicyError(f"{what}, expected noise of each lane: take `keys`, or a head, or {MEND}")
    for member in policy.policies.values() if isinstance(policy, GroupPolicy) else ():
        _check_lanes_apart(member, None)
    module = policy.module if isinstance(policy, TorchBacked) else None
    for part in module.modules() if isinstance(module, nn.Module) else ():
        if isinstance(part, nn.modules.batchnorm._BatchNorm) and part.training:
            what = f"the policy has a {type(part).__name__} in training mode, whose answers depend on all lanes"
            raise PolicyError(f"{what}, expected lanes apart: call module.eval(), or {MEND}")
