"""Batches from the columns that a loop recorded: counters are computed for all steps at once, and time comes last."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDict
from torch import Tensor

from funcollect.core.state import CollectorState, trajectory_ids
from funcollect.policies.actors.checks import check_apart
from funcollect.tree import Path, to_tensordict

Array = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class RolloutColumns:
    """The columns that a loop records over T steps, time first."""

    observation: dict[Path, Tensor]  # each [T, P, ...]
    next_observation: dict[Path, Tensor]  # each [T, P, ...], before any reset
    outputs: dict[Path, Tensor]  # the policy's, each [T, P, ...]
    reward: Tensor  # [T, P] or [T, P, players] float32
    terminated: Tensor  # [T, P] bool
    truncated: Tensor  # [T, P] bool
    info: dict[Path, Tensor]  # each [T, P, ...]


@dataclass(frozen=True, kw_only=True)
class Counters:
    """The position of each row in its trajectory, and the counters of the lanes after the last row.

    One call into Torch costs as much as a step of a small environment, so columns of one kind share one tensor.
    """

    numbers: Tensor  # [4, P, T] int64: trajectory id, step, lane, policy version
    flags: Tensor  # [6, P, T, 1] bool: terminated, truncated and done, at the root and next
    age: Tensor  # [P] int64, steps of the loop since the lane's last reset, counting those before this rollout
    after: dict[str, Tensor]  # the state's counters, each [P]


def count(state: CollectorState, columns: RolloutColumns, age: Tensor, *, reset_when_done: bool) -> Counters:
    """Compute, on the host, the counters of a rollout that began in `state`.

    Args:
        state: the state before the rollout.
        columns: the columns of the rollout.
        age: [P], steps of the loop since each lane's reset, at the rollout's start.
        reset_when_done: whether a finished lane began another episode or stayed as it was.
    """
    length, num_lanes = columns.terminated.shape
    numbers = np.empty((4, num_lanes, length), np.int64)
    flags = np.zeros((6, num_lanes, length), bool)
    flags[3], flags[4] = columns.terminated.cpu().numpy().T, columns.truncated.cpu().numpy().T
    np.logical_or(flags[3], flags[4], out=flags[5])
    fates = _resets if reset_when_done else _freezes
    after, ages = fates(state, numbers, flags, columns.reward, age.numpy())
    numbers[2] = state.lane.cpu().numpy()[:, None]
    numbers[3] = state.policy_version
    device = state.step.device
    return Counters(
        numbers=torch.from_numpy(numbers).to(device),
        flags=torch.from_numpy(flags[..., None]).to(device),
        age=torch.from_numpy(ages),
        after={name: torch.from_numpy(value).to(device) for name, value in after.items()},
    )


def _resets(
    state: CollectorState, numbers: Array, flags: Array, reward: Tensor, age: Array
) -> tuple[dict[str, Array], Array]:
    """Compute the counters if every finished lane began another episode. An episode's rows are adjacent."""
    done = flags[5]
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


def _freezes(
    state: CollectorState, numbers: Array, flags: Array, reward: Tensor, age: Array
) -> tuple[dict[str, Array], Array]:
    """Compute the counters if finished lanes stay finished. Their rows have the flags at the root as well."""
    flags[0, :, 0], flags[1, :, 0] = state.terminated.cpu().numpy(), state.truncated.cpu().numpy()
    flags[:2, :, 1:] = flags[3:5, :, :-1]
    np.logical_or(flags[0], flags[1], out=flags[2])
    live = ~np.logical_or.accumulate(flags[2], 1)
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


def reset_counters(state: CollectorState, lanes: Tensor, episode: Tensor) -> dict[str, Tensor]:
    """Return the counters after the lanes of the mask [P] began the episodes with the numbers `episode` [P]."""
    wide = lanes.reshape(-1, *[1] * (state.returns.ndim - 1))
    return {
        "episode": episode,
        "step": torch.where(lanes, 0, state.step),
        "returns": torch.where(wide, 0.0, state.returns),
        "terminated": state.terminated & ~lanes,
        "truncated": state.truncated & ~lanes,
    }


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


def deliver(state: CollectorState, columns: RolloutColumns, counters: Counters, *, batched: bool) -> TensorDict:
    """Return the batch of a rollout that began in `state`: [P, T], or [T] without a batch dimension, locked.

    Raises:
        PolicyError: for an output of the policy under the key of an observation.
    """
    check_apart(columns.outputs, columns.observation)
    reward = columns.reward
    recorded: dict[Path, Tensor] = {
        **columns.observation,
        **columns.outputs,
        **{("next", *path): leaf for path, leaf in columns.next_observation.items()},
        **{("next", "info", *path): leaf for path, leaf in columns.info.items()},
        ("next", "reward"): reward.unsqueeze(-1) if reward.ndim == 2 else reward,
    }
    numbers, flags = counters.numbers, counters.flags
    num_envs, length = numbers.shape[1:]
    if batched:
        batch_size: tuple[int, ...] = (num_envs, length)
        leaves = {path: leaf.transpose(0, 1) for path, leaf in recorded.items()}
    else:
        batch_size = (length,)
        numbers, flags = numbers[:, 0], flags[:, 0]
        leaves = {path: leaf[:, 0] for path, leaf in recorded.items()}
    leaves |= dict(zip(_NUMBERS, numbers.unbind(), strict=True)) | dict(zip(_FLAGS, flags.unbind(), strict=True))
    return to_tensordict(leaves, batch_size).lock_()


_NUMBERS = [("collector", name) for name in ("traj_ids", "step", "lane", "policy_version")]
_FLAGS = [(*prefix, name) for prefix in ((), ("next",)) for name in ("terminated", "truncated", "done")]
