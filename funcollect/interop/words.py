"""64-bit integers under 32-bit JAX: two words, low and high, which Torch views as one int64 without a copy."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from funcollect.interop.jax_setup import import_jax


def int64(value: Any) -> Any:
    """Integers [...] as int64 if JAX has it, else as words [..., 2] with the sign in the high one."""
    jax = import_jax()
    if jax.config.jax_enable_x64:
        return value.astype(jax.numpy.int64)
    value = value.astype(jax.numpy.int32)
    return jax.numpy.stack([value, value >> 31], -1)


def trajectory_ids(lane: Any, episode: Any, total_lanes: int) -> Any:
    """Trajectory ids as words [..., 2] int32 (see `funcollect.core.state.trajectory_ids`)."""
    jnp = import_jax().numpy
    lane = lane.astype(jnp.uint32)
    low, high = product(episode.astype(jnp.uint32), total_lanes)
    total = low + lane % total_lanes
    high = high + (total < low).astype(jnp.uint32) + ((lane // total_lanes) << 8)
    return jnp.stack([total, high], -1).view(jnp.int32)


def add(words: Any, number: Any) -> Any:
    """Unsigned words [2] plus a number that is not negative, for counts of steps that may exceed 32 bits."""
    jnp = import_jax().numpy
    low = words[0] + jnp.uint32(number)
    return jnp.stack([low, words[1] + (low < words[0]).astype(jnp.uint32)])


def number(words: Any) -> int:
    """The Python integer of unsigned words [2]."""
    low, high = map(int, np.asarray(words))  # one read of the array; one for each element would cost several times more
    return high << 32 | low


def from_number(value: int) -> npt.NDArray[np.uint32]:
    """Unsigned words [2] of a Python integer."""
    return np.array([value & 0xFFFFFFFF, value >> 32], np.uint32)


def product(one: Any, other: int) -> tuple[Any, Any]:
    """The low and the high word of the products of uint32 numbers [...] with a number that fits into 32 bits."""
    (one_high, one_low), (high, low) = ((each >> 16, each & 0xFFFF) for each in (one, other))
    crossed, across = one_low * high, one_high * low
    lowest = one_low * low
    middle = (lowest >> 16) + (crossed & 0xFFFF) + (across & 0xFFFF)
    return (lowest & 0xFFFF) | (middle << 16), one_high * high + (crossed >> 16) + (across >> 16) + (middle >> 16)


def as_int64(words: torch.Tensor) -> torch.Tensor:
    """int64 [...] over the memory of words [..., 2]."""
    return words.view(torch.int64).squeeze(-1)


def as_words(numbers: torch.Tensor) -> torch.Tensor:
    """Words [..., 2] int32, low and high, over the memory of contiguous int64 [...]: the inverse of `as_int64`."""
    return numbers.unsqueeze(-1).view(torch.int32)
