"""Running mean and variance of observations, as pure functions over a pytree, in Torch and in JAX.

Each update merges the moments of a batch into the earlier ones (Chan et al., 1979), so the result does not depend on
how data are cut into batches, except for rounding.

>>> import funcollect as fc
>>> env = fc.make_env("CartPole-v1", num_envs=4)
>>> policy = fc.random_policy(env)
>>> state, batch = fc.rollout(env, policy, fc.init(env, policy, seed=0), 100)
>>> stats = fc.running_statistics.update(fc.running_statistics.init(env.observation_space), batch)
>>> fc.running_statistics.normalize(stats, batch["observation"], clip=5.0).shape
torch.Size([4, 100, 4])
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from funcollect.arguments import check_choice, check_kind, check_number
from funcollect.interop import words
from funcollect.interop.jax_setup import import_jax
from funcollect.messages import shown
from funcollect.specs import FINAL, Space, map_leaves, observation_leaves
from funcollect.tree import flatten, moved, ranked

__all__ = ["RunningStatistics", "denormalize", "init", "merge", "normalize", "update"]

EPSILON = 1e-8  # added to variances, as Stable-Baselines3 does


class RunningStatistics(NamedTuple):
    """Moments of the observations so far; a pytree in optree and in JAX.

    >>> import gymnasium, torch
    >>> int(update(init(gymnasium.spaces.Box(-9, 9, (1,))), torch.tensor([[1.0], [3.0]])).count)
    2
    """

    count: Any  # of observations: int64 [], or over JAX uint32 [2], low word first
    mean: dict[str, Any]  # by the observation's key, its parts joined by dots: [*shape] float64, or float32 over JAX
    variance: dict[str, Any]  # in the same layout; 1 before the first update


_MEND = "pass the result of init, update or merge, or RunningStatistics(*saved)"
_check: Any = partial(check_kind, kind=RunningStatistics, mend=_MEND)


def init(space: Space, *, backend: Literal["torch", "jax"] = "torch") -> RunningStatistics:
    """Statistics of no observation: the mean is 0 and the variance 1, so that `normalize` changes nothing.

    The observation space is a Box, or a Dict or Tuple, of which only the spaces of floats count. Raises TypeError or
    ValueError for another space, one without floats, or keys that a batch cannot have.

    >>> import gymnasium
    >>> init(gymnasium.spaces.Box(-1, 1, (2,))).mean
    {'observation': tensor([0., 0.], dtype=torch.float64)}
    """
    check_choice("backend", backend, ("torch", "jax"))
    shapes = {leaf.name: leaf.shape for leaf in observation_leaves(space) if leaf.dtype.kind == "f"}
    if not shapes:
        raise TypeError(f"space is {shown(space)}, expected a Box of floats, or a Dict or Tuple with one: pass that")
    return start(shapes, backend)


def start(shapes: Mapping[str, tuple[int, ...]], backend: str) -> RunningStatistics:
    """Statistics of no observation, for leaves of these shapes. Names are sorted, as in JAX's pytrees."""
    xp = _TORCH if backend == "torch" else _jax()
    makers = (xp.library.zeros, xp.library.ones)
    mean, variance = ({name: make(shapes[name], dtype=xp.dtype) for name in sorted(shapes)} for make in makers)
    return RunningStatistics(xp.count(0), mean, variance)


def update(stats: RunningStatistics, batch: Any, *, weights: Any = None) -> RunningStatistics:
    """Statistics that also count the observations of a batch.

    `batch` is a batch [*B, T], whose observations before each step count; or only observations: an array [*B, *shape],
    or a dict or tuple of such arrays. `weights` [*B], an array or a list of bools, or of zeros and ones, selects those
    that count; by default, padding and the repeated frames of finished lanes do not.

    Raises KeyError if an observation is missing; ValueError for observations or weights of another shape, and for
    observations that are not finite.

    >>> import gymnasium, torch
    >>> stats = update(init(gymnasium.spaces.Box(-1, 1, (1,))), torch.tensor([[1.0], [3.0]]))
    >>> stats.mean["observation"], stats.variance["observation"]
    (tensor([2.], dtype=torch.float64), tensor([1.], dtype=torch.float64))
    """
    return merge(stats, moments_of(batch, stats, weights))


