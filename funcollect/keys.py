"""Computes random numbers from keys, by the formulas of docs/concepts/randomness.md: seeds of episodes, and noise.

A key is a ``uint32[2]`` array, the high and low words of a 64-bit seed (the layout of a legacy JAX key). Every random
number depends only on the run's key, a purpose, a lane, and an episode or step. It does not depend on earlier draws, on
the grouping of lanes, or on the code that computes it (NumPy, Torch, or a JAX program).
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from funcollect.threefry import Words, hashed, hashed_in_numpy, is_on_gpu, on_gpu

Key = npt.NDArray[np.uint32]  # [2]

_LOW = 0xFFFFFFFF
_HASHES = 1 << 14  # at a time, so that they stay in the processor's cache
_HASHES_ON_DEVICE = 1 << 22  # at a time, so that each intermediate result takes 32 MB
_ON_CPU = torch.default_generator
_DRAWS: dict[tuple[torch.device, int], Tensor] = {}  # the numbers 1, 2, … on GPUs, by device and count
_KEYS_ON_DEVICE: Any = WeakIdKeyDictionary()  # of the lanes [P] of a run, by its seed and the purpose
_FEW = 6  # hashes; fewer are faster with Python integers than with NumPy


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
    """The noise that a policy needs at each step; it is drawn before the rollout.

    ``uniform`` lies in (0, 1), ``gumbel`` and ``normal`` are standard; all are float32, one array of `shape` per lane.
    ``keys`` is one ``uint32[2]`` per lane; ``key`` is the first lane's, for a JAX function that draws by itself.

    >>> import funcollect as fc
    >>> fc.Noise(kind="gumbel", shape=(4,)).words
    4
    """

    kind: Literal["uniform", "gumbel", "normal", "key", "keys"]
    shape: tuple[int, ...] = ()

    @property
    def words(self) -> int:
        """The number of random words for one lane and step."""
        return 2 if self.kind in ("key", "keys") else math.prod(self.shape)


def key_from_seed(seed: int | None) -> Key:
    """The key of an integer seed in ``[0, 2**64)``; None draws fresh entropy from the system."""
    if seed is None:
        seed = secrets.randbits(32)
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)):
        raise TypeError(f"seed is {type(seed).__name__}, expected an int or None: pass for example seed=0")
    if not 0 <= seed < 1 << 64:
        raise ValueError(f"seed is {seed}, expected 0 <= seed < 2**64: take it modulo 2**64")
    return np.array([int(seed) >> 32, int(seed) & _LOW], np.uint32)


def seed_of(key: Any) -> int:
    """The integer seed of a key: the inverse of `key_from_seed`."""
    return int(key[0]) << 32 | int(key[1])


def fold(key: Any, *data: int) -> tuple[int, int]:
    """The key, as two ints, derived from a key and from each 32-bit word of `data` in turn."""
    words = int(key[0]), int(key[1])
    for word in data:
        words = hashed(words, 0, word)
    return words


@lru_cache(maxsize=256)
def _lane_keys(seed: int, purpose: Purpose, lanes: bytes) -> tuple[Words, Words]:
    one, two = (np.array([word], np.uint32) for word in fold(key_from_seed(seed), purpose))
    ids = np.frombuffer(lanes, np.int64).astype(np.uint32)
    return hashed_in_numpy((one, two), np.zeros(1, np.uint32), ids)


def lane_keys(key: Key, purpose: Purpose, lanes: npt.NDArray[np.int64]) -> tuple[Words, Words]:
    """The keys of lanes [P] for a purpose: their first and their second words, each [P]."""
    return _lane_keys(seed_of(key), purpose, lanes.tobytes())


def _keys_on_device(key: Key, purpose: Purpose, lanes: Tensor) -> tuple[Tensor, Tensor]:
    """Do what `lane_keys` does for lanes on a device, in int64 tensors there; cached: it takes a hundred kernels."""
    known: dict[Any, tuple[Tensor, Tensor]] = _KEYS_ON_DEVICE.setdefault(lanes, {})
    which = seed_of(key), purpose
    if which not in known:
        known[which] = hashed(fold(key, purpose), 0, lanes)
    return known[which]


def random_words(keys: tuple[Words, Words], numbers: npt.NDArray[np.int64], width: int) -> Words:
    """The random words [T, P, width] of lanes with these keys [P], at steps or episodes `numbers` [T, P] or [T, 1]."""
    draws, length, lanes = -(-width // 2), len(numbers), len(keys[0])
    if length * lanes * draws < _FEW:
        by_lane = [*zip(keys[0].tolist(), keys[1].tolist(), strict=True)]
        few = [
            hashed(key, draw | number >> 32 << 16, number & _LOW)
            for row in np.broadcast_to(numbers, (length, lanes)).tolist()
            for key, number in zip(by_lane, row, strict=True)
            for draw in range(1, 1 + draws)
        ]
        return np.array(few, np.uint32).reshape(length, lanes, 2 * draws)[..., :width]
    words = np.empty((length, lanes, draws, 2), np.uint32)
    counters = numbers.astype(np.uint64)[..., None]
    low, high = (counters & _LOW).astype(np.uint32), (counters >> 32 << 16).astype(np.uint32)
    one = np.arange(1, 1 + draws, dtype=np.uint32) | high
    rows = max(1, _HASHES // (lanes * draws))
    for at in range(0, length, rows):
        part = slice(at, at + rows)
        pair = hashed_in_numpy((keys[0][:, None], keys[1][:, None]), one[part], low[part])
        words[part, ..., 0], words[part, ..., 1] = pair
    return words.reshape(length, lanes, 2 * draws)[..., :width]


def draw_ahead(
    noise: Noise,
    key: Key,
    lanes: npt.NDArray[np.int64] | Tensor,
    start: int,
    length: int,
    purpose: Purpose = Purpose.NOISE,
    draw: Callable[..., Words] = random_words,
) -> Tensor:
    """The noise of a whole rollout: [length, P, *shape] float32, or uint32 keys [length, P, 2] or [length, 2].

    For a tensor `lanes` it is drawn on its device, where logarithms may round differently; else `draw` draws the words.
    """
    drawing = lanes[:1] if noise.kind == "key" else lanes
    if isinstance(drawing, Tensor):
        numbers = torch.arange(start, start + length, device=drawing.device)
        return draw_on_device(noise, _keys_on_device(key, purpose, drawing), numbers)
    steps = np.arange(start, start + length)[:, None]
    words = draw(lane_keys(key, purpose, drawing), steps, noise.words)
    if noise.kind == "key":
        return torch.from_numpy(words[:, 0])
    if noise.kind == "keys":
        return torch.from_numpy(words)
    drawn = ((words >> 9).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-23)  # in (0, 1), without its ends
    if noise.kind == "gumbel":
        drawn = -np.log(-np.log(drawn))
    elif noise.kind == "normal":
        drawn = torch.special.ndtri(torch.from_numpy(drawn).double()).float().numpy()
    return torch.from_numpy(drawn.reshape(length, len(lanes), *noise.shape))


def draw_on_device(noise: Noise, keys: tuple[Tensor, Tensor], steps: Tensor) -> Tensor:
    """The noise that `draw_ahead` returns, for steps with these numbers [T], on the device of the lanes' keys [P]."""
    draws = -(-noise.words // 2)
    at_a_time = max(1, _HASHES_ON_DEVICE // max(len(keys[0]) * draws, 1))
    parts = [_part_on_device(noise, keys, part, draws) for part in torch.split(steps[:, None], at_a_time)]
    drawn = parts[0] if len(parts) == 1 else torch.cat(parts)
    return drawn[:, 0] if noise.kind == "key" else drawn


def _part_on_device(noise: Noise, keys: tuple[Tensor, Tensor], steps: Tensor, draws: int) -> Tensor:
    if is_on_gpu(steps) and noise.kind in ("uniform", "gumbel"):
        kind = "gumbel" if noise.kind == "gumbel" else "uniform32"
        made: Tensor = on_gpu(kind, *_broadcast(keys, steps, draws))
        return made[..., : noise.words].reshape(len(steps), -1, *noise.shape)
    words = torch.stack(_words_on_device(keys, steps, draws), -1).flatten(-2)[..., : noise.words]
    if noise.kind in ("key", "keys"):
        return words.to(torch.uint32)
    drawn = ((words >> 9).float() + 0.5) * 2.0**-23
    if noise.kind == "gumbel":
        drawn = -(-drawn.log()).log()
    elif noise.kind == "normal":
        drawn = torch.special.ndtri(drawn.double()).float()
    return drawn.view(*words.shape[:2], *noise.shape)


def _words_on_device(keys: tuple[Tensor, Tensor], numbers: Tensor | int, draws: int) -> tuple[Tensor, Tensor]:
    """The random words ``2j`` and ``2j + 1`` for each j below `draws`, each [..., draws] int64, by lanes' keys [P]."""
    key, numbers, draw = _broadcast(keys, numbers, draws)
    if is_on_gpu(draw):
        return on_gpu("words", key, numbers, draw)  # type: ignore[no-any-return]
    return hashed(key, draw | numbers >> 32 << 16, numbers & _LOW)


def _broadcast(
    keys: tuple[Tensor, Tensor], numbers: Tensor | int, draws: int
) -> tuple[tuple[Tensor, Tensor], Tensor, Tensor]:
    """The keys [P], the numbers (one, or [..., P]) and the draws 1, 2, …, shaped to broadcast against each other."""
    number = torch.full((), numbers, device=keys[0].device) if isinstance(numbers, int) else numbers[..., None]
    return (keys[0][:, None], keys[1][:, None]), number, _draws(draws, keys[0])


def _draws(count: int, like: Tensor) -> Tensor:
    """The numbers of draws, 1 … `count`, on the device of `like`; cached on a GPU, where making them takes a launch."""
    which = like.device, count
    if which in _DRAWS and is_on_gpu(like):
        return _DRAWS[which]
    made = torch.arange(1, 1 + count, device=like.device)
    if is_on_gpu(like) and not torch.cuda.is_current_stream_capturing():  # such memory belongs to the graph
        _DRAWS[which] = made
    return made


@dataclass(frozen=True)
class LaneKeys:
    """The randomness of P lanes at one moment: the start of an episode, or one step.

    >>> import torch
    >>> lanes = torch.arange(3)
    >>> keys = LaneKeys.of(key_from_seed(0), Purpose.RESET, lanes, numbers=torch.zeros(3, dtype=torch.int64))
    >>> keys.uniform(2).shape, torch.equal(keys.uniform(2), keys.uniform(2))
    (torch.Size([3, 2]), True)
    """

    lanes: Tensor  #: [P] int64, the lanes' ids.
    keys: tuple[Any, Any]  #: The words of their keys, each [P] uint32 of NumPy, or int64 on a device.
    numbers: Tensor | int  #: The episodes' numbers [P], or the number of the step.

    @classmethod
    def of(cls, key: Key, purpose: Purpose, lanes: Tensor, numbers: Tensor | int) -> LaneKeys:
        """The randomness of `lanes` [P] under a run's key, on their device."""
        if lanes.device.type == "cpu":
            return cls(lanes, lane_keys(key, purpose, lanes.numpy()), numbers)
        return cls(lanes, _keys_on_device(key, purpose, lanes), numbers)

    def __len__(self) -> int:
        return len(self.lanes)

    def uniform(self, count: int) -> Tensor:
        """[P, count] float64 uniform numbers in (0, 1), on the lanes' device: the same at every call."""
        numbers: Any = self.numbers
        if isinstance(self.keys[0], np.ndarray):
            rows = np.full((1, 1), numbers) if isinstance(numbers, int) else numbers.numpy()[None]
            drawn = random_words(self.keys, rows, 2 * count).astype(np.int64)
            words: tuple[Tensor, ...] = torch.from_numpy(drawn.reshape(-1, count, 2)).unbind(-1)
        elif is_on_gpu(self.keys[0]):
            return on_gpu("uniform", *_broadcast(self.keys, numbers, count))  # type: ignore[no-any-return]
        else:
            words = _words_on_device(self.keys, numbers, count)
        return ((words[0] << 20 | words[1] >> 12).double() + 0.5) * 2.0**-52


class torch_generator:  # noqa: N801  (used as a function; a generator function costs a microsecond more per step)
    """A block without gradients that draws from `state`, which is advanced in place, by Torch's global CPU generator.

    Both are restored after it. So is the generator of a CUDA `device`, which is first seeded with a number that the
    CPU's draws; not while a graph is captured, which draws from the generator as it is at each launch.
    """

    def __init__(self, state: Tensor, device: torch.device | None = None) -> None:
        self._state, self._device = state, device

    def __enter__(self) -> None:
        self._before, self._grad = generator_states(self._device), torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        _ON_CPU.set_state(self._state)
        if self._before[1:]:
            seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_())
            _device_generator(self._device).manual_seed(seed)

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None:
            self._state.copy_(_ON_CPU.get_state())
        set_generator_states(self._device, self._before)
        torch._C._set_grad_enabled(self._grad)


def generator_states(device: torch.device | None) -> list[Tensor]:
    """The states of Torch's global CPU generator and, unless a graph is captured, of that of a CUDA `device`."""
    if device is None or device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return [_ON_CPU.get_state()]
    return [_ON_CPU.get_state(), _device_generator(device).get_state()]


def set_generator_states(device: torch.device | None, states: list[Tensor]) -> None:
    """Set the global generators to what `generator_states` returned."""
    _ON_CPU.set_state(states[0])
    for state in states[1:]:
        _device_generator(device).set_state(state)


def _device_generator(device: torch.device | None) -> torch.Generator:
    torch.cuda.init()  # type: ignore[no-untyped-call]
    index = torch.cuda.current_device() if device is None or device.index is None else device.index
    generator: torch.Generator = torch.cuda.default_generators[index]
    return generator


_state_of_seed = lru_cache(maxsize=64)(lambda seed: torch.Generator().manual_seed(seed).get_state())


def generator_state(seed: int) -> Tensor:
    """The state of a CPU generator seeded with `seed` (64 bits)."""
    return _state_of_seed(seed).clone()
