"""Policies that are functions which JAX can trace, and their actors: one jitted call per step."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import optree
from torch import Tensor
from typing_extensions import override

from funcollect.interop.bridge import torch_view
from funcollect.interop.jax_setup import compiled, import_jax, tracing
from funcollect.interop.memo import memo_of
from funcollect.keys import Key, Noise
from funcollect.messages import name_of, note_arguments
from funcollect.policies.actors.actor import (
    array_over,
    lane_mask,
    read_answer,
    recurrent_names,
    select_program,
    split_answer,
    split_recurrent,
)
from funcollect.policies.actors.checks import check_action, finish_columns
from funcollect.policies.base import HeadedPolicy, ProtocolActor
from funcollect.policies.heads.head import Head, chooses
from funcollect.policies.jax_functions.noise import draw_noise, split_key
from funcollect.policies.jax_functions.program import PROBE, PackedInputs, StepProgram
from funcollect.policies.numerics import jax_numerics
from funcollect.protocols import Actor, ActorInputs, BoundParams, Columns, Exploration
from funcollect.specs import ActionSpec, ExplorationType


def random_parameter(apply: Callable[..., Any]) -> Literal["key", "keys"] | None:
    """The name of the parameter for a function's own randomness; None if it has none."""
    names = inspect.signature(apply).parameters
    return "key" if "key" in names else "keys" if "keys" in names else None


class FunctionPolicy(HeadedPolicy):
    """Base class of policies over a traced function, with the arguments of `jax_policy`. Subclasses add `params`."""

    backend: Literal["jax"] = "jax"
    ties = False  # whether only the first of several ones in a one-hot action counts

    def __init__(
        self, apply: Callable[..., Any], head: Head | None, initial_state: Any, *, record_state: bool = False
    ) -> None:
        self.apply = apply
        self.record_state = record_state and initial_state is not None
        self.head = head
        self.initial_state = initial_state
        self.takes_key: Any = random_parameter(apply)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({name_of(self.apply)})"

    @override
    def noise(self, spec: ActionSpec, /) -> Noise | None:
        return Noise(kind=self.takes_key) if self.takes_key else super().noise(spec)

    @override
    def init(self, key: Key, num_envs: int, /) -> Any:
        jax = import_jax()

        def expand(leaf: Any) -> Any:
            return jax.numpy.tile(jax.numpy.asarray(leaf), (num_envs, *[1] * np.ndim(leaf)))

        return jax.tree.map(expand, self.initial_state)

    @override
    def __call__(
        self, params: Any, state: Any, observation: Any, noise: Any, spec: ActionSpec, exploration: Exploration, /
    ) -> tuple[Any, Mapping[str, Any]]:
        stochastic = exploration.type is ExplorationType.RANDOM
        state, outputs = self.answer(spec, stochastic, (params, exploration.values), state, observation, noise)
        outputs.pop(PROBE, None)
        return state, outputs

    def answer(
        self, spec: ActionSpec, stochastic: bool, bound: BoundParams, policy_state: Any, observation: Any, noise: Any
    ) -> tuple[Any, dict[str, Any]]:
        """One traced step: the next policy state and the outputs."""
        (params, values), keys = bound, {}
        num_envs = len(import_jax().tree.leaves(observation)[0])
        if self.takes_key:
            keys[self.takes_key], draw = split_key(noise, num_envs)
        before = import_jax().tree.leaves(policy_state) if self.record_state else []
        answer, policy_state = self.called(params, observation, policy_state, **keys)
        recorded = dict(zip(recurrent_names(before), before, strict=True))
        if self.head is None:
            action, extras = split_answer(answer, None)
            return policy_state, {"action": action, **extras, **recorded}
        xp, head = jax_numerics(), self.head.at(values)
        parameters, extras = read_answer(xp, head, answer, spec, num_envs)
        if self.takes_key:
            wanted = head.noise(spec)
            noise = None if wanted is None else draw_noise(wanted, draw)
        outputs = {**extras, **recorded, **head.sample(xp, parameters, noise if stochastic else None, spec)}
        log_prob = head.log_prob(xp, parameters, outputs, spec)
        if log_prob is None:
            outputs[PROBE] = sum(xp.where(each == each, 0.0, each).sum(-1) for each in parameters)
        else:
            outputs["action_log_prob"] = log_prob
        return policy_state, outputs

    def called(self, params: Any, observation: Any, recurrent: Any, **keys: Any) -> tuple[Any, Any]:
        """The function's answer, and the next recurrent state, or None if it has none."""
        inputs = (observation,) if recurrent is None else (observation, recurrent)
        try:
            with tracing("the policy's function"):
                answer = self.apply(params, *inputs, **keys)
        except Exception as error:
            note_arguments(error, "the policy's function", (params, *inputs, *keys.values()), recurrent)
            raise
        return split_recurrent(answer, recurrent)

    def program(self, inputs: ActorInputs) -> StepProgram:
        """The jitted step for this action space and number of lanes; made once."""
        memo: dict[Hashable, StepProgram] = memo_of(self)
        which = ("host step", id(inputs.spec), inputs.stochastic, inputs.num_envs)
        if which not in memo:  # the program holds the spec, so that no other one takes its id
            memo[which] = StepProgram(partial(self.answer, inputs.spec, inputs.stochastic), inputs)
        return memo[which]

    @override
    def actor(self, inputs: ActorInputs, /) -> Actor:
        on_device = isinstance(import_jax().tree.leaves(inputs.observation)[0], Tensor)
        return DeviceActor(self, inputs) if on_device else JaxActor(self, inputs)

    @override
    def finish(self, columns: Columns, spec: ActionSpec, /) -> Columns:
        columns = finish_columns(columns, spec, chosen=chooses(self.head), ties=self.ties)
        columns.pop((PROBE,), None)
        return columns


