"""Policies that are functions which JAX can trace: one jitted call per step, its outputs packed in one array."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
from torch import Tensor
from typing_extensions import override

from funcollect.interop.jax_setup import import_jax
from funcollect.keys import Key, Noise
from funcollect.policies.actors.actor import lane_mask, split_answer
from funcollect.policies.actors.checks import check_recurrent, finish_columns
from funcollect.policies.base import PolicyBase
from funcollect.policies.heads import Head
from funcollect.policies.jax_functions.device_actor import DeviceActor
from funcollect.policies.jax_functions.program import PROBE, StepProgram, select_program
from funcollect.policies.numerics import jax_numerics
from funcollect.protocols import Actor, ActorInputs, Columns, Exploration
from funcollect.specs import ActionSpec, ExplorationType


class FunctionPolicy(PolicyBase):
    """What policies over a traced function share: its call, its head, its recurrent state; parameters are theirs.

    Args:
        apply: called under `jit` as ``apply(params, observation)`` or ``apply(params, observation, state)``; see
            `funcollect.jax_policy`.
        head: from the answer to an action.
        initial_state: the recurrent state of one environment at the start of an episode, or None.
    """

    backend: Literal["jax"] = "jax"
    ties = False  # whether of several ones in a one-hot action the first counts

    def __init__(self, apply: Callable[..., Any], head: Head | None, initial_state: Any) -> None:
        self.apply = apply
        self.head = head
        self.initial_state = initial_state
        self.takes_key = "key" in inspect.signature(apply).parameters
        self._programs: dict[Any, tuple[ActionSpec, StepProgram]] = {}

    @override
    def check(self, spec: ActionSpec, /) -> None:
        if self.head is not None:
            self.head.check(spec)

    @override
    def noise(self, spec: ActionSpec, /) -> Noise | None:
        """A key where the function takes one, else what the head samples with."""
        if self.takes_key:
            return Noise(kind="key")
        return self.head.noise(spec) if self.head else None

    @override
    def init(self, key: Key, num_envs: int, /) -> Any:
        """The initial recurrent state for each lane, or None."""
        jax = import_jax()

        def expand(leaf: Any) -> Any:
            array = jax.numpy.asarray(leaf)
            return jax.numpy.tile(array, (num_envs, *[1] * array.ndim))

        return None if self.initial_state is None else jax.tree.map(expand, self.initial_state)

    @override
    def __call__(
        self,
        params: Any,
        policy_state: Any,
        observation: Any,
        noise: Any,
        spec: ActionSpec,
        exploration: Exploration,
        /,
    ) -> tuple[Any, Mapping[str, Any]]:
        stochastic = exploration.type is ExplorationType.RANDOM
        policy_state, outputs = self.answer(spec, stochastic, params, policy_state, observation, noise)
        outputs.pop(PROBE, None)
        return policy_state, outputs

    def answer(
        self, spec: ActionSpec, stochastic: bool, params: Any, policy_state: Any, observation: Any, noise: Any
    ) -> tuple[Any, dict[str, Any]]:
        """One traced step: the next policy state and the outputs."""
        extra = {}
        if self.takes_key:
            extra["key"], noise = import_jax().random.split(noise)
        inputs = (observation,) if policy_state is None else (observation, policy_state)
        answer = self.apply(params, *inputs, **extra)
        if policy_state is not None:
            check_recurrent(answer, policy_state)
            answer, policy_state = answer
        inner, extras = split_answer(answer, self.head)
        outputs = dict(extras)
        if self.head is None:
            return policy_state, {"action": inner, **outputs}
        xp = jax_numerics()
        parameters = self.head.parse(xp, inner, spec)
        if self.takes_key:
            noise = jax_noise(self.head.noise(spec), noise, parameters[0].shape[0])
        noise = noise if stochastic else None
        action = self.head.sample(xp, parameters, noise, spec)
        log_prob = self.head.log_prob(xp, parameters, action, noise, spec)
        if log_prob is None:
            outputs[PROBE] = sum(xp.where(each == each, 0.0, each).sum(-1) for each in parameters)
        else:
            outputs["action_log_prob"] = log_prob
        return policy_state, {"action": action, **outputs}

    def program(self, actor_inputs: ActorInputs) -> StepProgram:
        """The jitted step for this action space and number of lanes; made once."""
        which = (id(actor_inputs.spec), actor_inputs.stochastic, actor_inputs.num_envs)
        if which not in self._programs:
            self._programs[which] = (
                actor_inputs.spec,
                StepProgram(partial(self.answer, actor_inputs.spec, actor_inputs.stochastic), actor_inputs),
            )
        return self._programs[which][1]

    @override
    def actor(self, inputs: ActorInputs, /) -> Actor:
        """Over rows on the host, or over tensors where they are."""
        on_device = isinstance(import_jax().tree.leaves(inputs.observation)[0], Tensor)
        return DeviceActor(self, inputs) if on_device else JaxActor(self, inputs)

    @override
    def finish(self, columns: Columns, spec: ActionSpec, /) -> Columns:
        columns = finish_columns(columns, spec, chosen=self.head is not None, ties=self.ties)
        columns.pop((PROBE,), None)
        return columns


def jax_noise(noise: Noise | None, key: Any, num_envs: int) -> Any:
    """A head's noise drawn in JAX: [P, *shape] float32."""
    if noise is None:
        return None
    draw = {"gumbel": "gumbel", "normal": "normal", "uniform": "uniform"}[noise.kind]
    return getattr(import_jax().random, draw)(key, (num_envs, *noise.shape))


