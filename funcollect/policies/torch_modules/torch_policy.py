"""Torch modules as policies."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import optree
import torch
from torch import Tensor, nn
from typing_extensions import override

from funcollect.arguments import check_arrays, check_flags, checked_device
from funcollect.errors import PolicyError
from funcollect.interop.memo import memo_of
from funcollect.keys import torch_generator
from funcollect.messages import note_arguments
from funcollect.policies.base import Recorder, device_of, lane_mask, memory_of, recurrent_names, rows_of, split_answer
from funcollect.policies.checks import check_action, check_recurrent, check_rows, finish_columns
from funcollect.policies.heads.head import Head, check_head
from funcollect.policies.numerics import TORCH
from funcollect.policies.torch_modules.torch_backed import Compiler, TorchBacked, TorchPolicyState, check_module
from funcollect.protocols import Actor, ActorInputs, Columns
from funcollect.specs import ExplorationType
from funcollect.tree import select


def torch_policy(
    module: nn.Module | Callable[..., Any],
    *,
    head: Head | None = None,
    initial_state: Any = None,
    compile: Compiler | None = None,  # noqa: A002  (TorchRL's collectors and torch itself call it so)
    device: torch.device | str | None = None,
    record_state: bool = False,
) -> TorchPolicy:
    """A policy from a Torch module.

    Args:
        module: called as ``module(observation)`` with the batch dimension; `observation` is a tensor [P, ...], a dict
            of them for a Dict space, a tuple for a Tuple space. With a head the module returns the distribution's
            parameters (see `funcollect.heads`), without one the action; or a flat dict that holds these and further
            outputs to record, each [P, ...]. A function has the parameters of all modules that it refers to when the
            policy is made: in its closure, globals and defaults, in functions that it calls, in attributes it reads.
        head: one of `funcollect.heads`.
        initial_state: makes the policy recurrent: the state of one environment at the start of an episode, a pytree of
            tensors without a batch dimension. The call is then ``module(observation, state) -> (answer, next_state)``.
        compile: demands one way of running; it is an error if that way does not work. None takes the first that works.
            ``"xla"``: the module lowered to JAX (see `funcollect.lower`): fused with an environment written in JAX; one
            call of XLA per step, head included, for other environments, for which None means ``"eager"``.
            ``"eager"``: Torch's own forward, called by Python at each step.
            ``"inductor"``: the same by `torch.compile`, within rounding. It takes seconds and a C++ compiler. A call
            costs about 15 microseconds, too much for a small MLP on a CPU.
            ``"cudagraph"``: with an environment written in Torch, on a GPU: policy, environment and recording as CUDA
            graphs of 32 steps. Neither may read a tensor's value on the host, and tensors of a function must stay the
            same ones. A change of the module between rollouts (see below) captures new graphs.
        device: where the policy runs; by default where its parameters are.
        record_state: records the recurrent state before each step, as ``recurrent``, or ``recurrent_0``,
            ``recurrent_1``, … of its leaves, those of a dict in the order of sorted keys: `evaluate_actions` can then
            begin anywhere in a batch.

    Every change of the module acts at the next rollout: weights and buffers without compiling again; training and
    evaluation mode, submodules, hooks, patched methods and attributes with it. A lowered module and workers do not
    notice attributes and methods set on a class, hooks for all modules, globals, ``__slots__``, and writes through
    ``.data`` to tensors that are neither parameters nor buffers. Make another policy after such a change.

    Raises:
        TypeError: if `module` cannot be called, takes other arguments, or is a function that refers to a tensor which
            requires a gradient and is in no module; or if `head` is not a head.
        ValueError: for a device that does not exist, or an unknown way of running.
        LoweringError: by `funcollect.init`, if ``"xla"`` is demanded and the module cannot be lowered.

    >>> import torch, funcollect as fc
    >>> policy = torch_policy(torch.nn.Linear(4, 2), head=fc.heads.categorical)
    """
    recurrent = initial_state is not None
    inputs = "the observation and the state" if recurrent else "the observation (a recurrent one: initial_state=)"
    check_module(module, f"a torch.nn.Module or a function of {inputs}", 1 + recurrent, compile)
    check_head(head)
    check_arrays("initial_state", optree.tree_leaves(initial_state))
    check_flags(record_state=record_state)
    return TorchPolicy(module, head, initial_state, checked_device(device), compile, record_state=record_state)


class TorchPolicy(TorchBacked):
    """See `torch_policy`."""

    torch_backend = "inductor"  # of `torch.compile`

    def __init__(
        self,
        module: nn.Module | Callable[..., Any],
        head: Head | None,
        initial_state: Any,
        device: torch.device | None,
        compiler: Compiler | None = None,
        keys: Sequence[str] = (),
        *,
        record_state: bool = False,
    ) -> None:
        super().__init__(module, device, initial_state, compiler)
        self.record_state = record_state and initial_state is not None
        self.keys = tuple(keys)  # of a Dict space, passed as an argument each; empty to pass the dict as one argument
        self.head = head

    @override
    def bound(self, prepared: dict[str, Tensor] | None) -> Callable[..., Any]:
        module = super().bound(prepared)
        if self.compiler != "inductor":
            return module
        # Torch compiles a module at its first call, and again only for another object, such as that of another thread.
        memo, compiled = memo_of(self), memo_of(self).get("compiled", (None, None))
        if compiled[0] is not module:
            program = os.environ.get("CXX", "g++")
            if (self.run_device or torch.device("cpu")).type == "cpu" and shutil.which(program) is None:
                mend = "install g++, set CXX to the one there is, or leave compile out"
                raise PolicyError(f"compile='inductor' needs a C++ compiler, and {program!r} is not there: {mend}")
            options: Any = {"cpp_wrapper": True} if self.torch_backend == "inductor" else None  # halves a call's cost
            compiled = memo["compiled"] = module, torch.compile(module, backend=self.torch_backend, options=options)
        return compiled[1]  # type: ignore[no-any-return]

    def arguments(self, observation: Any, recurrent: Any) -> tuple[Any, ...]:
        """The arguments of the module."""
        observations = tuple([observation[key] for key in self.keys]) if self.keys else (observation,)
        return observations if recurrent is None else (*observations, recurrent)

    def call_module(
        self, module: Any, observation: Any, recurrent: Any, exploration_type: ExplorationType, *, single: bool = False
    ) -> Any:
        """The answer of `module`, which is this policy's module bound to parameters."""
        arguments = self.arguments(observation, recurrent)
        try:
            return module(*arguments)
        except Exception as error:
            note_arguments(error, "the policy's module", arguments, recurrent)
            raise

    @override
    def actor(self, inputs: ActorInputs, /) -> TorchActor:
        return TorchActor(self, inputs)


