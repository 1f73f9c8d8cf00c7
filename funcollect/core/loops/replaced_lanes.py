"""The actor of a rollout in which simulators of some lanes were lost: others act there from then on."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from torch import Tensor
from typing_extensions import override

from funcollect.core.state import with_lanes_of
from funcollect.errors import PolicyError
from funcollect.protocols import Actor, Columns


@contextlib.contextmanager
def _counted_from(lane: int, step: int) -> Iterator[None]:
    """Let a PolicyError count its lane and step from these."""
    try:
        yield
    except PolicyError as error:
        raise shifted(error, lane, step) from error


def shifted(error: PolicyError, lane: int, step: int = 0) -> PolicyError:
    """The error with the lane and the step that it names, if any, counted from others."""
    message = re.sub(r"^lane (\d+)", lambda own: f"lane {int(own[1]) + lane}", str(error))
    return PolicyError(
        re.sub(r"step (\d+) of this batch", lambda own: f"step {int(own[1]) + step} of this batch", message)
    )


class ReplacedLanes(Actor):
    """An actor for all lanes; from a later step on, other actors choose the actions of some of them."""

    def __init__(self, actor: Actor) -> None:
        """Act as `actor`, whose context has been entered."""
        self._actor = actor
        self._others: list[tuple[int, slice, Actor]] = []

    def replace(self, t: int, lanes: slice, actor: Actor) -> None:
        """Act in these lanes as `actor` does, which has made its step 0 as the step `t` of this one."""
        self._others.append((t, lanes, actor))

    @override
    def act(self, t: int) -> Any:
        action = self._actor.act(t)
        action = action.clone() if isinstance(action, Tensor) else np.array(action)
        for first, lanes, actor in self._others:
            with _counted_from(lanes.start, first):
                action[lanes] = actor.act(t - first)
        return action

    @override
    def restart(self, lanes: Sequence[int] | Tensor) -> None:
        self._actor.restart(lanes)
        for _, own, actor in self._others:
            inside = [int(lane) - own.start for lane in lanes if own.start <= lane < own.stop]
            if inside:
                actor.restart(inside)

    @override
    def finish(self) -> tuple[Any, Columns]:
        policy_state, columns = self._actor.finish()
        for first, lanes, actor in self._others:
            with _counted_from(lanes.start, first):
                own_state, own_columns = actor.finish()
            policy_state = with_lanes_of(policy_state, lanes, own_state)
            for path, column in own_columns.items():
                columns[path][first:, lanes] = column
        return policy_state, columns