def moments_of(batch: Any, stats: RunningStatistics, weights: Any = None) -> RunningStatistics:
    """The statistics of a batch alone, with the same leaves as `stats`; raises as `update` does."""
    _check("stats", stats)
    first, several = next(iter(stats.mean)), isinstance(batch, (TensorDictBase, Mapping, tuple))
    values = _by_name(batch) if several else {first: batch}
    if missing := [name for name in stats.mean if name not in values]:
        raise KeyError(f"the batch lacks {missing}, expected the observations of the statistics: pass all of them")
    lead = tuple(values[first].shape)[: values[first].ndim - stats.mean[first].ndim]
    if weights is None and isinstance(batch, (TensorDictBase, Mapping)):
        weights = _counting(batch, len(lead))
    for name, mean in stats.mean.items():
        if (got := tuple(values[name].shape)) != (wanted := (*lead, *mean.shape)):
            raise ValueError(f"{name!r} is {list(got)}, expected {list(wanted)}: pass values of the space's shape")
    if weights is not None and np.shape(weights) != lead:
        raise ValueError(f"weights is {list(np.shape(weights))}, expected {list(lead)}: pass one for each observation")
    moments = _moments(stats, values, weights, math.prod(lead))
    for name, variance in moments.variance.items():
        if not _hold(variance < math.inf):  # NaN is not smaller
            raise ValueError(
                f"{name!r} has NaN or infinite numbers, which would stay in the statistics, expected finite ones: "
                "correct the environment, or exclude these frames with weights="
            )
    return moments


def _counting(batch: Any, dims: int) -> Any:
    """A mask of the frames that count, in a batch of `dims` dimensions: no padding, none repeated. None for all."""
    flat = flatten(batch)
    done, mask = flat.get(("done",)), flat.get(("collector", "mask"))
    if done is None:
        return mask
    live = ~(done if done.ndim == dims else done[..., 0])  # flags of JAX arrays have no last dimension of size 1
    return live if mask is None else live & mask


def _by_name(observation: Any) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    map_leaves(flat.__setitem__, observation)
    return flat


def _moments(stats: RunningStatistics, values: Mapping[str, Any], weights: Any, size: int) -> RunningStatistics:
    xp, chosen = _arrays_of(stats), None
    if weights is not None:
        chosen = xp.array(weights, stats.count).reshape(-1)
        is_mask = chosen.dtype == xp.library.bool
        if not is_mask and not _hold((chosen == 0) | (chosen == 1)):
            raise ValueError(f"weights is {shown(weights)}, expected bools, or zeros and ones: pass a mask of rows")
        chosen = chosen if is_mask else chosen != 0
    count, mean, variance = xp.count(size if chosen is None else chosen.sum()), {}, {}
    for name, before in stats.mean.items():
        rows = xp.array(values[name], before, before.dtype).reshape(size, *before.shape)
        mean[name], variance[name] = xp.moments(rows, chosen, count)
    return RunningStatistics(count, mean, variance)


def _hold(flags: Any) -> bool:
    """Whether all flags are True; in traced code this is assumed."""
    return (not isinstance(flags, Tensor) and isinstance(flags, import_jax().core.Tracer)) or bool(flags.all())


def _torch_moments(rows: Tensor, chosen: Tensor | None, _: Tensor) -> tuple[Tensor, Tensor]:
    """The mean and the variance [*shape] of the rows [size, *shape] that are `chosen` [size]; zeros if none is."""
    kept = rows if chosen is None else rows[chosen]
    kept = kept if len(kept) else kept.new_zeros(1, *kept.shape[1:])
    mean = kept.mean(0)
    return mean, (kept - mean).square().mean(0)


