"""What `check_env` looks at in one run: the description, and what every row holds."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from funcollect.envs.host.host_env import seeding_of
from funcollect.protocols import Backend, Env, Seeding
from funcollect.specs import ActionSpec, Space, disassemble, observation_leaves
from funcollect.testing.compare import first_row, shown, spot
from funcollect.testing.contract import expect_chained, expect_counters, expect_flags, expect_layout
from funcollect.testing.report import fail
from funcollect.testing.trial import Trial

_STEPS_ALONE = 8


def describes(trial: Trial) -> None:
    """The description is whole: backend, seeding, lanes, spaces and the leaves that follow from them."""
    env: Env = trial.env
    for name, value, known in (("backend", env.backend, Backend), ("seeding", seeding_of(env), Seeding)):
        if value not in get_args(known):
            raise fail(name, expected=f"one of {get_args(known)}", got=repr(value), mend="set it to one of these")
    if env.num_envs is not None and (isinstance(env.num_envs, bool) or env.num_envs < 1):
        raise fail("num_envs", expected="a positive int or None", got=env.num_envs, mend="count the environments")
    wanted = [(leaf.path, leaf.shape) for leaf in observation_leaves(env.observation_space)]
    got = [(leaf.path, leaf.shape) for leaf in env.observation_leaves]
    if got != wanted:
        raise fail("observation_leaves", expected=wanted, got=got, mend="make them with specs.observation_leaves")
    if not isinstance(env.action_spec, ActionSpec) or env.action_spec.space != env.action_space:
        raise fail("action_spec", expected=f"ActionSpec({env.action_space})", got=env.action_spec, mend="make it so")


def runs(trial: Trial) -> None:
    """It resets and steps: observations have their space's structure, shape and dtype, rewards and flags are such."""
    trial.run(*[1] * _STEPS_ALONE, trial.third)  # each rollout's first step is looked at most closely


def layout(trial: Trial) -> None:
    """A batch has the keys, shapes and dtypes of the contract."""
    expect_layout(trial.batch)
    spec = trial.env.action_spec
    kinds = {
        leaf.path: (leaf.shape, torch.from_numpy(np.empty(0, leaf.dtype)).dtype)
        for leaf in trial.env.observation_leaves
    }
    for path, kind in (kinds | {("action",): (spec.shape, spec.dtype)}).items():
        leaf = trial.batch[path]
        got = (tuple(leaf.shape[2:]), leaf.dtype)
        if got != kind:
            raise fail(".".join(path), expected=kind, got=got, mend="correct the space or what is returned")


def observations(trial: Trial) -> None:
    """Every observation lies in its space, at the root and next."""
    space = trial.env.observation_space
    parts = disassemble(space, _spaces(space))
    for leaf, part in zip(trial.env.observation_leaves, parts, strict=True):
        for path in (("next", *leaf.path), leaf.path):
            value = trial.batch[path]
            if place := first_row(~_inside(part, value, leaf.dtype)):
                raise fail(
                    spot(*place, path),
                    expected=f"a value in {part}",
                    got=shown(value[place]),
                    mend="widen the space, or clip the observation",
                )


def _spaces(space: Space) -> Any:
    """The spaces of the leaves, in the structure of an observation."""
    match space:
        case spaces.Dict():
            return {name: _spaces(child) for name, child in space.spaces.items()}
        case spaces.Tuple():
            return tuple(_spaces(child) for child in space.spaces)
        case _:
            return space


def _inside(space: Any, value: Tensor, dtype: np.dtype[Any]) -> Tensor:
    """[P, T, ...] bool: the numbers within the bounds, which are rounded as observations are; NaN is outside."""
    low, high = _bounds(space, dtype)
    numbers = value.cpu()
    return (numbers >= torch.as_tensor(low)) & (numbers <= torch.as_tensor(high))


def _bounds(space: Any, dtype: np.dtype[Any]) -> tuple[Any, Any]:
    match space:
        case spaces.Box():
            return space.low.astype(dtype), space.high.astype(dtype)
        case spaces.Discrete():
            return int(space.start), int(space.start) + int(space.n) - 1
        case spaces.MultiDiscrete():
            return space.start, np.add(space.start, space.nvec, dtype=np.int64) - 1
        case _:
            return 0, 1


def rewards(trial: Trial) -> None:
    """Rewards are finite float32 numbers."""
    reward = trial.batch["next", "reward"]
    if place := first_row(~reward.isfinite()):
        raise fail(
            spot(*place, ("next", "reward")),
            expected="a finite number",
            got=shown(reward[place]),
            mend="look at the division or logarithm behind it",
        )


def flags(trial: Trial) -> None:
    """`done` is terminated or truncated, and no root is done."""
    expect_flags(trial.batch)


def counters(trial: Trial) -> None:
    """Steps count from 0 in each trajectory, whose id no other has."""
    expect_counters(trial.batch)


def chained(trial: Trial) -> None:
    """Inside an episode each root is the observation that the step before produced."""
    expect_chained(trial.batch)
