"""Base class of policies, and the actor that calls a policy at every step and records its outputs.

What can wait (stacking, log-probabilities, checks for NaN) is done once for all steps, in `Actor.finish`.
"""

from __future__ import annotations

import contextlib
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any

import optree
import torch
from torch import Tensor
from typing_extensions import override

from funcollect.errors import PolicyError
from funcollect.interop.bridge import jax_view, torch_view
from funcollect.interop.jax_setup import import_jax, own_generator
from funcollect.keys import Key, Noise
from funcollect.messages import dtypes_and_shapes, form, kind_of
from funcollect.policies.checks import check_action, check_recurrent, check_rows, finish_columns
from funcollect.policies.heads.head import Head
from funcollect.policies.numerics import jax_numerics
from funcollect.policies.weights import copied, matched, state_dict_of
from funcollect.protocols import Actor, ActorInputs, Columns, Exploration, Policy, is_env, is_policy
from funcollect.specs import RESERVED, ActionSpec
from funcollect.tree import NAMESPACE, Path, moved, select, version_of

_HELD_STEPS = 64
_NARROW = {torch.int64: torch.int32, torch.float64: torch.float32}  # JAX's own dtypes, unless 64 bits are on


class PolicyBase(ABC):
    """Subclass this with `backend` (``"torch"`` or ``"jax"``), `params` and `__call__`, a pure function.

    The other members of `funcollect.Policy` have defaults: no parameters to prepare, no noise, no state.

    >>> import torch, funcollect as fc
    >>> class Lean(fc.PolicyBase):
    ...     backend, params = "torch", None
    ...     def __call__(self, params, policy_state, observation, noise, spec, exploration):
    ...         return policy_state, {"action": (observation[:, 2] > 0).long()}
    >>> env = fc.make_env("CartPole-v1", num_envs=2)
    >>> state, batch = fc.rollout(env, Lean(), fc.init(env, Lean(), seed=0), 8)
    >>> batch["action"].shape
    torch.Size([2, 8])
    """

    backend: Any  # "torch" or "jax"; over a narrower type, pyright refuses the literal that a subclass declares
    params: Any
    exploration: Mapping[str, float] = MappingProxyType({})
    nested: Sequence[Path] = ()
    policies: Mapping[str, Policy] = MappingProxyType({})  # of which it is made, by group or by player

    def check(self, spec: ActionSpec, /) -> None:  # noqa: B027  (every space suits)
        """Raise ValueError for an action space that does not suit."""

    def noise(self, spec: ActionSpec, /) -> Noise | None:
        """The random numbers to draw ahead for each lane and step, or None."""
        return None

    def init(self, key: Key, num_envs: int, /) -> Any:
        """The policy's initial state; its leaves are [P, ...], and tensors are brought to the observation's device."""
        return None

    def prepare(self, params: Any, /) -> Any:
        """Parameters in the form that the call takes: the policy's own for None, or others of the same structure."""
        return self.params if params is None else matched(self.params, params, self.backend)

    def state_dict(self, params: Any = None) -> dict[str, Tensor]:
        """A copy of `params`, or of the policy's own, as tensors by path, for workers and for saving."""
        return state_dict_of(PolicyBase.prepare(self, params), self.backend)

    def load(self, params: Any) -> None:
        """Set `params` to a copy of a pytree like them, or of the result of `state_dict`.

        An optimizer over the previous tensors has to be made again. ValueError for other paths or shapes.
        """
        copy = copied(self.params, params, self.backend)
        try:
            self.params = copy
        except AttributeError as error:
            what = f"params of {type(self).__name__} cannot be set, expected an attribute"
            raise TypeError(f"{what}: give it a setter, or override load") from error

    def remembers(self, policy_state: Any, /) -> bool:
        """Whether a step may depend on those before it."""
        return bool(optree.tree_leaves(policy_state, namespace=NAMESPACE))

    def actor(self, inputs: ActorInputs, /) -> Actor:
        """The policy bound to one rollout."""
        return ProtocolActor(self, inputs)

    def finish(self, columns: Columns, spec: ActionSpec, /) -> Columns:
        """The outputs of a rollout, checked, with the dtypes that a batch has."""
        return finish_columns(columns, spec)

    @abstractmethod
    def __call__(
        self, params: Any, state: Any, observation: Any, noise: Any, spec: ActionSpec, exploration: Exploration, /
    ) -> tuple[Any, Mapping[str, Any]]:
        """One action for each of P environments: the next policy state and the outputs (see `funcollect.Policy`)."""


