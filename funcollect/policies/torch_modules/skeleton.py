"""A shallow copy of a Torch module, to run with other tensors; the user's module is only read.

Each submodule of the copy has its own dictionaries of parameters, buffers and submodules, and shares everything else
with the user's. So a change inside an attribute acts at once, and `Skeleton.follow` applies attributes set later.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from functools import partial
from operator import is_
from types import MethodType
from typing import Any

import torch
from tensordict.nn import TensorDictParams
from torch import Tensor, nn

from funcollect.policies.torch_modules.function_module import FunctionModule
from funcollect.policies.torch_modules.settings import LEAVES, REGISTERED, Look, is_registry, parts_of

_MOST_OBJECTS = 2_000  # that are looked through behind the attributes of a submodule
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)

_Copies = dict[int, tuple[nn.Module, nn.Module]]  # by the id of the original: it, which so keeps its id, and its copy


class Skeleton:
    """See the module's docstring. `root` is the copy of the user's module.

    What a forward pass writes into attributes stays in the copy until the module is changed.
    """

    root: nn.Module

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._copies: _Copies = {}
        self._look: Look | None = None
        self.follow()

    def __getstate__(self) -> dict[str, Any]:
        """The module alone. The first call of `follow` copies it again."""
        return {"_module": self._module, "_copies": {}, "_look": None}

    def follow(self) -> bool:
        """Apply the changes of the module since the last call. Return whether there were any."""
        if self._look is not None and self._look.holds():
            return False
        self._before, self._copies = self._copies, _Copies()
        self._copied: list[Any] = []  # containers of submodules or of their methods, which are copied separately
        self._open: set[int] = set()  # containers that are being copied
        self._entangled: str | None = None
        self.root = self._copy(self._module)
        self._before = {}
        parts = [part for part, _ in self._copies.values()]
        if not any(isinstance(part, torch.jit.ScriptModule) for part in parts):  # it changes where Python does not see
            registries = [getattr(part, kind) for part in parts for kind in REGISTERED]
            self._look = Look(parts, [*map(vars, parts), *registries, *self._copied]).take()
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

    @property
    def entangled(self) -> str:
        """An attribute through which the copy reaches parameters or submodules of the original; empty for none."""
        if self._entangled is None:
            parts = [part for part, _ in self._copies.values() if not isinstance(part, torch.jit.ScriptModule)]
            self._entangled = next((name for part in parts if (name := self._entanglement(part))), "")
        return self._entangled

    def _entanglement(self, part: nn.Module) -> str:
        if isinstance(part, TensorDictParams):
            return "_param_td"
        if isinstance(part, FunctionModule):
            return ""
        weights = {id(tensor) for tensor in (*self._module.parameters(), *self._module.buffers())}
        seen: dict[int, Any] = {}  # by id; kept, so that no other object takes the id

        def reaches(value: Any) -> bool:
            if isinstance(value, nn.Module):
                return id(value) in self._copies
            if isinstance(value, Tensor):
                return id(value) in weights
            if isinstance(value, LEAVES) or id(value) in seen or len(seen) == _MOST_OBJECTS:
                return False
            seen[id(value)] = value
            return any(map(reaches, parts_of(value)))

        own = {name: value for name, value in _shared(part).items() if not is_registry(part, name)}
        return next((name for name, value in own.items() if reaches(self._moved(value))), "")


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
