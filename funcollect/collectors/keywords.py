"""Declares, documents, checks and saves the keywords of collectors; lists TorchRL's that have no meaning here."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, is_dataclass
from difflib import get_close_matches
from functools import cache, wraps
from itertools import pairwise
from textwrap import fill
from typing import Any, TypeVar, dataclass_transform, get_type_hints

from funcollect.arguments import Foreign, unset, unset_or_false, without_foreign
from funcollect.collectors.options import Shard
from funcollect.specs import ExplorationType

_Class = TypeVar("_Class", bound=Any)

_SENT = "update_policy_weights_ sends weights in every collector"
_SCHEMES = Foreign(_SENT, lambda given, _: given is None or (isinstance(given, Mapping) and {*given} <= {"policy"}))
_RESULT = "MultiSyncDataCollector has it; RayCollector stacks batches, whose own rows follow collector_kwargs"
FOREIGN: Mapping[str, Foreign] = {
    "use_buffers": Foreign("batches are recorded into their own memory wherever that is possible"),
    "return_same_td": Foreign("a batch has memory of its own, or is a view that is not written while it is alive"),
    "trust_policy": Foreign("policies need no trust"),
    "no_cuda_sync": Foreign("queues of work are ordered by events"),
    "auto_register_policy_transforms": Foreign("hidden states are found without transforms"),
    "extend_buffer": Foreign("replay_buffer gets every batch whole"),
    "local_init_rb": Foreign("replay_buffer is filled in the process that has it"),
    "worker_idx": Foreign("every batch has ('collector', 'lane')"),
    "cudagraph_policy": Foreign("pass funcollect.torch_policy(module, compile='cudagraph')", unset_or_false),
    "compile_policy": Foreign("pass funcollect.torch_policy(module, compile='inductor')", unset_or_false),
    "weight_sync_schemes": _SCHEMES,
    "weight_recv_schemes": _SCHEMES,
    "weight_updater": Foreign(_SENT, unset_or_false),
    "preemptive_threshold": Foreign(
        "a slow worker is waited for, so that no frame is lost; MultiaSyncDataCollector waits for none",
        lambda value, _: value in (None, 1.0),
    ),
    "interruptor": Foreign("no worker is interrupted", unset_or_false),
    "init_fn": Foreign("create_env_fn and policy_factory are called in each worker", unset_or_false),
    "num_sub_threads": Foreign("pass num_threads, in the collectors with workers", lambda given, _: given in (None, 1)),
    "cat_results": Foreign(_RESULT, unset),
    "backend": Foreign("funcollect.Collector has it; of this class there is one kind", unset_or_false),
    "backend_options": Foreign("funcollect.Collector has it; pass the keywords themselves", lambda given, _: not given),
    "num_collectors": Foreign("funcollect.Collector and RayCollector have it; pass num_workers=", unset_or_false),
    "sync": Foreign("the class says so: MultiSyncDataCollector or MultiaSyncDataCollector", unset),
    "collector_class": Foreign("RayCollector has it", unset_or_false),
    "in_process": Foreign("MultiSyncDataCollector has it", unset_or_false),
    "update_at_each_batch": Foreign("pass update_after_each_batch, as TorchRL calls it", unset_or_false),
}


@dataclass_transform(kw_only_default=True, eq_default=False, field_specifiers=(field,))
def collector(cls: type[_Class]) -> type[_Class]:
    """Make the fields of a class, its own and those of its bases, the keywords of its constructor.

    Each field has its meaning in a string below it, where editors look for it. The docstring gets all of them, for
    ``help``. The constructor refuses an unknown keyword with TypeError; None stands for a keyword's default.
    """
    dataclass(kw_only=True, eq=False, repr=False)(cls)
    plain = cls.__init__
    known = inspect.signature(plain).parameters.keys() - {"self"}
    foreign = {name: keyword for name, keyword in FOREIGN.items() if name not in known}
    plain.__annotations__ |= {name: hint for name, hint in get_type_hints(cls).items() if name in known}

    @wraps(plain)
    def init(self: Any, *args: Any, **keywords: Any) -> None:
        keywords = without_foreign("this collector", foreign, keywords)
        keywords = {name: value for name, value in keywords.items() if value is not None or name not in known}
        if unknown := sorted(keywords.keys() - known):
            alike = [found for name in unknown for found in get_close_matches(name, known, 1)]
            likely = f" (perhaps you meant {' and '.join(alike)})" if alike else ""
            raise TypeError(
                f"the keywords {unknown} are unknown{likely}, expected some of {', '.join(sorted(known))}: check the "
                "spelling, and give arguments of make_env as create_env_kwargs"
            )
        if "frames_per_batch" not in keywords and keywords.get("trajs_per_batch") is None:
            mend = "pass them, or trajs_per_batch for whole trajectories"
            raise TypeError(f"frames_per_batch is not given, expected the frames in a batch, such as 1_000: {mend}")
        plain(self, *args, **keywords)

    cls.__init__ = init
    cls.__doc__ = _with_keywords(cls, inspect.signature(plain).parameters)
    return cls


def _with_keywords(cls: type, keywords: Iterable[str]) -> str:
    """The docstring of a class, with a section on all keywords before its other sections and the example."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        found |= _meanings(base.__module__).get(base.__name__, {}) if is_dataclass(base) else {}
    entries = [f"{name}: {found[name]}" for name in keywords if name in found]
    section = "\n".join(fill(entry, 116, initial_indent=" " * 4, subsequent_indent=" " * 8) for entry in entries)
    text = inspect.cleandoc(cls.__doc__ or "")
    head = re.split(r"^(?:Attributes:|Raises:|>>> )", text, maxsplit=1, flags=re.M)[0].rstrip()
    return f"{head}\n\nArgs:\n{section}\n\n{text[len(head) :].lstrip()}".rstrip() + "\n"