class HeadedPolicy(PolicyBase):
    """Base class of policies over a module or a function, whose answers may be read by a head."""

    head: Head | None = None
    initial_state: Any = None  # the recurrent state of one environment at the start of an episode

    def take_over(self, policy: HeadedPolicy, **changed: Any) -> None:
        """Take all attributes of `policy` but its memo, with those in `changed` replaced."""
        vars(self).update({name: value for name, value in vars(policy).items() if name != "_memo"} | changed)

    @property
    @override
    def exploration(self) -> Mapping[str, float]:  # type: ignore[override]
        return self.head.values if self.head else {}

    @override
    def check(self, spec: ActionSpec, /) -> None:
        if self.head is not None:
            self.head.check(spec)

    @override
    def noise(self, spec: ActionSpec, /) -> Noise | None:
        return self.head.noise(spec) if self.head else None


class ProtocolActor(Actor):
    """Calls a policy at every step; or ``call(state, observation, t)``, which returns the next state and the outputs.

    For a policy in JAX, tensors cross by DLPack, observations to JAX and outputs back. DLPack orders a reader after the
    writer, so the environment's next step may write the observation's memory.
    """

    def __init__(self, policy: Policy, inputs: ActorInputs, call: Callable[..., Any] | None = None) -> None:
        self._policy, self._inputs, self._call = policy, inputs, call or self._called
        self._in_jax, self._device = policy.backend == "jax", device_of(inputs.observation)
        states, noise = (inputs.policy_state, inputs.initial_state), inputs.noise
        stays = self._in_jax or self._device.type == "cpu"
        self._state, self._initial = states if stays else moved(states, self._device)
        self._noise = iter(noise.numpy()) if self._in_jax and noise is not None else rows_of(noise, self._device)
        tensors = optree.tree_leaves(inputs.observation, namespace=NAMESPACE)
        self._crosses = self._in_jax and any(isinstance(leaf, Tensor) for leaf in tensors)
        self._as_tensor: Callable[[Any], Tensor] = tensor_over if self._crosses else torch.as_tensor
        self._held: Any = None
        self._wanted = (inputs.num_envs, *inputs.spec.shape)
        self._recorder = Recorder(inputs.observation, inputs.length)

    @override
    def running(self) -> contextlib.AbstractContextManager[Any]:
        return torch.no_grad()

    def _called(self, state: Any, observation: Any, t: int) -> tuple[Any, Mapping[str, Any]]:
        inputs = self._inputs
        with own_generator() if self._in_jax else contextlib.nullcontext():
            answer = self._policy(inputs.params, state, observation, next(self._noise), inputs.spec, inputs.exploration)
        return split_call(answer)

    @override
    def act(self, t: int) -> Any:
        observation = self._inputs.observation
        if self._crosses:
            observation = optree.tree_map(array_over, observation)
        self._state, outputs = self._call(self._state, observation, t)
        action = outputs["action"]
        if t == 0 or getattr(action, "shape", None) != self._wanted:
            check_action(action, self._inputs.spec, self._inputs.num_envs)
        extras = self._recorder.ordered(t, {name: output for name, output in outputs.items() if name != "action"})
        recorded = tuple(map(self._as_tensor, (action, *extras)))
        self._recorder.append(recorded)
        if not self._crosses:
            return action
        self._held = (observation, outputs)  # keeps their memory alive until the next call is under way
        return recorded[0]

    @override
    def restart(self, lanes: Sequence[int] | Tensor) -> None:
        if self._state is not None:
            mask: Any = lane_mask(lanes, self._inputs.num_envs).to(self._device)
            if self._in_jax:
                mask = jax_view(mask) if self._crosses else mask.numpy()
            self._state = (select_program() if self._in_jax else select)(mask, self._initial, self._state)

    @override
    def finish(self) -> tuple[Any, Columns]:
        names = ("action", *(self._recorder.names or ()))
        columns: Columns = {(name,): column for name, column in zip(names, self._recorder.columns(), strict=True)}
        return self._state, self._policy.finish(columns, self._inputs.spec)


def policies_of(policy: Any) -> list[Any]:
    """The policies of which one by group or by player is made; otherwise the policy itself."""
    return [*(policy.policies.values() if isinstance(policy, PolicyBase) else ())] or [policy]


def is_flax(module: Any) -> bool:
    """Whether it is a module of Flax's Linen, whose call needs its parameters."""
    return any(base.__module__.startswith("flax.linen") for base in type(module).__mro__)


