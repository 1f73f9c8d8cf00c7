"""The eager loop: the policy acts once per step for all lanes, and a stepper makes the step and records it."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from functools import partial
from threading import Lock
from typing import Any

import optree
import torch
from tensordict import TensorDict
from torch import Tensor

from funcollect.core.batch import REWARD, Book, Page, deliver
from funcollect.core.request import ANOTHER_POLICY, OpenFor, Request, Rollout, check_state_kind, outputs_of_random
from funcollect.core.state import CollectorState
from funcollect.interop.jax_setup import import_jax
from funcollect.interop.memory import reads_together
from funcollect.keys import draw_ahead, random_words
from funcollect.policies.base import policies_of
from funcollect.policies.by_group import GroupPolicy
from funcollect.policies.checks import close_blocks
from funcollect.policies.numerics import TORCH
from funcollect.policies.random_policy import RandomStart
from funcollect.policies.torch_modules.torch_backed import TorchBacked, TorchPolicyState
from funcollect.processes.system import SIGNS
from funcollect.protocols import ActorInputs, Columns, Env, Exploration, Policy
from funcollect.threefry import Words
from funcollect.tree import Path

_STEPS, _WORDS = 64, 1 << 14  # at most, over the short rollouts that share noise
_SMALL = 1 << 22  # bytes of a rollout up to which it stays open
_NOTHING = nullcontext()


class Stepper:
    """Base class: steps all lanes of one kind of environment in a rollout, and records the steps in columns."""

    state: Any  # the `CollectorState` before the rollout, as an actor reads it
    observation: Any  # what the policy reads, in the structure of the space: the same memory at every step
    book: Any = None  # the `Book` of the request, once it has a page
    page: Page  # the memory that the steps of this rollout are recorded in
    infos: dict[Path, Tensor]  # further columns [T, P, ...] by the batch's keys
    roots: Sequence[tuple[Any, Any]] = ()  # pairs of a column and the rows that the policy reads
    waits = False  # whether reading a tensor waits for a device: then none is read before the last step
    in_numpy = False  # whether steps are recorded in arrays of NumPy
    ended = True  # whether a step has ended an episode; True also if that is not known
    fresh = True  # whether lanes at the first step of an episode begin it now
    small = False  # whether the rollout is small enough to keep its memory for the next one

    def __init__(self, env: Any, policy: Policy, state: CollectorState, request: Request) -> None:
        self.env, self.policy, self.state, self.request = env, policy, state, request
        self.key, self.lane, self.total = (None,) * 3 if state is None else (state.key, state.lane, state.total_lanes)

    def _turn_page(self, roots: Columns, nexts: Columns) -> Sequence[Any]:
        """Go to a new page; return its columns: of root and next observations, like these [P, ...], and rewards."""
        if self.book is None:
            like = next(iter(roots.values()))
            rows = {**roots, **{("next", *path): row for path, row in nexts.items()}}
            rows[REWARD] = like.new_empty(len(like), dtype=torch.float32)
            bytes_of_page = self.request.length * sum(row.nbytes for row in rows.values())
            self.small = bytes_of_page <= _SMALL and not self.request.columns  # these belong to the caller
            kind = {"in_numpy": self.in_numpy, "on_host": like.is_cpu and self.state is not None}  # None in a graph
            self.book = Book(rows, single=self.env.num_envs is None, request=self.request, **kind)
        self.page, self.infos = self.book.page(self.request.columns), {}
        return self.page.columns

    def again(self, state: CollectorState, request: Request) -> bool:
        """Prepare for another rollout of a request like the last one; False if that takes another stepper."""
        return False

    def bind(self, inputs: ActorInputs) -> Any:
        """Return the policy bound to the rollout, an `Actor`."""
        return self.policy.actor(inputs)

    def begin(self) -> None:
        """Begin to use the state, which may be possible only once; by now, bad arguments have raised."""

    def make_steps(self, act: Callable[[Any], Any], restart: Callable[[Any], None]) -> None:
        """Make the steps of a rollout, and give a sign of life at each to a parent that waits for this process."""
        roots, step, signs = self.roots, self.step, SIGNS.count
        for t in range(self.request.length):
            signs[0] += 1
            for column, row in roots:  # before the policy can write into what it reads
                column[t] = row
            begun = step(t, act(t))
            if begun is not None:
                restart(begun)

    def step(self, t: int, action: Any) -> Any:
        """Step all lanes; return those that began another episode, as `Actor.restart` takes them, or None."""
        raise NotImplementedError

    def deliver(self, outputs: Columns) -> tuple[dict[str, Tensor], TensorDict]:
        """Return the lanes' counters after the last step, and the batch, for the policy's `outputs`."""
        beside = self.infos | outputs if self.infos else outputs
        return deliver(self.state, self.request, self.book, self.page, beside, ended=self.ended)

    def end(self, counters: dict[str, Tensor]) -> tuple[Any, Any]:
        """Return the environment's state and the observation after the last step."""
        raise NotImplementedError

    def after(self, policy_state: Any, counters: dict[str, Tensor]) -> CollectorState:
        """Return the state after the last step."""
        env_state, observation = self.end(counters)
        steps = self.state.steps_made + self.request.length
        after: CollectorState = self.state.changed(
            env_state=env_state, observation=observation, policy_state=policy_state, steps=steps, **counters
        )
        return after


