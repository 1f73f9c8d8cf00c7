"""The base class of every collector: an iterator over batches, whose fields are its keywords."""

from __future__ import annotations

import inspect
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, ClassVar, Self, TypeVar, dataclass_transform, get_type_hints

from tensordict import TensorDictBase

from funcollect.collectors.options import Options, RunOptions
from funcollect.errors import ClosedError

_Collector = TypeVar("_Collector", bound="CollectorBase")

_ARGS = re.compile(r"^Args:\n((?: +.*\n|\n)*)", re.M)  # the section of a docstring
_ENTRY = re.compile(r"^    ([\w, ]+):.*\n(?:     +.*\n)*", re.M)  # an argument in it


@dataclass_transform(kw_only_default=True, eq_default=False, field_specifiers=(field,))
def collector(cls: type[_Collector]) -> type[_Collector]:
    """Make the fields of a class, its own and those of its bases, the keywords of its constructor.

    The docstring gets the descriptions of inherited keywords, so that ``help`` shows all of them. The constructor
    refuses an unknown keyword with TypeError, and explains those in the class's `_elsewhere`.
    """
    dataclass(kw_only=True, eq=False, repr=False)(cls)
    plain = cls.__init__
    known = inspect.signature(plain).parameters.keys() - {"self"}
    plain.__annotations__ |= {name: hint for name, hint in get_type_hints(cls).items() if name in known}

    @wraps(plain)
    def init(self: Any, *args: Any, **keywords: Any) -> None:
        check_known(keywords, known, cls._elsewhere)
        plain(self, *args, **keywords)

    cls.__init__ = init  # type: ignore[method-assign]
    cls.__doc__ = _with_inherited_keywords(cls)
    return cls


def check_known(keywords: Mapping[str, Any], known: set[str], elsewhere: Mapping[str, str]) -> None:
    """Raise TypeError for a keyword that is not among those `known`, with the explanation in `elsewhere` if any."""
    if not (unknown := sorted(keywords.keys() - known)):
        return
    if here := [f"{name} ({elsewhere[name]})" for name in unknown if name in elsewhere]:
        raise TypeError(f"this collector has no argument {', '.join(here)}: leave it out")
    raise TypeError(
        f"the keywords {unknown} are unknown, expected some of {', '.join(sorted(known))}: check the spelling"
    )


def _with_inherited_keywords(cls: type) -> str:
    text = inspect.cleandoc(cls.__doc__ or "") + "\n"
    entries = _entries(text)
    for base in cls.__mro__[1:]:
        inherited = _entries(inspect.cleandoc(base.__doc__ or "") + "\n") if issubclass(base, RunOptions) else {}
        entries = entries | {name: entry for name, entry in inherited.items() if name not in entries}
    section = "Args:\n" + "".join(dict.fromkeys(entries.values())) + "\n"
    return _ARGS.sub(lambda _: section, text)


def _entries(text: str) -> dict[str, str]:
    """The description of each argument in a docstring; those that share one have the same."""
    section = _ARGS.search(text)
    found = _ENTRY.finditer(section[1]) if section else ()
    return {name: entry[0] for entry in found for name in entry[1].split(", ")}


@collector
class CollectorBase(RunOptions, ABC):
    """The part that collectors share; a class that derives from it gathers the batches.

    Args:
        create_env_fn: an `Env`, whatever `make_env` takes, or a callable that returns one of these.
        policy: a `Policy`, a `TensorDictModule` or callable on a TensorDict, a module or function from observation to
            action, or None for random actions.
        seed: an int, or None to draw one.

    Attributes:
        options: the keywords, checked.
        frames: frames delivered so far.
    """

    create_env_fn: Any = field(kw_only=False)
    policy: Any = field(kw_only=False, default=None)
    seed: int | None = None
    options: Options = field(init=False)
    frames: int = field(init=False, default=0)

    _closed = False
    _elsewhere: ClassVar[Mapping[str, str]] = {
        "backend": "the class says it: SyncDataCollector, MultiSyncDataCollector, MultiaSyncDataCollector or "
        "RayCollector",
        "num_collectors": "MultiSyncDataCollector and MultiaSyncDataCollector have num_workers=, RayCollector has this "
        "one",
        "sync": "MultiSyncDataCollector collects so, MultiaSyncDataCollector does not; RayCollector has this argument",
    }  # of TorchRL's `Collector`, which chooses another class by them

    @property
    @abstractmethod
    def frames_of_batch(self) -> int:
        """The frames in every batch: `frames_per_batch`, rounded up to whole steps of all lanes in a batch."""

    @abstractmethod
    def _gather(self) -> TensorDictBase:
        """The next batch, not yet split or post-processed; its frames are counted."""

    @abstractmethod
    def shutdown(self, timeout: float | None = None) -> None:
        """End the run and free what it holds. Batches that were delivered stay. Does nothing the second time.

        Args:
            timeout: accepted as TorchRL has it, without effect: workers that do not end within seconds are killed.
        """

    @abstractmethod
    def stats(self) -> dict[str, float]:
        """Counts of the run."""

    def get_policy_version(self) -> int:
        """The number of the latest weights: 0 at first, one more with each update."""
        return int(self.stats()["policy_version"])

    def async_shutdown(self, timeout: float | None = None) -> None:
        """`shutdown`, by TorchRL's name for asynchronous collectors."""
        self.shutdown(timeout)

    def is_running(self) -> bool:
        """Whether batches can still be collected: there are frames left, and the collector was not shut down."""
        return not self._closed and not 0 <= self.total_frames <= self.frames

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
        if self.total_frames < 0:
            raise TypeError("an endless collector (total_frames=-1) has no length: give total_frames")
        return -(-self.total_frames // self.frames_of_batch)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> TensorDictBase:
        if 0 <= self.total_frames <= self.frames:
            raise StopIteration
        return self.options.finish(self._gather())

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"{self!r} was shut down: build another collector")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
