"""The keys, spaces and shapes of a batch, for all layers.

Letters in shapes are fixed: ``T`` time, ``P`` environments in one batch, ``W`` workers, ``L`` lanes (``W * P``), ``*B``
whatever batch dimensions there are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gymnasium import spaces
from gymnasium.vector.utils import batch_space
from tensordict import TensorDictBase
from tensordict.nn import InteractionType as ExplorationType

from funcollect.arguments import check_flags, check_keys, check_kind
from funcollect.tree import Path

__all__ = ["ActionSpec", "ExplorationType", "Group", "GroupedSpec", "Leaf", "observation_leaves"]

Space = spaces.Space[Any]
_ARRAYS = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)

RESERVED = frozenset(
    ("action", "action_log_prob", "action_unsquashed", "collector", "done", "env_params", "next", "reward")
) | {"terminated", "truncated"}

PRESENT = "mask"  # the observation of a group whose agents come and go: which of them are there, [n] bool
PLAYER = "current_player"  # the observation of whose turn it is, in a game where one player moves at a time

# Where a batch without next observations holds those that no following frame holds; see `funcollect.next_observations`.
FINAL = ("collector", "final_observations")


@cache
def torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    """The dtype of a Torch tensor over a NumPy array of this dtype."""
    return torch.from_numpy(np.empty(0, dtype)).dtype


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """One array of an observation: its key in a batch, and its shape and dtype in one environment."""

    path: Path
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def name(self) -> str:
        """The path, joined by dots, for messages."""
        return ".".join(self.path)


def observation_leaves(space: Space, dtype: npt.DTypeLike | None = None) -> tuple[Leaf, ...]:
    """The leaves of one environment's observation space, in a fixed order. Floating boxes get `dtype` (float32).

    Raises TypeError for a space that has no fixed-size arrays (Text, Sequence, Graph, OneOf), and ValueError for a Dict
    key that is a key of the batch, is empty or contains a dot.

    >>> import gymnasium
    >>> space = gymnasium.spaces.Dict(camera=gymnasium.spaces.Box(0, 255, (8, 8), "uint8"))
    >>> [(leaf.path, leaf.shape) for leaf in observation_leaves(space)]
    [(('camera',), (8, 8))]
    """
    try:
        floating = np.dtype(np.float32 if dtype is None else dtype)
    except TypeError as error:
        raise TypeError(f"dtype is {dtype!r}, expected a NumPy dtype ({error}): pass for example np.float64") from error
    if floating.kind != "f":
        raise ValueError(f"dtype is {floating}, expected a floating one: it applies to floating boxes only")
    check_kind("space", space, spaces.Space, "pass a space of gymnasium.spaces, such as env.observation_space")
    root = () if isinstance(space, spaces.Dict) else ("observation",)
    leaves = tuple(_leaves(space, root, floating))
    if not leaves:
        raise ValueError(f"the observation space {space} has no arrays, expected at least one: add one, a constant say")
    for leaf in leaves:
        if leaf.path[0] in RESERVED:
            mend = f"rename it with a Gymnasium wrapper; taken are {sorted(RESERVED)}"
            raise ValueError(f"the observation key {leaf.path[0]!r} collides with a key of the batch: {mend}")
        if any("." in part or not part for part in leaf.path):
            raise ValueError(f"the observation key {leaf.path} holds a dot or is empty: rename it")
    return leaves


def _leaves(space: Space, path: Path, floating: np.dtype[Any]) -> list[Leaf]:
    if (parts := _parts(space)) is not None:
        return [leaf for name, child in parts for leaf in _leaves(child, (*path, str(name)), floating)]
    if not isinstance(space, _ARRAYS):
        what = f"the observation space at {'.'.join(path) or 'the root'} is {type(space).__name__}"
        known = "Box, Discrete, MultiDiscrete, MultiBinary, Dict or Tuple"
        mend = "leave it out by make_env(…, drop=[…]) or gymnasium.wrappers.FilterObservation, or flatten it"
        if isinstance(space, spaces.Text):
            mend = f"leave it out by make_env(…, drop={[*path[:1]]}), or record its bytes by text=256, or flatten it"
        raise TypeError(f"{what}, expected {known}: {mend} with a Gymnasium wrapper")
    dtype = np.dtype(space.dtype)
    return [Leaf(path=path, shape=tuple(space.shape or ()), dtype=floating if dtype.kind == "f" else dtype)]


def _parts(space: Space) -> list[tuple[Any, Space]] | None:
    """The spaces in a Dict or a Tuple, with their names or positions; None for any other space."""
    if isinstance(space, spaces.Dict):
        return [*space.spaces.items()]
    return [*enumerate(space.spaces)] if isinstance(space, spaces.Tuple) else None


def assemble(space: Space, flat: Mapping[Path, Any], path: Path | None = None) -> Any:
    """An observation in the structure of its space (an array, or nested dicts and tuples), from leaves by path."""
    if path is None:
        path = () if isinstance(space, spaces.Dict) else ("observation",)
    if (parts := _parts(space)) is None:
        return flat[path]
    children = {name: assemble(child, flat, (*path, str(name))) for name, child in parts}
    return children if isinstance(space, spaces.Dict) else tuple(children.values())


def map_leaves(function: Callable[[str, Any], Any], observation: Any, name: str = "") -> Any:
    """An observation or a nested batch with ``function(name, leaf)`` in place of each leaf, named like ``"b.0"``."""
    if isinstance(observation, (Mapping, TensorDictBase)):
        prefix = f"{name}." if name else ""
        return {key: map_leaves(function, each, f"{prefix}{key}") for key, each in observation.items()}
    name = name or "observation"
    if isinstance(observation, tuple):
        return tuple(map_leaves(function, each, f"{name}.{index}") for index, each in enumerate(observation))
    return function(name, observation)


def disassemble(space: Space, observation: Any) -> list[Any]:
    """The leaves of one environment's observation, in the order of `observation_leaves`."""
    if isinstance(space, spaces.Dict):
        return [leaf for name, child in space.spaces.items() for leaf in disassemble(child, observation[name])]
    if isinstance(space, spaces.Tuple):
        pairs = zip(space.spaces, observation, strict=True)
        return [leaf for child, part in pairs for leaf in disassemble(child, part)]
    return [observation]


