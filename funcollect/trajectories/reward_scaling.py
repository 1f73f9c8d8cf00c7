"""Rewards divided by the running deviation of the discounted return, as `VecNormalize` of Stable-Baselines3 does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor

from funcollect.arguments import check_kind, check_number
from funcollect.interop.jax_setup import import_jax
from funcollect.running_statistics import EPSILON, RunningStatistics, start, update
from funcollect.trajectories.returns import check_factor, discounted_sums
from funcollect.trajectories.split import LANE, check_followed, check_time_first, require
from funcollect.trajectories.stats import CountedFrames, counted_frames

_NAME = "return"  # in the statistics


class RewardScaling(NamedTuple):
    """What is carried from one batch to the next; a pytree in optree and in JAX.

    Attributes:
        returns: the discounted returns of the unfinished trajectories: in Torch by trajectory id the pair of its lane
            and a tensor [players] float64, in JAX [P] or [P, players].
        statistics: of the returns at all frames so far.
    """

    returns: Any
    statistics: RunningStatistics


def scale_rewards(
    batch: TensorDictBase | Mapping[str, Any],
    scaling: RewardScaling | None = None,
    *,
    gamma: float = 0.99,
    clip: float = 10.0,
) -> tuple[Any, RewardScaling]:
    """Divide the rewards of a batch by the running deviation of the discounted return.

    In each trajectory ``returns = gamma * returns + reward``, beginning with 0, also across the borders of batches. The
    returns at all frames of the batch are added to the statistics before its rewards are divided; `VecNormalize` adds
    those of one step at a time.

    Args:
        batch: a batch [*B, T] as `episode_stats` takes it; or a nested dict of JAX arrays with ``next.reward`` [T, P]
            (or [T, P, players]) and ``next.done`` [T, P], also inside `jit`.
        scaling: the second result for the batch before; None for the first one.
        gamma: the discount per step, in [0, 1].
        clip: the largest absolute value of a scaled reward.

    Returns:
        The scaled rewards, with the shape and dtype of ``next.reward``, and what the next call takes. The batch is
        unchanged.

    Raises:
        TypeError: if the batch is neither a TensorDict nor a dict.
        ValueError: if keys are missing, frames are out of order, or gamma is outside [0, 1].

    >>> import funcollect as fc
    >>> scaling = None
    >>> with fc.SyncDataCollector("CartPole-v1", frames_per_batch=50, total_frames=100, seed=0) as collector:
    ...     for batch in collector:
    ...         batch["next", "reward"], scaling = scale_rewards(batch, scaling)
    >>> int(scaling.statistics.count)
    100
    """
    in_jax = isinstance(batch, Mapping) and not isinstance(batch, TensorDictBase)
    check_factor("gamma", gamma, in_jax)
    check_number("clip", clip, positive=True, example=10.0)
    check_kind("scaling", scaling, (tuple, type(None)), "pass the second result of the last call")
    if scaling is not None and isinstance(scaling[1], RewardScaling):
        raise TypeError("scaling is the pair (rewards, scaling), expected its second part: unpack the result")
    before = None if scaling is None else RewardScaling(scaling[0], RunningStatistics(*scaling[1]))
    if in_jax:
        return _in_jax(batch, before, gamma, clip)
    frames, _ = counted_frames(batch)
    check_followed(batch)
    shape = () if frames.rewards.shape[1] == 1 else (frames.rewards.shape[1],)
    if before is None:
        before = RewardScaling({}, start({_NAME: shape}, "torch"))
    returns = _returns(frames, before.returns, gamma)
    statistics = update(before.statistics, {_NAME: returns.reshape(-1, *shape)})
    reward = require(batch, ("next", "reward"), tail=None)
    deviation = (statistics.variance[_NAME] + EPSILON).sqrt().to(reward)
    return (reward / deviation).clamp(-clip, clip), RewardScaling(_open(frames, returns, before.returns), statistics)


def _returns(frames: CountedFrames, opened: Mapping[int, tuple[int, Tensor]], gamma: float) -> Tensor:
    """The discounted return up to each frame, [F, players] float64."""
    values = frames.rewards.clone()
    if not len(values):
        return values
    ids = frames.traj_ids
    goes_on = torch.cat([ids.new_zeros(1, dtype=torch.bool), ids[1:] == ids[:-1]])
    for row in (~goes_on).nonzero()[:, 0].tolist():
        if (head := opened.get(int(ids[row]))) is not None:
            values[row] += gamma * head[1]
    sums: Tensor = discounted_sums(torch, values.flip(0), (gamma * goes_on.double()[:, None]).flip(0))
    return sums.flip(0)


def _open(
    frames: CountedFrames, returns: Tensor, before: Mapping[int, tuple[int, Tensor]]
) -> dict[int, tuple[int, Tensor]]:
    """The returns of the trajectories that continue after the batch, those of lanes outside of it included."""
    here = {*frames.lanes.tolist()}
    opened = {number: head for number, head in before.items() if head[0] not in here}
    ends = torch.cat([frames.lanes[1:] != frames.lanes[:-1], torch.ones(1, dtype=torch.bool)])
    for row in (ends & ~frames.done).nonzero()[:, 0].tolist():
        opened[int(frames.traj_ids[row])] = int(frames.lanes[row]), returns[row].clone()
    return opened


def _in_jax(
    batch: Mapping[str, Any], before: RewardScaling | None, gamma: Any, clip: float
) -> tuple[Any, RewardScaling]:
    jnp = import_jax().numpy
    try:
        reward, done = jnp.asarray(batch["next"]["reward"]), jnp.asarray(batch["next"]["done"])
    except KeyError as error:
        raise ValueError(f"the batch lacks next.{error.args[0]}, which is needed here: pass it") from error
    if reward.ndim < done.ndim or done.ndim != 2 or reward.shape[:2] != done.shape:
        raise ValueError(
            f"next.reward is {list(reward.shape)} and next.done {list(done.shape)}, expected [T, P] or [T, P, players] "
            "and [T, P]: pass the arrays of funcollect.traced.rollout, or the TensorDict of a batch"
        )
    check_time_first(batch.get("collector", {}).get(LANE[-1]))
    players = reward.shape[done.ndim :]
    if before is None:
        before = RewardScaling(jnp.zeros_like(reward[0]), start({_NAME: players}, "jax"))
    step = batch.get("collector", {}).get("step")
    begun = jnp.zeros_like(done) if step is None else step == 0  # also where `reset` has begun an episode

    def by_player(flags: Any) -> Any:
        return flags.reshape(*flags.shape, *[1] * len(players))

    values = reward.at[0].add(jnp.where(by_player(begun[0]), 0, gamma * before.returns))
    goes_on = by_player(jnp.concatenate([jnp.zeros_like(done[:1]), ~(done[:-1] | begun[1:])]))
    discount = gamma * goes_on * jnp.ones_like(values)
    returns = discounted_sums(jnp, values[::-1], discount[::-1])[::-1]
    repeated = batch.get("done")  # of finished lanes
    statistics = update(before.statistics, {_NAME: returns}, weights=None if repeated is None else ~repeated)
    deviation = jnp.sqrt(statistics.variance[_NAME] + EPSILON)
    kept = jnp.where(by_player(done[-1]), 0, returns[-1])
    return jnp.clip(reward / deviation, -clip, clip), RewardScaling(kept, statistics)
