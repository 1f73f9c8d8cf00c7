"""Makes a shallow copy of a Torch module, to run with other tensors; the user's module is only read.

Each submodule of the copy has its own dictionaries of parameters, buffers and submodules, and shares everything else
with the user's. So a change inside an attribute acts at once, and `Skeleton.follow` applies attributes set later.

A function that refers to modules becomes a module that has their weights.
"""

from __future__ import annotations

import contextlib
import copy
import dis
import inspect
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property, partial
from itertools import chain, count, islice
from operator import is_
from types import BuiltinFunctionType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any

import torch
from tensordict.nn import TensorDictParams
from torch import Tensor, nn

from funcollect.interop.memo import codes_of, content_of
from funcollect.policies.torch_modules import settings
from funcollect.policies.torch_modules.settings import REGISTERED, Look, referents

_MOST_REFERENTS = 1_000  # that are searched for one function
_TENSORS = ("_parameters", "_buffers")
_ORDERED = (dict, list, tuple, deque)  # containers except sets, whose order differs between processes
_NO_MODULES = (*settings.PLAIN, Tensor, type, ModuleType, BuiltinFunctionType)
_LIBRARIES = {"torch", "jax", "jaxlib", "numpy", "tensordict", "funcollect", *sys.stdlib_module_names}

Slots = dict[str, tuple[dict[str, Any], dict[str, Any], str]]  # by name: the module's dict, the copy's, the key in both


class Skeleton:
    """The copy. Attributes that its forward pass sets stay set until the user's module is changed."""

    def __init__(self, module: Callable[..., Any]) -> None:
        self._module = self.root = module  # the root of the copy; for a function itself
        self.parameters: Slots = {}
        self.buffers: Slots = {}
        self.bound_buffers: dict[str, Tensor] = {}  # the copies of buffers that the copy was given last, by name
        # By the id of the original: the original, so that no other object takes the id, and its copy.
        self._copies: dict[int, tuple[nn.Module, nn.Module]] = {}
        self._look: Look | None = None

    def follow(self) -> None:
        """Apply the changes of the module since the last call."""
        module = self._module
        if not isinstance(module, nn.Module) or (self._look is not None and self._look.holds()):
            return
        self._before, self._copies = self._copies, {}
        self._rebuilt: list[Any] = []  # copied containers, methods and partials, since they lead to submodules
        self._open: set[int] = set()  # the ids of those that are being copied
        vars(self).pop("entangled", None)
        self.root = self._copy(module)
        self._before = {}
        parts = [part for part, _ in self._copies.values()]
        if not any(isinstance(part, torch.jit.ScriptModule) for part in parts):  # Python does not see it change
            registries = [getattr(part, kind) for part in parts for kind in REGISTERED]
            self._look = Look([*parts, *map(vars, parts), *registries, *self._rebuilt])
        self.parameters, self.buffers = (self._slots(module, kind) for kind in _TENSORS)
        self.bound_buffers = {}

    def _slots(self, module: nn.Module, kind: str) -> Slots:
        slots: Slots = {}
        for prefix, part in module.named_modules(remove_duplicate=False):  # a shared submodule has several names
            source, target = getattr(part, kind), getattr(self._copies[id(part)][1], kind)
            keys = (key for key, tensor in source.items() if tensor is not None)
            slots |= {f"{prefix}.{key}".removeprefix("."): (source, target, key) for key in keys}
        return slots

    def _copy(self, part: nn.Module) -> nn.Module:
        """The up-to-date copy of one module; the existing copy if there is one."""
        if id(part) in self._copies:
            return self._copies[id(part)][1]
        if isinstance(part, torch.jit.ScriptModule):
            pairs = zip(part.modules(), copy.deepcopy(part).modules(), strict=True)
            self._copies |= {id(original): (original, twin) for original, twin in pairs}
            return self._copies[id(part)][1]
        _, twin = self._copies[id(part)] = self._before.get(id(part)) or (part, settings.bare(type(part)))
        twin.__class__ = type(part)
        now: dict[str, Any] = {kind: dict(getattr(part, kind)) for kind in _TENSORS}
        now["_modules"] = {name: None if child is None else self._copy(child) for name, child in part._modules.items()}
        separate = (*REGISTERED, *(["forward"] if settings.is_compiled(part) else []))
        now |= {name: self._with_copies(value) for name, value in vars(part).items() if name not in separate}
        attributes = vars(twin)
        attributes |= now  # before the others are removed, since another thread may run the copy meanwhile
        for name in attributes.keys() - now.keys():
            del attributes[name]
        if settings.is_compiled(part):
            restore: Any = twin.__setstate__
            restore(attributes)  # makes its forward, over the copy of the module inside
        return twin

    def _with_copies(self, value: Any) -> Any:
        """The value with modules replaced by their copies; the value itself if it has none."""
        if isinstance(value, nn.Module):
            return self._copy(value)
        parts = list(_contents(value))
        if not parts or id(value) in self._open:  # the latter holds itself
            return value
        self._open.add(id(value))
        replaced = list(map(self._with_copies, parts))
        self._open.remove(id(value))
        if all(map(is_, replaced, parts)):
            return value
        self._rebuilt.append(value)
        return _like(value, replaced)

    @cached_property
    def entangled(self) -> str:
        """An attribute through which the copy reaches parameters or submodules of the original; empty for none."""
        module: Any = self._module
        originals = {*self._copies, *map(id, (*module.parameters(), *module.buffers()))}
        closed = (nn.Module, Tensor, weakref.ref)
        for part, _ in self._copies.values():
            if isinstance(part, TensorDictParams):
                return "_param_td"
            if not isinstance(part, (torch.jit.ScriptModule, FunctionModule)):
                for name, value in settings.own_attributes(part).items():
                    met = islice(settings.walk(self._with_copies(value), closed), settings.MOST_OBJECTS)
                    if any(isinstance(one, (nn.Module, Tensor)) and id(one) in originals for one in met):
                        return name
        return ""


