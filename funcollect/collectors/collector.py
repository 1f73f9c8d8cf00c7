"""What every collector is: an iterator over finished batches, with its keywords as attributes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, Self

from tensordict import TensorDictBase

from funcollect.collectors.options import Options
from funcollect.errors import ClosedError


class CollectorBase(ABC):
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
    def shutdown(self, timeout: float | None = None) -> None:
        """Free what is held; nothing can be collected afterwards. Does nothing the second time.

        Args:
            timeout: as TorchRL has it; workers that do not end within seconds are killed in any case.
        """

    @abstractmethod
    def stats(self) -> dict[str, float]:
        """Counts of the run."""

    def get_policy_version(self) -> int:
        """The number of the latest weights: 0 at first, one more with each update."""
        return int(self.stats()["policy_version"])

    def async_shutdown(self, timeout: float | None = None) -> None:
        """`shutdown`, as TorchRL calls it for asynchronous collectors."""
        self.shutdown(timeout)

    def is_running(self) -> bool:
        """Whether batches can still be collected: there are frames left, and the collector was not shut down."""
        return not self._closed and not 0 <= self.options.total_frames <= self.frames

    def next(self) -> TensorDictBase | None:
        """The next batch; None at the end of the run."""
        return next(self, None)

    def iterator(self) -> Iterator[TensorDictBase]:
        """The batches, as ``iter(collector)``."""
        return iter(self)

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