class TorchActor(Actor):
    """One forward pass per step; log-probabilities and checks once at the end."""

    def __init__(self, policy: TorchPolicy, inputs: ActorInputs) -> None:
        self._policy, self._spec, module = policy, inputs.spec, policy.bound(inputs.params)
        leaves = optree.tree_leaves(inputs.observation)
        self._run_device = run_device = policy.bound_device or device_of(leaves)
        self._arguments = policy.arguments(inputs.observation, None)
        away = any(leaf.device != run_device for leaf in leaves)
        self._move: Any = partial(optree.tree_map, lambda leaf: leaf.to(run_device)) if away else None
        start = optree.tree_leaves(inputs.initial_state.recurrent)
        self._state_names = recurrent_names(start) if policy.record_state else []
        self._read = set(map(memory_of, leaves))
        self._wanted = torch.Size((inputs.num_envs, *inputs.spec.shape))
        self._policy_head = policy.head  # `_head` has the exploration values of the rollout
        self._dtype: Any = ""  # of the last action that was checked
        self._shapes: list[Any] = []  # of the last head's parameters that were checked
        self._begin(module, inputs)

    def _begin(self, module: Callable[..., Any], inputs: ActorInputs) -> None:
        self._module, self._inputs, self._head = module, inputs, self._policy.head
        if self._head is not None and inputs.exploration.values:
            self._head = self._head.at(numbers_on(inputs.exploration.values, self._run_device))
        # A copy, as the next ones are: a module may write its state in place, or keep what it returned.
        self.recurrent = inputs.policy_state.recurrent
        if self.recurrent is not None:
            self.recurrent = optree.tree_map(torch.clone, inputs.policy_state.on(self._run_device).recurrent)
            self._initial = inputs.initial_state.on(self._run_device).recurrent
        self._noise = rows_of(inputs.noise if inputs.stochastic else None, self._run_device)
        self.reads_late = self._run_device.type == "cpu"  # where rows are views of the noise
        self._generator = inputs.policy_state.generator.clone()
        self._recorder = Recorder(inputs.observation, inputs.length, always_copy=self.recurrent is not None)
        self._chosen: tuple[str, ...] = ("action",)  # the keys of the head's samples

    @override
    def again(self, inputs: ActorInputs, /) -> bool:
        policy = self._policy
        module = policy.bound(inputs.params)
        if policy.head is not self._policy_head or self._move or policy.bound_device not in (None, self._run_device):
            return False
        self._begin(module, inputs)
        return True

    @override
    def running(self) -> contextlib.AbstractContextManager[Any]:
        generator = torch_generator(self._generator, self._run_device)
        return self._compiling(generator) if self._policy.compiler == "inductor" else generator

    @contextlib.contextmanager
    def _compiling(self, generator: torch_generator) -> Iterator[None]:
        with generator, torch._dynamo.config.patch(skip_nnmodule_hook_guards=False):  # compile again for other hooks
            yield

    @override
    def act(self, t: int) -> Tensor:
        observations = self._arguments if self._move is None else self._move(self._arguments)
        recurrent = self.recurrent
        arguments = observations if recurrent is None else (*observations, recurrent)
        # Copies, since a module may write the next state into the memory of this one.
        before = [leaf.clone() for leaf in optree.tree_leaves(recurrent)] if self._state_names else ()
        try:
            answer = self._module(*arguments)
        except Exception as error:
            note_arguments(error, "the policy's module", arguments, recurrent)
            raise
        if recurrent is not None:
            if t == 0:
                check_recurrent(answer, recurrent)
            answer, self.recurrent = answer[0], self._outside_observation(answer[1])
        extras: Sequence[Tensor] = ()
        if type(answer) is not Tensor and isinstance(answer, Mapping):
            answer, by_name = split_answer(answer, self._head)
            if self._recorder.names is None:
                check_rows(by_name, self._inputs.num_envs, Tensor)
            extras = self._recorder.ordered(t, by_name)
        if self._head is None:
            action = answer
            recorded = (action, *before, *extras)
        else:
            parameters = self._head.parse(TORCH, answer, self._spec)
            if t == 0 and self._shapes != (shapes := [leaf.shape for leaf in parameters]):
                check_rows(dict(zip(self._head.names, parameters, strict=True)), self._inputs.num_envs, Tensor)
                self._shapes = shapes
            outputs = self._head.sample(TORCH, parameters, next(self._noise), self._spec)
            action = outputs["action"]
            recorded = (*outputs.values(), *before, *parameters, *extras)
            if t == 0:
                self._chosen = tuple(outputs)
        if getattr(action, "dtype", None) is not self._dtype or action.shape != self._wanted:
            check_action(action, self._spec, self._inputs.num_envs, Tensor)
            self._dtype = action.dtype
        self._recorder.append(recorded)
        return action  # type: ignore[no-any-return]

    def _outside_observation(self, recurrent: Any) -> Any:
        """The next recurrent state, copied if it shares the observation's memory, which the next step overwrites."""
        shared = any(memory_of(leaf) in self._read for leaf in optree.tree_leaves(recurrent))
        return optree.tree_map(torch.clone, recurrent) if shared else recurrent

    @override
    def restart(self, lanes: Sequence[int] | Tensor) -> None:
        if self.recurrent is not None:
            mask = lane_mask(lanes, self._inputs.num_envs).to(self._run_device)
            self.recurrent = select(mask, self._initial, self.recurrent)

    def recorded(self) -> list[Tensor]:
        """Everything recorded so far, each [T, P, ...], in the order that `outputs_of` expects."""
        return self._recorder.columns()

    @override
    def finish(self) -> tuple[TorchPolicyState, Columns]:
        recurrent = self.recurrent if self.recurrent is None else optree.tree_map(torch.clone, self.recurrent)
        return TorchPolicyState(recurrent, self._generator), self.outputs_of(self.recorded())

    def outputs_of(self, recorded: Sequence[Tensor]) -> Columns:
        """The outputs for the batch, checked, from what was recorded."""
        head, extras, first = self._head, self._recorder.names or (), (*self._chosen, *self._state_names)
        start, end = len(first), len(recorded) - len(extras)  # of the head's parameters
        outputs = dict(zip((*first, *extras), (*recorded[:start], *recorded[end:]), strict=True))
        parameters = dict(zip(head.names if head else (), recorded[start:end], strict=True))
        if head and (log_prob := head.log_prob(TORCH, (*parameters.values(),), outputs, self._spec)) is not None:
            outputs["action_log_prob"] = log_prob
        columns: Columns = {(name,): column for name, column in outputs.items()}
        read: Columns = {(name,): column for name, column in parameters.items()}
        return finish_columns(columns, self._spec, parameters=read, chosen=getattr(head, "chooses", False))


def numbers_on(values: Mapping[str, Any], device: torch.device) -> dict[str, Tensor]:
    """Values of `Exploration` on a device. Numbers are made there, since copying them to a GPU would wait for it."""
    return {
        name: value.to(device) if isinstance(value, Tensor) else torch.full((), value, device=device)
        for name, value in values.items()
    }
