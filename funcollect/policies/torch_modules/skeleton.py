"""A shallow copy of a Torch module, to run with other tensors; the user's module is only read.

Each submodule of the copy has its own dictionaries of parameters, buffers and submodules, and shares everything else
with the user's. So a change inside an attribute acts at once, and `Skeleton.follow` applies attributes set later.
"""

from __future__ import annotations

import copy
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from operator import is_
from types import MethodType
from typing import Any

import torch
from tensordict.nn import TensorDictParams
from torch import Tensor, nn

from funcollect.policies.torch_modules.function_module import FunctionModule
from funcollect.policies.torch_modules.settings import MOST_OBJECTS, REGISTERED, Look, own_attributes, walk


class Skeleton:
    """See the module's docstring. `root` is the copy of the user's module, once `follow` has been called.

    What a forward pass writes into attributes stays in the copy until the module is changed.
    """

    root: nn.Module

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        # By the id of the original: it, which so keeps its id, and its copy.
        self._copies: dict[int, tuple[nn.Module, nn.Module]] = {}
        self._look: Look | None = None

    def __getstate__(self) -> dict[str, Any]:
        """The module alone. The first call of `follow` copies it again."""
        return {"_module": self._module, "_copies": {}, "_look": None}

    def follow(self) -> bool:
        """Apply the changes of the module since the last call. Return whether there were any."""
        if self._look is not None and self._look.holds():
            return False
        self._before, self._copies = self._copies, {}
        self._rebuilt: list[Any] = []  # what holds submodules or methods of them, and is copied separately
        self._open: set[int] = set()  # what is being copied
        self._entangled: str | None = None
        self.root = self._copy(self._module)
        self._before = {}
        parts = [part for part, _ in self._copies.values()]
        if not any(isinstance(part, torch.jit.ScriptModule) for part in parts):  # it changes where Python does not see
            registries = [getattr(part, kind) for part in parts for kind in REGISTERED]
            self._look = Look([*parts, *map(vars, parts), *registries, *self._rebuilt])
        return True

    def parts(self) -> Iterator[tuple[str, nn.Module, nn.Module]]:
        """For each submodule its name, the user's module and the copy."""
        for name, part in self._module.named_modules():
            yield name, part, self._copies[id(part)][1]

    def _copy(self, part: nn.Module) -> nn.Module:
        """The copy of one module, made equal to it. Modules that are still there keep theirs."""
        if id(part) in self._copies:
            return self._copies[id(part)][1]
        if isinstance(part, torch.jit.ScriptModule):
            pairs = zip(part.modules(), copy.deepcopy(part).modules(), strict=True)
            self._copies |= {id(original): (original, other) for original, other in pairs}
            return self._copies[id(part)][1]
        _, made = self._copies[id(part)] = self._before.get(id(part)) or (part, bare(type(part)))
        if type(made) is not type(part):
            made.__class__ = type(part)
        now: dict[str, Any] = {kind: dict(getattr(part, kind)) for kind in ("_parameters", "_buffers")}
        now["_modules"] = {name: None if child is None else self._copy(child) for name, child in part._modules.items()}
        now |= {name: self._moved(value) for name, value in _shared(part).items()}
        own = vars(made)
        own |= now  # another thread may run it, so nothing is missing meanwhile
        for name in own.keys() - now.keys():
            del own[name]
        if _is_compiled(part):
            restore: Any = made.__setstate__
            restore(own)  # makes its forward, over the copy of the module inside
        return made

    def _moved(self, value: Any) -> Any:
        """The value with modules replaced by their copies; the value itself if it has none."""
        if isinstance(value, nn.Module):
            return self._copy(value)
        parts, rebuild = _opened(value)
        if not parts or id(value) in self._open:  # it holds itself
            return value
        self._open.add(id(value))
        moved = list(map(self._moved, parts))
        self._open.remove(id(value))
        if all(map(is_, moved, parts)):
            return value
        self._rebuilt.append(value)
        return rebuild(moved)

    @property
    def entangled(self) -> str:
        """An attribute through which the copy reaches parameters or submodules of the original; empty for none."""
        if self._entangled is None:
            parts = [part for part, _ in self._copies.values() if not isinstance(part, torch.jit.ScriptModule)]
            self._entangled = next((name for part in parts if (name := self._entanglement(part))), "")
        return self._entangled

    def _entanglement(self, part: nn.Module) -> str:
        if isinstance(part, (TensorDictParams, FunctionModule)):
            return "_param_td" if isinstance(part, TensorDictParams) else ""
        own = {*self._copies, *map(id, (*self._module.parameters(), *self._module.buffers()))}

        def reaches(value: Any) -> bool:
            met = islice(walk(self._moved(value), closed=(nn.Module, Tensor, weakref.ref)), MOST_OBJECTS)
            return any(isinstance(each, (nn.Module, Tensor)) and id(each) in own for each in met)

        shared = _shared(part)
        return next((name for name in own_attributes(part) if name in shared and reaches(shared[name])), "")


def _opened(value: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """The parts of a container, a method or a partial, and a function that makes one like it of others."""
    if isinstance(value, MethodType):
        return [value.__self__], lambda parts: MethodType(value.__func__, *parts)
    if isinstance(value, partial):
        return [value.func, value.args, value.keywords], lambda parts: partial(parts[0], *parts[1], **parts[2])
    if isinstance(value, dict):
        return list(value.values()), partial(_updated, value)
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return list(value), lambda parts: type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return [], lambda parts: value


def _updated(before: dict[Any, Any], values: list[Any]) -> dict[Any, Any]:
    other = copy.copy(before)
    other.update(zip(before, values, strict=True))
    return other


def bare(kind: type[nn.Module]) -> nn.Module:
    """A module without attributes. `copy.copy` would refuse modules with parametrizations."""
    made: nn.Module = object.__new__(kind)
    return made


def _shared(part: nn.Module) -> dict[str, Any]:
    """The attributes that a copy has from the module, except those that are made for it."""
    made = (*REGISTERED, "forward") if _is_compiled(part) else REGISTERED
    return {name: value for name, value in vars(part).items() if name not in made}


def _is_compiled(part: nn.Module) -> bool:
    """Whether this is what `torch.compile` returned; its class is imported late, since that takes seconds."""
    kind = type(part)
    return kind.__name__ == "OptimizedModule" and kind.__module__.startswith("torch._dynamo")
