"""Checks of `check_env` that look at the description of an environment, and at the rows of one run."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import torch
from gymnasium import spaces

from funcollect.envs.host.host_env import seeding_of
from funcollect.protocols import Backend, Env, Seeding
from funcollect.specs import ActionSpec, disassemble, observation_leaves
from funcollect.testing.compare import first_row, shown, spot
from funcollect.testing.contract import expect_chained, expect_counters, expect_flags, expect_layout
from funcollect.testing.report import fail
from funcollect.testing.trial import Trial

_SINGLE_STEPS = 8


def describes(trial: Trial) -> None:
    """The description is complete: backend, seeding, number of lanes, spaces and their leaves."""
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
    """It resets and steps: observations, rewards and flags have the right structure, shape and dtype."""
    trial.run(*[1] * _SINGLE_STEPS, trial.third)  # the loops check the first step of each rollout most thoroughly


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
    """Every observation lies in its space, before and after a step."""
    space = trial.env.observation_space
    parts = disassemble(space, space)  # a Dict or Tuple space is indexed like its observations
    for leaf, part in zip(trial.env.observation_leaves, parts, strict=True):
        for path in (("next", *leaf.path), leaf.path):
            value = trial.batch[path]
            low, high = (torch.as_tensor(bound) for bound in _bounds(part, leaf.dtype))
            numbers = value.cpu()
            if place := first_row(~((numbers >= low) & (numbers <= high))):  # NaN is outside, too
                mend = "widen the space, or clip the observation"
                raise fail(spot(*place, path), expected=f"a value in {part}", got=shown(value[place]), mend=mend)


def _bounds(space: Any, dtype: np.dtype[Any]) -> tuple[Any, Any]:
    """The lowest and highest values of a leaf's space."""
    match space:
        case spaces.Box():
            return space.low.astype(dtype), space.high.astype(dtype)  # rounded as observations are
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
        where, mend = spot(*place, ("next", "reward")), "look at the division or logarithm behind it"
        raise fail(where, expected="a finite number", got=shown(reward[place]), mend=mend)


def flags(trial: Trial) -> None:
    """`done` is terminated or truncated, and is False before every step."""
    expect_flags(trial.batch)


def counters(trial: Trial) -> None:
    """Steps count from 0 in each trajectory, and every trajectory has an id of its own."""
    expect_counters(trial.batch)


def chained(trial: Trial) -> None:
    """Within an episode, each observation is the one that the step before returned."""
    expect_chained(trial.batch)
