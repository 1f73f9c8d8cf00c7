"""Generalised advantage estimates of a batch, in Torch and in JAX."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor

from funcollect.arguments import check_number
from funcollect.interop.jax_setup import import_jax
from funcollect.trajectories.split import (
    LANE,
    MASK,
    TRAJECTORY_IDS,
    check_batch,
    check_order,
    check_single_steps,
    check_time_first,
    require,
)
from funcollect.tree import flatten

__all__ = ["gae"]

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
        batch: a batch ``[*B, T]`` with ``next.reward`` ``[*B, T, 1]`` (or players), ``next.terminated`` and
            ``next.done`` ``[*B, T, 1]``, and optionally ``collector.traj_ids``. Split trajectories are accepted. So is
            a nested dict of JAX arrays, time first and without the trailing 1, ``[T, P]`` (``[T, P, players]`` for
            several), also inside `jit`, `vmap` and `grad`.
        value: the values of the observations; floating, with the shape of ``next.reward``.
        next_value: the values of ``next.observation``, with the same shape.
        gamma: the discount per step, in [0, 1]; for JAX also a scalar array.
        lmbda: the weight of later deltas, in [0, 1]: 0 uses one step, 1 the whole trajectory.

    Returns:
        ``(advantage, value_target)``, both with the shape of `value`; the target is ``advantage + value``.

    Raises:
        TypeError: if the batch is neither a TensorDict nor a dict, values are not floating, or factors not numbers.
        ValueError: if keys are missing, shapes differ, frames are out of order, rewards are sums of `MultiStep`, or
            factors are outside [0, 1].

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
    """The leaves of a batch, time first: tensors or JAX arrays that broadcast with each other and with the values."""

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
        if name in _NEEDED or batch.get(path, None) is not None:
            leaf = require(batch, path, tail=_TAILS.get(name, (1,)))
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
    if missing := [".".join(path) for name, path in _NEEDED.items() if name not in given]:
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
    if tuple(values.shape) == tuple(shape):
        return
    mend = "pass one value for each reward"
    if tuple(values.shape) == tuple(shape[:-1]):
        mend = f"pass {name}[..., None]"
    elif tuple(values.shape) == (*shape, 1):
        mend = f"pass {name}[..., 0]"
    raise ValueError(f"{name} has shape {list(values.shape)}, expected {list(shape)} as next.reward: {mend}")


def check_factor(name: str, factor: Any, in_jax: bool) -> None:
    """Raise unless `factor` is a number in [0, 1] or, for a JAX batch, any scalar JAX array."""
    if in_jax and isinstance(factor, import_jax().Array) and not factor.ndim:
        return  # within `jit` it may have no value yet
    check_number(name, factor, most=1, example=0.99)
