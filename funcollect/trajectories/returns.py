"""Advantages and n-step returns of a batch: `gae`, in Torch and in JAX, and `MultiStep`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor
from typing_extensions import override

from funcollect.arguments import check_number, check_positive
from funcollect.interop.jax_setup import import_jax
from funcollect.trajectories.next_observations import next_observations
from funcollect.trajectories.split import (
    LANE,
    MASK,
    ORIGINAL_REWARD,
    STEPS_AHEAD,
    TRAJECTORY_IDS,
    check_batch,
    check_order,
    check_single_steps,
    check_time_first,
    optional,
    require,
    steps_back,
)
from funcollect.tree import flatten

__all__ = ["MultiStep", "gae"]

_NEEDED = {"reward": ("next", "reward"), "terminated": ("next", "terminated"), "done": ("next", "done")}
_EPISODE = ("collector", "episode")  # traced rollouts have these numbers per lane instead of ids
_OPTIONAL = {"traj_ids": TRAJECTORY_IDS, "mask": MASK, "repeated": ("done",)}
_MENDS = {
    "value": "pass the value function's result for observation",
    "next_value": "pass the value function's result for next.observation",
}
_TAILS: dict[str, tuple[int, ...] | None] = {"reward": None, "traj_ids": (), "mask": ()}  # see `require`; [1] otherwise


def gae(
    batch: TensorDictBase | Mapping[str, Any], value: Any, next_value: Any, *, gamma: float = 0.99, lmbda: float = 0.95
) -> tuple[Any, Any]:
    """Generalised advantage estimates, and the targets for a value function.

    Let ``delta = reward + gamma * next_value - value``, without `next_value` after a termination. The advantage of a
    frame is the sum of its delta and all later ones of its trajectory, each weighted by ``(gamma * lmbda)**k``, where
    ``k`` is the number of steps between them (Schulman et al., 2016, https://arxiv.org/abs/1506.02438). At a
    truncation, and at the end of the batch, `next_value` stands for the missing rest of the trajectory. With
    ``lmbda=1`` the targets are the discounted returns to go. Padding of split trajectories and repeated frames of
    finished lanes have the advantage 0.

    Gradients flow through both results. Detach them, or stop their gradients, for losses that need constants.

    Args:
        batch: ``[*B, T]``, also split, with ``next.reward`` ``[*B, T, 1]`` (or players), ``next.terminated`` and
            ``next.done`` ``[*B, T, 1]``, and optionally ``collector.traj_ids``. Or a nested dict of JAX arrays, time
            first and without the trailing 1, ``[T, P]`` (or ``[T, P, players]``), also inside `jit`, `vmap` and `grad`.
        value: the values of the observations; floating, with the shape of ``next.reward``.
        next_value: the values of ``next.observation``, with the same shape.
        gamma: the discount per step, in [0, 1]; for JAX also a scalar array.
        lmbda: the weight of later deltas, in [0, 1]: 0 uses one step, 1 the whole trajectory.

    Returns:
        ``(advantage, value_target)``, both with the shape of `value`; the target is ``advantage + value``.

    Raises:
        TypeError: if the batch is neither a TensorDict nor a dict, values are not floating, or factors not numbers.
        ValueError: if keys are missing, shapes or the order of frames wrong, rewards sums, or factors outside [0, 1].

    >>> import torch
    >>> from tensordict import TensorDict
    >>> ended = torch.tensor([[False], [False], [True]])
    >>> batch = TensorDict({"next": {"reward": torch.ones(3, 1), "terminated": ended, "done": ended}}, [3])
    >>> zero = torch.zeros(3, 1)
    >>> advantage, value_target = gae(batch, zero, zero, gamma=0.5, lmbda=1.0)
    >>> value_target[:, 0]
    tensor([1.7500, 1.5000, 1.0000])
    """
    in_jax = isinstance(batch, Mapping) and not isinstance(batch, TensorDictBase)
    check_factor("gamma", gamma, in_jax)
    check_factor("lmbda", lmbda, in_jax)
    if in_jax:
        return _estimate(import_jax().numpy, *_read_jax(batch, value, next_value), gamma, lmbda)
    advantage, target = _estimate(torch, *_read_torch(batch, value, next_value), gamma, lmbda)
    return advantage.movedim(0, -2), target.movedim(0, -2)


class _AdvantageInputs(NamedTuple):
    """The leaves of a batch, time first, which broadcast with each other and with the values."""

    reward: Any  # [T, ...]
    terminated: Any  # [T, ...] bool
    done: Any  # [T, ...] bool
    traj_ids: Any = None  # [T, ...] integers
    mask: Any = None  # [T, ...] bool: False for padding
    repeated: Any = None  # [T, ...] bool: True for repeated frames of a finished lane


def _estimate(
    xp: Any, frames: _AdvantageInputs, value: Any, next_value: Any, gamma: Any, lmbda: Any
) -> tuple[Any, Any]:
    """The advantages and targets [T, ...]; `xp` is `torch` or `jax.numpy`."""
    delta = frames.reward + gamma * xp.where(frames.terminated, 0.0, next_value) - value
    if frames.mask is not None:
        delta = xp.where(frames.mask, delta, 0.0)
    if frames.repeated is not None:
        delta = xp.where(frames.repeated, 0.0, delta)
    done, ids = frames.done, frames.traj_ids
    ends = done[:-1] if ids is None else done[:-1] | (ids[1:] != ids[:-1])
    last = xp.concatenate([ends, xp.ones_like(done[-1:])])  # whether a frame is the last of its trajectory in the batch
    advantage = discounted_sums(xp, delta, xp.asarray(gamma * lmbda, dtype=delta.dtype) * ~last)
    return advantage, advantage + value


def discounted_sums(xp: Any, values: Any, discount: Any) -> Any:
    """``sums[t] = values[t] + discount[t] * sums[t + 1]``, in log2(T) rounds of whole arrays instead of T steps.

    Each round adds every odd row to the even one before it, which leaves the same problem of half the length. Nothing
    is divided by products of discounts, so long trajectories keep their precision. `values` and `discount` are
    [T, ...], and the last row of `discount` is 0.
    """
    length = len(values)
    if length <= 1:
        return values
    if length % 2:
        values, discount = (xp.concatenate([rows, xp.zeros_like(rows[:1])]) for rows in (values, discount))
    even, odd, step = values[::2], values[1::2], discount[::2]
    sums = discounted_sums(xp, even + step * odd, step * discount[1::2])
    after = xp.roll(sums, -1, 0)  # the last row is discounted to nothing
    both = xp.stack([sums, odd + discount[1::2] * after], 1)
    return both.reshape(values.shape)[:length]


def _read_torch(batch: TensorDictBase, value: Any, next_value: Any) -> tuple[_AdvantageInputs, Tensor, Tensor]:
    """The frames of a TensorDict and their values, each leaf ``[T, *B, n]``."""
    check_batch(batch)
    check_single_steps(batch)
    check_order(batch)
    columns: dict[str, Tensor] = {}
    for name, path in (_NEEDED | _OPTIONAL).items():
        leaf = (require if name in _NEEDED else optional)(batch, path, tail=_TAILS.get(name, (1,)))
        if leaf is not None:
            columns[name] = leaf if leaf.ndim > batch.batch_dims else leaf[..., None]
    for name, values in (("value", value), ("next_value", next_value)):
        if not isinstance(values, Tensor):
            raise TypeError(f"{name} is {type(values).__name__}, expected a tensor, as the batch has: {_MENDS[name]}")
        _check_values(name, values, values.is_floating_point(), columns["reward"].shape)
    frames = _AdvantageInputs(**{name: leaf.movedim(-2, 0) for name, leaf in columns.items()})
    return frames, value.movedim(-2, 0), next_value.movedim(-2, 0)


def _read_jax(batch: Mapping[str, Any], value: Any, next_value: Any) -> tuple[_AdvantageInputs, Any, Any]:
    """The frames of a nested dict and their values, each leaf ``[T, ...]``."""
    check_single_steps(batch)
    jnp, flat = import_jax().numpy, flatten(batch)
    paths = _NEEDED | _OPTIONAL
    if _EPISODE in flat:
        paths |= {"traj_ids": _EPISODE}
    given = {name: flat[path] for name, path in paths.items() if path in flat}
    if missing := [".".join(path) for path in _NEEDED.values() if path not in flat]:
        raise ValueError(f"the batch lacks {missing}, which are needed here; it has {sorted(map('.'.join, flat))}")
    for name, leaf in (given | {"value": value, "next_value": next_value}).items():
        if isinstance(leaf, Tensor) or not hasattr(leaf, "shape"):
            mend = _MENDS.get(name, "tensors come in a TensorDict")
            raise TypeError(f"{name} is {type(leaf).__name__}, expected a JAX array: {mend}")
    reward, done = given["reward"], given["done"]
    for name, leaf in given.items():
        fits = leaf.shape == done.shape or (name == "reward" and leaf.shape[:-1] == done.shape)
        if not fits or done.ndim not in (1, 2):
            raise ValueError(
                f"{'.'.join(paths[name])} has shape {list(leaf.shape)}, next.done {list(done.shape)}, expected [T, P], "
                "and [T, P, players] for rewards of several players: time first, no trailing 1, several runs under "
                "jax.vmap"
            )
    for name, values in (("value", value), ("next_value", next_value)):
        _check_values(name, values, jnp.issubdtype(values.dtype, jnp.floating), reward.shape)
    check_time_first(flat.get(LANE))
    columns = {name: jnp.asarray(leaf) for name, leaf in given.items()}
    if reward.ndim > done.ndim:
        columns = {name: leaf if name == "reward" else leaf[..., None] for name, leaf in columns.items()}
    return _AdvantageInputs(**columns), jnp.asarray(value), jnp.asarray(next_value)


def _check_values(name: str, values: Any, floating: bool, shape: tuple[int, ...]) -> None:
    """Raise unless `values`, the argument `name`, are floating and have the `shape` of the rewards."""
    if not floating:
        raise TypeError(f"{name} is {values.dtype}, expected a floating dtype: pass the result of the value function")
    got, shape = tuple(values.shape), tuple(shape)
    if got != shape:
        mends = {shape[:-1]: f"pass {name}[..., None]", (*shape, 1): f"pass {name}[..., 0]"}
        mend = mends.get(got, "pass one value for each reward")
        raise ValueError(f"{name} has shape {list(got)}, expected {list(shape)} as next.reward: {mend}")


def check_factor(name: str, factor: Any, in_jax: bool) -> None:
    """Raise unless `factor` is a number in [0, 1] or, for a JAX batch, any scalar JAX array."""
    if in_jax and isinstance(factor, import_jax().Array) and not factor.ndim:
        return  # within `jit` it may have no value yet
    check_number(name, factor, most=1, example=0.99)


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
        if (leaf := optional(batch, key, tail=())) is not None:
            yield leaf[..., 1:] != leaf[..., :-1]
    yield steps_back(batch)


def _gather(leaf: Tensor, index: Tensor, time: int) -> Tensor:
    """Select frames along time: at each time ``t``, the frame ``index[..., t]`` of `leaf` ``[*B, T, ...]``."""
    shape = (*index.shape, *[1] * (leaf.ndim - index.ndim))
    return torch.take_along_dim(leaf, index.reshape(shape), dim=time)