@dataclass(frozen=True)
class ActionSpec:
    """The encoding of actions in a batch: their space, and whether discrete actions are one-hot (TorchRL's encoding).

    TypeError for a space that is not Box, Discrete, MultiDiscrete or MultiBinary; ValueError for one-hot actions of a
    space without categories.

    >>> from gymnasium import spaces
    >>> spec = ActionSpec(spaces.MultiDiscrete([2, 3]), one_hot=True)
    >>> spec.categories, spec.choices
    ((2, 3), 5)
    """

    space: Space
    one_hot: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.space, _ARRAYS):
            known = "Box, Discrete, MultiDiscrete or MultiBinary: flatten it with a Gymnasium wrapper"
            raise TypeError(f"the action space is {type(self.space).__name__}, expected {known}")
        if isinstance(self.space, spaces.MultiDiscrete) and not self.space.nvec.size:
            raise ValueError(f"the action space {self.space} has no components, expected at least one: add one")
        check_flags(one_hot=self.one_hot)
        if self.one_hot and not self.categories:
            mend = "leave it out"
            raise ValueError(f"one_hot=True needs a Discrete or MultiDiscrete action space, got {self.space}: {mend}")

    @cached_property
    def categories(self) -> tuple[int, ...]:
        """The number of choices of each discrete component; empty for Box and MultiBinary."""
        if isinstance(self.space, spaces.Discrete):
            return (int(self.space.n),)
        return tuple(self.space.nvec.ravel().tolist()) if isinstance(self.space, spaces.MultiDiscrete) else ()

    @cached_property
    def choices(self) -> int:
        """The number of choices of all discrete components together."""
        return sum(self.categories)

    @cached_property
    def plain(self) -> bool:
        """Whether an action is a single index that starts at 0, like the index of a logit."""
        return isinstance(self.space, spaces.Discrete) and not self.one_hot and not self.space.start

    @cached_property
    def start(self) -> npt.NDArray[np.int64]:
        """The lowest value of each discrete component, in the space's own shape."""
        return np.asarray(getattr(self.space, "start", 0), np.int64)

    @cached_property
    def bounds(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The lowest and the highest value of each integer component of an action in a batch."""
        low, high = np.zeros((), np.int64), np.ones((), np.int64)
        if isinstance(self.space, spaces.Box):
            low, high = (bound.astype(np.int64) for bound in (self.space.low, self.space.high))
        elif self.categories and not self.one_hot:
            low, high = self.start, self.start + np.reshape(self.categories, self.start.shape) - 1
        return torch.as_tensor(low), torch.as_tensor(high)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The shape of one action in a batch."""
        return (self.choices,) if self.one_hot else tuple(self.space.shape or ())

    @cached_property
    def dtype(self) -> torch.dtype:
        """The dtype of an action in a batch."""
        return torch_dtype(np.dtype(np.int64 if self.one_hot else self.space.dtype))

    def from_one_hot(self, action: Any, numpy: Any) -> Any:
        """Integers [*B, *space.shape] from one-hot rows [*B, choices]; `numpy` is NumPy, `jax.numpy` or `torch`."""
        ends = np.cumsum(self.categories).tolist()
        parts = [action[..., begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
        chosen = numpy.stack([part.argmax(-1) for part in parts], -1)
        chosen = chosen.reshape((*action.shape[:-1], *(self.space.shape or ())))
        if not self.start.any():
            return chosen  # without a copy of `start` to the device
        return chosen + (torch.as_tensor(self.start, device=action.device) if numpy is torch else self.start)


@dataclass(frozen=True)
class Group:
    """Agents whose rows are stacked in a batch: ``(group, "observation")`` is [*B, T, n, ...].

    >>> from gymnasium import spaces
    >>> Group(("left", "right"), spaces.Box(-1, 1, (3,)), spaces.Discrete(2)).n
    2
    """

    names: tuple[str, ...]  # of the agents, in the order of their rows
    observation_space: Space  # of one agent
    action_space: Space  # of one agent
    # Whether an agent may end before its lane, or come back; a batch then has a ``mask`` [*B, T, n] of who is there.
    comes_and_goes: bool = False

    def __post_init__(self) -> None:
        """Raise TypeError or ValueError for wrong names, and TypeError for wrong spaces or a wrong flag."""
        check_keys("names", self.names, "ant")
        for name in ("observation_space", "action_space"):
            check_kind(name, getattr(self, name), spaces.Space, "pass a space of gymnasium.spaces")
        check_flags(comes_and_goes=self.comes_and_goes)

    @property
    def n(self) -> int:
        """The number of agents."""
        return len(self.names)

    @cached_property
    def action_spec(self) -> ActionSpec:
        """The encoding of one agent's action in a batch."""
        return ActionSpec(self.action_space)

    @cached_property
    def joint_space(self) -> Space:
        """The space of the actions of all agents together."""
        one = self.action_space
        if isinstance(one, spaces.MultiDiscrete):
            return spaces.MultiDiscrete(np.stack([one.nvec] * self.n), start=np.stack([one.start] * self.n))
        return batch_space(one, self.n)


@dataclass(frozen=True)
class TurnSpec(ActionSpec):
    """The actions, all in one space, of players who move in turn. In a loop, their rewards are infos."""

    players: tuple[str, ...] = ()


@dataclass(frozen=True)
class GroupedSpec(ActionSpec):
    """The actions of all agents, in loops one flat array [..., A]: group after group, in each agent after agent."""

    groups: Mapping[str, Group] = field(default_factory=dict)
    order: tuple[str, ...] = ()  # all agents, in an order that does not depend on their groups

    @cached_property
    def parts(self) -> dict[str, slice]:
        """The part of the array that holds the actions of each group."""
        sizes = [group.n * math.prod(group.action_spec.shape) for group in self.groups.values()]
        ends = np.cumsum([0, *sizes]).tolist()
        return {name: slice(*bounds) for name, bounds in zip(self.groups, pairwise(ends), strict=True)}

    def integers_of(self, name: str) -> bool:
        """Whether the array holds the integers of a group as floating numbers, since other groups have such."""
        return self.dtype.is_floating_point and not self.groups[name].action_spec.dtype.is_floating_point

    def rows_of(self, name: str, array: Any) -> Any:
        """A group's part [..., n, *shape] of an array [..., A] like that of all actions."""
        group = self.groups[name]
        return array[..., self.parts[name]].reshape(*array.shape[:-1], group.n, *group.action_spec.shape)

    def of_group(self, name: str, action: Any) -> Any:
        """A group's actions [..., n, *shape], from the array [..., A] of all actions."""
        rows = self.rows_of(name, action)
        if not self.integers_of(name):
            return rows
        return rows.to(self.groups[name].action_spec.dtype) if isinstance(rows, torch.Tensor) else rows.astype(int)
