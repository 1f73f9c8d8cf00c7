"""The loops that run a policy in an environment, one module for each way to run."""

from __future__ import annotations

from typing import Any, Protocol

from tensordict import TensorDict
from torch import Tensor

from funcollect.core.request import Request
from funcollect.core.state import CollectorState
from funcollect.keys import Key
from funcollect.protocols import Policy


class RunsRollouts(Protocol):
    """What `funcollect.rollout` calls; `env` is of the kind that the loop drives."""

    def run(
        self, env: Any, policy: Policy, state: CollectorState, request: Request
    ) -> tuple[CollectorState, TensorDict]:
        """Return the next state and the batch of a rollout."""


class Loop(RunsRollouts, Protocol):
    """The five functions of each of these modules: those of `funcollect.core.api`, with checked arguments."""

    def init(self, env: Any, policy: Policy, key: Key, first_lane: int, total_lanes: int) -> CollectorState:
        """Return the first state of the lanes ``first_lane … first_lane + P - 1`` of `total_lanes`."""

    def reset(self, env: Any, state: CollectorState, lanes: Tensor) -> CollectorState:
        """Begin another episode in the lanes of the mask [P]."""

    def recover(self, env: Any, state: CollectorState) -> CollectorState:
        """Begin another episode in all lanes, also from a stale state."""

    def fork(self, env: Any, state: CollectorState) -> CollectorState:
        """Return an independent copy of the state."""
