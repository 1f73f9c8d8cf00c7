"""The functions that heads, random actions and populations need, under the same names for Torch and for JAX."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import optree
import torch
from gymnasium import spaces

from funcollect.interop.jax_setup import import_jax
from funcollect.keys import Noise
from funcollect.specs import ActionSpec
from funcollect.tree import NAMESPACE, ranked, select

_WHOLE_VECTORS = 64  # rows


def _log_categorical(logits: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Transposed for speed, and padded to whole vectors: Torch rounds a remainder otherwise, so a cut would show."""
    rows = logits.reshape(-1, logits.shape[-1])
    count, choices = rows.shape
    columns = rows.new_zeros(choices, -(-count // _WHOLE_VECTORS) * _WHOLE_VECTORS)
    columns[:, :count] = rows.T
    chosen = torch.log_softmax(columns, 0)[:, :count].gather(0, index.reshape(1, -1))
    return chosen.reshape(index.shape)


# Functions that Torch and JAX have under the same names.
_SHARED = ("tanh", "log", "log1p", "exp", "where", "minimum", "maximum", "broadcast_to")


def _constant(value: Any, device: torch.device) -> torch.Tensor:
    """A number or NumPy array as a tensor; on a GPU the same one at each call, since a copy would wait for the GPU."""
    if device.type == "cpu" or not isinstance(value, np.ndarray):
        return torch.as_tensor(value, device=device)
    return _kept(value.tobytes(), value.dtype.str, value.shape, device)


@lru_cache(256)
def _kept(data: bytes, dtype: str, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(np.frombuffer(data, dtype).reshape(shape), device=device)


def _integers_between(low: Any, high: Any, offset: torch.Tensor) -> torch.Tensor:
    """The integers ``low + floor(offset)``, at most `high`: int64 from NumPy's int64 and a float32 `offset`."""
    bounds = [_constant(each, offset.device) for each in (low, high)]
    return torch.minimum(bounds[0] + offset.to(torch.int64), bounds[1])


def _scan(step: Callable[[Any, Any], tuple[Any, Any]], carry: Any, rows: Any) -> tuple[Any, Any]:
    """The same as `jax.lax.scan`."""
    leaves, treespec = optree.tree_flatten(rows, namespace=NAMESPACE)
    outputs = []
    for row in zip(*map(torch.unbind, leaves), strict=True):
        carry, output = step(carry, optree.tree_unflatten(treespec, row))
        outputs.append(output)
    return carry, TORCH.map(lambda *leaves: torch.stack(leaves), *outputs)


TORCH = SimpleNamespace(
    **{name: getattr(torch, name) for name in _SHARED},
    gumbel_max=lambda logits, noise: (logits if noise is None else logits + noise).argmax(-1),
    log_categorical=_log_categorical,  # the log-probability of each index [...] under logits [..., n]
    log_softmax=lambda x: torch.log_softmax(x, -1),
    softplus=torch.nn.functional.softplus,
    stack=lambda parts: torch.stack(parts, -1),
    concatenate=lambda parts: torch.cat(parts, -1),
    one_hot=torch.nn.functional.one_hot,
    broadcast=torch.broadcast_tensors,
    clip=torch.clamp,
    floor_int=lambda x: x.to(torch.int64),
    as_float=lambda x: x.float(),
    ndtri=lambda x: torch.special.ndtri(x.double()).float(),
    constant=lambda value, like: _constant(value, like.device),
    full=lambda shape, value, like: torch.full(shape, value, device=like.device),
    integers=(-(2**62), 2**62),  # whose difference fits into 64 bits
    integers_between=_integers_between,
    cast=torch.Tensor.to,
    join=torch.cat,  # along the first axis
    leaves=partial(optree.tree_leaves, namespace=NAMESPACE),
    map=partial(optree.tree_map, namespace=NAMESPACE),  # over the leaves of pytrees
    select=select,  # the lanes of a mask [P] from one pytree, the rest from another
    scan=_scan,
    vmap=partial(torch.func.vmap, randomness="different"),
)


@cache
def jax_numerics() -> Any:
    """The same functions on JAX arrays."""
    import jax
    import jax.numpy as jnp

    def gumbel_max(logits: Any, noise: Any) -> Any:
        """The index [...] of the first largest sum of logits and noise [..., n]; without noise, of the largest logit.

        Over lanes in the last dimension, six times as fast as over few choices, and in two steps, as XLA wants.
        """
        x = jnp.moveaxis(logits, -1, 0) + (0 if noise is None else jnp.moveaxis(noise, -1, 0))
        index = jnp.arange(len(x), dtype=jnp.int32).reshape(-1, *[1] * (x.ndim - 1))
        return jnp.where(x < x.max(0, keepdims=True), len(x), index).min(0)

    def select(mask: Any, chosen: Any, other: Any) -> Any:
        def pick(one: Any, two: Any) -> Any:
            rows = max(len(one), len(two)) // len(mask)  # for each lane: more than one where agents have rows
            row_mask = mask if rows == 1 else jnp.repeat(mask, rows)
            return jnp.where(row_mask.reshape(-1, *[1] * (one.ndim - 1)), one, two)

        return jax.tree.map(pick, chosen, other)

    def log_categorical(logits: Any, index: Any) -> Any:
        return jnp.take_along_axis(jax.nn.log_softmax(logits), index[..., None], -1)[..., 0]

    def integers_between(low: Any, high: Any, offset: Any) -> Any:
        """As in Torch, in int32: the sum wraps around, since an offset may need 32 bits without a sign."""
        half = np.float32(2**31)
        wide = offset >= half
        words = jnp.where(wide, offset - half, offset).astype(jnp.int32) + jnp.where(wide, np.int32(-(2**31)), 0)
        most = ranked((high - low).astype(np.uint32), offset)
        offsets = jnp.minimum(words.astype(jnp.uint32), most).astype(jnp.int32)
        return ranked(low.astype(np.int32), offset) + offsets

    return SimpleNamespace(
        **{name: getattr(jnp, name) for name in _SHARED},
        gumbel_max=gumbel_max,
        log_categorical=log_categorical,
        log_softmax=jax.nn.log_softmax,
        softplus=jax.nn.softplus,
        stack=lambda parts: jnp.stack(parts, -1),
        concatenate=lambda parts: jnp.concatenate(parts, -1),
        one_hot=lambda index, count: jax.nn.one_hot(index, count, dtype=jnp.int32),
        broadcast=jnp.broadcast_arrays,
        clip=jnp.clip,
        floor_int=lambda x: x.astype(jnp.int32),
        as_float=lambda x: x.astype(jnp.float32),
        ndtri=jax.scipy.special.ndtri,
        constant=lambda value, like: ranked(jnp.asarray(value), like),
        full=lambda shape, value, like: jnp.full(shape, value),
        integers=(-(2**31), 2**31 - 1),
        integers_between=integers_between,
        cast=jnp.astype,
        join=jnp.concatenate,
        leaves=jax.tree.leaves,
        map=jax.tree.map,
        select=select,
        scan=jax.lax.scan,
        vmap=jax.vmap,
    )


def of_kind(noise: Noise, uniform: Any) -> Any:
    """Numbers of the kind of a policy's noise, from as many uniform ones, in Torch or JAX."""
    xp: Any = TORCH if isinstance(uniform, torch.Tensor) else jax_numerics()
    if noise.kind == "gumbel":
        return -xp.log(-xp.log(uniform))
    return xp.ndtri(uniform) if noise.kind == "normal" else uniform


def encode_choices(xp: Any, chosen: Sequence[Any], spec: ActionSpec) -> Any:
    """An action [..., *spec.shape] from indices that begin at 0, one array [...] per component."""
    if spec.one_hot:
        return xp.concatenate([xp.one_hot(index, count) for index, count in zip(chosen, spec.categories, strict=True)])
    start = spec.start
    if isinstance(spec.space, spaces.Discrete):
        return chosen[0] + int(start) if start else chosen[0]
    stacked = xp.stack(chosen)
    shaped = stacked.reshape(*stacked.shape[:-1], *spec.shape)
    return shaped + xp.constant(start, shaped) if start.any() else shaped


def in_32_bits(xp: Any, array: Any) -> Any:
    """The array, as float32 if it has at most 16 bits: log-probabilities in 16 bits are off by up to 0.02."""
    if array.dtype.itemsize >= 4:
        return array
    if xp is not TORCH:  # without a barrier, a compiled step may leave out the rounding to 16 bits
        array = import_jax().lax.optimization_barrier(array)
    return xp.as_float(array)
