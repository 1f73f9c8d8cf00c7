"""From a loop's columns to a batch: counters worked out for all steps at once, keys named, time put last."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tensordict import TensorDict
from torch import Tensor

from funcollect.core.state import CollectorState, trajectory_ids
from funcollect.tree import Path, to_tensordict


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
    """The counters of a rollout that began in `state`.

    Args:
        state: where the rollout began.
        track: what it recorded.
        age: [P], steps of the loop since each lane's reset, at the rollout's start.
        reset_when_done: whether a done lane began another episode, or stayed as it was.
    """
    length = len(track.reward)
    done = track.terminated | track.truncated
    time = torch.arange(1, length + 1, device=done.device)[:, None]
    if not reset_when_done:
        return _count_frozen(state, track, done, age)
    begun = done.cumsum(0)  # episodes ended up to and with each row
    last = torch.where(done, time, 0).cummax(0).values  # rows up to the last end
    since = torch.where(begun > 0, time - last, state.step + time)  # steps of the open episode after each row
    flags = torch.zeros_like(done)
    return Counters(
        episode=torch.cat([state.episode[None], state.episode + begun[:-1]]),
        step=torch.cat([state.step[None], since[:-1]]),
        root_terminated=flags,
        root_truncated=flags.clone(),
        age=torch.where(begun[-1] > 0, time[-1] - last[-1], age + length),
        after={
            "episode": state.episode + begun[-1],
            "step": since[-1],
            "returns": _open_returns(state.returns, track.reward, begun[-1] > 0, last[-1]),
            "terminated": flags[0].clone(),
            "truncated": flags[0].clone(),
        },
    )


def _open_returns(before: Tensor, reward: Tensor, ended: Tensor, last: Tensor) -> Tensor:
    """[P] the rewards since each lane's last end; summed in order, so that no cut of a run shows in the sum."""
    players = reward.shape[2:]
    total = before if before.shape[1:] == players else torch.zeros(reward.shape[1:], dtype=before.dtype)
    kept = torch.arange(len(reward), device=reward.device)[:, None] >= last
    rows = reward.double() * kept.reshape(*kept.shape, *[1] * len(players))
    total = torch.where(ended.reshape(-1, *[1] * len(players)), 0.0, total.to(reward.device))
    return torch.cat([total[None], rows]).cumsum(0)[-1]


def _count_frozen(state: CollectorState, track: Track, done: Tensor, age: Tensor) -> Counters:
    """Finished lanes keep their counters, and their rows show the flags at the root."""
    frozen = torch.cat([(state.terminated | state.truncated)[None], done[:-1]]).cummax(0).values
    live = (~frozen).long()
    step = state.step + torch.cat([torch.zeros_like(live[:1]), live.cumsum(0)[:-1]])
    rows = torch.cat([state.terminated[None], track.terminated])
    cuts = torch.cat([state.truncated[None], track.truncated])
    return Counters(
        episode=state.episode.expand(len(done), -1).clone(),
        step=step,
        root_terminated=rows[:-1],
        root_truncated=cuts[:-1],
        age=age + len(done),
        after={
            "episode": state.episode,
            "step": step[-1] + live[-1],
            "returns": _open_returns(state.returns, track.reward, torch.zeros_like(done[0]), torch.zeros_like(age)),
            "terminated": rows[-1].clone(),
            "truncated": cuts[-1].clone(),
        },
    )


def deliver(state: CollectorState, track: Track, counters: Counters, *, batched: bool) -> TensorDict:
    """The batch of a rollout that began in `state`: [P, T], or [T] without a batch dimension, locked."""
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
