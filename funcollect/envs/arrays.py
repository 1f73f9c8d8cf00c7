"""The same array functions in JAX, for one lane, and in Torch, for all lanes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from funcollect.errors import EnvError
from funcollect.interop.jax_setup import import_jax
from funcollect.messages import form
from funcollect.protocols import Backend
from funcollect.specs import torch_dtype
from funcollect.tree import NAMESPACE


class ArrayFunctions(NamedTuple):
    """Functions of `jax.numpy` or of Torch."""

    module: Any  # `jax.numpy` or `torch`
    lanes: tuple[int, ...]  # the leading dimensions of all arrays: [P] in Torch, none in JAX
    zeros: Callable[..., Any]  # of a shape and a NumPy dtype
    asarray: Callable[[Any], Any]
    cast: Callable[..., Any]  # of a value and a NumPy dtype


def arrays_like(backend: Backend, observation: Any) -> ArrayFunctions:
    """The functions for this backend; in Torch they have the device and the number of lanes of an observation."""
    if backend == "jax":
        jnp = import_jax().numpy
        return ArrayFunctions(jnp, (), jnp.zeros, jnp.asarray, lambda value, dtype: jnp.asarray(value).astype(dtype))
    like = next(iter(optree.tree_leaves(observation, namespace=NAMESPACE)), None)
    if not isinstance(like, Tensor):
        raise EnvError(f"the observation of an environment in Torch holds {form(like)}, expected tensors: return these")
    return ArrayFunctions(
        module=torch,
        lanes=(*like.shape[:1],),
        zeros=lambda shape, dtype: like.new_zeros(shape, dtype=torch_dtype(dtype)),
        asarray=lambda value: torch.as_tensor(value, device=like.device),
        cast=lambda value, dtype: torch.as_tensor(value, dtype=torch_dtype(dtype), device=like.device),
    )
