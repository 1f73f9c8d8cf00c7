"""Counters and batches on an accelerator: what `delivery` computes on the host, as operations of the device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor

from funcollect.core.batch import NEXT_FLAGS, REWARD, ROOT_FLAGS, TERMINATED, TRUNCATED, checked_batch
from funcollect.core.request import Request
from funcollect.core.state import CollectorState, trajectory_ids
from funcollect.policies.checks import check_apart
from funcollect.protocols import Env
from funcollect.tree import Path


class _Counts(NamedTuple):
    """The counters of a rollout [T, P], and of the state after it [P]."""

    number: Tensor  # of the episode
    step: Tensor
    flags: dict[Path, Tensor]  # by their keys in the batch
    after: dict[str, Tensor]


def deliver(
    env: Env, state: CollectorState, request: Request, columns: dict[Path, Tensor], outputs: dict[Path, Tensor]
) -> tuple[dict[str, Tensor], TensorDict]:
    """Return the counters of the state after a rollout, and its batch; see `delivery.deliver`.

    Nothing waits for the device here within `reads_together`.
    """
    check_apart(outputs, state.observation)
    ends = columns.pop(TERMINATED), columns.pop(TRUNCATED)
    count = _count_episodes if request.reset_when_done else _count_until_finished
    counts = count(state, columns[REWARD], *ends)
    counted: dict[Path, Tensor] = {
        ("collector", "traj_ids"): trajectory_ids(state.lane, counts.number, state.total_lanes),
        ("collector", "step"): counts.step,
        ("collector", "lane"): state.lane.repeat(request.length, 1),
        ("collector", "policy_version"): torch.full_like(counts.step, int(state.policy_version)),
    }
    return counts.after, checked_batch(env, columns | outputs | counted | counts.flags)


def _count_episodes(state: CollectorState, reward: Tensor, terminated: Tensor, truncated: Tensor) -> _Counts:
    """Count if every finished lane began another episode."""
    done = terminated | truncated
    time = torch.arange(len(done), device=done.device)[:, None]
    begins = torch.cat([torch.zeros_like(done[:1]), done[:-1]])
    number = state.episode + begins.cumsum(0)
    step = time - torch.where(begins, time, -state.step).cummax(0).values
    made = torch.where(done[-1], 0, step[-1] + 1)
    after = {
        "episode": number[-1] + done[-1],
        "step": made,
        "returns": _open_returns(state, reward, len(done) - made),
        "terminated": torch.zeros_like(state.terminated),
        "truncated": torch.zeros_like(state.truncated),
    }
    return _Counts(number, step, dict(zip(NEXT_FLAGS, (terminated, truncated, done), strict=True)), after)


def _count_until_finished(state: CollectorState, reward: Tensor, terminated: Tensor, truncated: Tensor) -> _Counts:
    """Count if finished lanes stay finished: they repeat their flags, without reward or steps."""
    before = state.terminated, state.truncated
    over = _ever(before[0] | before[1], terminated | truncated)  # [T + 1, P]
    live = ~over[:-1]
    reward.masked_fill_(over[:-1], 0.0)
    ever = [_ever(flag, column & live) for flag, column in zip(before, (terminated, truncated), strict=True)]
    steps = state.step + live.cumsum(0)
    after = {
        "episode": state.episode,
        "step": steps[-1],
        "returns": _open_returns(state, reward, torch.zeros_like(state.step)),
        "terminated": ever[0][-1],
        "truncated": ever[1][-1],
    }
    flags = dict(zip(ROOT_FLAGS, (flag[:-1].clone() for flag in (*ever, over)), strict=True))
    flags |= zip(NEXT_FLAGS, (flag[1:].clone() for flag in (*ever, over)), strict=True)
    return _Counts(state.episode.repeat(len(reward), 1), steps - live.long(), flags, after)


def _open_returns(state: CollectorState, reward: Tensor, start: Tensor) -> Tensor:
    """Sum the rewards since the row `start` [P] in order, as `delivery` does."""
    time = torch.arange(len(reward), device=reward.device)[:, None]
    rows = reward.double().masked_fill_(time < start, 0.0)
    rows[0] += torch.where(start <= 0, state.returns, 0.0)
    return rows.cumsum(0)[-1]


def _ever(before: Tensor, flags: Tensor) -> Tensor:
    """Whether a flag has been set, before [P] or at any step so far: [T + 1, P], the first row is `before`."""
    return torch.cat([before[None], flags]).cumsum(0) > 0
