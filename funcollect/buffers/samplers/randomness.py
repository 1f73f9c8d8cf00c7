"""Random choices, as a function of a key or from a Torch generator."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from typing_extensions import override

from funcollect.buffers.arrays import Floats, Ints
from funcollect.keys import Key, Purpose, seed_of


class RandomSource(Protocol):
    """The source of a sampler's random numbers."""

    def below(self, limit: int, count: int) -> Ints:
        """`count` uniform integers in ``[0, limit)``."""

    def uniform(self, count: int) -> Floats:
        """`count` uniform numbers in ``[0, 1)``."""

    def permutation(self, count: int) -> Ints:
        """The integers below `count` in random order."""


class KeySource(RandomSource):
    """Random numbers that are a function of a key."""

    def __init__(self, key: Key) -> None:
        words = np.array([seed_of(key), int(Purpose.SAMPLE) << 48], np.uint64)
        self._generator = np.random.Generator(np.random.Philox(key=words))

    @override
    def below(self, limit: int, count: int) -> Ints:
        return self._generator.integers(limit, size=count)

    @override
    def uniform(self, count: int) -> Floats:
        return self._generator.random(count)

    @override
    def permutation(self, count: int) -> Ints:
        return self._generator.permutation(count)


class GeneratorSource(RandomSource):
    """Random numbers from a Torch generator, which advances; None means Torch's global generator."""

    def __init__(self, generator: torch.Generator | None) -> None:
        self._source: dict[str, Any] = {"generator": generator, "device": generator.device if generator else "cpu"}

    @override
    def below(self, limit: int, count: int) -> Ints:
        return torch.randint(limit, (count,), **self._source).numpy(force=True)

    @override
    def uniform(self, count: int) -> Floats:
        return torch.rand(count, dtype=torch.float64, **self._source).numpy(force=True)

    @override
    def permutation(self, count: int) -> Ints:
        return torch.randperm(count, **self._source).numpy(force=True)