def check_policy(policy: Any) -> None:
    """Raise TypeError unless `policy` is a policy."""
    if is_policy(policy):
        return
    if is_env(policy):
        raise TypeError(f"policy is the environment {type(policy).__name__}, expected a Policy: env comes first")
    mend = "wrap a module with funcollect.torch_policy, a JAX function with funcollect.jax_policy"
    if hasattr(policy, "in_keys"):  # a TensorDictModule
        mend = "wrap it with funcollect.tensordict_policy"
    if not isinstance(policy, type) and (hasattr(policy, "prepare") or hasattr(policy, "backend")):
        missing = [name for name in vars(Policy) if not name.startswith("_") and not hasattr(policy, name)]
        mend = f"it lacks {missing}: derive from funcollect.PolicyBase, which has all but backend, params and the call"
    raise TypeError(f"policy is {kind_of(policy)}, expected a Policy: {mend}")


def split_call(answer: Any) -> tuple[Any, Mapping[str, Any]]:
    """The state and the outputs that a policy's call returned; PolicyError for another answer, or without an action."""
    if not isinstance(answer, (tuple, list)) or len(answer) != 2:
        what = f"the policy's call returned {form(answer)}"
        raise PolicyError(f"{what}, expected the pair (policy_state, outputs): return both")
    action, extras = split_answer(answer[1], None)
    return answer[0], {"action": action, **extras}


def split_answer(answer: Any, head: Head | None) -> tuple[Any, Mapping[str, Any]]:
    """Split a policy's answer into a head's parameters (without a head: the action) and extras; else PolicyError."""
    if not isinstance(answer, Mapping):
        return answer, {}
    names = ("action",) if head is None else head.names
    if any(name not in answer for name in names):
        mend = "return the action, or a dict that holds it" if head is None else f"the head {head.name} reads them"
        got = sorted(map(str, answer))
        raise PolicyError(f"the policy returned the keys {got}, expected {list(names)} among them: {mend}")
    values = tuple(answer[name] for name in names)
    extras = {name: value for name, value in answer.items() if head is not None or name != "action"}
    reserved = RESERVED if head is not None else RESERVED - {"action_log_prob"}
    if taken := sorted(reserved & set(extras)):
        raise PolicyError(f"the policy returned {taken}, keys that a batch uses itself: rename them")
    return values if len(values) > 1 else values[0], extras


def split_recurrent(answer: Any, before: Any) -> tuple[Any, Any]:
    """A recurrent policy's answer and its next state, shaped like the one `before`; for None the answer and None."""
    if before is None:
        return answer, None
    check_recurrent(answer, before)
    return answer[0], answer[1]


def read_answer(xp: Any, head: Head, answer: Any, spec: ActionSpec, rows: int) -> tuple[Any, Mapping[str, Any]]:
    """The parameters that a head reads in a policy's answer, each [rows, ...], and the extras to record."""
    inner, extras = split_answer(answer, head)
    parameters = head.parse(xp, inner, spec)
    check_rows(dict(zip(head.names, parameters, strict=True)), rows)
    return parameters, extras


def recurrent_names(leaves: Sequence[Any]) -> list[str]:
    """The keys under which a batch holds these leaves of a recurrent state."""
    return ["recurrent"] if len(leaves) == 1 else [f"recurrent_{index}" for index in range(len(leaves))]


