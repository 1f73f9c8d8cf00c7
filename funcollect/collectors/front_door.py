"""`Collector`, which builds any collector as in TorchRL, and TorchRL's names for collectors with workers."""

from __future__ import annotations

import inspect
from abc import ABCMeta
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, get_args

from funcollect.arguments import check_choice, check_flags, check_positive
from funcollect.collectors.collector import CollectorBase
from funcollect.collectors.keywords import collector
from funcollect.collectors.multi import MultiaSyncDataCollector, MultiSyncDataCollector, ProcessCollector
from funcollect.collectors.ray_collector import RayCollector
from funcollect.collectors.sync import SyncDataCollector
from funcollect.collectors.workers.jobs import listed, number_of_workers

Backend = Literal["direct", "process", "multiprocessing", "ray"]


class _Door(ABCMeta):
    """The metaclass of classes whose call builds an object of another class, which the keywords choose.

    Every object of the kind `_builds` is an instance of such a class. Classes derived from one are ordinary.
    """

    def __call__(cls, *args: Any, **keywords: Any) -> Any:
        if "_builds" in vars(cls):
            chosen, args, keywords = cls._choose(*args, **keywords)  # type: ignore[attr-defined]
            return chosen(*args, **keywords)
        return super().__call__(*args, **keywords)

    def __instancecheck__(cls, instance: Any) -> bool:
        kind = vars(cls).get("_builds")
        return super().__instancecheck__(instance) if kind is None else kind in type(instance).__mro__

    @property
    def __signature__(cls) -> inspect.Signature:
        signature = inspect.signature(type.__getattribute__(cls, "__init__"))
        return signature.replace(parameters=[*signature.parameters.values()][1:])


class _DoorBase(metaclass=_Door):
    """The base class of doors. `_choose` returns the class to build, and its arguments and keywords."""

    _builds: ClassVar[Any] = CollectorBase  # the base class of the objects that a door builds

    @classmethod
    def _of_saved(cls, name: str, arguments: Any, keywords: dict[str, Any]) -> tuple[type[Any], dict[str, Any]]:
        """What `_choose` returns, if keywords of the door are given; else the class of the run, or the door itself."""
        if keywords.keys() & {"num_collectors", "sync", "backend", "backend_options"}:
            kind, _, keywords = cls._choose(*arguments, **keywords)  # type: ignore[attr-defined]
            return kind, keywords
        classes: list[type[Any]] = [SyncDataCollector, MultiSyncDataCollector, MultiaSyncDataCollector, RayCollector]
        fitting = (kind for kind in classes if kind.__name__ == name and issubclass(kind, cls._builds))
        return next(fitting, cls), keywords