class Opened(OpenFor):
    """A stepper and an actor bound to it, open for rollouts of one request; they do not depend on the state."""

    def __init__(self, stepper: Stepper, draw: Callable[..., Words]) -> None:
        self._lock = Lock()  # held during a rollout, and for good after one that was broken off
        self._lock.acquire()
        self._clock, self._stepper, self._noise = CLOCK.get(), stepper, NoiseAhead(stepper, draw)
        self._inputs = inputs_of(stepper, self._noise(stepper.state))
        self._remembers = stepper.policy.remembers(stepper.state.policy_state)
        self._members = policies_of(stepper.policy)
        self._actor = actor = open_actor(stepper, self._inputs)
        self._policy_calls = timed("policy", actor.act), timed("policy", actor.restart)
        self._make_steps, self._finish = timed("steps", stepper.make_steps), timed("finish", actor.finish)
        self._deliver = timed("delivery", stepper.deliver)

    def rollout(self, env: Env, policy: Policy, state: CollectorState, request: Request) -> Rollout | None:
        """Make a rollout from a state; None if another loop has to be opened for it, such as for another pair."""
        stepper, inputs, ready = self._stepper, self._inputs, False
        same_pair = stepper.env is env and stepper.policy is policy and policies_of(policy) == self._members
        same_lanes = stepper.key is state.key and stepper.lane is state.lane and stepper.total == state.total_lanes
        same_form = stepper.request.like(request) and type(state.policy_state) is type(inputs.policy_state)
        if not (same_pair and same_lanes and same_form) or CLOCK.get() is not self._clock:
            return None
        if not self._lock.acquire(blocking=False):
            return None
        try:
            ready = self._prepare(policy, state, request)
        finally:
            if not ready:  # also after bad arguments, which raise here
                stepper.state = None
                self._lock.release()
        return self.run() if ready else None

    def _prepare(self, policy: Policy, state: CollectorState, request: Request) -> bool:
        """Bind everything to a rollout from a state; False if that takes another loop."""
        inputs, remembers = self._inputs, policy.remembers(state.policy_state)
        if remembers != self._remembers or not self._stepper.again(state, request):
            return False
        self._inputs = inputs._replace(
            params=policy.prepare(request.params),
            policy_state=state.policy_state,
            initial_state=start_of(policy, state) if remembers else inputs.initial_state,
            noise=self._noise(state),
            exploration=Exploration(request.exploration_type, request.exploration),
        )
        if not self._actor.again(self._inputs):
            return False
        restart_fresh(self._actor, policy, state)
        return True

    def run(self) -> Rollout:
        """Make the rollout; return the next state, which keeps this loop for its own rollout, and the batch."""
        stepper, actor = self._stepper, self._actor
        stepper.begin()
        grad_enabled = torch.is_grad_enabled()
        try:
            with reads_together() if stepper.waits else _NOTHING:
                with actor.running():
                    self._make_steps(*self._policy_calls)
                    policy_state, outputs = self._finish()
                counters, batch = self._deliver(outputs)
        except BaseException:
            close_blocks(grad_enabled)
            raise
        after = stepper.after(policy_state, counters)
        if stepper.small:
            vars(after)["opened"] = self
            stepper.state = None  # it may hold this loop, which would be a cycle
            self._lock.release()
        return after, batch


