"""The batch of a rollout: counts its steps, names its columns, checks the rewards, and puts time last.

Counters are computed for all steps at once, and those of one kind share one array: one call into Torch costs as much as
a step of a small environment.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from funcollect.core.request import Request
from funcollect.core.state import CollectorState, trajectory_ids
from funcollect.envs.host.host_env import check_rewards
from funcollect.interop.memory import complain_if
from funcollect.policies.checks import check_apart
from funcollect.protocols import Columns, Env
from funcollect.tree import Path, select, to_batch

ROOT_FLAGS: list[Path] = [("terminated",), ("truncated",), ("done",)]
NEXT_FLAGS: list[Path] = [("next", *path) for path in ROOT_FLAGS]
OUTCOME_KEYS: list[Path] = [("next", name) for name in ("reward", "terminated", "truncated")]
REWARD, TERMINATED, TRUNCATED = OUTCOME_KEYS
_LANES = ("lane", "episode", "step", "returns", "terminated", "truncated")  # the counters [P] of a state
_NUMBERS: list[Path] = [("collector", name) for name in ("traj_ids", "step", "lane", "policy_version")]


def deliver(
    env: Env, state: CollectorState, request: Request, columns: Columns, outputs: Columns, *, on_host: bool = True
) -> tuple[dict[str, Tensor], TensorDict]:
    """Return the counters of the state after a rollout that began with `state`, and its batch.

    The environment's `columns` and the policy's `outputs` are [T, P, ...] by the batch's keys. Unless they are
    `on_host`, nothing waits for the device here within `reads_together`.
    """
    check_apart(outputs, state.observation)
    reward, place = columns[REWARD], columns[REWARD].device
    length, num_lanes = reward.shape
    numbers = torch.empty(4, num_lanes, length, dtype=torch.int64, device=place)
    flags = torch.zeros(6, num_lanes, length, dtype=torch.bool, device=place)
    xp, view = (np, Tensor.numpy) if on_host else (torch, Tensor.detach)
    rows: list[Any] = [view(each) for each in (flags, reward, columns.pop(TERMINATED), columns.pop(TRUNCATED))]
    time = np.arange(length) if on_host else torch.arange(length, device=place)
    before = SimpleNamespace(**{name: view(getattr(state, name)) for name in _LANES})
    count = _count_episodes if request.reset_when_done else _count_until_finished
    number, step, after = count(xp, before, time, *rows)
    ids = trajectory_ids(before.lane[:, None], number, state.total_lanes)
    for row, value in zip(view(numbers), (ids, step, before.lane[:, None], state.policy_version), strict=True):
        row[...] = value
    if env.num_envs is None:
        numbers, flags = numbers[:, 0], flags[:, 0]
    counters = dict(zip(_NUMBERS, numbers.unbind(), strict=True))
    counters |= zip((*ROOT_FLAGS, *NEXT_FLAGS), flags.unsqueeze(-1).unbind(), strict=True)
    if on_host:
        check_rewards(rows[1])
    else:
        _check_reward(reward.detach())
    batch = as_batch(columns | outputs, single=env.num_envs is None, counters=counters)
    return {name: torch.from_numpy(value) if on_host else value for name, value in after.items()}, batch


def _count_episodes(
    xp: Any, before: Any, time: Any, flags: Any, reward: Any, terminated: Any, truncated: Any
) -> tuple[Any, Any, dict[str, Any]]:
    """Return each step's episode and its number in that [P, T], and the counters after the last one.

    Finished lanes began others. `time` are the steps' numbers [T], the batch's `flags` [6, P, T] are False and written.
    """
    flags[3], flags[4] = terminated.T, truncated.T
    flags[5] = done = flags[3] | flags[4]
    begins = xp.zeros_like(done)
    begins[:, 1:] = done[:, :-1]
    number = before.episode[:, None] + begins.cumsum(-1)
    origin = xp.where(begins, time, -before.step[:, None])  # where an episode begins, the row of its first step
    step = time - (np.maximum.accumulate(origin, -1) if xp is np else origin.cummax(-1).values)
    made = xp.where(done[:, -1], 0, step[:, -1] + 1)
    after = {
        "episode": number[:, -1] + done[:, -1],
        "step": made,
        "returns": _open_returns(xp, before, time, reward, len(reward) - made),
        "terminated": xp.zeros_like(before.terminated),
        "truncated": xp.zeros_like(before.truncated),
    }
    return number, step, after


def _count_until_finished(
    xp: Any, before: Any, time: Any, flags: Any, reward: Any, terminated: Any, truncated: Any
) -> tuple[Any, Any, dict[str, Any]]:
    """Count as `_count_episodes` does, where finished lanes stay so; a loop may have recorded anything for them."""
    flags[2, :, 0] = finished = before.terminated | before.truncated
    flags[5] = done = ((terminated | truncated).T.cumsum(-1) > 0) | finished[:, None]  # at or before a step's end
    flags[2, :, 1:] = done[:, :-1]
    live = ~flags[2]
    reward[...] = xp.where(live.T, reward, 0.0)
    after = {"episode": before.episode, "step": before.step + live.sum(-1)}
    after["returns"] = _open_returns(xp, before, time, reward, xp.zeros_like(before.step))
    for root, (name, column) in enumerate({"terminated": terminated, "truncated": truncated}.items()):
        was, now = getattr(before, name), column.T & live
        flags[root + 3] = ever = (now.cumsum(-1) > 0) | was[:, None]
        flags[root, :, 0], flags[root, :, 1:] = was, ever[:, :-1]
        after[name] = was | now.any(-1)
    steps = before.step[:, None] + live.cumsum(-1)
    return before.episode[:, None], xp.where(live, steps - 1, steps), after


def _open_returns(xp: Any, before: Any, time: Any, reward: Any, start: Any) -> Any:
    """Sum the rewards [T, P] since the row `start` [P] in order, so that sums do not depend on how a run is cut."""
    first = min(max(int(start.min()), 0), len(reward) - 1) if xp is np else 0  # on a device, to find it is to read it
    rows = xp.where(time[first:, None] < start, 0.0, xp.asarray(reward[first:], dtype=xp.float64))
    rows[0] += xp.where(start <= 0, before.returns, 0.0)
    return rows.cumsum(0)[-1]


def reset_counters(state: CollectorState, lanes: Tensor, episode: Tensor) -> dict[str, Tensor]:
    """Return the counters after the lanes of the mask [P] began the episodes with the numbers `episode` [P]."""
    counters = {name: getattr(state, name) for name in ("step", "returns", "terminated", "truncated")}
    cleared = {name: select(lanes, torch.zeros_like(counter), counter) for name, counter in counters.items()}
    return {"episode": episode, **cleared}


def checked_batch(env: Env, columns: dict[Path, Tensor]) -> TensorDict:
    """Return the batch of all columns [T, P, ...], counters included; root flags that are missing are False."""
    _check_reward(columns[REWARD].detach())
    if ROOT_FLAGS[0] not in columns:
        shape = len(ROOT_FLAGS), *columns[NEXT_FLAGS[0]].shape
        columns |= zip(ROOT_FLAGS, columns[NEXT_FLAGS[0]].new_zeros(shape).unbind(), strict=True)
    return as_batch(columns, single=env.num_envs is None)


def _check_reward(reward: Tensor) -> None:
    """Raise EnvError for the first NaN among rewards [T, P], or [T, P, players]; of others one number is read."""

    def complain() -> None:
        check_rewards(reward.reshape(*reward.shape[:2], -1).sum(-1).cpu().numpy())

    complain_if(reward.sum(), math.isnan, complain)  # or a sum of both infinities


def as_batch(
    columns: Mapping[Path, Tensor], *, single: bool, counters: Mapping[Path, Tensor] | None = None, time: int = 0
) -> TensorDict:
    """Return a locked batch [*B, P, T], or [*B, T] of a `single` environment, which has no batch dimension.

    The `columns` are [*B, T, P, ...], with `time` dimensions in ``*B``; flags and rewards of one player may lack their
    last dimension, of size 1. The `counters` have the batch's own shapes already.
    """
    *lead, length, num_lanes = columns[REWARD].shape[: time + 2]
    leaves = dict(columns)
    for path in (REWARD, *ROOT_FLAGS, *NEXT_FLAGS):
        if path in leaves and leaves[path].ndim == time + 2:  # rewards of several players have their own
            leaves[path] = leaves[path].unsqueeze(-1)
    for path, leaf in leaves.items():
        leaves[path] = leaf.select(time + 1, 0) if single else leaf.transpose(time, time + 1)
    shape = (*lead, length) if single else (*lead, num_lanes, length)
    return to_batch({**leaves, **(counters or {})}, shape).lock_()
