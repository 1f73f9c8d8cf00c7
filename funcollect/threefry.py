"""Threefry 2x32 with 20 rounds (Salmon et al., 2011): two random words from a key of two words and a counter of two.

JAX's default generator uses the same function: ``hashed(key, 0, data)`` is ``jax.random.fold_in(key, data)``. Words
have 32 bits: Python integers, uint32 arrays of NumPy or JAX, or int64 tensors of Torch. On a GPU, where Torch's
operations would launch a hundred kernels for one hash, a single kernel does all; CUDA compiles it at its first use.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from funcollect.tree import ranked

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
    """Hash uint32 arrays of JAX that broadcast against each other. The rounds are unrolled, but traced only once."""
    words: Pair = _rounds_in_jax()(key, one, two)
    return words


@cache
def _rounds_in_jax() -> Any:
    import jax  # which has made the arrays

    return jax.jit(_rounds)


def _rounds(key: Pair, one: Any, two: Any) -> Pair:
    widest = max(one, two, *key, key=lambda each: each.ndim)
    one, two, first, second = (ranked(each, widest) for each in (one, two, *key))
    keys = (first, second, first ^ second ^ np.uint32(_PARITY))
    one, two = one + first, two + second
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


_ROUNDS = """
    unsigned int keys[3] = {(unsigned int)first, (unsigned int)second, (unsigned int)(first ^ second) ^ 0x1BD11BDA};
    unsigned int one = (unsigned int)(draw | number >> 32 << 16) + keys[0], two = (unsigned int)number + keys[1];
    const int shifts[8] = {13, 15, 26, 6, 17, 29, 16, 24};
    #pragma unroll
    for (int group = 0; group < 5; ++group) {
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int shift = shifts[group % 2 * 4 + i];
            one += two;
            two = (two << shift | two >> (32 - shift)) ^ one;
        }
        one += keys[(group + 1) % 3];
        two += keys[(group + 2) % 3] + group + 1;
    }
"""
_KERNELS = {
    "words": f"""template <typename T>
void threefry_words(T first, T second, T number, T draw, T& low, T& high) {{{_ROUNDS}
    low = one;
    high = two;
}}""",
    "uniform": f"""template <typename T>
T threefry_uniform(T first, T second, T number, T draw) {{{_ROUNDS}
    const long long bits = (long long)one << 20 | two >> 12;
    return __double_as_longlong(((double)bits + 0.5) * {2.0**-52!r});
}}""",
} | {
    kind: f"""template <typename T>
T threefry_{kind}(T first, T second, T number, T draw) {{{_ROUNDS}
    const float x = ((float)(one >> 9) + 0.5f) * {2.0**-23!r}f;
    const float y = ((float)(two >> 9) + 0.5f) * {2.0**-23!r}f;
    return (long long)__float_as_int({result.format("y")}) << 32 | (unsigned int)__float_as_int({result.format("x")});
}}"""
    for kind, result in (("uniform32", "{}"), ("gumbel", "-logf(-logf({}))"))
}


def is_on_gpu(tensor: Tensor) -> bool:
    """Whether the kernels take a tensor: on a GPU, and of no subclass, such as tensors without data."""
    return tensor.is_cuda and type(tensor) is Tensor and _can_compile(tensor.device)


def on_gpu(kind: str, key: Pair, number: Tensor, draw: Tensor) -> Any:
    """The ``words`` ``hashed(key, draw | number >> 32 << 16, number & 0xFFFFFFFF)`` of int64 tensors, or numbers.

    ``uniform`` returns a float64 number in (0, 1) for the upper 52 bits of each pair of words; ``uniform32`` and
    ``gumbel`` return two float32 numbers for each pair, so that the last dimension is twice as long.
    """
    made = _kernel(kind)(*key, number, draw)
    return made if kind == "words" else made.view(torch.float64 if kind == "uniform" else torch.float32)


@cache
def _kernel(kind: str) -> Any:
    from torch.cuda import jiterator

    if kind == "words":
        return jiterator._create_multi_output_jit_fn(_KERNELS[kind], num_outputs=2)
    return jiterator._create_jit_fn(_KERNELS[kind])


@cache
def _can_compile(device: torch.device) -> bool:
    """Whether this build of Torch can compile the kernels; without CUDA's compiler, operations are used instead."""
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    try:
        for kind in _KERNELS:
            on_gpu(kind, (zero, zero), zero, zero)
    except RuntimeError:
        return False
    return True
