"""Advantages and n-step returns of a batch, and rewards divided by the deviation of the return."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor
from typing_extensions import override

from funcollect.arguments import check_kind, check_number, check_positive
from funcollect.interop.jax_setup import import_jax
from funcollect.running_statistics import EPSILON, RunningStatistics, start, update
from funcollect.trajectories import split
from funcollect.trajectories.next_observations import next_observations
from funcollect.trajectories.stats import CountedFrames, counted_frames
from funcollect.tree import flatten

_NEEDED = {"reward": ("next", "reward"), "terminated": ("next", "terminated"), "done": ("next", "done")}
_EPISODE = ("collector", "episode")  # traced rollouts have these numbers per lane instead of ids
_OPTIONAL = {"traj_ids": split.TRAJECTORY_IDS, "mask": split.MASK, "repeated": ("done",)}
_TAILS: dict[str, tuple[int, ...] | None] = {"reward": None, "traj_ids": (), "mask": ()}  # see `require`; [1] otherwise
_VALUES = {"value": "observation", "next_value": "next.observation"}  # the argument of the value function
_RETURN = "return"  # the key in the statistics of `scale_rewards`


def gae(
    batch: TensorDictBase | Mapping[str, Any], value: Any, next_value: Any, *, gamma: float = 0.99, lmbda: float = 0.95
) -> tuple[Any, Any]:
    """Generalised advantage estimates, and the targets for a value function.

    Let ``delta = reward + gamma * next_value - value``, without `next_value` after a termination. The advantage of a
    frame is the sum of its delta and all later ones of its trajectory, each weighted by ``(gamma * lmbda)**k``, where
    ``k`` is the number of steps between them (Schulman et al., 2016, https://arxiv.org/abs/1506.02438). At a
    truncation, and at the end of the batch, `next_value` stands for the missing rest of the trajectory. Padding and
    repeated frames of finished lanes have the advantage 0. Gradients flow through both results.

    Args:
        batch: ``[*B, T]``, also split, with ``next.reward`` ``[*B, T, 1]`` (or players), ``next.terminated`` and
            ``next.done`` ``[*B, T, 1]``, and optionally ``collector.traj_ids``. Or a nested dict of JAX arrays, time
            first and without the trailing 1, ``[T, P]`` (or ``[T, P, players]``), also inside `jit`, `vmap` and `grad`.
        value: the values of the observations; floating, with the shape of ``next.reward``.
        next_value: the values of ``next.observation``, with the same shape.
        gamma: the discount per step, in [0, 1]; for JAX also a scalar array.
        lmbda: the weight of later deltas, in [0, 1]; with 1 the targets are the discounted returns to go.

    Returns ``(advantage, value_target)``, both with the shape of `value`; the target is ``advantage + value``. Raises
    TypeError or ValueError for another kind of batch, missing keys, wrong shapes or order of frames, rewards that are
    sums, values that are not floating, and factors outside [0, 1].

    >>> import torch
    >>> from tensordict import TensorDict
    >>> ended = torch.tensor([[False], [False], [True]])
    >>> batch = TensorDict({"next": {"reward": torch.ones(3, 1), "terminated": ended, "done": ended}}, [3])
    >>> zero = torch.zeros(3, 1)
    >>> advantage, value_target = gae(batch, zero, zero, gamma=0.5, lmbda=1.0)
    >>> value_target[:, 0]
    tensor([1.7500, 1.5000, 1.0000])
    """
    values = {"value": value, "next_value": next_value}
    if _in_jax(batch, gamma=gamma, lmbda=lmbda):
        return _estimate(import_jax().numpy, gamma, lmbda, _arrays_of(batch, values))
    advantage, target = _estimate(torch, gamma, lmbda, _tensors_of(batch, values))
    return advantage.movedim(0, -2), target.movedim(0, -2)


def _estimate(xp: Any, gamma: Any, lmbda: Any, columns: Mapping[str, Any]) -> tuple[Any, Any]:
    """The advantages and targets [T, ...], from leaves that broadcast with each other; `xp` is Torch or JAX's NumPy."""
    value, done, ids = columns["value"], columns["done"], columns.get("traj_ids")
    delta = columns["reward"] + gamma * xp.where(columns["terminated"], 0.0, columns["next_value"]) - value
    if (mask := columns.get("mask")) is not None:  # False for padding
        delta = xp.where(mask, delta, 0.0)
    if (repeated := columns.get("repeated")) is not None:  # True for repeated frames of a finished lane
        delta = xp.where(repeated, 0.0, delta)
    ends = done[:-1] if ids is None else done[:-1] | (ids[1:] != ids[:-1])
    last = xp.concatenate([ends, xp.ones_like(done[-1:])])  # whether a frame is the last of its trajectory in the batch
    advantage = _discounted_sums(xp, delta, xp.asarray(gamma * lmbda, dtype=delta.dtype) * ~last)
    return advantage, advantage + value


def _discounted_sums(xp: Any, values: Any, discount: Any) -> Any:
    """``sums[t] = values[t] + discount[t] * sums[t + 1]``, in log2(T) rounds of whole arrays instead of T steps.

    Each round adds every odd row to the even one before it, which leaves the same problem of half the length. Long
    trajectories keep their precision, since nothing is divided by products of discounts. `values` and `discount` are
    [T, ...], and the last row of `discount` is 0.
    """
    length = len(values)
    if length <= 1:
        return values
    if length % 2:
        values, discount = (xp.concatenate([rows, xp.zeros_like(rows[:1])]) for rows in (values, discount))
    even, odd, step = values[::2], values[1::2], discount[::2]
    sums = _discounted_sums(xp, even + step * odd, step * discount[1::2])
    after = xp.roll(sums, -1, 0)  # the discount of the last row is 0
    both = xp.stack([sums, odd + discount[1::2] * after], 1)
    return both.reshape(values.shape)[:length]


def _tensors_of(batch: TensorDictBase, values: Mapping[str, Any]) -> dict[str, Tensor]:
    """The leaves of a TensorDict by name, and the values, each ``[T, *B, n]``."""
    split.check_order(batch)
    split.check_single_steps(batch)
    columns: dict[str, Tensor] = {}
    for name, path in (_NEEDED | _OPTIONAL).items():
        leaf = (split.require if name in _NEEDED else split.optional)(batch, path, tail=_TAILS.get(name, (1,)))
        if leaf is not None:
            columns[name] = leaf if leaf.ndim > batch.batch_dims else leaf[..., None]
    columns["done"] = columns["done"].clone()
    columns["done"][..., :-1, :] |= split.breaks(batch)[..., None]
    for name, leaf in values.items():
        _check_type(name, leaf, isinstance(leaf, Tensor), "a tensor, as the batch has")
        _check_values(name, leaf, leaf.is_floating_point(), columns["reward"].shape)
    return {name: leaf.movedim(-2, 0) for name, leaf in (columns | dict(values)).items()}


def _arrays_of(batch: Mapping[str, Any], values: Mapping[str, Any], needed: Iterable[str] = _NEEDED) -> dict[str, Any]:
    """The leaves of a nested dict by name, and the values, each ``[T, ...]``."""
    split.check_single_steps(batch)
    jnp, flat = import_jax().numpy, flatten(batch)
    paths = _NEEDED | _OPTIONAL | ({"traj_ids": _EPISODE} if _EPISODE in flat else {})
    leaves = {name: flat[path] for name, path in paths.items() if path in flat}
    if missing := [".".join(paths[name]) for name in needed if name not in leaves]:
        raise ValueError(f"the batch lacks {missing}, which are needed here; it has {sorted(map('.'.join, flat))}")
    for name, leaf in (leaves | dict(values)).items():
        _check_type(name, leaf, hasattr(leaf, "shape") and not isinstance(leaf, Tensor), "a JAX array")
    reward, done = leaves["reward"], leaves["done"]
    for name, leaf in leaves.items():
        fits = leaf.shape == done.shape or (name == "reward" and leaf.shape[:-1] == done.shape)
        if not fits or done.ndim not in (1, 2):
            what = f"{'.'.join(paths[name])} has shape {list(leaf.shape)}, next.done {list(done.shape)}"
            wanted = "[T, P], and [T, P, players] for rewards of several: time first, no trailing 1, runs under vmap"
            raise ValueError(f"{what}, expected {wanted}")
    for name, leaf in values.items():
        _check_values(name, leaf, jnp.issubdtype(leaf.dtype, jnp.floating), reward.shape)
    split.check_time_first(flat.get(split.LANE))
    columns = {name: jnp.asarray(leaf) for name, leaf in leaves.items()}
    if reward.ndim > done.ndim:
        columns = {name: leaf if name == "reward" else leaf[..., None] for name, leaf in columns.items()}
    return columns | {name: jnp.asarray(leaf) for name, leaf in values.items()}


def _check_type(name: str, leaf: Any, fits: bool, wanted: str) -> None:
    if not fits:
        of = _VALUES.get(name)
        mend = f"pass the value function's result for {of}" if of else "tensors come in a TensorDict"
        raise TypeError(f"{name} is {type(leaf).__name__}, expected {wanted}: {mend}")


def _check_values(name: str, values: Any, floating: bool, shape: tuple[int, ...]) -> None:
    if not floating:
        raise TypeError(f"{name} is {values.dtype}, expected a floating dtype: pass the result of the value function")
    got, shape = tuple(values.shape), tuple(shape)
    if got != shape:
        mends = {shape[:-1]: f"pass {name}[..., None]", (*shape, 1): f"pass {name}[..., 0]"}
        groups = "; of agents or players, pass the batch of agents_as_rows, or of player_trajectories"
        mend = mends.get(got, f"pass one value for each reward{groups if len(got) > 2 else ''}")
        raise ValueError(f"{name} has shape {list(got)}, expected {list(shape)} as next.reward: {mend}")


def _in_jax(batch: Any, **factors: Any) -> bool:
    """Whether a batch is one of JAX; TypeError or ValueError unless factors are in [0, 1], or scalar arrays in JAX."""
    in_jax = isinstance(batch, Mapping) and not isinstance(batch, TensorDictBase)
    for name, factor in factors.items():
        if not (in_jax and isinstance(factor, import_jax().Array) and not factor.ndim):  # traced ones have no value yet
            check_number(name, factor, most=1, example=0.99)
    return in_jax


class MultiStep:
    """Sums rewards over up to `n_steps` steps, and takes ``next`` from the last of them.

    For a frame at time ``t``, let ``m`` be the number of steps that its trajectory has from ``t`` on in the batch, at
    most `n_steps`. ``next.reward`` becomes the sum of ``gamma**k * next.reward[t + k]`` over ``k < m``. All other
    leaves under ``next`` become those of frame ``t + m - 1``. New keys are ``gamma`` ``[*B, T, 1]`` float32, which is
    ``gamma**m``, ``steps_to_next_obs`` ``[*B, T, 1]`` int64, which is ``m``, and ``original_reward``. So
    ``next.reward + gamma * value(next.observation) * ~next.terminated`` is correct at terminations, at truncations and
    at the end of a batch, where there are fewer steps. Pass it to a collector as `postproc`. `episode_stats`,
    `scale_rewards` and slices of a buffer go by the frames' own rewards and ends. `MultiStepSampler` does the same for
    samples of a buffer, also across batches; take one of both.

    `gamma` is the discount per step, in [0, 1], and `n_steps` the largest number of steps. Raises TypeError or
    ValueError for others.

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

        ValueError if it has no frames, no ``next.reward`` or no ``next.done``, frames out of order, rewards that are
        sums already, or rewards of groups of agents.
        """
        split.check_order(batch)
        split.check_single_steps(batch)
        paths = flatten(batch.get("next", {}))
        if groups := [name for name, *rest in paths if rest == ["reward"] and (name, "done") in paths]:
            what = f"the batch has rewards of the groups {groups}, which are not summed, expected those of one agent"
            raise ValueError(f"{what}: call agents_as_rows(batch, group) first")
        batch = next_observations(batch)  # a compact batch lacks those that the result takes from later frames
        if not batch.shape[-1]:
            raise ValueError(f"the batch {list(batch.shape)} has no frames, expected [*B, T] with T of at least 1")
        steps = self._steps(batch)
        time = batch.batch_dims - 1
        last = torch.arange(batch.shape[-1], device=steps.device) + steps - 1
        following = batch.get("next").apply(lambda leaf: split.taken_along(leaf, last, time))
        reward = split.require(batch, ("next", "reward"), tail=None)
        following.set("reward", self._sum(reward, steps, time))
        result = batch.clone(False).unlock_()
        result.set("next", following)
        result.set(split.ORIGINAL_REWARD, reward.clone())
        result.set(split.STEPS_AHEAD, steps[..., None])
        result.set("gamma", self.gamma ** steps[..., None].float())
        return result

    def _steps(self, batch: TensorDictBase) -> Tensor:
        """The number of steps whose rewards each frame sums: ``[*B, T]`` int64, from 1 to `n_steps`."""
        ends = split.require(batch, ("next", "done"), tail=(1,))[..., 0].clone()
        for key in (split.TRAJECTORY_IDS, ("episode",), split.MASK):
            if (leaf := split.optional(batch, key, tail=())) is not None:
                ends[..., :-1] |= leaf[..., 1:] != leaf[..., :-1]
        ends[..., :-1] |= split.breaks(batch)
        ends[..., -1] = True
        length = ends.shape[-1]
        time = torch.arange(length, device=ends.device)
        nearest = torch.where(ends, time, length).flip(-1).cummin(-1).values.flip(-1)
        return (nearest - time + 1).clamp(max=self.n_steps)

    def _sum(self, reward: Tensor, steps: Tensor, time: int) -> Tensor:
        """The discounted sum of the rewards of each frame's steps, in the shape of `reward`; of integers as float32."""
        reward = reward if reward.is_floating_point() else reward.float()
        total = reward.clone()
        for ahead in range(1, min(self.n_steps, reward.shape[time])):
            counts = (steps[..., :-ahead] > ahead)[..., None]
            later = reward.narrow(time, ahead, reward.shape[time] - ahead)
            total.narrow(time, 0, later.shape[time]).add_(torch.where(counts, self.gamma**ahead * later, 0))
        return total

    @override
    def __repr__(self) -> str:
        return f"MultiStep(gamma={self.gamma}, n_steps={self.n_steps})"


class RewardScaling(NamedTuple):
    """The state of `scale_rewards` between two batches; a pytree in optree and in JAX."""

    # The discounted returns of the unfinished trajectories. In Torch, by trajectory id, its lane and a tensor [players]
    # float64; in JAX [P] or [P, players].
    returns: Any
    statistics: RunningStatistics  # of the returns at all frames so far


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

    Returns the scaled rewards, with the shape and dtype of ``next.reward``, and the next call's `scaling`. Raises the
    errors of `gae`.

    >>> import funcollect as fc
    >>> scaling = None
    >>> with fc.SyncDataCollector("CartPole-v1", frames_per_batch=50, total_frames=100, seed=0) as collector:
    ...     for batch in collector:
    ...         batch["next", "reward"], scaling = scale_rewards(batch, scaling)
    >>> int(scaling.statistics.count)
    100
    """
    in_jax = _in_jax(batch, gamma=gamma)
    check_number("clip", clip, positive=True, example=10.0)
    check_kind("scaling", scaling, (tuple, type(None)), "pass the second result of the last call")
    if scaling is not None and isinstance(scaling[1], RewardScaling):
        raise TypeError("scaling is the pair (rewards, scaling), expected its second part: unpack the result")
    before = None if scaling is None else RewardScaling(scaling[0], RunningStatistics(*scaling[1]))
    if in_jax:
        return _scaled_arrays(batch, before, gamma, clip)
    frames, *_ = counted_frames(batch)
    split.check_followed(batch)
    shape = () if frames.rewards.shape[1] == 1 else (frames.rewards.shape[1],)
    if before is None:
        before = RewardScaling({}, start({_RETURN: shape}, "torch"))
    returns = _returns(frames, before.returns, gamma)
    statistics = update(before.statistics, {_RETURN: returns.reshape(-1, *shape)})
    reward = split.require(batch, ("next", "reward"), tail=None)
    deviation = (statistics.variance[_RETURN] + EPSILON).sqrt().to(reward)
    return (reward / deviation).clamp(-clip, clip), RewardScaling(_open(frames, returns, before.returns), statistics)


def _returns(frames: CountedFrames, opened: Mapping[int, tuple[int, Tensor]], gamma: float) -> Tensor:
    """The discounted return up to each frame, [F, players] float64."""
    values = frames.rewards.clone()
    if not len(values):
        return values
    ids, steps = frames.traj_ids, frames.steps
    goes_on = torch.zeros_like(ids, dtype=torch.bool)
    goes_on[1:] = (ids[1:] == ids[:-1]) & (steps[1:] > steps[:-1])  # of joined runs, ids may be equal
    goes_on &= ~frames.comes
    for row in (~goes_on & ~frames.comes).nonzero()[:, 0].tolist():
        if steps[row] > 0 and (so_far := opened.get(int(ids[row]))) is not None:
            values[row] += gamma * so_far[1]
    sums: Tensor = _discounted_sums(torch, values.flip(0), (gamma * goes_on.double()[:, None]).flip(0))
    return sums.flip(0)


def _open(
    frames: CountedFrames, returns: Tensor, before: Mapping[int, tuple[int, Tensor]]
) -> dict[int, tuple[int, Tensor]]:
    """The returns of the trajectories that continue after the batch, including those of lanes that it lacks."""
    here = {*frames.lanes.tolist()}
    opened = {traj_id: so_far for traj_id, so_far in before.items() if so_far[0] not in here}
    ends = torch.cat([frames.lanes[1:] != frames.lanes[:-1], torch.ones(1, dtype=torch.bool)])
    for row in (ends & ~frames.done).nonzero()[:, 0].tolist():
        opened[int(frames.traj_ids[row])] = int(frames.lanes[row]), returns[row].clone()
    return opened


def _scaled_arrays(
    batch: Mapping[str, Any], before: RewardScaling | None, gamma: Any, clip: float
) -> tuple[Any, RewardScaling]:
    jnp, columns = import_jax().numpy, _arrays_of(batch, {}, ("reward", "done"))
    reward, done = columns["reward"], columns["done"]
    if before is None:
        players = reward.shape[batch["next"]["done"].ndim :]
        before = RewardScaling(jnp.zeros_like(reward[0]), start({_RETURN: players}, "jax"))
    step, repeated = batch.get("collector", {}).get("step"), batch.get("done")
    begun = jnp.zeros_like(done) if step is None else (step == 0).reshape(done.shape)  # without an end, by `reset`
    values = reward.at[0].add(jnp.where(begun[0], 0, gamma * before.returns))
    goes_on = jnp.concatenate([jnp.zeros_like(done[:1]), ~(done[:-1] | begun[1:])])
    returns = _discounted_sums(jnp, values[::-1], gamma * goes_on[::-1])[::-1]
    statistics = update(before.statistics, {_RETURN: returns}, weights=None if repeated is None else ~repeated)
    deviation = jnp.sqrt(statistics.variance[_RETURN] + EPSILON)
    kept = jnp.where(done[-1], 0, returns[-1])
    return jnp.clip(reward / deviation, -clip, clip), RewardScaling(kept, statistics)
