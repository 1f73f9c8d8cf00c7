"""How the keywords of collectors are declared, documented and refused; and TorchRL's that mean nothing here."""

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
from typing import Any, NamedTuple, TypeVar, dataclass_transform, get_type_hints

from funcollect.messages import shown

_Class = TypeVar("_Class", bound=Any)


class _Foreign(NamedTuple):
    """A keyword of TorchRL's that is none here."""

    why: str  # what there is instead
    ignored: Callable[[Any], bool] = lambda value: True  # the values without which a call means the same


def _unset(value: Any) -> bool:
    return value is None


def _nothing(value: Any) -> bool:
    return value is None or value is False


def _only_policy(schemes: Any) -> bool:
    return schemes is None or (isinstance(schemes, Mapping) and {*schemes} <= {"policy"})


_SENT = "update_policy_weights_ sends weights in every collector"
_RESULT = "MultiSyncDataCollector has it; RayCollector stacks batches, whose own rows follow collector_kwargs"
FOREIGN: Mapping[str, _Foreign] = {
    "use_buffers": _Foreign("batches are recorded into their own memory wherever that is possible"),
    "return_same_td": _Foreign("a batch has memory of its own, or is a view that is not written while it is alive"),
    "trust_policy": _Foreign("policies need no trust"),
    "no_cuda_sync": _Foreign("queues of work are ordered by events"),
    "auto_register_policy_transforms": _Foreign("hidden states are found without transforms"),
    "extend_buffer": _Foreign("replay_buffer gets every batch whole"),
    "local_init_rb": _Foreign("replay_buffer is filled in the process that has it"),
    "worker_idx": _Foreign("every batch has ('collector', 'lane')"),
    "cudagraph_policy": _Foreign("pass funcollect.torch_policy(module, compile='cudagraph')", _nothing),
    "compile_policy": _Foreign("pass funcollect.torch_policy(module, compile='inductor')", _nothing),
    "weight_sync_schemes": _Foreign(_SENT, _only_policy),
    "weight_recv_schemes": _Foreign(_SENT, _only_policy),
    "weight_updater": _Foreign(_SENT, _nothing),
    "preemptive_threshold": _Foreign(
        "a slow worker is waited for, so that no frame is lost; MultiaSyncDataCollector waits for none",
        lambda given: given is None or given == 1.0,
    ),
    "interruptor": _Foreign("no worker is interrupted", _nothing),
    "init_fn": _Foreign("create_env_fn and policy_factory are called in each worker", _nothing),
    "num_sub_threads": _Foreign("pass num_threads, in the collectors with workers", lambda given: given in (None, 1)),
    "cat_results": _Foreign(_RESULT, _unset),
    "backend": _Foreign("funcollect.Collector has it; of this class there is one kind", _nothing),
    "backend_options": _Foreign("funcollect.Collector has it; pass the keywords themselves", lambda given: not given),
    "num_collectors": _Foreign("funcollect.Collector and RayCollector have it; pass num_workers=", _nothing),
    "sync": _Foreign("the class says so: MultiSyncDataCollector or MultiaSyncDataCollector", _unset),
    "collector_class": _Foreign("RayCollector has it", _nothing),
    "in_process": _Foreign("MultiSyncDataCollector has it", _nothing),
    "update_at_each_batch": _Foreign("pass update_after_each_batch, as TorchRL calls it", _nothing),
}


@dataclass_transform(kw_only_default=True, eq_default=False, field_specifiers=(field,))
def collector(cls: type[_Class]) -> type[_Class]:
    """Make the fields of a class, its own and those of its bases, the keywords of its constructor.

    Each field has its meaning in a string below it, where editors look for it. The docstring gets all of them, for
    ``help``. The constructor refuses an unknown keyword with TypeError.
    """
    dataclass(kw_only=True, eq=False, repr=False)(cls)
    plain = cls.__init__
    known = inspect.signature(plain).parameters.keys() - {"self"}
    plain.__annotations__ |= {name: hint for name, hint in get_type_hints(cls).items() if name in known}

    @wraps(plain)
    def init(self: Any, *args: Any, **keywords: Any) -> None:
        unknown = {name: value for name, value in keywords.items() if name not in known}
        _refuse({name: value for name, value in unknown.items() if not without_meaning(name, value)}, known)
        plain(self, *args, **{name: value for name, value in keywords.items() if name in known})

    cls.__init__ = init
    cls.__doc__ = _with_keywords(cls, inspect.signature(plain).parameters)
    return cls


def without_meaning(name: str, value: Any) -> bool:
    """Whether a call of a collector means the same without this keyword of TorchRL's."""
    return name in FOREIGN and FOREIGN[name].ignored(value)


def _refuse(unknown: Mapping[str, Any], known: set[str]) -> None:
    if here := [f"{name}={shown(value)} ({FOREIGN[name].why})" for name, value in unknown.items() if name in FOREIGN]:
        raise TypeError(f"this collector does not take {', '.join(here)}: leave it out")
    if unknown:
        alike = [found for name in unknown for found in get_close_matches(name, known, 1)]
        likely = f" (perhaps you meant {' and '.join(alike)})" if alike else ""
        raise TypeError(
            f"the keywords {sorted(unknown)} are unknown{likely}, expected some of {', '.join(sorted(known))}: check "
            "the spelling, and give arguments of make_env as create_env_kwargs"
        )


def _with_keywords(cls: type, keywords: Iterable[str]) -> str:
    """The docstring of a class with a section on all its keywords, before its other sections and the example."""
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
    """By class and attribute, the strings below attributes in the source of a module; none if there is no source."""
    try:
        source = inspect.getsource(sys.modules[module])
    except (OSError, TypeError):
        return {}
    found: dict[str, dict[str, str]] = {}
    for each in (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)):
        for pair in pairwise(each.body):
            match pair:
                case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                    found.setdefault(each.name, {})[name] = inspect.cleandoc(text)
    return found
