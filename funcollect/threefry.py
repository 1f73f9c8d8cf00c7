"""Threefry 2x32 with 20 rounds (Salmon et al., 2011): two random words from a key of two words and a counter of two.

JAX's default generator uses the same function: ``hashed(key, 0, data)`` is ``jax.random.fold_in(key, data)``. Words
have 32 bits, and come as Python integers, uint32 arrays of NumPy or JAX, or int64 tensors of Torch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint32]
Pair = tuple[Any, Any]

_MASK = 0xFFFFFFFF
_PARITY = 0x1BD11BDA
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
# As arrays: NumPy would convert a scalar in every call.
_SHIFTS = [[(np.array(by, np.uint32), np.array(32 - by, np.uint32)) for by in group] for group in _ROTATIONS]


def hashed(key: Pair, one: Any, two: Any) -> Pair:
    """Hash Python integers, or int64 tensors that broadcast against each other."""
    first, second = key
    third = first ^ second ^ _PARITY
    keys = (first, second, third)
    one, two = one + first & _MASK, two + second & _MASK
    for group in range(5):
        for shift in _ROTATIONS[group % 2]:
            one = one + two & _MASK
            two = (two << shift & _MASK | two >> 32 - shift) ^ one
        one = one + keys[(group + 1) % 3] & _MASK
        two = two + keys[(group + 2) % 3] + group + 1 & _MASK
    return one, two


def hashed_in_jax(key: Pair, one: Any, two: Any) -> Pair:
    """Hash uint32 arrays of JAX that broadcast against each other. The rounds are unrolled, and so fused by XLA."""
    keys = (*key, key[0] ^ key[1] ^ np.uint32(_PARITY))
    one, two = one + keys[0], two + keys[1]
    for group in range(5):
        for shift in _ROTATIONS[group % 2]:
            one = one + two
            two = (two << np.uint32(shift) | two >> np.uint32(32 - shift)) ^ one
        one = one + keys[(group + 1) % 3]
        two = two + keys[(group + 2) % 3] + np.uint32(group + 1)
    return one, two


def hashed_in_numpy(key: tuple[Words, Words], one: Words, two: Words) -> tuple[Words, Words]:
    """Hash uint32 arrays that broadcast against each other."""
    shape = np.broadcast_shapes(key[0].shape, one.shape, two.shape)
    keys = (*key, key[0] ^ key[1] ^ np.uint32(_PARITY))
    first, second, spare = (np.empty(shape, np.uint32) for _ in range(3))
    add, left, right, either, xor = np.add, np.left_shift, np.right_shift, np.bitwise_or, np.bitwise_xor
    add(one, keys[0], first)
    add(two, keys[1], second)
    for group in range(5):
        for shift, rest in _SHIFTS[group % 2]:
            add(first, second, first)
            left(second, shift, spare)
            right(second, rest, second)
            either(second, spare, second)
            xor(second, first, second)
        add(first, keys[(group + 1) % 3], first)
        add(second, keys[(group + 2) % 3] + np.uint32(group + 1), second)
    return first, second
