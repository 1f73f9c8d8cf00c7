"""64-bit integers where JAX has 32 bits: two words, low and high, which Torch views as one int64 without a copy."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from funcollect.interop.jax_setup import import_jax


def sign_extended(value: Any) -> Any:
    """Words [..., 2] of int32 numbers [...]."""
    jnp = import_jax().numpy
    value = value.astype(jnp.int32)
    return jnp.stack([value, value >> 31], -1)


def add(words: Any, number: int) -> Any:
    """Unsigned words [2] plus a small number: how many steps there were, which 32 bits might not hold."""
    jnp = import_jax().numpy
    low = words[0] + jnp.uint32(number)
    return jnp.stack([low, words[1] + (low < words[0]).astype(jnp.uint32)])


def number(words: Any) -> int:
    """The Python integer of unsigned words [2]."""
    low, high = map(int, np.asarray(words))  # one read: `int` of each would cost several times more
    return high << 32 | low


def from_number(value: int) -> Any:
    """Unsigned words [2] of a Python integer."""
    jnp = import_jax().numpy
    return jnp.array([value & 0xFFFFFFFF, value >> 32], jnp.uint32)


def product(one: Any, other: int) -> tuple[Any, Any]:
    """The low and the high word of the products of uint32 numbers [...] with one that 16 bits hold."""
    low, high = (one & 0xFFFF) * other, (one >> 16) * other
    total = low + (high << 16)
    carry = (total < low).astype(total.dtype)
    return total, (high >> 16) + carry


def as_int64(words: torch.Tensor) -> torch.Tensor:
    """int64 [...] over the memory of words [..., 2]."""
    return words.view(torch.int64).squeeze(-1)


def as_words(numbers: torch.Tensor) -> torch.Tensor:
    """Words [..., 2] int32, low and high, over the memory of contiguous int64 [...]: the inverse of `as_int64`.

    >>> as_words(torch.tensor([2**40 + 7, -1]))
    tensor([[  7, 256],
            [ -1,  -1]], dtype=torch.int32)
    """
    return numbers.unsqueeze(-1).view(torch.int32)
