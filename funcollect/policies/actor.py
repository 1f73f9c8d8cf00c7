"""A policy bound to one rollout: what a loop calls at every step, and what is left to do once at the end.

A small network's cost is dispatch. So whatever need not happen between two steps (recording, log-probabilities,
checks for NaN) happens once, over the stacked outputs of all steps, in `Actor.finish`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import optree
import torch
from torch import Tensor

from funcollect.errors import PolicyError
from funcollect.policies.heads import Head
from funcollect.specs import RESERVED, ActionSpec, ExplorationType
from funcollect.tree import NAMESPACE, Path

Columns = dict[Path, Tensor]  # each [T, P, ...]

_HELD_STEPS = 64


@dataclass(frozen=True, kw_only=True)
class Drive:
    """Everything that a policy is given for one rollout.

    Attributes:
        observation: what the policy reads at each step: always the same arrays [P, ...], in the space's structure.
        params: prepared parameters.
        policy_state: the state to start from.
        initial_state: the state of a lane at the start of an episode.
        noise: [T, P, ...], or None.
        spec: how an action looks.
    """

    observation: Any
    params: Any
    policy_state: Any
    initial_state: Any
    noise: Tensor | None
    exploration_type: ExplorationType
    spec: ActionSpec
    num_envs: int
    length: int

    @property
    def stochastic(self) -> bool:
        """Whether a head samples; otherwise it takes the mode."""
        return self.exploration_type is ExplorationType.RANDOM


class Actor(Protocol):
    """A policy at work."""

    def running(self) -> contextlib.AbstractContextManager[Any]:
        """The context in which `act` and `finish` are called."""
        ...

    def act(self, t: int) -> Any:
        """The action [P, ...] for the observation that stands in `Drive.observation` now."""
        ...

    def restart(self, lanes: Sequence[int]) -> None:
        """These lanes begin an episode before the next `act`: forget their recurrent state."""
        ...

    def finish(self) -> tuple[Any, Columns]:
        """The policy's next state, and its outputs of all steps."""
        ...


@contextlib.contextmanager
def torch_generator(state: Tensor) -> Iterator[None]:
    """Torch's global CPU generator runs from `state`, a private copy that is moved on; afterwards it is as it was."""
    before = torch.get_rng_state()
    torch.set_rng_state(state)
    try:
        yield
        state.copy_(torch.get_rng_state())
    finally:
        torch.set_rng_state(before)


def generator_state(seed: int) -> Tensor:
    """The state of a CPU generator seeded with `seed` (64 bits)."""
    return torch.Generator().manual_seed(seed).get_state()


def check_action(action: Any, spec: ActionSpec, num_envs: int) -> None:
    """Raise PolicyError unless `action` is [P, *spec.shape] of a dtype that the space can take."""
    wanted = (num_envs, *spec.shape)
    if not hasattr(action, "shape"):
        raise PolicyError(f"the policy's action is {type(action).__name__}, expected an array of shape {wanted}")
    if tuple(action.shape) != wanted:
        raise PolicyError(
            f"action has shape {tuple(action.shape)}, the space {spec.space} wants {wanted} for {num_envs} "
            f"environment{'s' if num_envs > 1 else ''}: return one action of shape {spec.shape} per environment"
        )
    kind = "float" if "float" in str(action.dtype) else "int"
    if kind != ("float" if spec.dtype.is_floating_point else "int"):
        raise PolicyError(f"action has dtype {action.dtype}, the space {spec.space} wants {spec.dtype}: cast it")


def check_numbers(columns: Columns) -> None:
    """Raise PolicyError for the first row that is NaN."""
    for path, column in columns.items():
        if column.is_floating_point() and bool(torch.isnan(column.sum())):
            _raise_at(torch.isnan(column), f"{'.'.join(path)} is NaN", column)


def check_outputs(columns: Columns, spec: ActionSpec) -> None:
    """Raise PolicyError for the first row that is NaN, or an action that is infinite or outside its choices."""
    check_numbers(columns)
    action = columns[("action",)]
    if action.is_floating_point():
        if bool(torch.isinf(action.sum())):
            _raise_at(torch.isinf(action), "the action is infinite", action)
    elif spec.categories and not spec.one_hot:
        low = torch.from_numpy(spec.start).to(action.device)
        counts = torch.tensor(spec.categories, device=action.device).reshape(spec.shape)
        wrong = (action < low) | (action >= low + counts)
        if bool(wrong.any()):
            _raise_at(wrong, f"the action lies outside {spec.space}", action)


