"""The eager loop: the policy acts once per step for all lanes, and a stepper makes the step and records it."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from typing import Any, TypeVar

import optree
import torch
from tensordict import TensorDict
from torch import Tensor

from funcollect.core.batch import OUTCOME_KEYS, REWARD, deliver
from funcollect.core.request import ANOTHER_POLICY, Request, Rollout, check_state_kind, head_of
from funcollect.core.state import CollectorState
from funcollect.interop.memory import reads_together
from funcollect.keys import draw_ahead, random_words
from funcollect.policies.random_policy import RandomStart
from funcollect.policies.torch_modules.torch_backed import TorchPolicyState
from funcollect.processes.system import SIGNS
from funcollect.protocols import Actor, ActorInputs, Columns, Env, Exploration, Policy
from funcollect.threefry import Words
from funcollect.tree import Path

Function = TypeVar("Function", bound=Callable[..., Any])


class Stepper:
    """All lanes of one rollout over one kind of environment, and the columns that their steps are recorded in."""

    state: CollectorState  # before the rollout, as an actor reads it
    observation: Any  # that the policy reads: the same memory throughout, in the structure of the space
    columns: dict[Any, Any]  # the recorded entries [T, P, ...] by the batch's keys
    roots: Sequence[tuple[Any, Any]] = ()  # pairs of a column and the rows that the policy reads
    waits = False  # whether to read a tensor is to wait for a device, so that none is read before the last step

    def __init__(self, env: Any, policy: Policy, state: CollectorState, request: Request) -> None:
        self.env, self.policy, self.state, self.request = env, policy, state, request

    def _make_columns(self, roots: Mapping[Path, Tensor], nexts: Mapping[Path, Tensor]) -> None:
        """Make columns for rows of root observations [P, ...] and of next ones, and for the outcomes of the steps."""
        rows = {**roots, **{("next", *path): row for path, row in nexts.items()}}
        self.columns = {path: self.request.column(path, row) for path, row in rows.items()}
        like = next(iter(roots.values()))
        for path in OUTCOME_KEYS:
            dtype = torch.float32 if path == REWARD else torch.bool
            self.columns[path] = torch.zeros(self.request.length, len(like), dtype=dtype, device=like.device)

    def begin(self) -> None:
        """Use the state, which may be possible once: bad arguments have raised."""

    def record(self, t: int) -> None:
        """Record the observations that the policy reads at step `t`, before it may write into them."""
        for column, row in self.roots:
            column[t] = row

    def step(self, t: int, action: Any) -> Any:
        """Step all lanes; return those that began another episode, as `Actor.restart` takes them, or None."""
        raise NotImplementedError

    def deliver(self, outputs: Columns) -> tuple[dict[str, Tensor], TensorDict]:
        """Return the lanes' counters after the last step, and the batch, for the policy's `outputs`."""
        return deliver(self.env, self.state, self.request, self.columns, outputs, on_host=not self.waits)

    def end(self, counters: dict[str, Tensor]) -> tuple[Any, Any]:
        """Return the environment's state and the observation after the last step."""
        raise NotImplementedError

    def after(self, policy_state: Any, counters: dict[str, Tensor]) -> CollectorState:
        """Return the state after the last step."""
        env_state, observation = self.end(counters)
        return self.state.replace(
            env_state=env_state,
            observation=observation,
            policy_state=policy_state,
            steps=self.state.steps_made + self.request.length,
            **counters,
        )


def run(stepper: Stepper, draw: Callable[..., Words] = random_words) -> Rollout:
    """Make a rollout; return the next state and the batch. Noise is made of the words that `draw` draws."""
    actor = open_actor(stepper, draw)
    stepper.begin()
    with reads_together() if stepper.waits else nullcontext():
        with actor.running():
            timed("steps", step_all)(stepper, actor, stepper.request.length)
            policy_state, outputs = timed("finish", actor.finish)()
        counters, batch = timed("delivery", stepper.deliver)(outputs)
    return stepper.after(policy_state, counters), batch


def step_all(stepper: Stepper, actor: Actor, length: int) -> None:
    """Make the steps of a rollout; whoever waits for this process sees a sign of life at each."""
    act, restart = timed("policy", actor.act), timed("policy", actor.restart)
    record, step, signs = stepper.record, stepper.step, SIGNS.count
    for t in range(length):
        signs[0] += 1
        record(t)
        begun = step(t, act(t))
        if begun is not None:
            restart(begun)


def inputs_of(
    env: Env, policy: Policy, state: CollectorState, request: Request, observation: Any, noise: Tensor | None
) -> ActorInputs:
    """Return a policy's inputs for this rollout; raise ValueError for a state of another policy."""
    initial_state = policy.init(state.key, state.num_lanes)
    check_state_kind(state.policy_state, type(initial_state))
    if isinstance(initial_state, TorchPolicyState):
        held, wanted = state.policy_state.recurrent, initial_state.recurrent
        shapes, own = ([list(leaf.shape) for leaf in optree.tree_leaves(each)] for each in (held, wanted))
        if own != shapes or optree.tree_structure(held) != optree.tree_structure(wanted):
            raise ValueError(
                "the state holds the policy state of another policy, with recurrent states of the shapes "
                f"{shapes}, this policy wants {own}: {ANOTHER_POLICY}"
            )
    return ActorInputs(
        observation=observation,
        params=policy.prepare(request.params),
        policy_state=state.policy_state,
        initial_state=initial_state,
        noise=noise,
        exploration=Exploration(request.exploration_type, request.exploration),
        spec=env.action_spec,
        num_envs=state.num_lanes,
        length=request.length,
        single=env.num_envs is None,
    )


def open_actor(stepper: Stepper, draw: Callable[..., Words] = random_words) -> Actor:
    """Return the policy bound to a stepper's rollout. Its noise is drawn ahead, from words that `draw` draws."""
    env, policy, state, request = stepper.env, stepper.policy, stepper.state, stepper.request
    steps, noise = state.steps_made, policy.noise(env.action_spec)
    on_device = isinstance(state.lane, Tensor) and state.lane.device.type != "cpu" and policy.backend == "torch"
    lanes = state.lane if on_device else state.lane_ids
    drawn = None if noise is None else draw_ahead(noise, state.key, lanes, steps, request.length, draw=draw)
    inputs = inputs_of(env, policy, state, request, stepper.observation, drawn)
    actor = policy.actor(inputs)
    random_left = min(request.random_steps - steps, request.length)
    if random_left > 0:
        actor = RandomStart(actor, inputs, state.key, state.lane_ids, steps, random_left, head_of(policy))
    fresh = state.step == 0
    if fresh.device.type != "cpu":
        actor.restart(fresh)  # which is not read, since that would wait for the device
    elif bool(fresh.any()):
        actor.restart(fresh.nonzero()[:, 0].tolist())
    return actor


class TrajectoryLimit:
    """The limit on a trajectory's length, in NumPy or Torch as the lanes' `step` [P] is."""

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
        """Count from zero, after step `t`, in these lanes: their indices, or for a tensor a mask [P]."""
        if isinstance(self.due, Tensor):
            self.due.masked_fill_(lanes, t + self._limit)
        else:
            self.due[lanes] = t + self._limit


class Clock:
    """Adds up the seconds of calls, by part; `wait` blocks until an accelerator has done all its work."""

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


def timed(part: str, function: Function) -> Function:
    """Return the function itself, or one that is timed, in a rollout that is."""
    clock: Any = CLOCK.get()
    return function if clock is None else clock.timed(part, function)