class JaxActor:
    """One jitted call and one read-back per step."""

    def __init__(self, policy: FunctionPolicy, actor_inputs: ActorInputs) -> None:
        program = policy.program(actor_inputs)
        self._actor_inputs = actor_inputs
        self._step = program.step
        self._plain = program.plain
        self._finish = policy.finish
        self._params = program.params(actor_inputs.params)
        self._recurrent = actor_inputs.policy_state
        self._inputs, self._others, _ = program.inputs(actor_inputs)
        # a call that returns a state would commit it to the buffer's device, and compile again for that
        self._buffer = self._inputs.argument(self._params) if self._plain else self._inputs.buffer
        self._noise: Any = [None] * actor_inputs.length if actor_inputs.noise is None else actor_inputs.noise.numpy()
        self._fields = program.fields
        self._words = np.empty((actor_inputs.length, actor_inputs.num_envs, self._fields[-1].stop), np.int32)
        action = self._fields[0]
        self._scalar = not action.shape and np.dtype(action.dtype) == np.int32

    def running(self) -> contextlib.AbstractContextManager[Any]:
        """Nothing is needed."""
        return contextlib.nullcontext()

    def act(self, t: int) -> Any:
        """The action [P, ...] of step `t`."""
        self._inputs.fill(self._noise[t])
        if self._plain:
            packed = self._step(self._params, self._buffer)
        else:
            self._recurrent, packed = self._step(self._params, self._buffer, self._recurrent, self._others)
        self._words[t] = words = np.asarray(packed)
        return words[:, 0] if self._scalar else self._fields[0].unpack(words)

    def restart(self, lanes: Sequence[int] | Tensor) -> None:
        """Give these lanes their initial recurrent state."""
        if self._recurrent is not None:
            mask = lane_mask(lanes, self._actor_inputs.num_envs).numpy()
            self._recurrent = select_program()(mask, self._actor_inputs.initial_state, self._recurrent)

    def finish(self) -> tuple[Any, Columns]:
        """The next policy state and every output, [T, P, ...]."""
        columns: Columns = {(field.name,): field.column(self._words) for field in self._fields}
        return self._recurrent, self._finish(columns, self._actor_inputs.spec)
