"""The eager loop: the policy acts once per step for all lanes, and a stepper makes the step and records it."""

from __future__ import annotations

from typing import Any, Protocol

from funcollect.processes.life import SIGNS
from funcollect.protocols import Actor


class Stepper(Protocol):
    """All lanes of one rollout over one kind of environment, and the columns that their steps are recorded in."""

    def record(self, t: int, /) -> None:
        """Record the observations that the policy reads at step `t`, before it may write into them."""

    def step(self, t: int, action: Any, /) -> Any:
        """Step all lanes; return those that began another episode, as `Actor.restart` takes them, or None."""


def step_all(stepper: Stepper, actor: Actor, length: int) -> None:
    """Make the steps of a rollout; whoever waits for this process sees a sign of life at each."""
    record, act, step, signs = stepper.record, actor.act, stepper.step, SIGNS.count
    for t in range(length):
        signs[0] += 1
        record(t)
        begun = step(t, act(t))
        if begun is not None:
            actor.restart(begun)
