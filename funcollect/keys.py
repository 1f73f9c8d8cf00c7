"""Compute random numbers from keys: seeds of episodes, and the noise of a whole rollout.

A key is a ``uint32[2]`` array, the high and low words of a 64-bit seed (the layout of a legacy JAX key). Every random
number is a pure function of the key, a purpose, a lane and an episode or step, so no draw depends on earlier draws.

There are two counter-based generators. Philox 4x64 (Salmon et al., 2011, as in NumPy) draws the noise of a whole
rollout at once. SplitMix64 (Steele et al., 2014) computes single words: in Python integers for one lane, in int64
tensors for many, with equal results.
"""

from __future__ import annotations

import math
import secrets
import threading
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Key = npt.NDArray[np.uint32]  # [2]

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS = (30, 27, 31)
_WORDS_PER_BLOCK = 8  # one Philox block is 4 x 64 bits


class Purpose(IntEnum):
    """The purpose of a draw; draws for different purposes are independent."""

    RESET = 1
    NOISE = 2
    RANDOM_ACTION = 3
    GENERATOR = 4
    DYNAMICS = 5
    SAMPLE = 6


@dataclass(frozen=True, kw_only=True)
class Noise:
    """The noise that a policy needs at each step, which is drawn before the rollout.

    ``uniform`` lies in (0, 1); ``gumbel`` and ``normal`` are standard; all are float32, one array of `shape` per lane.
    ``key`` is one ``uint32[2]`` for all lanes (a JAX function's own randomness), and has no shape.
    """

    kind: Literal["uniform", "gumbel", "normal", "key"]
    shape: tuple[int, ...] = ()


def key_from_seed(seed: int | None) -> Key:
    """The key of an integer seed in ``[0, 2**64)``; None draws fresh entropy from the system.

    >>> key_from_seed(7)
    array([0, 7], dtype=uint32)
    """
    if seed is None:
        seed = secrets.randbits(32)
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)):
        raise TypeError(f"seed is {type(seed).__name__}, expected an int or None: pass for example seed=0")
    if not 0 <= seed <= _MASK:
        raise ValueError(f"seed is {seed}, expected 0 <= seed < 2**64: take it modulo 2**64")
    return np.array([int(seed) >> 32, int(seed) & 0xFFFFFFFF], np.uint32)


def seed_of(key: Key) -> int:
    """The integer seed of a key: the inverse of `key_from_seed`."""
    return int(key[0]) << 32 | int(key[1])


def fold(key: Key, *words: int) -> int:
    """A 64-bit word that depends on the key and on all `words`."""
    word = seed_of(key)
    for data in words:
        word = fold_in(word, data)
    return word


def fold_in(word: int, data: int) -> int:
    """A 64-bit word that depends on another word and on `data`: one round of `fold`."""
    word = (word + _GOLDEN * (data + 1)) & _MASK
    word = ((word ^ word >> 30) * _MULTIPLIERS[0]) & _MASK
    word = ((word ^ word >> 27) * _MULTIPLIERS[1]) & _MASK
    return word ^ word >> 31


def _signed(word: int) -> int:
    """Return a 64-bit word as the int64 of the same bits."""
    return word - (1 << 64) if word >= 1 << 63 else word


def _mix(words: Tensor) -> Tensor:
    """Return the output function of SplitMix64 over int64 words."""
    for shift, multiplier in zip(_SHIFTS, (*_MULTIPLIERS, 1), strict=True):
        words = (words ^ ((words >> shift) & ((1 << (64 - shift)) - 1))) * _signed(multiplier)
    return words