def _contents(value: Any) -> Iterable[Any]:
    """The parts of a container, a method or a partial, from which `_like` makes another; empty for other values."""
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return value
    return referents(value) if isinstance(value, (MethodType, partial)) else ()


def _like(value: Any, parts: list[Any]) -> Any:
    if isinstance(value, dict):
        twin = copy.copy(value)
        twin.update(zip(value, parts, strict=True))
        return twin
    if isinstance(value, partial):
        return partial(parts[0], *parts[1], **parts[2])
    return type(value)(*parts) if isinstance(value, MethodType) or hasattr(value, "_fields") else type(value)(parts)


class FunctionModule(nn.Module):
    """Calls `function`, lending its modules the tensors of the submodules, which a skeleton copies and binds."""

    def __init__(self, function: Callable[..., Any], found: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.function = function
        for name, module in found.items():
            self.add_module(f"{name}_" if hasattr(self, name) else name, module)
        self._referred = MappingProxyType(dict(found))  # modules in a container of another kind would be copied

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_referred"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        # Found again: in another process a function that is imported refers to modules made there.
        self._referred = MappingProxyType(modules_of(self.function))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        with _lent(self.children(), self._referred.values()):
            return self.function(*args, **kwargs)


@contextlib.contextmanager
def _lent(owners: Iterable[nn.Module], users: Iterable[nn.Module]) -> Iterator[None]:
    """Lend the tensors of each owner, and of its submodules, to the user in the same place."""
    flat = (chain.from_iterable(module.modules() for module in modules) for modules in (owners, users))
    pairs = [(vars(owner), vars(user)) for owner, user in zip(*flat, strict=True) if owner is not user]
    before = [{kind: user[kind] for kind in _TENSORS} for _, user in pairs]
    try:
        for owner, user in pairs:
            user.update({kind: owner[kind] for kind in _TENSORS})
        yield
    finally:
        for (_, user), tensors in zip(pairs, before, strict=True):
            user.update(tensors)


def modules_of(function: Callable[..., Any]) -> dict[str, nn.Module]:
    """The modules that a function refers to, by name: in its closure, globals and defaults, and in attributes it reads.

    So are the functions that it refers to, except those of libraries. TypeError for a trainable tensor outside modules.
    """
    found: dict[str, nn.Module] = {}
    names = {"__wrapped__"}  # of the attributes that are searched
    seen: dict[int, Any] = {}  # by id; kept, so that no other object takes the id
    queue: deque[tuple[str, Any]] = deque([("module", function)])
    while queue and len(seen) < _MOST_REFERENTS:
        name, value = queue.popleft()
        if isinstance(value, Tensor) and value.requires_grad:
            what = f"the policy's function refers to the tensor {name!r}, which requires a gradient"
            mend = "make it a parameter of an nn.Module, so that it is saved and sent to workers"
            raise TypeError(f"{what}, expected modules with such tensors: {mend}")
        if id(value) in seen or isinstance(value, _NO_MODULES):
            continue
        seen[id(value)] = value
        if isinstance(value, nn.Module):
            names_of_it = (f"{name.replace('.', '_')}{f'_{number}' if number else ''}" for number in count())
            found[next(free for free in names_of_it if free not in found)] = value
        elif isinstance(value, FunctionType):
            if str(value.__module__).partition(".")[0] not in _LIBRARIES:
                names.update(*(code.co_names for code in codes_of(value.__code__)))
                queue += _referents(value)
        elif parts := referents(value):
            queue += [(name, part) for part in parts]
        elif isinstance(value, _ORDERED):
            items = islice(value.items() if isinstance(value, dict) else enumerate(value), _MOST_REFERENTS)
            queue += [(f"{name}_{key}", item) for key, item in items]
        else:
            call = inspect.getattr_static(type(value), "__call__", None)
            names.update(getattr(getattr(call, "__code__", None), "co_names", ()))
            attributes = getattr(value, "__dict__", {})
            queue += [(name, call), *((key, part) for key, part in attributes.items() if key in names)]
    return found


def _referents(function: FunctionType) -> Iterator[tuple[str, Any]]:
    steps = chain.from_iterable(map(dis.get_instructions, codes_of(function.__code__)))
    read = [step.argval for step in steps if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")]
    yield from ((name, function.__globals__[name]) for name in dict.fromkeys(read) if name in function.__globals__)
    yield from zip(function.__code__.co_freevars, map(content_of, function.__closure__ or ()), strict=True)
    yield from (("default", values) for values in (function.__defaults__, function.__kwdefaults__))
