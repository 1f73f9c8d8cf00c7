"""Environments that live in simulators on the host: what a loop needs of them.

A host environment is a description; `open` makes simulators, which are mutable and belong to one collector state.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from funcollect.envs.rows import Rows
from funcollect.specs import ActionSpec, Leaf, Seeding, Space

Info = Mapping[str, Any]


class Outcome(NamedTuple):
    """What one step of all P lanes gave beside the observations."""

    reward: Sequence[Any]  # [P]
    terminated: Sequence[Any]  # [P] bool
    truncated: Sequence[Any]  # [P] bool
    info: Sequence[tuple[Any, ...]]  # per info key: [P]


class Simulators(Protocol):
    """P live simulators, and the rows in which their current observations stand."""

    rows: Rows

    def reset(self, lanes: Sequence[int], seeds: Sequence[int | None]) -> None:
        """Start an episode in each of `lanes`."""
        ...

    def step(self, action: Any, frozen: Collection[int] = ()) -> Outcome:
        """Step every lane but the frozen ones, whose rows stay as they are. `action` is [P, ...]."""
        ...

    def close(self) -> None:
        """Free the simulators."""
        ...


@dataclass(frozen=True, kw_only=True)
class HostEnv:
    """A host environment (see `funcollect.Env`).

    Attributes:
        label: how it is called in messages.
        info_keys: the keys of `info` that a batch records under ``next.info``.
        opener: makes the simulators.
    """

    label: str
    num_envs: int | None
    observation_space: Space
    action_spec: ActionSpec
    observation_leaves: tuple[Leaf, ...]
    opener: Callable[[], Simulators]
    info_keys: tuple[str, ...] = ()
    seeding: Seeding = "episode"
    backend: Literal["host"] = "host"

    @property
    def action_space(self) -> Space:
        """The action space of one environment."""
        return self.action_spec.space

    def open(self) -> Simulators:
        """Live simulators, not reset yet."""
        return self.opener()

    def __repr__(self) -> str:
        lanes = "" if self.num_envs is None else f", num_envs={self.num_envs}"
        return f"HostEnv({self.label!r}{lanes})"


def decoder(spec: ActionSpec) -> Callable[[Any], Any]:
    """A function from a batch's action [P, ...] (Torch or NumPy) to one that Gymnasium environments take, P times."""
    dtype = np.dtype(spec.space.dtype)
    shape = tuple(spec.space.shape or ())
    if spec.one_hot:
        return lambda action: _from_one_hot(spec, np.asarray(action))
    if not shape:
        return lambda action: action.tolist()

    def rows(action: Any) -> npt.NDArray[Any]:
        array = np.asarray(action)
        return array if array.dtype == dtype else array.astype(dtype)

    return rows


def _from_one_hot(spec: ActionSpec, action: npt.NDArray[Any]) -> Any:
    ends = np.cumsum(spec.categories)
    parts = np.split(action, ends[:-1], axis=-1)
    chosen = np.stack([part.argmax(-1) for part in parts], -1)
    shaped = chosen.reshape(len(action), *(spec.space.shape or ())) + spec.start
    return shaped if spec.space.shape else shaped.tolist()
