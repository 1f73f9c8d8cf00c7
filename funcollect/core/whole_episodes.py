"""Rollouts of whole episodes: `evaluate` returns their statistics, `rollout_trajectories` their frames."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping
from typing import Any, get_args

import torch
from tensordict import TensorDictBase

from funcollect.arguments import check_choice, check_kind, check_positive
from funcollect.core.api import close, init, rollout, run
from funcollect.core.request import NO_VALUES, Request, Value, check_state
from funcollect.core.state import Array, CollectorState
from funcollect.envs.host.host_env import statistics_of
from funcollect.errors import EnvError, EvaluationError
from funcollect.protocols import Env, Policy
from funcollect.specs import ExplorationType
from funcollect.trajectories.by_agent import agents_as_rows
from funcollect.trajectories.split import split_trajectories
from funcollect.trajectories.stats import EpisodeStats, episode_stats
from funcollect.trajectories.whole_trajectories import PendingTrajectories, TrajectoryFormat
from funcollect.tree import Path

_STEPS_AT_ONCE = 128


def evaluate(
    env: Env,
    policy: Policy,
    *,
    episodes: int,
    seed: int | None,
    params: Any = None,
    max_frames: int = 10_000_000,
    exploration_type: ExplorationType = ExplorationType.DETERMINISTIC,
    group: str | None = None,
) -> EpisodeStats:
    """Return the statistics of exactly `episodes` whole episodes, run on new simulators.

    Each lane contributes its first episodes, since those that finish first would be the short ones; if `episodes` is
    not a multiple of the number of lanes, the first lanes contribute one more. Warns if the first episode, started
    again from its seed, begins with another observation: the environment then keeps something between episodes.

    An instance that a state uses is rebuilt from its spec. The same `seed` gives the same statistics; None draws one.
    `params` are those of `rollout`. With several agents, returns are sums over all of them; those of the agents of a
    `group` are the statistics of `agents_as_rows`, in which agent i of n is lane ``lane * n + i``, and
    each stay in one of these episodes counts.

    Raises:
        ValueError: for a `group` that the environment lacks.
        EvaluationError: if `max_frames` over all lanes are not enough, and for an environment whose wrappers normalise
            by running statistics (Gymnasium's `NormalizeObservation`, TorchRL's `VecNorm`), which new simulators lack.
        EnvError: if an environment raises, or a process of its lanes is lost.

    >>> import funcollect as fc
    >>> env = fc.make_env("CartPole-v1", num_envs=4)
    >>> len(evaluate(env, fc.random_policy(env), episodes=10, seed=0))
    10
    """
    check_positive("episodes", episodes)
    check_positive("max_frames", max_frames)
    check_kind("group", group, (str, type(None)), "name one group")
    if kept := statistics_of(env):
        mend = "use funcollect.normalized and scale_rewards, or wrappers frozen with a copy of the trained statistics"
        raise EvaluationError(f"{env} cannot be evaluated: {kept}, which new simulators lack: {mend}")
    state = init(env, policy, seed=seed)
    first = dict(state.observation)
    lanes = torch.arange(state.num_lanes)
    quota = episodes // state.num_lanes + (lanes < episodes % state.num_lanes).long()
    parts, of_group = list[EpisodeStats](), list[EpisodeStats]()
    finished, agents = torch.zeros_like(quota), 1
    try:
        while bool((finished < quota).any()):
            if state.frames >= max_frames:
                what = f"{int(finished.minimum(quota).sum())} of {episodes} episodes ended within {max_frames=}"
                raise EvaluationError(f"{what}: raise max_frames, or give the environment a time limit")
            length = min(_STEPS_AT_ONCE, -(-(max_frames - state.frames) // state.num_lanes))
            state, batch = rollout(env, policy, state, length, params=params, exploration_type=exploration_type)
            parts.append(episode_stats(batch, parts[-1] if parts else None))
            finished += torch.bincount(parts[-1].lanes, minlength=len(quota))
            if group is not None:
                rows = agents_as_rows(batch, group)
                of_group.append(episode_stats(rows, of_group[-1] if of_group else None))
                agents = rows.shape[-2]
        if env.backend == "host" and env.seeding == "episode":
            _warn_if_kept(env, state, first)
    finally:
        close(state)
    stats = EpisodeStats.concatenate(parts)
    first_ones = [(stats.lanes == lane).nonzero()[:count, 0] for lane, count in enumerate(quota.tolist())]
    stats = stats.select(torch.cat(first_ones))
    if not of_group:
        return stats
    stays = EpisodeStats.concatenate(of_group)
    chosen = torch.isin(stays.traj_ids // agents, stats.traj_ids).nonzero()[:, 0]
    return stays.select(chosen[stays.lanes[chosen].argsort(stable=True)])


def _warn_if_kept(env: Env, state: CollectorState, first: Mapping[Path, torch.Tensor]) -> None:
    """Warn if the first episode of lane 0, started again from its seed, does not begin with `first` [P, ...]."""
    simulation = state.env_state.claim()
    simulation.episodes[0] = -1
    with contextlib.suppress(EnvError):
        simulation.restart([0])
        again = simulation.observation()
        if not all(torch.equal(again[path][0].nan_to_num(), row[0].nan_to_num()) for path, row in first.items()):
            why = "keeps something from episode to episode (running statistics?), which an evaluation on new ones lacks"
            what = f"{env}: an episode begun again from its seed begins with another observation. The environment {why}"
            mend = "or it draws from an unseeded generator: run funcollect.testing.check_env"
            warnings.warn(f"{what}, {mend}", stacklevel=3)


def rollout_trajectories(
    env: Env,
    policy: Policy,
    state: CollectorState[Array],
    count: int,
    pending: PendingTrajectories | None = None,
    *,
    params: Any = None,
    exploration_type: ExplorationType = ExplorationType.RANDOM,
    exploration: Mapping[str, Value] = NO_VALUES,
    max_frames_per_traj: int | None = None,
    traj_format: TrajectoryFormat = "cat",
    length: int = 64,
) -> tuple[CollectorState[Array], TensorDictBase, PendingTrajectories]:
    """Run all lanes until `count` trajectories are whole, and return these.

    They are the ones that began first, by the step of their first frame, then by lane: those that end first would be
    the short ones. Trajectories that had begun before the first call are left out. The third result holds the frames of
    all others. Pass it as `pending` to the next call: two calls with a count of 2 then return what one with 4 returns.

    `traj_format` is ``"cat"`` for one trajectory after another, ``[F]``, or ``"padded"`` for ``[N, Tmax]``, as
    `split_trajectories` returns them. Rollouts have `length` steps. The other arguments and the errors are those of
    `rollout`; after an error, the frames since the call are lost. Raises ValueError if neither the environment nor
    `max_frames_per_traj` truncates trajectories.

    >>> import funcollect as fc
    >>> env = fc.make_env("CartPole-v1", num_envs=2)
    >>> policy = fc.random_policy(env)
    >>> state, batch, pending = fc.rollout_trajectories(env, policy, fc.init(env, policy, seed=0), 3)
    >>> int(batch["next", "done"].sum()), batch["collector", "traj_ids"].unique().tolist()
    (3, [0, 1, 2])
    >>> state, batch, pending = fc.rollout_trajectories(env, policy, state, 1, pending)
    >>> batch["collector", "traj_ids"].unique().tolist()  # it began before 3, in the other lane
    [4]
    """
    check_state(env, state, "rollout_trajectories", live=False)
    check_positive("count", count, 16)
    check_kind("pending", pending, (PendingTrajectories, type(None)), "pass the pending frames of the last call")
    check_choice("traj_format", traj_format, get_args(TrajectoryFormat))
    request = Request(length, params, exploration_type, exploration, max_frames_per_traj)
    check_limited(is_limited(env, max_frames_per_traj), repr(env))
    pending = PendingTrajectories() if pending is None else pending
    while (taken := pending.take(count)) is None:
        state, batch = run(env, policy, state, request)
        pending = pending.add(batch)
    frames, pending = taken
    return state, (split_trajectories(frames) if traj_format == "padded" else frames).lock_(), pending


def is_limited(env: Env, max_frames_per_traj: int | None) -> bool:
    """Whether every trajectory is sure to end."""
    by_itself = getattr(env, "truncates", False) or getattr(env, "max_episode_steps", None)  # or by the loop's limit
    return bool(by_itself) or (max_frames_per_traj is not None and max_frames_per_traj > 0)


def check_limited(limited: bool, env: str) -> None:
    """Raise ValueError unless trajectories are `limited`; the message names the environment by `env`, its repr."""
    if not limited:
        mend = "pass max_frames_per_traj or, if it ends them by itself, give its class an attribute truncates = True"
        raise ValueError(f"{env} is not known to truncate episodes, so a whole trajectory may never come: {mend}")