@cache
def _meanings(module: str) -> dict[str, dict[str, str]]:
    """The strings below attributes in a module's source, by class and attribute; empty if there is no source."""
    try:
        source = inspect.getsource(sys.modules[module])
    except (OSError, TypeError):
        return {}
    found: dict[str, dict[str, str]] = {}
    for definition in (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)):
        for pair in pairwise(definition.body):
            match pair:
                case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                    found.setdefault(definition.name, {})[name] = inspect.cleandoc(text)
    return found


# Keywords that are objects, or depend on the machine.
_NOT_SAVED = {
    "create_env_fn", "create_env_kwargs", "policy", "policy_factory", "postproc", "device", "env_device",
    "policy_device", "storing_device", "num_threads", "in_process", "collector_class", "collector_kwargs",
    "ray_init_config", "remote_configs", "replay_buffer", "pre_collect_hook", "post_collect_hook",
}  # fmt: skip
_MAY_CHANGE = {"total_frames", "timeout", "start_timeout", "on_failure"}  # saved, but not part of the run
_READ_BACK: Mapping[str, Callable[[Any], Any]] = {  # the inverse of `_plain`
    "exploration_type": lambda name: ExplorationType[name],
    "shard": lambda place: Shard(*place),
}
_A_FUNCTION = "a function"  # in place of a schedule of `exploration`


def plain_keywords(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords that are saved with a run, as plain data by name."""
    return {name: _plain(keywords[name]) for name in sorted(keywords.keys() - _NOT_SAVED)}


def read_back(saved: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `plain_keywords`; ValueError for a function, which is not saved, unless it is `given`."""
    known = {name: _READ_BACK.get(name, lambda value: value)(value) for name, value in saved.items()}
    if "exploration" not in given and _A_FUNCTION in known.get("exploration", {}).values():
        what = f"the saved run has the exploration {known['exploration']}, and functions are not saved"
        raise ValueError(f"{what}: pass exploration= with the same schedules")
    return known


def check_same_run(saved: Mapping[str, Any], kind: type, keywords: Mapping[str, Any]) -> None:
    """Raise ValueError for the run of another class, or with other values of the keywords that define a run."""
    if saved["class"] != kind.__name__:
        raise ValueError(f"the saved run is that of a {saved['class']}, this is a {kind.__name__}: use that class")
    for name, value in keywords.items():
        was = saved["keywords"].get(name, value)
        if was != value and name not in _MAY_CHANGE:
            mend = "build the collector with that, or begin another run"
            raise ValueError(f"{name} is {value!r}, but {was!r} in the saved run: {mend}")


def _plain(value: Any) -> Any:
    if isinstance(value, ExplorationType):
        return value.name
    if isinstance(value, Shard):
        return [value.index, value.count]
    if isinstance(value, Mapping):
        return {name: _A_FUNCTION if callable(each) else _plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value.tolist() if hasattr(value, "ndim") else value  # numbers of NumPy, Torch or JAX
