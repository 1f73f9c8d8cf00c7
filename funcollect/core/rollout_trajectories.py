"""`rollout_trajectories`: rollouts until a number of trajectories are whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from tensordict import TensorDictBase

from funcollect.arguments import check_choice, check_kind, check_optional_positive, check_positive
from funcollect.core.api import run
from funcollect.core.checks import check_state
from funcollect.core.exploration import NO_VALUES, Value
from funcollect.core.request import Request
from funcollect.core.state import Array, CollectorState
from funcollect.envs.base import ends_episodes
from funcollect.protocols import Env, Policy
from funcollect.specs import ExplorationType
from funcollect.trajectories.split import split_trajectories
from funcollect.trajectories.whole_trajectories import PendingTrajectories, TrajectoryFormat


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

    They are the ones that began first, by the step of their first frame, then by lane; those that merely end first
    would be short ones. Frames of other trajectories are kept as `pending`, so that two calls with a count of 2 return
    the trajectories of one call with 4.

    Trajectories that had begun before the first call are left out. `pending` is that of the last call; None for the
    first one. `max_frames_per_traj` may be None if the environment truncates. `traj_format` is ``"cat"`` for one
    trajectory after another, ``[F]``, or ``"padded"`` for ``[N, Tmax]``, padded with zeros, with
    ``("collector", "mask")`` as `split_trajectories` has it. Rollouts have `length` steps; afterwards it is known which
    trajectories are whole. The other arguments are those of `rollout`.

    Returns:
        The next state, the trajectories with the keys of `rollout`, and the other frames.

    Raises:
        TypeError, ValueError: for a bad argument; also if neither the environment nor `max_frames_per_traj` truncates
            trajectories, since one that never ends would be waited for.
        StaleStateError, EnvError, PolicyError: as `rollout` does. Frames since the call are lost then.

    >>> import funcollect as fc
    >>> env = fc.make_env("CartPole-v1", num_envs=2)
    >>> policy = fc.random_policy(env)
    >>> state = fc.init(env, policy, seed=0)
    >>> state, batch, pending = fc.rollout_trajectories(env, policy, state, 3)
    >>> int(batch["next", "done"].sum()), batch["collector", "traj_ids"].unique().tolist()
    (3, [0, 1, 2])
    >>> state, batch, pending = fc.rollout_trajectories(env, policy, state, 1, pending)
    >>> batch["collector", "traj_ids"].unique().tolist()  # it began before 3, in the other lane
    [4]
    """
    check_state(env, state, "rollout_trajectories", live=False)
    check_positive("count", count, 16)
    check_positive("length", length, 64)
    check_optional_positive("max_frames_per_traj", max_frames_per_traj)
    check_kind("pending", pending, (PendingTrajectories, type(None)), "pass the pending frames of the last call")
    check_choice("traj_format", traj_format, get_args(TrajectoryFormat))
    check_limited(is_limited(env, max_frames_per_traj), repr(env))
    pending = PendingTrajectories() if pending is None else pending
    request = Request(
        length=length,
        params=params,
        exploration_type=exploration_type,
        exploration=exploration,
        max_frames_per_traj=max_frames_per_traj,
    )
    while (taken := pending.take(count)) is None:
        state, batch = run(env, policy, state, request)
        pending = pending.add(batch)
    frames, pending = taken
    return state, (split_trajectories(frames) if traj_format == "padded" else frames).lock_(), pending


def is_limited(env: Env, max_frames_per_traj: int | None) -> bool:
    """Whether every trajectory ends after some number of steps."""
    return (max_frames_per_traj is not None and max_frames_per_traj > 0) or ends_episodes(env)


def check_limited(limited: bool, env: str) -> None:
    """Raise ValueError if trajectories of the environment with this name may never end."""
    if not limited:
        raise ValueError(
            f"{env} is not known to truncate episodes, so a whole trajectory might be waited for without end: pass "
            "max_frames_per_traj or, if it ends them by itself, give its class an attribute truncates = True"
        )