class JaxActor(Actor):
    """Calls the policy on NumPy rows on the host: one jitted call per step, and one array that is read back."""

    def __init__(self, policy: FunctionPolicy, inputs: ActorInputs) -> None:
        program = policy.program(inputs)
        self._rollout = inputs
        self._step = program.step
        self._plain = program.plain
        self._finish = policy.finish
        self._params = program.params(inputs)
        self._recurrent = inputs.policy_state
        self._inputs = PackedInputs(inputs)
        # A call that returns a state would commit it to the buffer's device, and JAX would compile again for that.
        self._buffer = self._inputs.argument(self._params) if self._plain else self._inputs.buffer
        self._noise: Any = [None] * inputs.length if inputs.noise is None else inputs.noise.numpy()
        self._fields = program.fields
        self._words = np.empty((inputs.length, inputs.num_envs, self._fields[-1].stop), np.int32)
        action = self._fields[0]
        self._scalar = not action.shape and np.dtype(action.dtype) == np.int32

    @override
    def act(self, t: int) -> Any:
        self._inputs.fill(self._noise[t])
        if self._plain:
            packed = self._step(self._params, self._buffer)
        else:
            self._recurrent, packed = self._step(self._params, self._buffer, self._recurrent, self._inputs.others)
        self._words[t] = words = np.asarray(packed)
        return words[:, 0] if self._scalar else self._fields[0].unpack(words)

    @override
    def restart(self, lanes: Sequence[int] | Tensor) -> None:
        if self._recurrent is not None:
            mask = lane_mask(lanes, self._rollout.num_envs).numpy()
            self._recurrent = select_program()(mask, self._rollout.initial_state, self._recurrent)

    @override
    def finish(self) -> tuple[Any, Columns]:
        columns: Columns = {(field.name,): field.column(self._words) for field in self._fields}
        return self._recurrent, self._finish(columns, self._rollout.spec)


class DeviceActor(ProtocolActor):
    """Calls the policy on Torch tensors on an accelerator: one jitted call per step, DLPack each way.

    On the CPU an export to JAX costs more than the whole call, so there `JaxActor` reads NumPy rows. DLPack orders a
    reader after the writer: the call waits for the observation, and Torch waits for the call when it reads the action.
    So the environment's next step may write the observation's memory.
    """

    def __init__(self, policy: FunctionPolicy, inputs: ActorInputs) -> None:
        super().__init__(policy, inputs)
        spec, stochastic = inputs.spec, inputs.stochastic

        def step(
            bound: BoundParams, policy_state: Any, observation: Any, noise: Any, t: Any
        ) -> tuple[Any, dict[str, Any]]:
            drawn = None if noise is None else noise[t]
            return policy.answer(spec, stochastic, bound, policy_state, observation, drawn)

        self._step, self._bound = compiled(policy, ("device step", id(spec), stochastic), step), inputs.bound
        device = next(iter(array_over(optree.tree_leaves(inputs.observation)[0]).devices()))
        self._noise = None if inputs.noise is None else import_jax().device_put(inputs.noise.numpy(), device)

    @override
    def act(self, t: int) -> Tensor:
        observation = optree.tree_map(array_over, self._inputs.observation)
        self._state, outputs = self._step(self._bound, self._state, observation, self._noise, t)
        if t == 0:
            check_action(outputs["action"], self._inputs.spec, self._inputs.num_envs)
            self._names = sorted(outputs)
        tensors = {name: torch_view(outputs[name]) for name in self._names}
        self._recorder.append(tuple(tensors.values()))
        self._held = (observation, outputs)  # until the next call is under way
        return tensors["action"]
