"""The keywords of a collector as plain data, which a saved run has, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from funcollect.collectors.options import Shard
from funcollect.specs import ExplorationType

# Keywords that are objects, or say how a machine is used.
_NOT_SAVED = {
    "create_env_fn", "create_env_kwargs", "policy", "policy_factory", "postproc", "device", "env_device",
    "policy_device", "storing_device", "num_threads", "in_process", "collector_class", "collector_kwargs",
    "ray_init_config", "remote_configs", "replay_buffer", "pre_collect_hook", "post_collect_hook",
}  # fmt: skip
_MAY_CHANGE = {"total_frames", "timeout", "start_timeout", "on_failure"}  # although they are saved
_READ_BACK: Mapping[str, Callable[[Any], Any]] = {  # the inverse of `_plain`
    "exploration_type": lambda name: ExplorationType[name],
    "shard": lambda place: Shard(*place),
}
_A_FUNCTION = "a function"  # in place of a schedule of `exploration`
_NOT_PLAIN = object()


def plain_keywords(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords that a saved run has, by name."""
    values = {name: _plain(keywords[name]) for name in sorted(keywords.keys() - _NOT_SAVED)}
    return {name: value for name, value in values.items() if value is not _NOT_PLAIN}


def read_back(saved: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `plain_keywords`; ValueError if a function was not saved, nor is `given`."""
    known = {name: _READ_BACK.get(name, lambda value: value)(value) for name, value in saved.items()}
    if "exploration" not in given and _A_FUNCTION in known.get("exploration", {}).values():
        raise ValueError(
            f"the saved run has the exploration {known['exploration']}, and functions are not saved: pass "
            "exploration= with the same schedules"
        )
    return known


def check_equal(saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raise ValueError for other values of keywords that define a run."""
    for name, value in own.items():
        was = saved.get(name, value)
        if was != value and name not in _MAY_CHANGE:
            raise ValueError(
                f"{name} is {value!r}, but {was!r} in the saved run: build the collector with that, or begin another "
                "run"
            )


def _plain(value: Any) -> Any:
    if isinstance(value, ExplorationType):
        return value.name
    if isinstance(value, Shard):
        return [value.index, value.count]
    if isinstance(value, Mapping):
        return {name: _A_FUNCTION if callable(each) else _plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if hasattr(value, "ndim"):  # numbers of NumPy, Torch or JAX
        return value.tolist()
    return value if value is None or isinstance(value, (bool, int, float, str)) else _NOT_PLAIN
