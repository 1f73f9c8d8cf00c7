"""Any object that follows the `Policy` protocol, at work in a rollout."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from funcollect.errors import PolicyError
from funcollect.policies.actors.actor import Recorder, lane_mask, split_answer
from funcollect.policies.actors.checks import check_action, finish_columns
from funcollect.protocols import ActorInputs, Columns
from funcollect.tree import select


class ProtocolActor:
    """Calls a function like a policy at every step. Leaves of the policy's state are [P, ...]."""

    def __init__(self, policy: Callable[..., Any], actor_inputs: ActorInputs) -> None:
        self._policy = policy
        self._actor_inputs = actor_inputs
        self._state = actor_inputs.policy_state
        self._names: list[str] = []
        self._recorder = Recorder(actor_inputs.observation, actor_inputs.length)

    def running(self) -> contextlib.AbstractContextManager[Any]:
        """No gradients."""
        return torch.no_grad()

    def act(self, t: int) -> Any:
        """The action [P, ...] of step `t`."""
        actor_inputs = self._actor_inputs
        noise = None if actor_inputs.noise is None else actor_inputs.noise[t]
        self._state, outputs = self._policy(
            actor_inputs.params,
            self._state,
            actor_inputs.observation,
            noise,
            actor_inputs.spec,
            actor_inputs.exploration,
        )
        action, extras = split_answer(outputs, None)
        check_action(action, actor_inputs.spec, actor_inputs.num_envs)
        names = sorted(extras)
        if t and names != self._names:
            raise PolicyError(
                f"step {t} of this batch: the policy answered with the extra keys {names} after {self._names}: keep "
                "them the same at every step"
            )
        self._names = names
        self._recorder.append((torch.as_tensor(action), *(torch.as_tensor(extras[name]) for name in self._names)))
        return action

    def restart(self, lanes: Sequence[int] | Tensor) -> None:
        """Give these lanes their initial state."""
        if self._state is not None:
            self._state = select(
                lane_mask(lanes, self._actor_inputs.num_envs), self._actor_inputs.initial_state, self._state
            )

    def finish(self) -> tuple[Any, Columns]:
        """The next policy state and every output, [T, P, ...]."""
        columns: Columns = dict(
            zip([("action",), *((name,) for name in self._names)], self._recorder.columns(), strict=True)
        )
        return self._state, finish_columns(columns, self._actor_inputs.spec)
