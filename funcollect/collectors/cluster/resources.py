"""Imports Ray, opens a session on a cluster, and checks whether the cluster has room."""

from __future__ import annotations

import itertools
import os
import threading
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from funcollect.errors import WorkerError

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a library reports its use only if its user wants that
try:
    import ray as _ray
except ImportError as error:
    raise ImportError("RayCollector needs Ray, which is not installed: pip install 'funcollect[ray]'") from error

ray: Any = _ray  # half of it is typed

_QUIET = {"include_dashboard": False, "logging_level": "warning"}
_OPTIONS = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}  # of an actor, by the names of resources


class RaySession:
    """One use of Ray in this process. The first session may start Ray; the last one then shuts it down.

    The config is for `ray.init`; None uses a running cluster, or else starts one on this machine. ValueError for one
    that differs from that of Ray in this process.
    """

    _lock = threading.Lock()
    _count = 0  # sessions that use the cluster that the first one started
    _config: Mapping[str, Any] | None = None

    def __init__(self, config: Mapping[str, Any] | None) -> None:
        with RaySession._lock:
            started = not ray.is_initialized()
            if started:
                with warnings.catch_warnings():  # JAX warns of forks; those of Ray become other programs at once
                    warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)
                    ray.init(**_QUIET | dict(config or {}))
                RaySession._count, RaySession._config = 0, config
            self._counted = started or RaySession._count > 0  # otherwise Ray was started by the user
            if config is not None and not (self._counted and config == RaySession._config):
                raise ValueError(
                    "ray_init_config is given, but Ray runs in this process already: leave it out, or call "
                    "ray.shutdown() before"
                )
            RaySession._count += self._counted

    def release(self) -> None:
        """Leave Ray. Does nothing the second time."""
        with RaySession._lock:
            RaySession._count -= self._counted
            if self._counted and RaySession._count == 0 and ray.is_initialized():
                ray.shutdown()
            self._counted = False


def _demand(config: Mapping[str, Any]) -> dict[str, float]:
    """The resources that an actor with these options asks for, by Ray's names."""
    asked = {resource: config.get(option) for resource, option in _OPTIONS.items()} | dict(
        config.get("resources") or {}
    )
    return {resource: amount for resource, amount in asked.items() if amount}


def resources(configs: Sequence[Mapping[str, Any]]) -> str:
    """The resources that actors with these options request, and those of the cluster, for error messages."""
    counts = Counter(_words(_demand(config)) for config in configs)
    asked = "; ".join(f"{count} x ({words})" for words, count in counts.items())
    nodes = "; ".join(f"{node['NodeManagerAddress']} has {_words(node['Resources'])}" for node in _alive())
    return f"asked for [{asked}]; the cluster: [{nodes}], free: {_words(ray.available_resources())}"


def check_room(configs: Sequence[Mapping[str, Any]], first: int, taken: Sequence[Mapping[str, Any]] = ()) -> None:
    """Raise WorkerError if the cluster is too small for these actors beside those that are `taken`.

    What is refused fits nowhere, however Ray places it. What is not refused may still have to wait for other jobs.
    """
    wanted = [_units(_demand(config)) for config in (*taken, *configs)]
    refused = _left_over(wanted, [_units(node["Resources"]) for node in _alive()])
    if newcomers := [index for index in refused if index >= len(taken)]:
        worker = first + min(newcomers) - len(taken)
        raise WorkerError(
            f"the cluster has no room for collector {worker} of {first + len(configs)}: {resources(configs)}: use "
            "fewer collectors, ask for less by remote_configs, or let the cluster grow before "
            "(ray.autoscaler.sdk.request_resources)",
            worker,
        )


def _left_over(wanted: Sequence[Counter[str]], nodes: Sequence[Counter[str]]) -> Iterator[int]:
    """The indices of demands that exceed what all nodes hold of a resource, or the number of nodes that fit them."""
    for name in {name for asked in wanted for name in asked}:
        room = sum(node[name] for node in nodes)
        sums = itertools.accumulate(asked[name] for asked in wanted)
        yield from (index for index, total in enumerate(sums) if total > room and wanted[index][name])
    for asked in {tuple(asked.items()): asked for asked in wanted if asked}.values():
        places = sum(min(node[name] // amount for name, amount in asked.items()) for node in nodes)
        yield from [index for index, other in enumerate(wanted) if asked <= other][places:]


def _units(amounts: Mapping[str, float]) -> Counter[str]:
    """Resources in Ray's integer units, so that ten tenths are one."""
    return +Counter({name: round(amount * 10_000) for name, amount in amounts.items()})


def _alive() -> list[Mapping[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def _words(amounts: Mapping[str, float]) -> str:
    """Amounts of resources in words, without those that Ray adds itself."""
    shown = {name: amount for name, amount in amounts.items() if ":" not in name and name != "object_store_memory"}
    return ", ".join(f"{amount:g} {name}" for name, amount in sorted(shown.items())) or "nothing"
