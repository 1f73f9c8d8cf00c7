"""n-step returns: each frame gets the summed rewards, and the next observation, of several steps."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from tensordict import TensorDictBase
from torch import Tensor
from typing_extensions import override

from funcollect.arguments import check_number, check_positive
from funcollect.trajectories.next_observations import next_observations
from funcollect.trajectories.split import (
    MASK,
    ORIGINAL_REWARD,
    STEPS_AHEAD,
    TRAJECTORY_IDS,
    check_batch,
    check_order,
    check_single_steps,
    require,
    steps_back,
)

__all__ = ["MultiStep"]


class MultiStep:
    """Sums rewards over up to `n_steps` steps, and takes ``next`` from the last of them.

    For a frame at time ``t``, let ``m`` be the number of steps that its trajectory has from ``t`` on in the batch, at
    most `n_steps`. ``next.reward`` becomes the sum of ``gamma**k * next.reward[t + k]`` over ``k < m``. All other
    leaves under ``next`` become those of frame ``t + m - 1``. New keys are ``gamma`` ``[*B, T, 1]`` float32, which is
    ``gamma**m``, ``steps_to_next_obs`` ``[*B, T, 1]`` int64, which is ``m``, and ``original_reward``. So

        target = next.reward + gamma * value(next.observation) * ~next.terminated

    is correct at terminations, at truncations and at the end of a batch, where there are fewer steps. Pass it to a
    collector as `postproc`. `episode_stats`, `scale_rewards` and slices of a buffer go by the frames' own rewards and
    ends. `MultiStepSampler` does the same for samples of a buffer, also across batches; take one of both.

    Args:
        gamma: the discount per step, between 0 and 1.
        n_steps: the largest number of steps.

    Raises:
        TypeError, ValueError: if the arguments are outside these ranges.

    >>> import torch
    >>> from tensordict import TensorDict
    >>> done = torch.tensor([False, False, True, False])[:, None]
    >>> batch = TensorDict({"next": {"reward": torch.ones(4, 1), "done": done}}, [4])
    >>> MultiStep(gamma=0.5, n_steps=2)(batch)["next", "reward"][:, 0]
    tensor([1.5000, 1.5000, 1.0000, 1.0000])
    """

    def __init__(self, gamma: float, n_steps: int) -> None:
        """Check the arguments, which the class documents, and keep them."""
        check_positive("n_steps", n_steps)
        check_number("gamma", gamma, most=1, example=0.99)
        self.gamma, self.n_steps = float(gamma), int(n_steps)

    def __call__(self, batch: TensorDictBase) -> TensorDictBase:
        """The n-step batch of a batch ``[*B, T]``, which is not changed.

        Raises:
            TypeError: if the batch is not a TensorDict.
            ValueError: if the batch has no frames, no ``next.reward`` or no ``next.done``, frames out of order, or
                rewards that are sums already.
        """
        check_batch(batch)
        check_single_steps(batch)
        check_order(batch)
        batch = next_observations(batch)  # those of a compact batch are one step away
        if not batch.shape[-1]:
            raise ValueError(f"the batch {list(batch.shape)} has no frames, expected [*B, T] with T of at least 1")
        steps = self._steps(batch)
        time = batch.batch_dims - 1
        last = torch.arange(batch.shape[-1], device=steps.device) + steps - 1
        following = batch.get("next").apply(lambda leaf: _gather(leaf, last, time))
        reward = require(batch, ("next", "reward"), tail=None)
        following.set("reward", self._sum(reward, steps, time))
        result = batch.clone(False).unlock_()
        result.set("next", following)
        result.set(ORIGINAL_REWARD, reward.clone())
        result.set(STEPS_AHEAD, steps[..., None])
        result.set("gamma", self.gamma ** steps[..., None].float())
        return result

    def _steps(self, batch: TensorDictBase) -> Tensor:
        """The number of steps whose rewards each frame sums: ``[*B, T]`` int64, from 1 to `n_steps`."""
        ends = require(batch, ("next", "done"), tail=(1,))[..., 0].clone()
        for changes in _changes(batch):
            ends[..., :-1] |= changes
        ends[..., -1] = True
        length = ends.shape[-1]
        time = torch.arange(length, device=ends.device)
        nearest = torch.where(ends, time, length).flip(-1).cummin(-1).values.flip(-1)
        return (nearest - time + 1).clamp(max=self.n_steps)

    def _sum(self, reward: Tensor, steps: Tensor, time: int) -> Tensor:
        """The discounted sum of the rewards of each frame's steps; the shape is that of `reward`."""
        total = reward.clone()
        for ahead in range(1, min(self.n_steps, reward.shape[time])):
            counts = (steps[..., :-ahead] > ahead)[..., None]
            later = reward.narrow(time, ahead, reward.shape[time] - ahead)
            total.narrow(time, 0, later.shape[time]).add_(torch.where(counts, self.gamma**ahead * later, 0))
        return total

    @override
    def __repr__(self) -> str:
        return f"MultiStep(gamma={self.gamma}, n_steps={self.n_steps})"


def _changes(batch: TensorDictBase) -> Iterator[Tensor]:
    """Yield masks ``[*B, T - 1]``: True where, by one of the keys, the next frame is not of the same trajectory."""
    for key in (TRAJECTORY_IDS, ("episode",), MASK):
        if batch.get(key, None) is not None:
            leaf = require(batch, key, tail=())
            yield leaf[..., 1:] != leaf[..., :-1]
    yield steps_back(batch)


def _gather(leaf: Tensor, index: Tensor, time: int) -> Tensor:
    """Select frames along time: at each time ``t``, the frame ``index[..., t]`` of `leaf` ``[*B, T, ...]``."""
    shape = (*index.shape, *[1] * (leaf.ndim - index.ndim))
    return torch.take_along_dim(leaf, index.reshape(shape), dim=time)