_TORCH = SimpleNamespace(
    name="Torch",
    library=torch,
    dtype=torch.float64,  # of moments; counts are int64
    array=lambda value, like, dtype=None: torch.as_tensor(value, dtype=dtype, device=like.device).detach(),
    count=torch.as_tensor,
    moments=_torch_moments,
    total=operator.add,
    share=lambda part, total: part.double() / total.clamp(min=1),
)


@cache
def _jax() -> Any:
    """The functions of `_TORCH` in JAX: in its default precision, with counts in two words of 32 bits."""
    jnp = import_jax().numpy

    def array(value: Any, like: Any, dtype: Any = None) -> Any:
        return jnp.asarray(value.numpy(force=True) if isinstance(value, Tensor) else value, dtype)

    def moments(rows: Any, chosen: Any, count: Any) -> tuple[Any, Any]:
        """Do what `_torch_moments` does, over all rows under a mask, since shapes cannot depend on data."""
        kept = (jnp.ones(len(rows), bool) if chosen is None else chosen).reshape(-1, *[1] * (rows.ndim - 1))
        number = jnp.maximum(count[0], 1).astype(rows.dtype)
        rough = jnp.where(kept, rows, 0).sum(0) / number  # the sum of many rows is rounded, so this is corrected
        apart = jnp.where(kept, rows - ranked(rough, rows), 0)
        missing = apart.sum(0) / number
        return rough + missing, jnp.maximum((apart**2).sum(0) / number - missing**2, 0)

    def number(count: Any) -> Any:
        return count[0].astype(np.float32) + count[1].astype(np.float32) * np.float32(2.0**32)

    return SimpleNamespace(
        name="JAX",
        library=jnp,
        dtype=None,
        array=array,
        count=partial(words.add, np.zeros(2, np.uint32)),
        moments=moments,
        total=lambda one, other: words.add(one, other[0]) + other[1] * np.array([0, 1], np.uint32),
        share=lambda part, total: number(part) / jnp.maximum(number(total), 1),
    )


def _arrays_of(stats: RunningStatistics) -> Any:
    return _TORCH if isinstance(stats.count, Tensor) else _jax()


def merge(one: RunningStatistics, other: RunningStatistics) -> RunningStatistics:
    """The statistics of the observations of both, for example of two workers, on the device of the first.

    Raises TypeError or ValueError if one is of Torch and the other of JAX, or their keys differ.

    >>> import gymnasium, torch
    >>> empty = init(gymnasium.spaces.Box(-1, 1, (1,)))
    >>> one, two = update(empty, torch.ones(3, 1)), update(empty, -torch.ones(1, 1))
    >>> int(merge(one, two).count), merge(one, two).mean["observation"]
    (4, tensor([0.5000], dtype=torch.float64))
    """
    _check("one", one)
    check_alike(one, other)
    xp = _arrays_of(one)
    other = moved(other, one.count.device) if xp is _TORCH else other
    count = xp.total(one.count, other.count)
    share, mean, variance = xp.share(other.count, count), {}, {}
    for name in sorted(one.mean):
        apart = other.mean[name] - one.mean[name]
        mean[name] = one.mean[name] + apart * share
        within = one.variance[name] * (1 - share) + other.variance[name] * share
        variance[name] = within + apart**2 * (share * (1 - share))
    return RunningStatistics(count, mean, variance)


def check_alike(one: RunningStatistics, other: Any) -> None:
    """Raise TypeError if two statistics are of different frameworks, and ValueError for different keys or shapes."""
    _check("other", other)
    first, second = (_arrays_of(stats).name for stats in (one, other))
    if first != second:
        raise TypeError(
            f"the statistics are of {first} and of {second}, expected one framework: start both with the same backend, "
            f"running_statistics.init(space, backend={first.lower()!r})"
        )
    own, got = ({name: tuple(np.shape(each)) for name, each in sorted(stats.mean.items())} for stats in (one, other))
    if own != got:
        raise ValueError(f"the statistics have the keys and shapes {own} and {got}, expected the same: pass those")


