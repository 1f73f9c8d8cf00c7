"""Random choices, as a function of a key or from a Torch generator."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from funcollect.keys import Key, Purpose, seed_of

Ints = npt.NDArray[np.int64]


class RandomSource(Protocol):
    """Where samplers take their randomness from."""

    def below(self, limit: int, count: int) -> Ints:
        """`count` uniform integers in ``[0, limit)``."""
        ...

    def uniform(self, count: int) -> npt.NDArray[np.float64]:
        """`count` uniform numbers in ``[0, 1)``."""
        ...

    def permutation(self, count: int) -> Ints:
        """The numbers below `count` in random order."""
        ...


class KeySource:
    """Random numbers that are a function of a key.

    >>> from funcollect.keys import key_from_seed
    >>> one, two = KeySource(key_from_seed(1)), KeySource(key_from_seed(1))
    >>> one.below(1000, 3).tolist() == two.below(1000, 3).tolist()
    True
    """

    def __init__(self, key: Key) -> None:
        words = np.array([seed_of(key), int(Purpose.SAMPLE) << 48], np.uint64)
        self._generator = np.random.Generator(np.random.Philox(key=words))

    def below(self, limit: int, count: int) -> Ints:
        """`count` uniform integers in ``[0, limit)``."""
        return self._generator.integers(limit, size=count)

    def uniform(self, count: int) -> npt.NDArray[np.float64]:
        """`count` uniform numbers in ``[0, 1)``."""
        return self._generator.random(count)

    def permutation(self, count: int) -> Ints:
        """The numbers below `count` in random order."""
        return self._generator.permutation(count)


class GeneratorSource:
    """Random numbers from a Torch generator, which moves on; None for Torch's global one."""

    def __init__(self, generator: torch.Generator | None) -> None:
        self._generator = generator
        self._device = "cpu" if generator is None else generator.device

    def below(self, limit: int, count: int) -> Ints:
        """`count` uniform integers in ``[0, limit)``."""
        drawn = torch.randint(limit, (count,), generator=self._generator, device=self._device)
        return drawn.numpy(force=True)

    def uniform(self, count: int) -> npt.NDArray[np.float64]:
        """`count` uniform numbers in ``[0, 1)``."""
        drawn = torch.rand(count, generator=self._generator, device=self._device, dtype=torch.float64)
        return drawn.numpy(force=True)

    def permutation(self, count: int) -> Ints:
        """The numbers below `count` in random order."""
        return torch.randperm(count, generator=self._generator, device=self._device).numpy(force=True)