class Recorder:
    """Records the outputs of every step, and stacks them 64 steps at a time, since many live tensors slow Python down.

    To copy an output costs a dispatch. So they are only copied with `always_copy`, or if the second step's outputs use
    the memory of the first step's or of the observation. If others are written later, that is an error: of each stack,
    the first outputs that are not copied are watched, so a function that writes several buffers in turn is found.
    """

    def __init__(self, observation: Any, length: int, *, always_copy: bool = False) -> None:
        self._observation, self._always_copy, self._length = observation, always_copy, length
        self.names: list[str] | None = None  # of the extra outputs, from the first call of `ordered` on
        self._first: tuple[Tensor, ...] = ()  # the outputs of the first step, not copied
        self._held: list[tuple[Tensor, ...]] = []  # the outputs of the latest steps, not stacked yet
        self._written, self._copying = 0, True  # the number of stacked steps; whether outputs are copied
        self._watched: tuple[tuple[Tensor, ...], list[int]] | None = None  # uncopied outputs, and their versions
        self._columns: list[Tensor] = []

    def ordered(self, t: int, extras: Mapping[str, Any]) -> list[Any]:
        """The extra outputs of step `t` in the order of their names; PolicyError if these change in a rollout."""
        names = sorted(extras)
        if self.names is None:
            self.names = names
        elif names != self.names:
            mend = "keep them the same"
            raise PolicyError(f"step {t} of this batch: it returned the extra keys {names} after {self.names}: {mend}")
        return [extras[name] for name in names]

    def append(self, tensors: tuple[Tensor, ...]) -> None:
        """Record one step."""
        if self._copying:
            tensors = self._copied(tensors)
        elif self._watched is None:
            self._watched = tensors, list(map(version_of, tensors))
        self._held.append(tensors)
        if len(self._held) == _HELD_STEPS:
            self._write()

    def _copied(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Copies of the outputs of one step. The second step decides whether later ones are copied as well."""
        if not self._first:
            self._first = tensors
        elif self._written + len(self._held) == 1:
            inputs = optree.tree_leaves(self._observation, namespace=NAMESPACE)
            memory = {memory_of(tensor) for tensor in (*inputs, *self._first) if isinstance(tensor, Tensor)}
            self._copying = self._always_copy or any(memory_of(tensor) in memory for tensor in tensors)
        return tuple(map(torch.clone, tensors))

    def _write(self) -> None:
        start, self._written = self._written, self._written + len(self._held)
        if not start:
            self._columns = [tensor.new_empty(self._length, *tensor.shape) for tensor in self._first]
        try:
            for column, parts in zip(self._columns, zip(*self._held, strict=True), strict=True):
                torch.stack(parts, out=column[start : self._written])
        except (RuntimeError, TypeError, ValueError) as error:
            raise self._stacking_error(start) from error
        if self._watched and list(map(version_of, self._watched[0])) != self._watched[1]:
            what = f"steps {start} to {self._written - 1} of this batch: an output of the policy was written"
            mend = "return new tensors at each step"
            raise PolicyError(f"{what} after it had been returned, expected outputs that stay as they are: {mend}")
        self._watched = None
        self._held.clear()

    def _stacking_error(self, start: int) -> PolicyError:
        expected, *others = map(dtypes_and_shapes, (self._first, *self._held))
        for step, got in enumerate(others, start):
            if got != expected:
                what = f"step {step} of this batch: the policy returned {got} (action first) after {expected}"
                return PolicyError(f"{what}: keep the shapes and dtypes of its outputs the same")
        return PolicyError(f"the policy's outputs {expected} cannot be stacked: return tensors")

    def columns(self) -> list[Tensor]:
        """Each output, [T, P, ...]."""
        if self._length == len(self._held) == 1:
            return [tensor.unsqueeze(0) for tensor in self._held[0]]
        if self._held:
            self._write()
        return self._columns


def rows_of(columns: Tensor | None, device: torch.device) -> Iterator[Any]:
    """Each row of columns [T, ...] on `device`, made 64 at a time, as in `Recorder`; for None, None without end."""
    if columns is None:
        return itertools.repeat(None)
    columns = columns if columns.device == device else columns.to(device)
    if len(columns) <= _HELD_STEPS:
        return iter(columns.unbind())  # takes a third of the time
    return itertools.chain.from_iterable(map(torch.unbind, torch.split(columns, _HELD_STEPS)))


@cache
def select_program() -> Callable[[Any, Any, Any], Any]:
    """Jitted: the lanes of a mask [P] from one pytree, the rest from another."""
    return import_jax().jit(jax_numerics().select)  # type: ignore[no-any-return]


def array_over(leaf: Tensor) -> Any:
    """A leaf of an observation on an accelerator as a JAX array over its memory; 64-bit numbers are cast to 32 bits."""
    return jax_view(leaf.to(_NARROW.get(leaf.dtype, leaf.dtype)))


def tensor_over(output: Any) -> Tensor:
    """An output of a policy as a tensor, over its memory if it is an array of JAX."""
    return torch_view(output) if isinstance(output, import_jax().Array) else torch.as_tensor(output)


def device_of(observation: Any) -> torch.device:
    """The device of an observation's tensors; the CPU for arrays of NumPy."""
    leaves = optree.tree_leaves(observation, namespace=NAMESPACE)
    return next((leaf.device for leaf in leaves if isinstance(leaf, Tensor)), torch.device("cpu"))


def memory_of(tensor: Tensor) -> int:
    """The address of the memory that a tensor is a view of."""
    return tensor.untyped_storage().data_ptr()


def lane_mask(lanes: Sequence[int] | Tensor, num_envs: int) -> Tensor:
    """The mask [P] bool of `lanes`. They may already be one, since listing lanes of a GPU would wait for it."""
    if isinstance(lanes, Tensor):
        return lanes
    mask = torch.zeros(num_envs, dtype=torch.bool)
    mask[list(lanes)] = True
    return mask
