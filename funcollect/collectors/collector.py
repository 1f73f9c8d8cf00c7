"""What every collector is: an iterator over finished batches, with its keywords as attributes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Self

from tensordict import TensorDictBase

from funcollect.collectors.options import Options
from funcollect.errors import ClosedError


class Collector(ABC):
    """The part that collectors share; those that derive from it gather the batches.

    Attributes:
        options: the keywords, checked.
        frames: frames delivered so far.
    """

    options: Options
    frames: int
    _closed: bool = False

    def __getattr__(self, name: str) -> Any:
        """The keywords, as given; devices as `device` filled them."""
        if name != "options" and name in type(self.options).__dataclass_fields__:
            return getattr(self.options, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *type(self.options).__dataclass_fields__]

    @property
    @abstractmethod
    def frames_of_batch(self) -> int:
        """The frames that every batch has: `frames_per_batch`, rounded up to whole steps of all lanes."""

    @abstractmethod
    def _gather(self) -> TensorDictBase:
        """The next batch, unfinished; its frames are counted."""

    @abstractmethod
    def shutdown(self) -> None:
        """Free what is held; nothing can be collected afterwards. Does nothing the second time."""

    def __len__(self) -> int:
        """Batches in the whole run.

        Raises:
            TypeError: for an endless run.
        """
        if self.options.total_frames < 0:
            raise TypeError("an endless collector (total_frames=-1) has no length: give total_frames")
        return -(-self.options.total_frames // self.frames_of_batch)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> TensorDictBase:
        if 0 <= self.options.total_frames <= self.frames:
            raise StopIteration
        return self.options.finish(self._gather())

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"{self!r} was shut down: build another collector")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
