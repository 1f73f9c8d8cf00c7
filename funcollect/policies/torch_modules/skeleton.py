"""A shallow copy of a Torch module, to run with other tensors; the user's module is only read.

Each submodule of the copy has its own dictionaries of parameters, buffers and submodules, and shares everything else
with the user's. So a change inside an attribute acts at once, and `Skeleton.follow` applies attributes set later.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from operator import is_
from types import MethodType, ModuleType
from typing import Any

import torch
from tensordict.nn import TensorDictParams
from torch import Tensor, nn

from funcollect.policies.torch_modules.function_module import FunctionModule
from funcollect.policies.torch_modules.settings import PLAIN, REGISTERED, Look, is_registry, referents

_MOST_OBJECTS = 2_000  # that are looked through behind the attributes of a submodule
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)


@dataclass
class _PartCopy:
    """The copy of one submodule, and the attributes that were copied last."""

    original: nn.Module  # kept alive, so that its id is not used again
    copy: nn.Module
    taken: dict[str, Any] = field(default_factory=dict)


class Skeleton:
    """See the module's docstring. `root` is the copy of the user's module.

    `entangled` is the name of an attribute through which the copy reaches parameters or submodules of the original;
    empty if there is none.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._copies: dict[int, _PartCopy] = {}  # by the id of the original
        self._look: Look | None = None
        self.follow()

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the look, which the first call of `follow` takes again."""
        return {**vars(self), "_look": None}

    def follow(self) -> bool:
        """Apply the changes of the module since the last call. Return whether there were any."""
        if self._look is not None and self._look.holds():
            return False
        parts = _parts_of(self._module)
        self._copies = self._copies_of(parts)
        self.root: nn.Module = self._copies[id(self._module)].copy
        self._registered = {id(tensor) for tensor in (*self._module.parameters(), *self._module.buffers())}
        self._copied: list[Any] = []  # containers of submodules or of their methods, which are copied separately
        self._open: set[int] = set()  # containers that are being copied
        self._seen: dict[int, Any] = {}  # by id, objects that were looked through for one submodule
        self.entangled = ""
        plain = [part for part in parts if not isinstance(part, torch.jit.ScriptModule)]
        for part in plain:
            self.entangled = self._update(part) or self.entangled
        self._seen = {}
        if len(plain) == len(parts):  # a script module changes where Python does not see it
            registries = [getattr(part, kind) for part in parts for kind in REGISTERED]
            self._look = Look(parts, [*map(vars, parts), *registries, *self._copied]).take()
        return True

    def _copies_of(self, parts: list[nn.Module]) -> dict[int, _PartCopy]:
        """The copies by the id of the original. Submodules that are still there keep theirs."""
        copies: dict[int, _PartCopy] = {}
        for part in parts:
            if id(part) in copies:
                continue
            if isinstance(part, torch.jit.ScriptModule):
                pairs = zip(part.modules(), copy.deepcopy(part).modules(), strict=True)
                copies |= {id(original): _PartCopy(original, other) for original, other in pairs}
            else:
                copies[id(part)] = self._copies.get(id(part)) or _PartCopy(part, bare(type(part)))
        return copies

    def parts(self) -> Iterator[tuple[str, nn.Module, nn.Module]]:
        """For each submodule its name, the user's module and the copy."""
        for name, part in self._module.named_modules():
            yield name, part, self._copies[id(part)].copy

    def _update(self, part: nn.Module) -> str:
        """Make the copy of a submodule equal to it. Return the name of an entangled attribute, or an empty string."""
        known = self._copies[id(part)]
        rebuilt = (*REGISTERED, "forward") if _is_compiled(part) else REGISTERED
        attributes = {name: value for name, value in vars(part).items() if name not in rebuilt}
        own = vars(known.copy)
        if type(known.copy) is not type(part):
            known.copy.__class__ = type(part)
        for name in known.taken.keys() - attributes.keys():
            del known.taken[name]
            own.pop(name, None)
        entangled = "_param_td" if isinstance(part, TensorDictParams) else ""
        self._seen = {}
        for name, value in attributes.items():
            moved = self._moved(value)
            if moved is not value or name not in known.taken or known.taken[name] is not value:
                known.taken[name], own[name] = value, moved
            if not (is_registry(part, name) or isinstance(part, FunctionModule)) and self._reaches(moved):
                entangled = entangled or name
        own["_modules"] = {
            name: None if child is None else self._copies[id(child)].copy for name, child in part._modules.items()
        }
        for kind in ("_parameters", "_buffers"):
            own[kind] = dict(getattr(part, kind))
        if _is_compiled(part):
            restore: Any = known.copy.__setstate__
            restore(own)  # makes its forward, over the copy of the module inside
        return entangled

    def _moved(self, value: Any) -> Any:
        """The value with submodules replaced by their copies; the value itself if it has none."""
        if isinstance(value, nn.Module):
            known = self._copies.get(id(value))
            return value if known is None else known.copy
        if isinstance(value, MethodType):
            owner = self._moved(value.__self__)
            return value if owner is value.__self__ else MethodType(value.__func__, owner)
        if isinstance(value, partial):
            parts = (value.func, value.args, value.keywords)
            moved = tuple(map(self._moved, parts))
            return value if all(map(is_, moved, parts)) else partial(moved[0], *moved[1], **moved[2])
        return self._container(value) if isinstance(value, _CONTAINERS) and value else value

    def _container(self, value: Any) -> Any:
        """A container with its items moved, or the container itself if none of them is replaced."""
        if id(value) in self._open:  # it holds itself
            return value
        self._open.add(id(value))
        items = list(value.values() if isinstance(value, dict) else value)
        moved = list(map(self._moved, items))
        self._open.remove(id(value))
        if all(map(is_, moved, items)):
            return value
        self._copied.append(value)
        if isinstance(value, dict):
            other = copy.copy(value)
            other.update(zip(value, moved, strict=True))
            return other
        return type(value)(*moved) if hasattr(value, "_fields") else type(value)(moved)

    def _reaches(self, value: Any) -> bool:
        """Whether a value that was moved still leads to the user's own submodules or registered tensors."""
        if isinstance(value, nn.Module):
            return id(value) in self._copies
        if isinstance(value, Tensor):
            return id(value) in self._registered
        if isinstance(value, PLAIN) or id(value) in self._seen or len(self._seen) == _MOST_OBJECTS:
            return False
        self._seen[id(value)] = value
        return any(map(self._reaches, _inside(value)))


