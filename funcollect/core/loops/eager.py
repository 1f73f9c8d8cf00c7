"""The eager loop: the policy acts once per step for all lanes, and a stepper makes the step and records it."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from contextvars import ContextVar
from typing import Any, TypeVar

from tensordict import TensorDict
from torch import Tensor

from funcollect.core.batch import deliver
from funcollect.core.request import Request, open_actor
from funcollect.core.state import CollectorState
from funcollect.interop.memory import reads_together
from funcollect.keys import random_words
from funcollect.processes.system import SIGNS
from funcollect.protocols import Actor, Columns, Policy
from funcollect.threefry import Words

Function = TypeVar("Function", bound=Callable[..., Any])


class Stepper:
    """All lanes of one rollout over one kind of environment, and the columns that their steps are recorded in.

    Attributes:
        state: the state before the rollout, as an actor reads it.
        observation: what the policy reads: the same memory throughout, in the structure of the space.
        columns: the recorded entries [T, P, ...] by the batch's keys.
        waits: whether to read a tensor is to wait for a device, so that none is read before the last step.
    """

    observation: Any
    columns: dict[Any, Any]
    waits = False

    def __init__(self, env: Any, policy: Policy, state: CollectorState, request: Request) -> None:
        self.env, self.policy, self.state, self.request = env, policy, state, request

    def begin(self) -> None:
        """Use the state, which may be possible once: bad arguments have raised."""

    def record(self, t: int) -> None:
        """Record the observations that the policy reads at step `t`, before it may write into them."""

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


def run(stepper: Stepper, draw: Callable[..., Words] = random_words) -> tuple[CollectorState, TensorDict]:
    """Make a rollout; return the next state and the batch. Noise is made of the words that `draw` draws."""
    env, policy, state, request = stepper.env, stepper.policy, stepper.state, stepper.request
    actor = open_actor(env, policy, state, request, stepper.observation, draw)
    stepper.begin()
    with reads_together() if stepper.waits else nullcontext():
        with actor.running():
            timed("steps", step_all)(stepper, actor, request.length)
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


class TrajectoryLimit:
    """The limit on a trajectory's length, as the step of this rollout at which each lane reaches it.

    Attributes:
        due: [P] int64, the step at which each lane reaches the limit; NumPy or Torch, as `step` is.
    """

    def __init__(self, step: Any, limit: int) -> None:
        self._limit = min(limit, 1 << 62)  # so that sums with steps fit into 64 bits
        self.due = self._limit - 1 - step

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
