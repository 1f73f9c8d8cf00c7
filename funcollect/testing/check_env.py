"""`check_env`, and its checks of an environment's description, and of rows against the data contract."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping
from typing import Any, get_args

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from tensordict import TensorDictBase
from torch import Tensor

from funcollect.arguments import check_kind
from funcollect.envs.base import EnvBase
from funcollect.envs.registry import WORKER_ARGUMENTS, make_env
from funcollect.messages import shown
from funcollect.policies.random_policy import RandomPolicy
from funcollect.protocols import Backend, Env, Forking, Seeding, Starts
from funcollect.specs import ActionSpec, disassemble, observation_leaves, torch_dtype
from funcollect.testing import env_runs, pair_checks
from funcollect.testing.report import Check, Report, bits_differ, digits, expect_rows, fail, first_row, run_checks, spot
from funcollect.testing.trial import Trial, check_run
from funcollect.trajectories.split import STEP, TRAJECTORY_IDS
from funcollect.tree import Path, flatten, time_last

FLAGS = ("terminated", "truncated", "done")
COUNTERS = ("traj_ids", "step", "lane", "policy_version")
DIVISION = "look at the division, root or logarithm behind it"
REPORT_IT = "the library writes this, or a wrapper around it: it has to have the keys and shapes of a batch"
_ALIKE = 4  # the least number of terminations at the greatest length, which look like those of a time limit
_SINGLE_STEPS = 8


def describes(trial: Trial) -> None:
    """The description is complete: backend, seeding, number of lanes, spaces and their leaves."""
    env = trial.env
    for name, known in (("backend", Backend), ("seeding", Seeding), ("forking", Forking), ("starts", Starts)):
        value = getattr(env, name, None)  # which members there are depends on the backend
        if value not in (None, *get_args(known)):
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
    kinds = {leaf.path: (leaf.shape, torch_dtype(leaf.dtype)) for leaf in trial.env.observation_leaves}
    for path, kind in (kinds | {("action",): (spec.shape, spec.dtype)}).items():
        leaf = trial.batch[path]
        got = (tuple(leaf.shape[2:]), leaf.dtype)
        if got != kind:
            raise fail(".".join(path), expected=kind, got=got, mend="correct the space or the returned value")


def observations(trial: Trial) -> None:
    """Every observation lies in its space, before and after a step."""
    space = trial.env.observation_space
    parts = disassemble(space, space)  # a Dict or Tuple space is indexed like its observations
    for leaf, part in zip(trial.env.observation_leaves, parts, strict=True):
        low, high = (torch.as_tensor(bound) for bound in _bounds(part, leaf.dtype))
        for path in (("next", *leaf.path), leaf.path):
            numbers = trial.batch[path].cpu()
            expected = f"a value in {part}"
            expect_rows(numbers.isnan(), path, numbers, expected, DIVISION)
            outside = ~((numbers >= low) & (numbers <= high))
            expect_rows(outside, path, numbers, expected, "widen the space, or clip the observation")


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


def rewards(trial: Trial) -> str | None:
    """Rewards are finite float32 numbers."""
    reward = trial.batch["next", "reward"]
    expect_rows(~reward.isfinite(), ("next", "reward"), reward, "a finite number", DIVISION)
    players = reward.shape[-1]
    return None if players == 1 else f"{players} in each step, one for each player: if there is one player, sum them"


def flags(trial: Trial) -> str | None:
    """`done` is terminated or truncated, and is False before every step."""
    expect_flags(trial.batch)
    counts = (trial.batch["collector", "step"][trial.batch["next", "terminated"][..., 0]] + 1).bincount()  # by length
    if len(counts) <= 2 or counts[-1] < max(_ALIKE, 2 * int(counts[:-1].max()) + 1):
        return None
    how_many, longest = f"{int(counts[-1])} of {int(counts.sum())} terminations", len(counts) - 1
    return f"{how_many} come after {longest} steps, none later: if that is a limit, return truncated"


def counters(trial: Trial) -> None:
    """Steps count from 0 in each trajectory, and every trajectory has a unique id."""
    expect_counters(trial.batch)


def chained(trial: Trial) -> None:
    """Within an episode, each observation is the one that the step before returned."""
    expect_chained(trial.batch)


def expect_layout(batch: TensorDictBase) -> None:
    """Fail unless a batch [*B] has the keys, shapes and dtypes that every batch has."""
    leaves, size = flatten(batch), tuple(batch.batch_size)
    reward = leaves.get(("next", "reward"))
    players = 1 if reward is None or not reward.ndim else reward.shape[-1]
    wanted: dict[Path, tuple[tuple[int, ...], torch.dtype]] = {
        **{(*prefix, name): ((*size, 1), torch.bool) for prefix in ((), ("next",)) for name in FLAGS},
        **{("collector", name): (size, torch.int64) for name in COUNTERS},
        ("next", "reward"): ((*size, players), torch.float32),
        **{("next", *path): (tuple(leaf.shape), leaf.dtype) for path, leaf in roots(leaves).items()},
    }
    if batch.names != time_last(len(size)):
        raise fail("the batch's names", expected=time_last(len(size)), got=batch.names, mend=REPORT_IT)
    if ("action",) not in leaves:
        raise fail("the batch", expected="the key 'action'", got=sorted(map(".".join, leaves)), mend=REPORT_IT)
    for path, kind in wanted.items():
        leaf = leaves.get(path)
        got = None if leaf is None else (tuple(leaf.shape), leaf.dtype)
        if got != kind:
            raise fail(f"the batch's {'.'.join(path)}", expected=kind, got=got, mend=REPORT_IT)
    for path, leaf in leaves.items():
        if leaf.shape[: len(size)] != size:
            where, expected = f"the batch's {'.'.join(path)}", [*size, "..."]
            raise fail(where, expected=expected, got=list(leaf.shape), mend=REPORT_IT)


def roots(leaves: Mapping[Path, Tensor]) -> dict[Path, Tensor]:
    """Of the leaves of a batch, the observations before the step: those with a key that is also under `next`."""
    own = {("reward",), *((name,) for name in FLAGS)}
    nexts = {path[1:] for path in leaves if path[0] == "next" and path[1] != "info"} - own
    return {path: leaf for path, leaf in leaves.items() if path in nexts}


def expect_flags(batch: TensorDictBase) -> None:
    """Fail unless ``done`` is terminated or truncated, and is False before every step of a batch [P, T]."""
    for prefix in ((), ("next",)):
        terminated, truncated, done = (batch[(*prefix, name)] for name in FLAGS)
        if place := first_row(done != (terminated | truncated)):
            flags = f"terminated={digits(terminated[place])}, truncated={digits(truncated[place])}"
            where, got = spot(*place, (*prefix, "done")), f"{digits(done[place])} with {flags}"
            mend = "set these two flags, and never done itself"
            raise fail(where, expected="terminated or truncated", got=got, mend=mend)
    expect_rows(batch["done"], ("done",), batch["done"], "False: a done lane is reset", REPORT_IT)


def expect_counters(rows: TensorDictBase, *, cut: bool = False) -> None:
    """Fail unless, in consecutive rows [P, T], steps count from 0 in each trajectory and no id comes back.

    With `cut`, trajectories may also end without a done flag, as they do when the user resets a lane.
    """
    ids, step = rows[TRAJECTORY_IDS], rows[STEP]
    over = rows["next", "done"][:, :-1, 0]
    begins = over | (cut & (step[:, 1:] == 0))
    wanted = torch.where(begins, 0, step[:, :-1] + 1)
    for before, wrong in (("done", over), ("not done", ~over)):
        note = f", as the row before is {before}"
        expect_rows((step[:, 1:] != wanted) & wrong, STEP, step[:, 1:], wanted, REPORT_IT, note=note, first=1)
    wrong = (ids[:, 1:] != ids[:, :-1]) != begins
    expect_rows(wrong, TRAJECTORY_IDS, ids[:, 1:], "another id after a done row, and only there", REPORT_IT, first=1)
    expect_used_once([segment for lane in ids for segment in lane.unique_consecutive().tolist()])


def expect_used_once(ids: list[int]) -> None:
    """Fail if an id is in the list twice, which has one id for each trajectory."""
    if again := sorted(each for each, count in Counter(ids).items() if count > 1):
        raise fail("collector.traj_ids", expected="one trajectory per id", got=f"{again[:3]} twice", mend=REPORT_IT)


def expect_chained(rows: TensorDictBase) -> None:
    """Fail unless each observation in consecutive rows [P, T] is the next one of the row before in its trajectory."""
    leaves = flatten(rows)
    within = rows[TRAJECTORY_IDS][:, 1:] == rows[TRAJECTORY_IDS][:, :-1]
    for path, root in roots(leaves).items():
        produced = leaves["next", *path][:, :-1]
        note = ", the next observation of the row before"
        mend = "write observations in reset and step only, and only for the lanes that these are called with"
        wrong = bits_differ(root[:, 1:], produced) & within
        expect_rows(wrong, path, root[:, 1:], produced, mend, note=note, first=1)


CHECKS: tuple[Check[Trial], ...] = (
    describes,
    runs,
    layout,
    observations,
    rewards,
    flags,
    counters,
    chained,
    pair_checks.generators,
    pair_checks.same_seed,
    env_runs.another_seed,
    pair_checks.cuts,
    env_runs.resets,
    env_runs.own_resets,
    env_runs.terminal,
    env_runs.reset_mask,
    env_runs.lanes_alone,
    env_runs.action_memory,
    env_runs.observation_memory,
    pair_checks.batch_memory,
    env_runs.old_states,
    pair_checks.fork,
    pair_checks.save,
    env_runs.close,
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
    if single is None:
        single = _single(env, made, kwargs)
    trial = Trial(env=made, policy=RandomPolicy(made.action_spec), steps=steps, seed=seed, single=single)
    return run_checks(repr(made), CHECKS, trial)


def _single(env: Any, made: Env, kwargs: dict[str, Any]) -> Env | None:
    """The environment with one lane, or None if it cannot be made from the arguments."""
    if isinstance(made, EnvBase):
        alone = copy.copy(made)
        alone.num_envs = 1
        return alone
    if isinstance(env, (str, EnvSpec)) or (callable(env) and "num_envs" in kwargs):
        of_one_lane = {name: value for name, value in kwargs.items() if name not in WORKER_ARGUMENTS}
        return make_env(env, **of_one_lane | {"num_envs": 1})
    return None