def _parts_of(module: nn.Module) -> list[nn.Module]:
    """The module, its submodules, and other modules in their attributes, which may have submodules in common."""
    parts: dict[int, nn.Module] = {}
    queue = [module]
    while queue:
        part = queue.pop()
        if id(part) not in parts:
            parts[id(part)] = part
            queue += [each for each in part._modules.values() if each is not None]
            if not isinstance(part, torch.jit.ScriptModule):
                queue += [value for value in vars(part).values() if isinstance(value, nn.Module)]
    return list(parts.values())


def bare(kind: type[nn.Module]) -> nn.Module:
    """A module without attributes. `copy.copy` would refuse modules with parametrizations."""
    made: nn.Module = object.__new__(kind)
    return made


def _inside(value: Any) -> Any:
    """The contents of a container, the referents of a function or method, or an object's attributes."""
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, _CONTAINERS):
        return list(value)
    if (parts := referents(value)) is not None:
        return parts
    attributes = None if isinstance(value, type | ModuleType) else getattr(value, "__dict__", None)
    return list(attributes.values()) if isinstance(attributes, dict) else []


def _is_compiled(part: nn.Module) -> bool:
    """Whether this is what `torch.compile` returned; its class is imported late, since that takes seconds."""
    kind = type(part)
    return kind.__name__ == "OptimizedModule" and kind.__module__.startswith("torch._dynamo")
