"""What `delivery` does for rollouts on an accelerator: all counters are computed there, and nothing is read."""

from __future__ import annotations

from typing import NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor

from funcollect.core.loops.delivery import REWARD, ROOT_FLAGS, TERMINATED, TRUNCATED, as_batch, check_reward
from funcollect.core.request import Request
from funcollect.core.state import CollectorState, trajectory_ids
from funcollect.policies.actors.checks import check_apart
from funcollect.protocols import Env
from funcollect.tree import Path


class _Counts(NamedTuple):
    """The counters of a rollout [T, P], and of the state after it [P]; `flags` are terminated, truncated and done."""

    number: Tensor  # of the episode
    step: Tensor
    root_flags: tuple[Tensor, Tensor, Tensor]
    next_flags: tuple[Tensor, Tensor, Tensor]
    after: dict[str, Tensor]


def deliver(
    env: Env, state: CollectorState, request: Request, columns: dict[Path, Tensor], outputs: dict[Path, Tensor]
) -> tuple[dict[str, Tensor], TensorDict]:
    """Return the counters of the state after a rollout, and its batch; see `delivery.deliver`.

    Nothing waits for the device here within `reads_together`.
    """
    check_apart(outputs, state.observation)
    ends = columns.pop(TERMINATED), columns.pop(TRUNCATED)
    reward = columns[REWARD]
    count = _count_episodes if request.reset_when_done else _count_until_finished
    counts = count(state, reward, *ends)
    counted: dict[Path, Tensor] = {
        ("collector", "traj_ids"): trajectory_ids(state.lane, counts.number, state.total_lanes),
        ("collector", "step"): counts.step,
        ("collector", "lane"): state.lane.repeat(len(reward), 1),
        ("collector", "policy_version"): torch.full_like(counts.step, int(state.policy_version)),
        **dict(zip(ROOT_FLAGS, counts.root_flags, strict=True)),
        **{("next", *path): flag for path, flag in zip(ROOT_FLAGS, counts.next_flags, strict=True)},
    }
    check_reward(reward)
    return counts.after, as_batch(columns | outputs | counted, single=env.num_envs is None)


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
    never = torch.zeros_like(done), torch.zeros_like(done), torch.zeros_like(done)
    return _Counts(number, step, never, (terminated, truncated, done), after)


def _count_until_finished(state: CollectorState, reward: Tensor, terminated: Tensor, truncated: Tensor) -> _Counts:
    """Count if finished lanes stay finished: they repeat their flags, without reward or steps."""
    before = state.terminated, state.truncated
    over = _ever(before[0] | before[1], terminated | truncated)  # [T + 1, P]
    live = ~over[:-1]
    reward.masked_fill_(over[:-1], 0.0)
    flags = [_ever(flag, column & live) for flag, column in zip(before, (terminated, truncated), strict=True)]
    steps = state.step + live.cumsum(0)
    after = {
        "episode": state.episode,
        "step": steps[-1],
        "returns": _open_returns(state, reward, torch.zeros_like(state.step)),
        "terminated": flags[0][-1],
        "truncated": flags[1][-1],
    }
    root, following = ((*(flag[rows].clone() for flag in (*flags, over)),) for rows in (slice(-1), slice(1, None)))
    return _Counts(state.episode.repeat(len(reward), 1), steps - live.long(), root, following, after)  # type: ignore[arg-type]


def _open_returns(state: CollectorState, reward: Tensor, start: Tensor) -> Tensor:
    """Sum the rewards since the row `start` [P] in order, as `delivery` does."""
    time = torch.arange(len(reward), device=reward.device)[:, None]
    rows = reward.double().masked_fill_(time < start, 0.0)
    rows[0] += torch.where(start <= 0, state.returns, 0.0)
    return rows.cumsum(0)[-1]


def _ever(before: Tensor, flags: Tensor) -> Tensor:
    """Whether a flag has been set, before [P] or at any step so far: [T + 1, P], the first row is `before`."""
    return torch.cat([before[None], flags]).cumsum(0) > 0