def normalize(stats: RunningStatistics, observation: Any, *, clip: float | None = None) -> Any:
    """The observation with mean 0 and variance 1, in its own dtype: ``(x - mean) / sqrt(variance + 1e-8)``.

    The observation is an array [..., *shape] of NumPy, Torch or JAX, whichever library the statistics are in; a dict or
    tuple of arrays; or a batch, whose observations before and after each step are normalised. Other keys stay as they
    are. Integers are normalised in the dtype of the statistics. `clip` is the largest absolute value of the result.

    Raises KeyError if an observation is missing; ValueError for one of another shape, and for a batch without its next
    observations (``compact_obs``).

    >>> import gymnasium, torch
    >>> stats = update(init(gymnasium.spaces.Box(-1, 1, (1,))), torch.tensor([[1.0], [3.0]]))
    >>> normalize(stats, torch.tensor([[3.0]]))
    tensor([[1.]])
    """
    if clip is not None:
        check_number("clip", clip, positive=True, example=10.0)

    def scaled(value: Any, mean: Any, deviation: Any) -> Any:
        result = (value - mean) / deviation
        return result if clip is None else result.clip(-clip, clip)

    return _applied(stats, observation, scaled)


def denormalize(stats: RunningStatistics, observation: Any) -> Any:
    """The inverse of `normalize` without `clip`, with its errors.

    >>> import gymnasium, torch
    >>> stats = update(init(gymnasium.spaces.Box(-1, 1, (1,))), torch.tensor([[1.0], [3.0]]))
    >>> denormalize(stats, torch.tensor([[1.0]]))
    tensor([[3.]])
    """
    return _applied(stats, observation, lambda value, mean, deviation: value * deviation + mean)


def _applied(stats: RunningStatistics, observation: Any, function: Callable[[Any, Any, Any], Any]) -> Any:
    """The observation with ``function(value, mean, deviation)`` in place of each leaf that has statistics."""
    _check("stats", stats)

    def leaf(name: str, value: Any) -> Any:
        if (name := name.removeprefix("next.")) not in stats.mean:
            return value
        value = value if hasattr(value, "dtype") else np.asarray(value)
        own = tuple(stats.mean[name].shape)
        if tuple(value.shape[value.ndim - len(own) :]) != own:
            raise ValueError(f"{name!r} is {list(value.shape)}, expected [..., *{list(own)}]: pass those of the space")
        deviation = (stats.variance[name] + EPSILON) ** 0.5
        return function(value, *(ranked(_like(each, value), value) for each in (stats.mean[name], deviation)))

    if not isinstance(observation, (TensorDictBase, Mapping, tuple)):
        if len(stats.mean) > 1:
            names = sorted(stats.mean)
            raise ValueError(f"there are statistics of {names}, but one array is given: pass a dict of these")
        return leaf(next(iter(stats.mean)), observation)
    if missing := sorted(stats.mean.keys() - {name.removeprefix("next.") for name in _by_name(observation)}):
        raise KeyError(f"the observation lacks {missing}, which the statistics have: pass all keys")
    scaled = map_leaves(leaf, observation)
    if not isinstance(observation, TensorDictBase):
        return scaled
    if observation.get(FINAL, None) is not None:
        raise ValueError("the batch has compact_obs, so no next observations: pass funcollect.next_observations(batch)")
    return observation.copy().update(scaled)


def _like(moment: Any, value: Any) -> Any:
    """A moment in the framework of an observation, and in its dtype if that is floating."""
    if isinstance(value, Tensor):
        own = moment if isinstance(moment, Tensor) else torch.from_numpy(np.array(moment))
        return own.to(value) if value.is_floating_point() else own.to(value.device)
    if isinstance(moment, Tensor):
        moment = moment.numpy(force=True)
    elif isinstance(value, np.ndarray) and not isinstance(moment, import_jax().core.Tracer):
        moment = np.asarray(moment)
    floats = np.issubdtype(value.dtype, np.floating) or value.dtype.name in ("bfloat16", "float16")
    return moment.astype(value.dtype) if floats else moment
