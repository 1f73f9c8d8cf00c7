"""The fields of a collector's class are the keywords of its constructor."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from difflib import get_close_matches
from functools import cache, wraps
from itertools import pairwise
from textwrap import fill
from typing import Any, TypeVar, dataclass_transform, get_type_hints

_Class = TypeVar("_Class", bound=Any)
_SENT = "update_policy_weights_ sends weights in every collector"
_FILLED = "extend the buffer with each batch; the collectors with workers also have start(buffer)"
ONLY_IN_TORCHRL: Mapping[str, str] = {  # keywords that say how TorchRL's collectors work, and why there is none here
    "use_buffers": "batches are recorded into their own memory wherever that is possible",
    "return_same_td": "every batch has memory of its own, or is a view that is not written again while it is alive",
    "trust_policy": "policies need no trust",
    "no_cuda_sync": "queues of work are ordered by events",
    "auto_register_policy_transforms": "hidden states are found without transforms",
    "cudagraph_policy": "it is funcollect.torch_policy(module, compile='cudagraph') here",
    "compile_policy": "it is funcollect.torch_policy(module, compile='inductor') here",
    "track_policy_version": "every batch has ('collector', 'policy_version')",
    "weight_updater": _SENT,
    "weight_sync_schemes": _SENT,
    "weight_recv_schemes": _SENT,
    "replay_buffer": _FILLED,
    "extend_buffer": _FILLED,
    "local_init_rb": _FILLED,
    "preemptive_threshold": "a slow worker is waited for, and MultiaSyncDataCollector waits for none",
    "interruptor": "no worker is interrupted",
    "pre_collect_hook": "call the function before you take a batch",
    "post_collect_hook": "call the function with each batch, or pass it as postproc=",
    "trajs_per_write": "trajs_per_batch=1 delivers each trajectory by itself",
    "track_traj_ids": "every batch has ('collector', 'traj_ids')",
    "init_fn": "create_env_fn and policy_factory are called in each worker",
    "num_sub_threads": "it is num_threads here, in the collectors with workers",
    "backend_options": "the collectors have their own keywords for workers",
    "worker_idx": "every batch has ('collector', 'lane')",
    "collector_class": "RayCollector has it",
    "cat_results": "MultiSyncDataCollector has it",
}
_SECTIONS = re.compile(r"^(?:Attributes:|Raises:|>>> )", re.M)  # what follows the prose of a docstring


@dataclass_transform(kw_only_default=True, eq_default=False, field_specifiers=(field,))
def collector(cls: type[_Class]) -> type[_Class]:
    """Make the fields of a class, its own and those of its bases, the keywords of its constructor.

    Each field has its meaning in a string below it, where editors look for it. The docstring gets all of them, for
    ``help``. The constructor refuses an unknown keyword with TypeError, and explains those in the class's `_elsewhere`.
    """
    dataclass(kw_only=True, eq=False, repr=False)(cls)
    plain = cls.__init__
    known = inspect.signature(plain).parameters.keys() - {"self"}
    plain.__annotations__ |= {name: hint for name, hint in get_type_hints(cls).items() if name in known}

    @wraps(plain)
    def init(self: Any, *args: Any, **keywords: Any) -> None:
        check_known(keywords, known, cls._elsewhere)
        plain(self, *args, **keywords)

    cls.__init__ = init
    cls.__doc__ = _with_keywords(cls, inspect.signature(plain).parameters)
    return cls


def check_known(keywords: Mapping[str, Any], known: set[str], elsewhere: Mapping[str, str]) -> None:
    """Raise TypeError for a keyword that is not among those `known`, with the explanation in `elsewhere` if any."""
    if not (unknown := sorted(keywords.keys() - known)):
        return
    if here := [f"{name} ({elsewhere[name]})" for name in unknown if name in elsewhere]:
        raise TypeError(f"this collector has no argument {', '.join(here)}: leave it out")
    alike = [found for name in unknown for found in get_close_matches(name, known, 1)]
    likely = f" (perhaps you meant {' and '.join(alike)})" if alike else ""
    raise TypeError(
        f"the keywords {unknown} are unknown{likely}, expected some of {', '.join(sorted(known))}: check the spelling, "
        "and give arguments of make_env as create_env_kwargs"
    )


def _with_keywords(cls: type, keywords: Iterable[str]) -> str:
    """The docstring of a class with a section on all its keywords, before its other sections and the example."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        found |= _attribute_docstrings(base.__module__).get(base.__name__, {}) if is_dataclass(base) else {}
    entries = [f"{name}: {found[name]}" for name in keywords if name in found]
    section = "\n".join(fill(entry, 116, initial_indent=" " * 4, subsequent_indent=" " * 8) for entry in entries)
    text = inspect.cleandoc(cls.__doc__ or "")
    head = _SECTIONS.split(text, maxsplit=1)[0].rstrip()
    return f"{head}\n\nArgs:\n{section}\n\n{text[len(head) :].lstrip()}".rstrip() + "\n"


@cache
def _attribute_docstrings(module: str) -> dict[str, dict[str, str]]:
    """By class and attribute, the strings below attributes in the source of a module; none if there is no source."""
    try:
        source = inspect.getsource(sys.modules[module])
    except (OSError, TypeError):
        return {}
    classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    return {each.name: dict(_documented(each.body)) for each in classes}


def _documented(body: Sequence[ast.stmt]) -> Iterator[tuple[str, str]]:
    """The annotated attributes in the body of a class that have a string below them, and these strings."""
    for statement, below in pairwise(body):
        match statement, below:
            case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                yield name, inspect.cleandoc(text)
