"""A JAX policy that reads Torch tensors where they are: one jitted call per step, DLPack each way.

For tensors on an accelerator. On the CPU an export to JAX costs more than the whole call, so there `JaxActor` reads
NumPy rows. DLPack orders a reader after the writer: the call waits for the observation, and Torch, by reading the
action, for the call; so the observation's memory is free to be written by the environment's next step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from funcollect.interop.bridge import jax_view, torch_view
from funcollect.interop.jax_setup import compiled, import_jax
from funcollect.policies.actors.actor import Recorder, lane_mask
from funcollect.policies.actors.checks import check_action
from funcollect.policies.jax_functions.program import select_program
from funcollect.protocols import ActorInputs, Columns
from funcollect.specs import ActionSpec

_NARROW = {torch.int64: torch.int32, torch.float64: torch.float32}  # JAX's own dtypes, unless 64 bits are on


class DeviceActor:
    """A JAX policy bound to one rollout over tensors.

    Args:
        policy: a `JaxPolicy`.
        actor_inputs: the rollout, its observation made of tensors.
    """

    def __init__(self, policy: Any, actor_inputs: ActorInputs) -> None:
        jax = import_jax()
        self._actor_inputs = actor_inputs
        which = ("device step", id(actor_inputs.spec), actor_inputs.stochastic)
        self._step = compiled(policy, which, partial(_step, policy, actor_inputs.spec, actor_inputs.stochastic))
        self._finish = policy.finish
        self._recurrent = actor_inputs.policy_state
        self._sources, self._structure = jax.tree.flatten(actor_inputs.observation)
        self._run_device = self._sources[0].device
        device = next(iter(self._observation()[0].devices()))
        self._noise = None if actor_inputs.noise is None else jax.device_put(actor_inputs.noise.numpy(), device)
        self._names: list[str] = []
        self._recorder = Recorder(actor_inputs.observation, actor_inputs.length)
        self._held: Any = None

    def _observation(self) -> list[Any]:
        return [jax_view(leaf.to(_NARROW.get(leaf.dtype, leaf.dtype))) for leaf in self._sources]

    def running(self) -> contextlib.AbstractContextManager[Any]:
        """No gradients."""
        return torch.no_grad()

    def act(self, t: int) -> Tensor:
        """The action [P, ...] of step `t`."""
        leaves = self._observation()
        observation = import_jax().tree.unflatten(self._structure, leaves)
        self._recurrent, outputs = self._step(self._actor_inputs.params, self._recurrent, observation, self._noise, t)
        if t == 0:
            check_action(outputs["action"], self._actor_inputs.spec, self._actor_inputs.num_envs)
            self._names = sorted(outputs)
        tensors = {name: torch_view(outputs[name]) for name in self._names}
        self._recorder.append(tuple(tensors.values()))
        self._held = (leaves, outputs)  # until the next call is under way
        return tensors["action"]

    def restart(self, lanes: Sequence[int] | Tensor) -> None:
        """Give these lanes their initial recurrent state."""
        if self._recurrent is not None:
            mask = jax_view(lane_mask(lanes, self._actor_inputs.num_envs).to(self._run_device))
            self._recurrent = select_program()(mask, self._actor_inputs.initial_state, self._recurrent)

    def finish(self) -> tuple[Any, Columns]:
        """The next policy state and every output, [T, P, ...]."""
        columns: Columns = dict(zip(((name,) for name in self._names), self._recorder.columns(), strict=True))
        return self._recurrent, self._finish(columns, self._actor_inputs.spec)


def _step(
    policy: Any,
    spec: ActionSpec,
    stochastic: bool,
    params: Any,
    policy_state: Any,
    observation: Any,
    noise: Any,
    t: Any,
) -> tuple[Any, dict[str, Any]]:
    """The policy's traced step with row `t` of the noise."""
    answer: tuple[Any, dict[str, Any]] = policy.answer(
        spec, stochastic, params, policy_state, observation, None if noise is None else noise[t]
    )
    return answer
