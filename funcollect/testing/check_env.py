"""`check_env`, and its checks of an environment's description, and of the rows that its runs give."""

from __future__ import annotations

import copy
from typing import Any, get_args

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec

from funcollect.arguments import check_kind, check_num_envs
from funcollect.envs.base import EnvBase
from funcollect.envs.registry import WORKER_ARGUMENTS, make_env
from funcollect.messages import shown
from funcollect.policies.random_policy import RandomPolicy
from funcollect.protocols import Backend, Env, Forking, Seeding, Starts
from funcollect.specs import ActionSpec, disassemble, observation_leaves
from funcollect.testing import env_runs, pairs
from funcollect.testing.pairs import Trial, check_run
from funcollect.testing.report import Check, Report, bits_differ, expect_rows, fail, mended_by, run_checks
from funcollect.trajectories.split import STEP, TRAJECTORY_IDS

_DIVISION = "look at the division, root or logarithm behind it"
_ALIKE = 4  # the least number of terminations at the greatest length, which look like those of a time limit
_SINGLE_STEPS = 8


def describes(trial: Trial) -> None:
    """The description is complete: backend, seeding, number of lanes, spaces and their leaves."""
    env, right = trial.env, observation_leaves(trial.env.observation_space)
    for name, known in (("backend", Backend), ("seeding", Seeding), ("forking", Forking), ("starts", Starts)):
        value = getattr(env, name, None)  # which members there are depends on the backend
        if value not in (None, *get_args(known)):
            raise fail(name, f"one of {get_args(known)}", repr(value), "set it to one of these")
    check_num_envs(env.num_envs)
    got, wanted = ([(leaf.path, leaf.shape) for leaf in leaves] for leaves in (env.observation_leaves, right))
    if got != wanted:
        raise fail("observation_leaves", wanted, got, "make them with specs.observation_leaves")
    if not isinstance(env.action_spec, ActionSpec) or env.action_spec.space != env.action_space:
        raise fail("action_spec", f"ActionSpec({env.action_space})", env.action_spec, "make it so")


def runs(trial: Trial) -> str | None:
    """It resets and steps: observations, rewards and flags have the right structure, shape and dtype."""
    trial.run(*[1] * _SINGLE_STEPS, trial.third)  # the loops check the first step of each rollout most thoroughly
    counts = (trial.batch[STEP][trial.batch["next", "terminated"][..., 0]] + 1).bincount()  # of terminations, by length
    if len(counts) <= 2 or counts[-1] < max(_ALIKE, 2 * int(counts[:-1].max()) + 1):
        return None
    how_many, longest = f"{int(counts[-1])} of {int(counts.sum())} terminations", len(counts) - 1
    return f"{how_many} come after {longest} steps, none later: if that is a limit, return truncated"


@mended_by("widen the space, or clip the observation")
def observations(trial: Trial) -> None:
    """Every observation lies in its space, before and after a step."""
    space = trial.env.observation_space
    parts = disassemble(space, space)  # a Dict or Tuple space is indexed like its observations
    for leaf, part in zip(trial.env.observation_leaves, parts, strict=True):
        low, high = (torch.as_tensor(bound) for bound in _bounds(part, leaf.dtype))
        for path in (("next", *leaf.path), leaf.path):
            numbers = trial.batch[path].cpu()
            expect_rows(numbers.isnan(), path, numbers, f"a value in {part}", _DIVISION)
            expect_rows(~((numbers >= low) & (numbers <= high)), path, numbers, f"a value in {part}")


def _bounds(space: Any, dtype: np.dtype[Any]) -> tuple[Any, Any]:
    """The lowest and highest values in the space of one leaf, whose dtype in a batch is `dtype`."""
    match space:
        case spaces.Box():
            return space.low.astype(dtype), space.high.astype(dtype)  # rounded as observations are
        case spaces.Discrete():
            return int(space.start), int(space.start) + int(space.n) - 1
        case spaces.MultiDiscrete():
            return space.start, np.add(space.start, space.nvec, dtype=np.int64) - 1
        case _:
            return 0, 1


@mended_by(_DIVISION)
def rewards(trial: Trial) -> str | None:
    """Rewards are finite float32 numbers."""
    reward = trial.batch["next", "reward"]
    expect_rows(~reward.isfinite(), ("next", "reward"), reward, "a finite number")
    players = reward.shape[-1]
    return None if players == 1 else f"{players} in each step, one for each player: if there is one player, sum them"


@mended_by("write observations in reset and step only, and only for the lanes that these are called with")
def chained(trial: Trial) -> None:
    """Within an episode, each observation is the one that the step before returned."""
    ids, note = trial.batch[TRAJECTORY_IDS], ", the next observation of the row before"
    within = ids[:, 1:] == ids[:, :-1]
    for leaf in trial.env.observation_leaves:
        root, produced = trial.batch[leaf.path][:, 1:], trial.batch["next", *leaf.path][:, :-1]
        expect_rows(bits_differ(root, produced) & within, leaf.path, root, produced, note=note, first=1)


CHECKS: tuple[Check[Trial], ...] = (
    *(describes, runs, observations, rewards, chained),
    *(pairs.generators, pairs.same_seed, env_runs.another_seed, pairs.cuts),
    *(env_runs.resets, env_runs.own_resets, env_runs.terminal, env_runs.reset_mask, env_runs.lanes_alone),
    *(env_runs.policy_memory, pairs.batch_memory, env_runs.old_states, pairs.fork, pairs.save, env_runs.close),
)


def check_env(env: Any, *, steps: int = 100, seed: int = 0, single: Env | None = None, **kwargs: Any) -> Report:
    """Check that an environment keeps the contract, under random actions.

    Args:
        env: an `Env`, or anything that `make_env` accepts. An instance needs a spec, from which copies are made.
        steps: T, the number of steps of a run; ends of episodes are checked only if some episodes end within it.
        seed: the seed of the runs.
        single: the same environment with ``num_envs=1``, which the lanes of a batch are compared with. By default it is
            made, if `env` is an id, a factory or an instance of one of the base classes.
        **kwargs: arguments of `make_env`, such as ``num_envs=3``: some checks need two lanes.

    Returns:
        The report; `print` shows one line for each check.

    Raises:
        CheckError: at the first check that fails, with the place, the expectation, the value and the fix.
        TypeError, ValueError: if no environment can be made of the arguments.

    >>> report = check_env("CartPole-v1", num_envs=3, steps=40)
    >>> "same_seed" in report.passed
    True
    """
    check_run(steps, seed)
    check_kind("single", single, (*get_args(Env), type(None)), "make it with funcollect.make_env(…, num_envs=1)")
    if isinstance(env, gymnasium.Env) and env.spec is None:
        raise TypeError(
            f"env is {shown(env)}, an instance without a spec, which cannot be copied: pass its class or a "
            f"factory, check_env({type(env).__name__}, num_envs=3)"
        )
    made = make_env(env, **kwargs)
    if single is None and isinstance(made, EnvBase):
        alone = copy.copy(made)
        alone.num_envs = 1
        single = alone
    elif single is None and (isinstance(env, (str, EnvSpec)) or (callable(env) and "num_envs" in kwargs)):
        of_one_lane = {name: value for name, value in kwargs.items() if name not in WORKER_ARGUMENTS}
        single = make_env(env, **of_one_lane | {"num_envs": 1})
    trial = Trial(env=made, policy=RandomPolicy(made.action_spec), steps=steps, seed=seed, single=single)
    return run_checks(repr(made), CHECKS, trial)
