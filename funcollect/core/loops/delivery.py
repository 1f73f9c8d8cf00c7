"""What the eager loops (`host` and `tensor`) share: the limit on trajectories, counters and finished lanes.

Counters are computed for all steps at once, after the last one. One call into Torch costs as much as a step of a small
environment, so counters of one kind share one array.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDict
from torch import Tensor

from funcollect.core.batch import NEXT_FLAGS, OUTCOME_KEYS, REWARD, ROOT_FLAGS, TERMINATED, TRUNCATED, as_batch
from funcollect.core.request import Request
from funcollect.core.state import CollectorState, trajectory_ids
from funcollect.envs.host.host_env import check_rewards
from funcollect.policies.checks import check_apart
from funcollect.protocols import Env
from funcollect.tree import Path, select

Array = npt.NDArray[Any]

_NUMBERS: list[Path] = [("collector", name) for name in ("traj_ids", "step", "lane", "policy_version")]


class TrajectoryLimit:
    """The limit on a trajectory's length, as the step of this rollout at which each lane reaches it.

    Attributes:
        due: [P] int64, the step at which each lane reaches the limit; NumPy or Torch, as `step` is.
    """

    def __init__(self, step: Any, limit: int) -> None:
        self._limit = min(limit, 1 << 62)  # so that sums with steps fit into 64 bits
        self.due = self._limit - 1 - step

    def reached(self, t: int) -> Any:
        """Return the mask [P] of the lanes that step `t` brings to the limit."""
        return self.due <= t

    def steps(self, t: int) -> Any:
        """Return the steps [P] of each lane's trajectory before step `t`."""
        return t + self._limit - 1 - self.due

    def restart(self, t: int, lanes: Any) -> None:
        """Count from zero, after step `t`, in these lanes: their indices, or for a tensor a mask [P]."""
        if isinstance(self.due, Tensor):
            self.due.masked_fill_(lanes, t + self._limit)
        else:
            self.due[lanes] = t + self._limit


def new_columns(rows: Mapping[Path, Tensor], request: Request, *, compact: bool = False) -> dict[Path, Tensor]:
    """Return memory [T, P, ...] for a rollout with root rows [P, ...]; with `compact`, none for next observations."""
    columns = {path: request.column(path, row) for path, row in rows.items()}
    if not compact:
        columns |= {("next", *path): request.column(("next", *path), row) for path, row in rows.items()}
    row = next(iter(rows.values()))
    for path in OUTCOME_KEYS:
        dtype = torch.float32 if path == REWARD else torch.bool
        columns[path] = torch.zeros(request.length, len(row), dtype=dtype, device=row.device)
    return columns


def deliver(
    env: Env,
    state: CollectorState,
    request: Request,
    columns: dict[Path, Tensor],
    outputs: dict[Path, Tensor],
    age: Tensor,
) -> tuple[dict[str, Tensor], TensorDict, Tensor]:
    """Return the counters of the state after a rollout that began with `state`, its batch, and each lane's new age.

    The environment's `columns` and the policy's `outputs` are [T, P, ...] by the batch's keys. Under ``next``, flags
    and rewards of lanes that were finished before a step are ignored. The `age` [P] int64 of a lane, on the CPU, is the
    number of the loop's steps since its last reset.
    """
    check_apart(outputs, state.observation)
    reward = columns[REWARD]
    length, num_lanes = reward.shape[:2]
    numbers = np.empty((4, num_lanes, length), np.int64)
    flags = np.zeros((6, num_lanes, length), bool)
    flags[3], flags[4] = columns.pop(TERMINATED).cpu().numpy().T, columns.pop(TRUNCATED).cpu().numpy().T
    np.logical_or(flags[3], flags[4], out=flags[5])
    count = _count_episodes if request.reset_when_done else _count_until_finished
    after, ages = count(state, numbers, flags, reward, age.numpy())
    check_rewards(reward.cpu().numpy())
    numbers[2] = state.lane.cpu().numpy()[:, None]
    numbers[3] = state.policy_version
    single = env.num_envs is None
    if single:
        numbers, flags = numbers[:, 0], flags[:, 0]
    device = state.step.device
    counters = dict(zip(_NUMBERS, torch.from_numpy(numbers).to(device).unbind(), strict=True))
    counters |= zip((*ROOT_FLAGS, *NEXT_FLAGS), torch.from_numpy(flags[..., None]).to(device).unbind(), strict=True)
    batch = as_batch(columns | outputs, single=single, counters=counters)
    return {name: torch.from_numpy(value).to(device) for name, value in after.items()}, batch, torch.from_numpy(ages)