def _raise_at(wrong: Tensor, what: str, column: Tensor) -> None:
    rows = wrong.reshape(*wrong.shape[:2], -1).any(-1)
    if not bool(rows.any()):
        return  # values whose sum overflows
    step, lane = rows.nonzero()[0].tolist()
    raise PolicyError(
        f"lane {lane}, step {step} of this batch: {what} (it is {column[step, lane].tolist()}): "
        "look at the parameters and at the observation of that step"
    )


def split_answer(answer: Any, head: Head | None) -> tuple[Any, Mapping[str, Any]]:
    """A policy's answer as what its head reads (its action, without a head) and the extras to be recorded.

    Raises:
        PolicyError: for a dict without these, or with a name that a batch uses itself.
    """
    if not isinstance(answer, Mapping):
        return answer, {}
    names = ("action",) if head is None else head.names
    if any(name not in answer for name in names):
        raise PolicyError(
            f"the policy answered with the keys {sorted(answer)}, expected {list(names)} among them: "
            f"{'return the action, or a dict that holds it' if head is None else 'its head reads these'}"
        )
    parts = tuple(answer[name] for name in names)
    extras = {name: value for name, value in answer.items() if head is not None or name != "action"}
    own = RESERVED if head is not None else RESERVED - {"action_log_prob"}
    if taken := sorted(own & set(extras)):
        raise PolicyError(f"the policy answered with {taken}, which a batch uses itself: rename them")
    return parts if len(parts) > 1 else parts[0], extras


class Recorder:
    """Outputs of every step: kept as they are, and stacked into their columns some dozens of steps at a time.

    Thousands of live tensors would set off Python's full garbage collections; a copy per step would cost a dispatch.
    A policy that answers with memory which it writes again, or with a view of its input, is noticed at the first two
    steps; its answers are then copied.
    """

    def __init__(self, observation: Any, length: int) -> None:
        tensors = optree.tree_leaves(observation, namespace=NAMESPACE)
        self._memory = {_memory(leaf) for leaf in tensors if isinstance(leaf, Tensor)}
        self._length = length
        self._first: tuple[Tensor, ...] = ()
        self._held: list[tuple[Tensor, ...]] = []
        self._written = 0
        self._columns: list[Tensor] = []
        self._copying = True

    def append(self, tensors: tuple[Tensor, ...]) -> None:
        """Record one step."""
        if self._copying:
            tensors = self._own(tensors)
        self._held.append(tensors)
        if len(self._held) == _HELD_STEPS:
            self._write()

    def _own(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if not self._first:
            self._first = tensors
            self._columns = [tensor.new_empty(self._length, *tensor.shape) for tensor in tensors]
        elif self._written + len(self._held) == 1:
            self._memory.update(_memory(tensor) for tensor in self._first)
            self._copying = any(_memory(tensor) in self._memory for tensor in tensors)
        return tuple(tensor.clone() for tensor in tensors)

    def _write(self) -> None:
        start, self._written = self._written, self._written + len(self._held)
        for column, parts in zip(self._columns, zip(*self._held, strict=True), strict=True):
            torch.stack(parts, out=column[start : self._written])
        self._held.clear()

    def columns(self) -> list[Tensor]:
        """Each output, [T, P, ...]."""
        if self._held:
            self._write()
        return self._columns


class NoiseRow:
    """The noise of one step at a time, always in the same memory; None where nothing is drawn."""

    def __init__(self, noise: Tensor | None) -> None:
        self.tensor = None if noise is None else noise[0].clone()
        self._all = None if noise is None else noise.numpy()
        self._row = None if self.tensor is None else self.tensor.numpy()

    def at(self, t: int) -> Tensor | None:
        """The noise of step `t`, [P, ...], good until the next call."""
        if self._row is not None and self._all is not None:
            self._row[...] = self._all[t]
        return self.tensor


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def lane_mask(lanes: Sequence[int], num_envs: int) -> Tensor:
    """[P] bool, True for `lanes`."""
    mask = torch.zeros(num_envs, dtype=torch.bool)
    mask[list(lanes)] = True
    return mask