@dataclass(frozen=True)
class LaneKeys:
    """The randomness of P lanes at one moment: the start of an episode, or one step.

    Attributes:
        key: the run's key.
        purpose: the purpose of the draws.
        lanes: [P] int64, the lanes' ids.
        numbers: [P] int64, the episodes' numbers, or the number of the step.
    """

    key: Key
    purpose: Purpose
    lanes: Tensor
    numbers: Tensor | int

    def __len__(self) -> int:
        """P."""
        return len(self.lanes)

    def uniform(self, count: int) -> Tensor:
        """[P, count] float64 uniform numbers in (0, 1), on the lanes' device: the same at every call."""
        words = torch.full_like(self.lanes, _signed(fold(self.key, self.purpose)))
        draws = torch.arange(count, dtype=torch.int64, device=words.device)
        words = _mix(words + _signed(_GOLDEN) * (self.lanes + 1))
        if isinstance(self.numbers, int):
            words = _mix(words + _signed(_GOLDEN * (self.numbers + 1) & _MASK))
        else:
            words = _mix(words + _signed(_GOLDEN) * (self.numbers + 1))
        words = _mix(words[:, None] + _signed(_GOLDEN) * (draws + 1))
        return (((words >> 11) & ((1 << 53) - 1)).double() + 0.5) * 2.0**-53


class _Thread(threading.local):
    """A thread's generator. It is kept, since making one costs more than its draws here: it reads system entropy."""

    def __init__(self) -> None:
        self.philox = np.random.Philox(0)


_THREAD = _Thread()


def random_words(key: Key, purpose: Purpose, lane: int, start: int, length: int, width: int) -> npt.NDArray[np.uint32]:
    """Philox words for the steps ``start … start + length - 1``: [length, width] uint32.

    Step ``s`` always gets the same words, in any range. `lane` is the first lane's id.
    """
    blocks = math.ceil(width / _WORDS_PER_BLOCK)
    generator = _THREAD.philox
    generator.state = {
        "bit_generator": "Philox",
        "state": {
            "counter": np.array([start * blocks, 0, 0, 0], np.uint64),
            "key": np.array([seed_of(key), int(purpose) << 48 | lane], np.uint64),
        },
        "buffer": np.zeros(4, np.uint64),
        "buffer_pos": 4,  # the buffer is used up
        "has_uint32": 0,
        "uinteger": 0,
    }
    raw = generator.random_raw(length * blocks * 4)
    return raw.view(np.uint32).reshape(length, blocks * _WORDS_PER_BLOCK)[:, :width]


def uniforms(words: npt.NDArray[np.uint32]) -> npt.NDArray[np.float32]:
    """Float32 numbers in (0, 1), both ends excluded, from uint32 words."""
    centred = (words >> 9).astype(np.float32) + np.float32(0.5)
    scaled: npt.NDArray[np.float32] = centred * np.float32(2.0**-23)
    return scaled


def normals(uniform: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Standard normal float32 numbers from uniform ones, by the inverse of the distribution function."""
    normal: npt.NDArray[np.float32] = torch.special.ndtri(torch.from_numpy(uniform).double()).float().numpy()
    return normal


def draw_ahead(noise: Noise, key: Key, lane: int, num_envs: int, start: int, length: int) -> Tensor:
    """The noise of a whole rollout: [length, P, *shape] float32, or [length, 2] uint32 keys."""
    if noise.kind == "key":
        return torch.from_numpy(random_words(key, Purpose.NOISE, lane, start, length, 2).copy())
    width = num_envs * math.prod(noise.shape)
    drawn = uniforms(random_words(key, Purpose.NOISE, lane, start, length, width))
    if noise.kind == "gumbel":
        drawn = -np.log(-np.log(drawn))
    elif noise.kind == "normal":
        drawn = normals(drawn)
    return torch.from_numpy(drawn.reshape(length, num_envs, *noise.shape))


class torch_generator:  # noqa: N801  (used as a function; a generator function costs a microsecond more per step)
    """Run Torch's global CPU generator from `state`, which is advanced in place; restore it afterwards."""

    def __init__(self, state: Tensor) -> None:
        self._state = state

    def __enter__(self) -> None:
        self._before = torch.get_rng_state()
        torch.set_rng_state(self._state)

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None:
            self._state.copy_(torch.get_rng_state())
        torch.set_rng_state(self._before)


def generator_state(seed: int) -> Tensor:
    """The state of a CPU generator seeded with `seed` (64 bits)."""
    return torch.Generator().manual_seed(seed).get_state()
