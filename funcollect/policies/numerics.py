"""The few functions that a head needs, once for Torch and once for JAX, under the same names."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import torch

_WHOLE_VECTORS = 64  # rows


def _log_categorical(logits: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Choices are put first: Torch then works on many rows at once, not on the few numbers of each.

    The rows are padded to whole vectors, since Torch rounds a remainder differently and a cut of a run would show.
    """
    rows = logits.reshape(-1, logits.shape[-1])
    columns = rows.new_zeros(rows.shape[1], -(-len(rows) // _WHOLE_VECTORS) * _WHOLE_VECTORS)
    columns[:, : len(rows)] = rows.T
    chosen = torch.log_softmax(columns, 0)[:, : len(rows)].gather(0, index.reshape(1, -1))
    return chosen.reshape(index.shape)


TORCH = SimpleNamespace(
    log_categorical=_log_categorical,  # the log-probability of each index [...] under logits [..., n]
    softplus=torch.nn.functional.softplus,
    tanh=torch.tanh,
    log=torch.log,
    log1p=torch.log1p,
    exp=torch.exp,
    where=torch.where,
    stack=lambda parts: torch.stack(parts, -1),
    concatenate=lambda parts: torch.cat(parts, -1),
    one_hot=lambda index, count: torch.nn.functional.one_hot(index, count),
    broadcast=torch.broadcast_tensors,
    clip=torch.clamp,
    floor_int=lambda x: x.to(torch.int64),
    constant=lambda value, like: torch.as_tensor(value, device=like.device),
)


@cache
def jax_numerics() -> Any:
    """The same functions on JAX arrays."""
    import jax
    import jax.numpy as jnp

    return SimpleNamespace(
        log_categorical=lambda logits, index: jnp.take_along_axis(jax.nn.log_softmax(logits), index[..., None], -1)[
            ..., 0
        ],
        softplus=jax.nn.softplus,
        tanh=jnp.tanh,
        log=jnp.log,
        log1p=jnp.log1p,
        exp=jnp.exp,
        where=jnp.where,
        stack=lambda parts: jnp.stack(parts, -1),
        concatenate=lambda parts: jnp.concatenate(parts, -1),
        one_hot=lambda index, count: jax.nn.one_hot(index, count, dtype=jnp.int32),
        broadcast=jnp.broadcast_arrays,
        clip=jnp.clip,
        floor_int=lambda x: x.astype(jnp.int32),
        constant=lambda value, like: jnp.asarray(value),
    )
