"""Ray, imported when it is first needed; a cluster to work on, and whether it has room."""

from __future__ import annotations

import os
import threading
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from funcollect.errors import WorkerError

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a library tells nobody of its use unless it is told to
try:
    import ray as _ray
except ImportError as error:
    raise ImportError("RayCollector needs Ray, which is not installed: pip install 'funcollect[ray]'") from error

ray: Any = _ray  # half of it is typed
__all__ = ["Lease", "check_room", "ray", "resources"]

_QUIET = {"include_dashboard": False, "logging_level": "warning"}


class Lease:
    """A use of Ray in this process: what the first one has started, the last one ends.

    Args:
        config: for `ray.init`; None: a cluster that is there is found, else one is started on this machine.

    Raises:
        ValueError: for a config where Ray runs in this process under another one.
    """

    _lock = threading.Lock()
    _count = 0  # of the leases of what the first one has started
    _config: Mapping[str, Any] | None = None

    def __init__(self, config: Mapping[str, Any] | None) -> None:
        with Lease._lock:
            self._counted = True
            if not ray.is_initialized():
                with warnings.catch_warnings():  # JAX's, of forks that go on; Ray's become other programs at once
                    warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)
                    ray.init(**_QUIET | dict(config or {}))
                Lease._count, Lease._config = 0, config
            elif Lease._count == 0:
                self._counted = False  # the user's own
            if self._differs(config):
                raise ValueError(
                    "ray_init_config is given, but Ray runs in this process already: leave it out, or call "
                    "ray.shutdown() before"
                )
            Lease._count += self._counted

    def _differs(self, config: Mapping[str, Any] | None) -> bool:
        return config is not None and not (self._counted and config == Lease._config)

    def release(self) -> None:
        """Leave Ray. Does nothing the second time."""
        with Lease._lock:
            counted, self._counted = self._counted, False
            if not counted:
                return
            Lease._count -= 1
            if Lease._count == 0 and ray.is_initialized():
                ray.shutdown()


def demand(config: Mapping[str, Any]) -> dict[str, float]:
    """The resources that an actor with these options asks for, by Ray's names."""
    named = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
    asked = {resource: config.get(option) for resource, option in named.items()} | dict(config.get("resources") or {})
    return {resource: amount for resource, amount in asked.items() if amount}


def resources(configs: Sequence[Mapping[str, Any]]) -> str:
    """What actors with these options ask for and what the cluster has, in words."""
    counts = Counter(_words(demand(config)) for config in configs)
    asked = "; ".join(f"{count} x ({words})" for words, count in counts.items())
    nodes = "; ".join(f"{node['NodeManagerAddress']} has {_words(node['Resources'])}" for node in _alive())
    return f"asked for [{asked}]; the cluster: [{nodes}], of which free: {_words(ray.available_resources())}"


def check_room(configs: Sequence[Mapping[str, Any]], first: int, taken: Iterable[Mapping[str, Any]] = ()) -> None:
    """Raise WorkerError where the cluster's nodes, were they idle but for the actors `taken`, lack the resources.

    Largest demands are placed first, each on the first node that has room.
    """
    free = [dict(node["Resources"]) for node in _alive()]
    wanted = [(None, demand(config)) for config in taken] + [
        (first + index, demand(config)) for index, config in enumerate(configs)
    ]
    for worker, asked in sorted(wanted, key=lambda each: -sum(amount for amount in each[1].values())):
        node = next((each for each in free if all(each.get(name, 0) >= asked[name] for name in asked)), None)
        if node is not None:
            for name, amount in asked.items():
                node[name] -= amount
        elif worker is not None:
            raise WorkerError(
                f"the cluster has no place for collector {worker} of {first + len(configs)}: {resources(configs)}: use "
                "fewer collectors, ask for less by remote_configs, or let the cluster grow before "
                "(ray.autoscaler.sdk.request_resources)",
                worker,
            )


def _alive() -> list[Mapping[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def _words(amounts: Mapping[str, float]) -> str:
    shown = {name: amount for name, amount in amounts.items() if ":" not in name and name != "object_store_memory"}
    return ", ".join(f"{amount:g} {name}" for name, amount in sorted(shown.items())) or "nothing"