def _count_episodes(
    state: CollectorState, numbers: Array, flags: Array, reward: Tensor, age: Array
) -> tuple[dict[str, Array], Array]:
    """Compute the counters if every finished lane began another episode. An episode's rows are adjacent."""
    done = flags[5]  # [P, T], of the steps
    num_lanes, length = done.shape
    begins = np.empty(done.size, bool)
    begins[1:] = done.ravel()[:-1]
    begins[::length] = True
    start = begins.nonzero()[0]  # the first row of each episode that has rows here
    lane = start // length
    first = (start == lane * length).nonzero()[0]  # [P], each lane's first episode among them
    number = state.episode.cpu().numpy()[lane] + np.arange(len(start)) - first[lane]
    origin = start.copy()  # the row of its step 0
    origin[first] -= state.step.cpu().numpy()
    rows = np.diff(start, append=done.size)
    ids = trajectory_ids(state.lane.cpu().numpy()[lane], number, state.total_lanes)
    numbers[0] = ids.repeat(rows).reshape(done.shape)
    numbers[1] = (np.arange(done.size) - origin.repeat(rows)).reshape(done.shape)
    last = np.append(first[1:], len(start)) - 1  # [P], the episode of each lane's last row
    ended = done[:, -1]
    open_since = np.where(ended, length, origin[last] - np.arange(num_lanes) * length)
    after = {
        "episode": number[last] + ended,
        "step": length - open_since,
        "returns": _open_returns(state, reward, open_since),
        "terminated": np.zeros(num_lanes, bool),
        "truncated": np.zeros(num_lanes, bool),
    }
    return after, np.where(open_since > 0, length - open_since, age + length)


def _count_until_finished(
    state: CollectorState, numbers: Array, flags: Array, reward: Tensor, age: Array
) -> tuple[dict[str, Array], Array]:
    """Compute the counters if finished lanes stay finished: they repeat their flags, without reward or steps.

    This completes `flags` and `reward`, into which a loop may write anything for lanes that are finished.
    """
    terminated, truncated = state.terminated.cpu().numpy(), state.truncated.cpu().numpy()
    done = np.logical_or.accumulate(flags[5], 1) | (terminated | truncated)[:, None]  # at or before the step's end
    flags[2, :, 0] = terminated | truncated
    flags[2, :, 1:] = done[:, :-1]
    live = ~flags[2]
    for root, before in enumerate((terminated, truncated)):
        flags[root + 3] = np.logical_or.accumulate(flags[root + 3] & live, 1) | before[:, None]
        flags[root, :, 0], flags[root, :, 1:] = before, flags[root + 3, :, :-1]
    flags[5] = done
    reward[torch.from_numpy(flags[2].T).to(reward.device)] = 0.0
    episode, step = state.episode.cpu().numpy(), state.step.cpu().numpy()
    steps = live.cumsum(1) + step[:, None]
    numbers[0] = trajectory_ids(state.lane.cpu().numpy(), episode, state.total_lanes)[:, None]
    numbers[1] = steps - live
    after = {
        "episode": episode.copy(),
        "step": steps[:, -1].copy(),
        "returns": _open_returns(state, reward, np.zeros_like(step)),
        "terminated": flags[3, :, -1].copy(),
        "truncated": flags[4, :, -1].copy(),
    }
    return after, age + live.shape[1]


def _open_returns(state: CollectorState, reward: Tensor, start: Array) -> Array:
    """Sum the rewards since the row `start` [P] in order, so that the sum does not depend on how a run is cut."""
    rewards = reward.cpu().numpy()
    before = state.returns.cpu().numpy()
    wide = start.reshape(start.shape + (1,) * (rewards.ndim - 2))
    earliest = min(max(int(start.min()), 0), len(rewards) - 1)
    time = np.arange(earliest, len(rewards)).reshape(-1, *[1] * (rewards.ndim - 1))
    rows = np.where(time >= wide, rewards[earliest:], np.float64(0))
    rows[0] += np.where(wide <= 0, before if before.shape == rows.shape[1:] else 0.0, 0.0)
    total: Array = rows.cumsum(0, dtype=np.float64)[-1]
    return total


def reset_counters(state: CollectorState, lanes: Tensor, episode: Tensor) -> dict[str, Tensor]:
    """Return the counters after the lanes of the mask [P] began the episodes with the numbers `episode` [P]."""
    counters = {name: getattr(state, name) for name in ("step", "returns", "terminated", "truncated")}
    cleared = {name: select(lanes, torch.zeros_like(counter), counter) for name, counter in counters.items()}
    return {"episode": episode, **cleared}
