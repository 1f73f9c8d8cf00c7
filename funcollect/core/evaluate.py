"""Evaluation of a policy by whole episodes, without favouring short ones."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from funcollect.arguments import check_positive
from funcollect.core.api import close, init, rollout
from funcollect.core.state import CollectorState
from funcollect.envs.host.host_env import statistics_of
from funcollect.errors import EnvError, EvaluationError
from funcollect.protocols import Env, Policy
from funcollect.specs import ExplorationType
from funcollect.trajectories.stats import EpisodeStats, episode_stats
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
) -> EpisodeStats:
    """Return the statistics of exactly `episodes` whole episodes, run on new simulators.

    Each lane contributes its first episodes. If `episodes` is not a multiple of the number of lanes, the first lanes
    contribute one more. Taking the first episodes to finish instead would favour short ones.

    Args:
        env: the environment; an instance that is in use by a state is rebuilt from its spec.
        policy: the policy.
        episodes: the number of episodes, over all lanes.
        seed: an int; the same seed gives the same statistics. None draws one.
        params: the parameters to act with; None for the policy's own.
        max_frames: frames over all lanes after which the evaluation gives up.
        exploration_type: whether the policy samples or acts deterministically.

    Warns if the first episode, started again from its seed, begins with another observation. The environment then keeps
    something from episode to episode, which new simulators lack.

    Raises:
        EvaluationError: if `max_frames` is not enough, and for an environment whose wrappers normalise by running
            statistics (Gymnasium's `NormalizeObservation`, TorchRL's `VecNorm`), which new simulators lack.
        EnvError: if an environment raises, or a process of its lanes is lost.

    >>> import funcollect as fc
    >>> env = fc.make_env("CartPole-v1", num_envs=4)
    >>> len(evaluate(env, fc.random_policy(env), episodes=10, seed=0))
    10
    """
    check_positive("episodes", episodes)
    check_positive("max_frames", max_frames)
    if kept := statistics_of(env):
        raise EvaluationError(
            f"{env} cannot be evaluated: {kept}, which new simulators lack: normalise in the policy "
            "(funcollect.normalized; funcollect.scale_rewards for rewards), or evaluate over wrappers that hold a copy "
            "of the trained statistics and are frozen (update_running_mean=False)"
        )
    state = init(env, policy, seed=seed)
    first = dict(state.observation)
    lanes = torch.arange(state.num_lanes)
    quota = episodes // state.num_lanes + (lanes < episodes % state.num_lanes).long()
    parts: list[EpisodeStats] = []
    finished = torch.zeros_like(quota)
    try:
        while bool((finished < quota).any()):
            if state.frames >= max_frames:
                raise EvaluationError(
                    f"{int(finished.minimum(quota).sum())} of {episodes} episodes ended within max_frames={max_frames}"
                    ": raise max_frames, or give the environment a time limit"
                )
            length = min(_STEPS_AT_ONCE, -(-(max_frames - state.frames) // state.num_lanes))
            state, batch = rollout(env, policy, state, length, params=params, exploration_type=exploration_type)
            parts.append(episode_stats(batch, parts[-1] if parts else None))
            finished += torch.bincount(parts[-1].lanes, minlength=len(quota))
        _warn_if_kept(env, state, first)
    finally:
        close(state)
    stats = EpisodeStats.concatenate(parts)
    first_ones = [(stats.lanes == lane).nonzero()[:count, 0] for lane, count in enumerate(quota.tolist())]
    return stats.select(torch.cat(first_ones))


def _warn_if_kept(env: Env, state: CollectorState, first: Mapping[Path, torch.Tensor]) -> None:
    """Warn if the first episode of lane 0, started again from its seed, does not begin with `first` [P, ...]."""
    if env.backend != "host" or env.seeding != "episode":
        return
    simulation = state.env_state.claim()
    simulation.episodes[0] = -1
    with contextlib.suppress(EnvError):
        simulation.restart([0])
        again = simulation.observation()
        if not all(torch.equal(again[path][0].nan_to_num(), row[0].nan_to_num()) for path, row in first.items()):
            warnings.warn(
                f"{env}: an episode begun again from its seed begins with another observation. The environment keeps "
                "something from episode to episode (a wrapper's running statistics?), which an evaluation on new "
                "simulators lacks, or it draws from an unseeded generator: run funcollect.testing.check_env",
                stacklevel=3,
            )