def run(
    make: Callable[..., Stepper],
    env: Env,
    policy: Policy,
    state: CollectorState,
    request: Request,
    draw: Callable[..., Words] = random_words,
) -> Rollout:
    """Make a rollout; return the next state and the batch. `draw` draws the random words for the noise.

    The loop of a pair, its lanes and a request is opened once; the next state keeps it for its own rollout.
    """
    result: Rollout | None = state.opened and state.opened.rollout(env, policy, state, request)
    return result or Opened(make(env, policy, state, request), draw).run()


class NoiseAhead:
    """Draws a policy's noise for a rollout, or for several short ones at once."""

    def __init__(self, stepper: Stepper, draw: Callable[..., Words]) -> None:
        policy, state, length = stepper.policy, stepper.state, stepper.request.length
        self._noise, self._length, self._draw = policy.noise(stepper.env.action_spec), length, draw
        on_device = isinstance(state.lane, Tensor) and state.lane.device.type != "cpu" and policy.backend == "torch"
        self._key, self._lanes = state.key, state.lane if on_device else state.lane_ids
        words = state.num_lanes * length * (self._noise.words if self._noise else 1)
        self._count = 1 if on_device else max(1, min(_STEPS // length, _WORDS // max(words, 1)))  # rollouts
        self._first, self._drawn = 0, torch.empty(0)

    def __call__(self, state: CollectorState) -> Tensor | None:
        """The noise [T, P, ...] of the rollout from `state`, a view of memory that later rollouts may share."""
        if self._noise is None:
            return None
        at = state.steps_made - self._first
        if not 0 <= at <= self._drawn.shape[0] - self._length:
            first, at, steps = state.steps_made, 0, self._count * self._length
            drawn = draw_ahead(self._noise, self._key, self._lanes, first, steps, draw=self._draw)
            self._first, self._drawn = first, drawn  # neither, if an interrupt came
        return self._drawn[at : at + self._length]


def start_of(policy: Policy, state: CollectorState) -> Any:
    """Return the policy's state at the start of a run; raise ValueError for a state of another policy."""
    initial_state = policy.init(state.key, state.num_lanes)
    check_state_kind(state.policy_state, type(initial_state))
    for name in policy.policies if isinstance(policy, GroupPolicy) else ():
        check_state_kind(state.policy_state.get(name), type(initial_state[name]))
    if isinstance(initial_state, TorchPolicyState):
        held, wanted = state.policy_state.recurrent, initial_state.recurrent
        shapes, own = ([list(leaf.shape) for leaf in optree.tree_leaves(part)] for part in (held, wanted))
        if own != shapes or optree.tree_structure(held) != optree.tree_structure(wanted):
            what = f"the state holds recurrent states of the shapes {shapes}, this policy wants {own}"
            raise ValueError(f"{what}: {ANOTHER_POLICY}")
    return initial_state


def inputs_of(stepper: Stepper, noise: Tensor | None) -> ActorInputs:
    """Return a policy's inputs for a rollout; raise ValueError for a state of another policy."""
    env, policy, state, request = stepper.env, stepper.policy, stepper.state, stepper.request
    return ActorInputs(
        observation=stepper.observation,
        params=policy.prepare(request.params),
        policy_state=state.policy_state,
        initial_state=start_of(policy, state),
        noise=noise,
        exploration=Exploration(request.exploration_type, request.exploration),
        spec=env.action_spec,
        num_envs=state.num_lanes,
        length=request.length,
        single=env.num_envs is None,
    )


def open_actor(stepper: Stepper, inputs: ActorInputs) -> Any:
    """Return the policy bound to a stepper's rollout, an `Actor`."""
    policy, state, request = stepper.policy, stepper.state, stepper.request
    actor: Any = stepper.bind(inputs)
    random_left = min(request.random_steps - state.steps_made, request.length)
    if random_left > 0:
        outputs = partial(outputs_of_random, TORCH, policy, inputs.spec)
        actor = RandomStart(actor, inputs, state.key, state.lane_ids, state.steps_made, random_left, outputs)
    if stepper.fresh:
        restart_fresh(actor, policy, state)
    return actor


def restart_fresh(actor: Any, policy: Policy, state: CollectorState) -> None:
    """Reset the recurrent state of lanes whose episodes begin."""
    if policy.remembers(state.policy_state):
        fresh = state.step == 0
        if fresh.device.type != "cpu":
            actor.restart(fresh)  # as a mask: to read it would wait for the device
        elif bool(fresh.any()):
            actor.restart(fresh.nonzero()[:, 0].tolist())


class TrajectoryLimit:
    """The limit on a trajectory's length, in NumPy or Torch like the lanes' `step` [P]."""

    def __init__(self, step: Any, limit: int) -> None:
        self._limit = min(limit, 1 << 62)  # so that sums with steps fit into 64 bits
        self.due = self._limit - 1 - step  # [P] int64, the step of this rollout at which each lane reaches it

    def reached(self, t: int) -> Any:
        """Return the mask [P] of the lanes that step `t` brings to the limit."""
        return self.due <= t

    def steps(self, t: int) -> Any:
        """Return the steps [P] of each lane's trajectory before step `t`."""
        return t + self._limit - 1 - self.due

    def restart(self, t: int, lanes: Any) -> None:
        """Count from zero again after step `t` in `lanes`: their indices, or in Torch a mask [P]."""
        if isinstance(self.due, Tensor):
            self.due.masked_fill_(lanes, t + self._limit)
        else:
            self.due[lanes] = t + self._limit


class Clock:
    """Adds up the seconds of calls by part; `wait` blocks until an accelerator has finished all its work."""

    def __init__(self, wait: Callable[[], None] | None = None) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._wait = wait or (lambda: None)

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that does what `function` does, and adds its time to ``seconds[part]``."""

        def call(*args: Any) -> Any:
            self._wait()
            began = time.perf_counter()
            try:
                return function(*args)
            finally:
                self._wait()
                self.seconds[part] += time.perf_counter() - began

        return call


CLOCK: ContextVar[Clock | None] = ContextVar("clock", default=None)  # of rollouts that are timed


def timed(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function itself, or in a timed rollout one that adds its time to `part`."""
    clock = CLOCK.get()
    return function if clock is None else clock.timed(part, function)


_COMPILED = ("fused", "captured")  # loops that are one program, in which no part can be timed


class TimedLoops(dict[str, Callable[..., Rollout]]):
    """Loops by name, for `funcollect.core.api.run`, which add up the time of their rollouts."""

    def __init__(self, loops: Mapping[str, Callable[..., Rollout]]) -> None:
        super().__init__({name: partial(self._run, name, loop) for name, loop in loops.items()})
        self.loop = ""  # the name of the loop that ran last
        self.cpu = 0.0  # seconds of this process's CPU time in rollouts
        self.seconds: dict[str, float] = defaultdict(float)  # by part: "rollout" alone in a loop that is one program

    def _run(self, name: str, loop: Callable[..., Rollout], env: Env, policy: Policy, *given: Any) -> Rollout:
        clock = Clock(torch.cuda.synchronize if _on_accelerator(env, policy) else None)
        token = CLOCK.set(None if name in _COMPILED else clock)
        cpu, began = time.process_time(), time.perf_counter()
        try:
            result = loop(env, policy, *given)
        finally:
            CLOCK.reset(token)
        self._count(name, time.perf_counter() - began, clock.seconds)
        self.loop, self.cpu = name, self.cpu + time.process_time() - cpu
        return result

    def _count(self, name: str, whole: float, spent: dict[str, float]) -> None:
        """Add the seconds of a rollout by part, from the seconds `spent` in its calls."""
        if name in _COMPILED:
            self.seconds["rollout"] += whole
            return
        recording = max(spent["steps"] - spent["environment"] - spent["policy"], 0.0)  # outside of these calls
        self.seconds["environment"] += spent["environment"]
        self.seconds["environment" if name == "crossing" else "recording"] += recording  # a compiled step records
        self.seconds["policy"] += spent["policy"] + spent["finish"]
        self.seconds["preparation"] += max(whole - spent["steps"] - spent["finish"] - spent["delivery"], 0.0)
        self.seconds["delivery"] += spent["delivery"]


def _on_accelerator(env: Env, policy: Policy) -> bool:
    """Whether calls of the environment or of the policy may return before their work is done."""
    if not torch.cuda.is_available():
        return False
    policy_device = policy.run_device if isinstance(policy, TorchBacked) else None
    devices = [env.device] if env.backend in ("torch", "device") else []
    if any(str(device).startswith("cuda") for device in (policy_device, *devices)):
        return True
    return "jax" in (env.backend, policy.backend) and import_jax().default_backend() == "gpu"
