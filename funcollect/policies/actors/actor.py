"""Splits the answers of a policy and records its outputs, for the actors of all policies.

The cost of a small network is dispatch. Work that can wait (stacking, log-probabilities, checks for NaN) therefore
happens once, over the outputs of all steps, in `Actor.finish`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import optree
import torch
from torch import Tensor

from funcollect.errors import PolicyError
from funcollect.interop.bridge import jax_view, torch_view
from funcollect.interop.jax_setup import import_jax
from funcollect.messages import form
from funcollect.policies.actors.checks import check_recurrent, check_rows
from funcollect.policies.heads.head import Head
from funcollect.policies.numerics import jax_numerics
from funcollect.specs import RESERVED, ActionSpec
from funcollect.tree import NAMESPACE

_HELD_STEPS = 64
_NARROW = {torch.int64: torch.int32, torch.float64: torch.float32}  # JAX's own dtypes, unless 64 bits are on


def split_call(answer: Any) -> tuple[Any, Mapping[str, Any]]:
    """What a policy's call returned: its state, and its outputs, with an action; else PolicyError."""
    if not isinstance(answer, (tuple, list)) or len(answer) != 2:
        raise PolicyError(
            f"the policy's call returned {form(answer)}, expected the pair (policy_state, outputs): return both, with "
            "the state that it was given if it has none"
        )
    action, extras = split_answer(answer[1], None)
    return answer[0], {"action": action, **extras}


def split_answer(answer: Any, head: Head | None) -> tuple[Any, Mapping[str, Any]]:
    """Split a policy's answer into what its head reads (without a head: the action) and the extras to record.

    PolicyError if a dict lacks these keys, or has a key that a batch uses itself.
    """
    if not isinstance(answer, Mapping):
        return answer, {}
    names = ("action",) if head is None else head.names
    if any(name not in answer for name in names):
        mend = "return the action, or a dict that holds it" if head is None else f"the head {head.name} reads them"
        raise PolicyError(
            f"the policy returned the keys {sorted(map(str, answer))}, expected {list(names)} among them: {mend}"
        )
    parts = tuple(answer[name] for name in names)
    extras = {name: value for name, value in answer.items() if head is not None or name != "action"}
    own = RESERVED if head is not None else RESERVED - {"action_log_prob"}
    if taken := sorted(own & set(extras)):
        raise PolicyError(f"the policy returned {taken}, keys that a batch uses itself: rename them")
    return parts if len(parts) > 1 else parts[0], extras


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
    """Records the outputs of every step, and stacks them into columns 64 steps at a time.

    Thousands of live tensors would set off Python's full garbage collections, and a copy per step would cost a
    dispatch. The first two steps show whether a policy returns memory that it writes again, or a view of its input; its
    outputs are then copied at every step. `always_copy` is for a policy that may begin to do so later.
    """

    def __init__(self, observation: Any, length: int, *, always_copy: bool = False) -> None:
        tensors = optree.tree_leaves(observation, namespace=NAMESPACE)
        self._memory = {memory_of(leaf) for leaf in tensors if isinstance(leaf, Tensor)}
        self._always_copy = always_copy
        self._length = length
        self.names: list[str] | None = None  # of the extra outputs, once there were any
        self._first: tuple[Tensor, ...] = ()
        self._held: list[tuple[Tensor, ...]] = []
        self._written = 0
        self._columns: list[Tensor] = []
        self._copying = True

    def ordered(self, t: int, extras: Mapping[str, Any]) -> list[Any]:
        """The extra outputs of step `t` in the order of their names, which the first ones fix."""
        names = sorted(extras)
        if self.names is None:
            self.names = names
        elif names != self.names:
            raise PolicyError(
                f"step {t} of this batch: the policy returned the extra keys {names} after {self.names}: keep them the "
                "same at every step"
            )
        return [extras[name] for name in names]

    def append(self, tensors: tuple[Tensor, ...]) -> None:
        """Record one step."""
        if self._copying:
            tensors = self._own(tensors)
        self._held.append(tensors)
        if len(self._held) == _HELD_STEPS:
            self._write()

    def _own(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Copies of one of the first steps' outputs. The second step decides whether later ones are also copied."""
        if not self._first:
            self._first = tensors
            self._columns = [tensor.new_empty(self._length, *tensor.shape) for tensor in tensors]
        elif self._written + len(self._held) == 1:
            self._memory.update(memory_of(tensor) for tensor in self._first)
            self._copying = self._always_copy or any(memory_of(tensor) in self._memory for tensor in tensors)
        return tuple(tensor.clone() for tensor in tensors)

    def _write(self) -> None:
        start, self._written = self._written, self._written + len(self._held)
        try:
            for column, parts in zip(self._columns, zip(*self._held, strict=True), strict=True):
                torch.stack(parts, out=column[start : self._written])
        except (RuntimeError, TypeError, ValueError) as error:
            raise self._changed(start) from error
        self._held.clear()

    def _changed(self, start: int) -> PolicyError:
        expected = _kinds(self._first)
        for step, tensors in enumerate(self._held, start):
            if (got := _kinds(tensors)) != expected:
                return PolicyError(
                    f"step {step} of this batch: the policy returned {got} (action first) after {expected}: keep the "
                    "shapes and dtypes of its outputs the same"
                )
        return PolicyError(f"the policy's outputs {expected} cannot be stacked: return tensors")

    def columns(self) -> list[Tensor]:
        """Each output, [T, P, ...]."""
        if self._held:
            self._write()
        return self._columns


def _kinds(outputs: tuple[Any, ...]) -> list[str]:
    return [f"{getattr(each, 'dtype', type(each).__name__)} {list(getattr(each, 'shape', ()))}" for each in outputs]


def noise_by_step(noise: Tensor | None, run_device: torch.device) -> Callable[[int], Tensor | None]:
    """A function from a step to its noise [P, ...] on the policy's device; on the CPU always in the same memory."""
    if noise is None:
        return lambda t: None
    if run_device.type != "cpu":
        return noise.to(run_device).__getitem__
    noise = noise.cpu()
    rows, current = noise.numpy(), noise[0].clone()
    memory = current.numpy()

    def copied(t: int) -> Tensor:
        memory[...] = rows[t]
        return current

    return copied


@cache
def select_program() -> Callable[[Any, Any, Any], Any]:
    """Jitted: the lanes of a mask [P] from one pytree, the rest from another."""
    return import_jax().jit(jax_numerics().select)  # type: ignore[no-any-return]


def array_over(leaf: Tensor) -> Any:
    """A leaf of an observation on an accelerator as an array of JAX, in 32 bits where JAX has no 64 by default."""
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
    """[P] bool, True for `lanes`. They may already be such a mask, since listing the lanes of a GPU waits for it."""
    if isinstance(lanes, Tensor):
        return lanes
    mask = torch.zeros(num_envs, dtype=torch.bool)
    mask[list(lanes)] = True
    return mask
