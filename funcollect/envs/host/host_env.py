"""Environments that live in simulators on the host: what a loop needs of them.

A host environment is a description; `open` makes simulators, which are mutable and belong to one collector state.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from funcollect.envs.host.rows import Rows
from funcollect.errors import EnvError
from funcollect.messages import shown
from funcollect.specs import ActionSpec, Leaf, Seeding, Space

Forking = Literal["replay", "snapshot", "none"]
ONWARD = "correct that, or begin new episodes with funcollect.recover(env, state), as a collector does by itself"


# What one step of all P lanes gave beside the observations: reward [P], terminated [P] bool, truncated [P] bool and,
# per info key, [P, ...]. A plain tuple, since one is made at every step.
Column = Sequence[Any] | npt.NDArray[Any]
Outcome = tuple[Column, Column, Column, Sequence[Column]]


class Camera(NamedTuple):
    """How a simulator shows itself; `Simulators` that can have a method ``camera(lane) -> Camera``."""

    mode: str | None  # Gymnasium's render_mode
    fps: float | None  # the frames per second that the environment names
    shoot: Callable[[], Any]  # what it shows now: [H, W, 3] uint8 in the mode "rgb_array"


_NUMBERS = {float, int, np.float64, np.float32}
_FLAGS = {bool, np.bool_}


def check_outcome(outcome: Outcome) -> None:
    """Raise EnvError for the first lane whose reward is no number, or whose flag is no bool."""
    reward, terminated, truncated, _ = outcome
    flags = {*map(type, terminated), *map(type, truncated)}
    if flags <= _FLAGS and set(map(type, reward)) <= _NUMBERS:
        return
    _check_each("reward", reward, "biuf", "a number: return a float")
    for name, values in (("terminated", terminated), ("truncated", truncated)):
        _check_each(name, values, "biu", "a bool: return (observation, reward, terminated, truncated, info)")


def _check_each(name: str, values: Column, kinds: str, expected: str) -> None:
    for lane, value in enumerate(values):
        try:
            array = np.asarray(value)
        except (TypeError, ValueError, RuntimeError):
            array = np.empty(0)
        if array.shape or array.dtype.kind not in kinds:
            raise EnvError(f"lane {lane}: step returned the {name} {shown(value, 60)}, expected {expected}")


def check_rewards(rewards: npt.NDArray[np.float32]) -> None:
    """Raise EnvError for the first row [T, P] that is NaN; a NumPy array takes None for NaN, too."""
    wrong = np.isnan(rewards)
    if wrong.any():
        step, lane = np.argwhere(wrong)[0].tolist()
        raise EnvError(
            f"lane {lane}, step {step} of this batch: the reward is NaN or None, expected a number: look at the action "
            f"and the observation of that step; {ONWARD}"
        )


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


class SnapshotSimulators(Simulators, Protocol):
    """Simulators that can say where they stand, generators included, and others of the same environment go there."""

    def snapshot(self) -> Any:
        """All that the next steps depend on; later steps do not change it."""
        ...

    def restore(self, snapshot: Any) -> None:
        """Go to where `snapshot` was taken, rows included, on these or on other simulators."""
        ...


@dataclass(frozen=True, kw_only=True)
class HostEnv:
    """A host environment (see `funcollect.Env`).

    Attributes:
        label: how it is called in messages.
        info_keys: the keys of `info` that a batch records under ``next.info``.
        opener: makes the simulators.
        forking: how `fork` copies them: by replaying episodes from their seeds, by a full snapshot (the simulators are
            `SnapshotSimulators`), or not at all.
        running_statistics: the wrappers that normalise by statistics of their own, updated over episodes. New
            simulators lack these statistics, so `evaluate` and `fork` refuse such an environment.
    """

    label: str
    num_envs: int | None
    observation_space: Space
    action_spec: ActionSpec
    observation_leaves: tuple[Leaf, ...]
    opener: Callable[[], Simulators]
    info_keys: tuple[str, ...] = ()
    seeding: Seeding = "episode"
    forking: Forking = "replay"
    running_statistics: tuple[str, ...] = ()
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


def statistics_of(env: Any) -> str:
    """The clause that explains why `env` is neither evaluated nor forked; empty unless it has running statistics."""
    names = env.running_statistics if isinstance(env, HostEnv) else ()
    return (
        f"{' and '.join(names)} normalise{'s'[len(names) > 1 :]} by statistics updated over episodes" if names else ""
    )


def batch_decoder(spec: ActionSpec) -> Callable[[Any], npt.NDArray[Any]]:
    """A function from a batch's action [P, ...] (Torch or NumPy) to a copy that vector environments take, [P, ...]."""
    dtype = np.dtype(spec.space.dtype)
    if spec.one_hot:
        return lambda action: np.array(_from_one_hot(spec, np.asarray(action)), dtype)
    return lambda action: np.asarray(action).astype(dtype)


def decoder(spec: ActionSpec) -> Callable[[Any], Any]:
    """A function from a batch's action [P, ...] (Torch or NumPy) to one that Gymnasium environments take, P times."""
    dtype = np.dtype(spec.space.dtype)
    shape = tuple(spec.space.shape or ())
    if spec.one_hot:
        return lambda action: _from_one_hot(spec, np.asarray(action))
    if spec.categories and not shape:
        return lambda action: action.tolist()

    def rows(action: Any) -> npt.NDArray[Any]:
        return np.asarray(action).astype(dtype)  # a copy: an environment may keep its action, or write it

    if not shape:
        return lambda action: [np.asarray(value) for value in rows(action)]  # as Box.sample gives it
    return rows


def _from_one_hot(spec: ActionSpec, action: npt.NDArray[Any]) -> Any:
    ends = np.cumsum(spec.categories)
    parts = np.split(action, ends[:-1], axis=-1)
    chosen = np.stack([part.argmax(-1) for part in parts], -1)
    shaped = chosen.reshape(len(action), *(spec.space.shape or ())) + spec.start
    return shaped if spec.space.shape else shaped.tolist()
