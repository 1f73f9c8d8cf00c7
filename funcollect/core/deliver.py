"""From a loop's columns to a batch: counters worked out for all steps at once, keys named, time put last."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDict
from torch import Tensor

from funcollect.core.state import CollectorState, trajectory_ids
from funcollect.errors import PolicyError
from funcollect.tree import Path, to_tensordict

Array = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Track:
    """What a loop records of T steps, time-major."""

    observation: dict[Path, Tensor]  # each [T, P, ...]
    next_observation: dict[Path, Tensor]  # each [T, P, ...], before any reset
    outputs: dict[Path, Tensor]  # the policy's, each [T, P, ...]
    reward: Tensor  # [T, P] or [T, P, players] float32
    terminated: Tensor  # [T, P] bool
    truncated: Tensor  # [T, P] bool
    info: dict[Path, Tensor]  # each [T, P, ...]


@dataclass(frozen=True, kw_only=True)
class Counters:
    """Where each row stands in its trajectory, and where the lanes stand after the last one."""

    episode: Tensor  # [T, P] int64
    step: Tensor  # [T, P] int64
    root_terminated: Tensor  # [T, P] bool
    root_truncated: Tensor  # [T, P] bool
    age: Tensor  # [P] int64, steps of the loop since the lane's last reset, counting those before this rollout
    after: dict[str, Tensor]  # the state's counters, each [P]


def count(state: CollectorState, track: Track, age: Tensor, *, reset_when_done: bool) -> Counters:
    """The counters of a rollout that began in `state`, worked out on the host.

    Args:
        state: where the rollout began.
        track: what it recorded.
        age: [P], steps of the loop since each lane's reset, at the rollout's start.
        reset_when_done: whether a done lane began another episode, or stayed as it was.
    """
    terminated, truncated = track.terminated.cpu().numpy(), track.truncated.cpu().numpy()
    fates = _resets if reset_when_done else _freezes
    return fates(state, terminated, truncated, track.reward, age.numpy())


def _resets(state: CollectorState, terminated: Array, truncated: Array, reward: Tensor, age: Array) -> Counters:
    """Every done lane began another episode."""
    done = terminated | truncated
    length = len(done)
    time = np.arange(length)[:, None]
    start = np.empty(done.shape, np.int64)  # the row in which the row's episode began; before this batch, negative
    start[0] = -state.step.cpu().numpy()
    np.copyto(start[1:], np.where(done[:-1], time[1:], start[0]))
    np.maximum.accumulate(start, 0, out=start)
    episode = np.empty_like(start)
    episode[0] = state.episode.cpu().numpy()
    episode[1:] = done[:-1]
    np.cumsum(episode, 0, out=episode)
    after = np.where(done[-1], length, start[-1])  # where the episode began that is open after the last row
    flags = torch.zeros(done.shape, dtype=torch.bool)
    return _counters(
        state,
        episode=episode,
        step=time - start,
        roots=(flags, flags.clone()),
        age=np.where(after > 0, length - after, age + length),
        after={
            "episode": episode[-1] + done[-1],
            "step": length - after,
            "returns": _open_returns(state, reward, after),
            "terminated": np.zeros_like(done[0]),
            "truncated": np.zeros_like(done[0]),
        },
    )


def _freezes(state: CollectorState, terminated: Array, truncated: Array, reward: Tensor, age: Array) -> Counters:
    """Finished lanes keep their counters, and their rows show the flags at the root."""
    rows = np.concatenate([state.terminated.cpu().numpy()[None], terminated])
    cuts = np.concatenate([state.truncated.cpu().numpy()[None], truncated])
    live = ~np.logical_or.accumulate(rows | cuts, 0)[:-1]
    episode, step = state.episode.cpu().numpy(), state.step.cpu().numpy()
    steps = np.concatenate([np.zeros_like(step)[None], live.cumsum(0)]) + step
    return _counters(
        state,
        episode=np.broadcast_to(episode, live.shape).copy(),
        step=steps[:-1],
        roots=(torch.from_numpy(rows[:-1]), torch.from_numpy(cuts[:-1])),
        age=age + len(live),
        after={
            "episode": episode,
            "step": steps[-1],
            "returns": _open_returns(state, reward, np.zeros_like(step)),
            "terminated": rows[-1],
            "truncated": cuts[-1],
        },
    )


def _open_returns(state: CollectorState, reward: Tensor, start: Array) -> Array:
    """The rewards since the row `start` [P], summed in order: no cut of a run shows in the sum."""
    rewards = reward.cpu().numpy()
    before = state.returns.cpu().numpy()
    wide = start.reshape(start.shape + (1,) * (rewards.ndim - 2))
    time = np.arange(len(rewards)).reshape(-1, *[1] * (rewards.ndim - 1))
    rows = np.where(time >= wide, rewards, np.float64(0))
    rows[0] += np.where(wide <= 0, before if before.shape == rows.shape[1:] else 0.0, 0.0)
    total: Array = rows.cumsum(0, dtype=np.float64)[-1]
    return total


def _counters(
    state: CollectorState,
    episode: Array,
    step: Array,
    roots: tuple[Tensor, Tensor],
    age: Array,
    after: dict[str, Array],
) -> Counters:
    device = state.step.device
    return Counters(
        episode=torch.from_numpy(episode).to(device),
        step=torch.from_numpy(step).to(device),
        root_terminated=roots[0].to(device),
        root_truncated=roots[1].to(device),
        age=torch.from_numpy(age),
        after={name: torch.from_numpy(np.array(value)).to(device) for name, value in after.items()},
    )


def deliver(state: CollectorState, track: Track, counters: Counters, *, batched: bool) -> TensorDict:
    """The batch of a rollout that began in `state`: [P, T], or [T] without a batch dimension, locked.

    Raises:
        PolicyError: for an output of the policy under the key of an observation.
    """
    _check_apart(track.outputs, track.observation)
    lane = state.lane.expand_as(counters.step).clone()
    flat: dict[Path, Tensor] = {
        **track.observation,
        **track.outputs,
        ("terminated",): counters.root_terminated.unsqueeze(-1),
        ("truncated",): counters.root_truncated.unsqueeze(-1),
        ("done",): (counters.root_terminated | counters.root_truncated).unsqueeze(-1),
        **{("next", *path): leaf for path, leaf in track.next_observation.items()},
        **{("next", "info", *path): leaf for path, leaf in track.info.items()},
        ("next", "reward"): track.reward.unsqueeze(-1) if track.reward.ndim == 2 else track.reward,
        ("next", "terminated"): track.terminated.unsqueeze(-1),
        ("next", "truncated"): track.truncated.unsqueeze(-1),
        ("next", "done"): (track.terminated | track.truncated).unsqueeze(-1),
        ("collector", "traj_ids"): trajectory_ids(state.lane, counters.episode, state.total_lanes),
        ("collector", "step"): counters.step,
        ("collector", "lane"): lane,
        ("collector", "policy_version"): torch.full_like(lane, state.policy_version),
    }
    length, num_envs = counters.step.shape
    if batched:
        return to_tensordict({path: leaf.transpose(0, 1) for path, leaf in flat.items()}, (num_envs, length)).lock_()
    return to_tensordict({path: leaf[:, 0] for path, leaf in flat.items()}, (length,)).lock_()


def _check_apart(outputs: Iterable[Path], observation: Iterable[Path]) -> None:
    for path in outputs:
        for other in observation:
            if path[: len(other)] == other[: len(path)]:
                raise PolicyError(
                    f"the policy's output {'.'.join(path)!r} collides with the observation {'.'.join(other)!r}, which "
                    "the batch keeps under that key: rename the output"
                )
