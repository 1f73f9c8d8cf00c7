"""The batch of a rollout: names its columns, checks the rewards, and puts time last."""

from __future__ import annotations

import math
from functools import partial

from tensordict import TensorDict
from torch import Tensor

from funcollect.envs.host.host_env import check_rewards
from funcollect.interop.reads import complain_if
from funcollect.protocols import Env
from funcollect.tree import Path, to_batch

ROOT_FLAGS: list[Path] = [("terminated",), ("truncated",), ("done",)]
NEXT_FLAGS: list[Path] = [("next", *path) for path in ROOT_FLAGS]
OUTCOME_KEYS: list[Path] = [("next", name) for name in ("reward", "terminated", "truncated")]
REWARD, TERMINATED, TRUNCATED = OUTCOME_KEYS


def checked_batch(env: Env, columns: dict[Path, Tensor]) -> TensorDict:
    """Return the batch of all columns [T, P, ...], counters included; root flags that are missing are False.

    Raises:
        EnvError: for a NaN among the rewards; within `reads_together`, at its end.
    """
    check_reward(columns[REWARD].detach())
    if ROOT_FLAGS[0] not in columns:
        shape = len(ROOT_FLAGS), *columns[NEXT_FLAGS[0]].shape
        columns |= zip(ROOT_FLAGS, columns[NEXT_FLAGS[0]].new_zeros(shape).unbind(), strict=True)
    return as_batch(columns, single=env.num_envs is None)


def check_reward(reward: Tensor) -> None:
    """Raise EnvError for the first NaN among rewards [T, P], or [T, P, players]; of others one number is read."""
    complain_if(reward.sum(), math.isnan, partial(_check_each_reward, reward))  # or a sum of both infinities


def _check_each_reward(reward: Tensor) -> None:
    check_rewards(reward.reshape(*reward.shape[:2], -1).sum(-1).cpu().numpy())


def as_batch(
    columns: dict[Path, Tensor], *, single: bool, counters: dict[Path, Tensor] | None = None, time: int = 0
) -> TensorDict:
    """Return a locked batch [*B, P, T], or [*B, T] of a `single` environment, which has no batch dimension.

    The `columns` are [*B, T, P, ...], with `time` dimensions in ``*B``; flags and rewards of one player may lack their
    last dimension, of size 1. The `counters` have the batch's own shapes already.
    """
    for path in (REWARD, *ROOT_FLAGS, *NEXT_FLAGS):
        if path in columns and columns[path].ndim == time + 2:  # rewards of several players have their own
            columns[path] = columns[path].unsqueeze(-1)
    *lead, length, num_lanes = columns[REWARD].shape[: time + 2]
    if single:
        leaves = {path: leaf.select(time + 1, 0) for path, leaf in columns.items()}
        return to_batch(leaves | (counters or {}), (*lead, length)).lock_()
    leaves = {path: leaf.transpose(time, time + 1) for path, leaf in columns.items()}
    return to_batch(leaves | (counters or {}), (*lead, num_lanes, length)).lock_()