@collector
class Collector(_DoorBase, SyncDataCollector):
    """Builds a collector of the class that its keywords choose, all of whose keywords it takes.

    It is a `SyncDataCollector` unless `backend` or `num_collectors` ask for others: with ``backend="process"``, a
    `MultiSyncDataCollector` if `sync` is True, else a `MultiaSyncDataCollector`; with ``"ray"`` a `RayCollector`.
    Every collector is an instance of this class. TypeError or ValueError for keywords that contradict each other.

    >>> import funcollect as fc
    >>> with fc.Collector("CartPole-v1", frames_per_batch=20, num_collectors=2, sync=True, in_process=True) as made:
    ...     type(made).__name__, next(made).batch_size, isinstance(made, fc.Collector)
    ('MultiSyncDataCollector', torch.Size([2, 10]), True)
    """

    num_collectors: int | None = None
    """the number of workers, or of actors; by default one for each entry of `create_env_fn`, if that is a list."""
    sync: bool | None = None
    """whether a batch consists of one rollout of every worker; else, as by default, of one worker."""
    backend: Backend | None = None
    """``"direct"`` for a collector in this process, ``"process"`` for worker processes, ``"ray"`` for actors; None for
    processes if there is `num_collectors`, else for this process."""
    backend_options: Mapping[str, Any] | None = None
    """further keywords of the class that is chosen."""

    _builds: ClassVar[Any] = CollectorBase

    def __post_init__(self) -> None:  # runs only in derived classes
        for name in ("num_collectors", "sync", "backend", "backend_options"):
            if (given := getattr(self, name)) is not None:
                raise TypeError(f"{name} is {given!r}, but {type(self).__name__} is one class: leave it out")
        super().__post_init__()

    @staticmethod
    def _choose(
        create_env_fn: Any,
        policy: Any = None,
        *,
        num_collectors: int | None = None,
        sync: bool | None = None,
        backend: Backend | None = None,
        backend_options: Mapping[str, Any] | None = None,
        **keywords: Any,
    ) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        if backend is not None:
            check_choice("backend", backend, get_args(Backend))
        if sync is not None:
            check_flags(sync=sync)
        if num_collectors is not None:
            check_positive("num_collectors", num_collectors, example=2)
        named = {"create_env_fn", "policy", "num_collectors", "num_workers", "sync", "backend"}
        if twice := sorted({*(backend_options or {})} & {*keywords, *named}):
            raise ValueError(f"backend_options has {twice}, which are keywords of their own: give each once")
        keywords |= backend_options or {}
        if backend == "direct" or (backend is None and num_collectors is None):
            entries = listed(create_env_fn) or [create_env_fn]
            if sync is not None or backend_options or num_collectors not in (None, 1) or len(entries) > 1:
                given = f"num_collectors={num_collectors}, sync={sync}, backend_options={backend_options}"
                what = f"{given} and {len(entries)} environments are for workers, expected one in this process"
                raise ValueError(f"{what}: pass num_collectors=, or backend='process' or 'ray'")
            return SyncDataCollector, (entries[0], policy), keywords
        if backend == "ray":
            keywords |= {"num_collectors": num_collectors, "sync": bool(sync)}
            return RayCollector, (create_env_fn, policy), keywords
        if (workers := keywords.pop("num_workers", None)) is not None and num_collectors not in (None, workers):
            raise ValueError(f"num_collectors is {num_collectors}, but num_workers is {workers}: give one of them")
        wanted = num_collectors or workers or (None if listed(create_env_fn) else 1)
        chosen = MultiSyncDataCollector if sync else MultiaSyncDataCollector
        return chosen, (create_env_fn, policy), {"num_workers": number_of_workers(create_env_fn, wanted)} | keywords


@collector
class MultiCollector(_DoorBase, ProcessCollector):
    """Builds a `MultiSyncDataCollector` if `sync` is True, else a `MultiaSyncDataCollector`, with their keywords.

    >>> import funcollect as fc
    >>> with fc.MultiCollector(["CartPole-v1"] * 2, sync=False, frames_per_batch=20, in_process=True) as made:
    ...     type(made).__name__, next(made).batch_size
    ('MultiaSyncDataCollector', torch.Size([20]))
    """

    sync: bool
    """whether a batch consists of one rollout of every worker, or of one worker."""

    _builds: ClassVar[Any] = ProcessCollector

    @staticmethod
    def _choose(*args: Any, sync: bool, **keywords: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        check_flags(sync=sync)
        return MultiSyncDataCollector if sync else MultiaSyncDataCollector, args, keywords


@collector
class AsyncCollector(_DoorBase, MultiaSyncDataCollector):
    """Builds a `MultiaSyncDataCollector` with one worker, which is for one environment.

    >>> import funcollect as fc
    >>> with fc.AsyncCollector("CartPole-v1", frames_per_batch=20, in_process=True) as made:
    ...     next(made).batch_size
    torch.Size([20])
    """

    _builds: ClassVar[Any] = MultiaSyncDataCollector

    @staticmethod
    def _choose(create_env_fn: Any, *args: Any, **keywords: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        return MultiaSyncDataCollector, (create_env_fn, *args), {"num_workers": 1} | keywords
