"""Notices changes of a Torch module in anything but its weights: in what programs bake in, and workers have."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from functools import partial
from itertools import chain
from operator import is_
from types import BuiltinFunctionType, CodeType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any, Self

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from funcollect.errors import LoweringError
from funcollect.policies.weights import weights_of
from funcollect.tree import flatten

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
LEAVES = (*PLAIN, Enum, type, BuiltinFunctionType, CodeType, ModuleType)  # into which nobody looks
REGISTERED = ("_parameters", "_buffers", "_modules")

_MAPPINGS = (dict, MappingProxyType)
_SEQUENCES = (list, set, deque)
_MOST_OBJECTS = 2_000
_MOST_LOOKS = 8  # at one module; a program is made for half as many


class Look:
    """Records the state of objects. `holds` shows cheaply whether it is still the same, `alike` whether it is equal."""

    def __init__(
        self, owners: Iterable[Any] = (), containers: Iterable[Any] = (), weights: Iterable[Tensor] = ()
    ) -> None:
        self.owners = list(owners)  # objects whose classes may change
        self.containers = list(containers)  # dictionaries, lists and sets, for their contents
        self.cells: list[Any] = []  # of closures, for their contents
        self.tensors: list[Tensor] = []  # for how often they were written
        self.arrays: list[Any] = []  # for their numbers
        self.error: LoweringError | None = None  # why not all is looked at
        self._weights = {id(each): each for each in weights}

    @classmethod
    def at(cls, module: Any) -> Self:
        """A look at everything that a module is, except its weights, as far as Python shows it.

        These are its submodules and their classes, hooks, the names, shapes and dtypes of tensors, and the values of
        attributes, with all that these refer to. Not seen are global variables that a function reads, attributes in
        ``__slots__`` or in C, and writes through ``.data`` to other tensors. There is an `error` for more than 2,000
        objects.

        >>> module = torch.nn.Dropout(0.1)
        >>> look = Look.at(module)
        >>> module.eval().p, look.holds()
        (0.1, False)
        >>> module.train().p, look.holds()
        (0.1, True)
        """
        look = cls(weights=weights_of(module))
        seen: dict[int, Any] = {}  # by id; kept, so that no other object takes the id
        queue = deque([module])
        while queue:
            value = queue.popleft()
            if isinstance(value, LEAVES) or id(value) in seen:
                continue
            if len(seen) == _MOST_OBJECTS:
                look.error = LoweringError(
                    f"its attributes lead to more than {_MOST_OBJECTS:,} objects, too many to look at before each "
                    "rollout: keep environments, buffers and the like out of the module"
                )
                break
            seen[id(value)] = value
            queue += look._open(value)
        return look.take()

    def _open(self, value: Any) -> Iterable[Any]:
        """Note what of a value can change without its being replaced, and return its parts."""
        if isinstance(value, Tensor):
            self.tensors += () if id(value) in self._weights else (value,)
            return ()
        if isinstance(value, weakref.ref):
            return (value(),)
        if isinstance(value, np.ndarray | np.generic):
            self.arrays.append(value)
        elif isinstance(value, (*_MAPPINGS, *_SEQUENCES)):
            self.containers.append(value)
        elif isinstance(value, FunctionType):
            self.cells += value.__closure__ or ()
        elif hasattr(value, "__dict__"):
            self.owners.append(value)
        return parts_of(value)

    def take(self) -> Self:
        """Record the current state."""
        self._sizes = list(map(len, self.containers))
        self._objects, self._versions = self._objects_now(), self._versions_now()
        return self

    def holds(self) -> bool:
        """Whether the state is the recorded one: the same objects, and none of the tensors and arrays written."""
        return self._compares(is_)

    def alike(self) -> bool:
        """Whether it may stand for the recorded one: plain values are equal, and weights have the same form."""
        return self._compares(self._equal)

    def _compares(self, same: Callable[[Any, Any], bool]) -> bool:
        if list(map(len, self.containers)) != self._sizes:
            return False
        objects = self._objects_now()
        return (
            len(objects) == len(self._objects)
            and all(map(same, objects, self._objects))
            and self._versions_now() == self._versions
        )

    def _equal(self, now: Any, before: Any) -> bool:
        if now is before:
            return True
        if id(before) in self._weights:
            return isinstance(now, Tensor) and _form(now) == _form(before)
        if type(now) is not type(before):  # 1, 1.0 and True are equal
            return False
        if isinstance(now, PLAIN):
            return bool(now == before)
        if isinstance(now, weakref.ref):
            return self._equal(now(), before())
        if isinstance(now, dict):
            return self._equal([*now, *now.values()], [*before, *before.values()])
        if isinstance(now, (list, tuple, deque)):
            return len(now) == len(before) and all(map(self._equal, now, before))
        parts = referents(now)
        return parts is not None and _code(now) == _code(before) and self._equal(parts, referents(before))

    def _objects_now(self) -> list[Any]:
        """The classes of owners, and the contents of containers and of cells."""
        objects: list[Any] = list(map(type, self.owners))
        for each in self.containers:
            if each:
                objects += each
                if isinstance(each, _MAPPINGS):
                    objects += each.values()
        objects += [content_of(cell) for cell in self.cells]
        return objects

    def _versions_now(self) -> list[Any]:
        arrays = [(each.dtype, each.shape, each.tobytes()) for each in self.arrays]
        return [*map(_version_of, self.tensors), *arrays]


class ModuleSettings:
    """Numbers the settings of a module, which are all that it is besides its weights; see `Look.at`."""

    def __init__(self, module: Any) -> None:
        self._module = module  # None has one setting
        self._looks: list[tuple[int, Look]] = []  # with their numbers, that of the last call first; never written
        self._count = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return ModuleSettings, (self._module,)

    @property
    def number(self) -> int:
        """The number of the current setting: the same one as when the module was like this before.

        LoweringError if there is too much to compare.
        """
        if self._module is None:
            return 0
        known = self._looks
        found = next((each for each in known if each[1].holds()), None)
        if found is None:
            number = next((number for number, look in known if look.alike()), None)
            if number is None:
                number = self._count = self._count + 1
            found = number, Look.at(self._module)
        if not known or found is not known[0]:
            self._looks = [found, *(each for each in known if each[0] != found[0])][:_MOST_LOOKS]
        number, look = found
        if look.error:
            raise look.error
        return number


def _form(tensor: Tensor) -> Any:
    return tensor.dtype, None if is_lazy(tensor) else tensor.shape, tensor.device


def _version_of(tensor: Tensor) -> int:
    """How often a tensor was written in place; writes through ``.data`` do not count."""
    return 0 if tensor.is_inference() else tensor._version


def content_of(cell: Any) -> Any:
    """The object in a closure cell; None for an empty one."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _code(value: Any) -> Any:
    return getattr(value, "__code__", None)


def parts_of(value: Any) -> Iterable[Any]:
    """What a value leads to: what a container holds, what a function refers to, or an object's attributes, a dict."""
    if isinstance(value, TensorDictBase):  # whose own attributes change as it is read
        return flatten(value).values()
    if isinstance(value, _MAPPINGS):
        return chain(value, value.values())
    if isinstance(value, (*_SEQUENCES, tuple, frozenset)):
        return value
    if (parts := referents(value)) is not None:
        return parts
    attributes = getattr(value, "__dict__", None)
    return (attributes,) if isinstance(attributes, dict) else ()


def referents(value: Any) -> tuple[Any, ...] | None:
    """The objects that a method, a partial or a function with a closure refers to; None for anything else."""
    if isinstance(value, MethodType):
        return value.__func__, value.__self__
    if isinstance(value, partial):
        return value.func, value.args, value.keywords
    if isinstance(value, FunctionType):
        return *map(content_of, value.__closure__ or ()), value.__defaults__, value.__kwdefaults__
    return None


def unregistered(module: nn.Module) -> str:
    """Where `module` refers to a tensor or a module that is no parameter, buffer or submodule; empty if nowhere.

    >>> module = torch.nn.Identity()
    >>> module.mean = torch.zeros(3)
    >>> unregistered(module)
    'mean'
    """
    for prefix, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            raise LoweringError(
                f"{type(part).__name__} is a program of TorchScript, which torch.export does not take: pass the module "
                "that it was made from"
            )
        held = {name: value for name, value in vars(part).items() if not is_registry(part, name)}
        for name, value in {**held, "forward": type(part).forward}.items():
            if any(isinstance(each, (Tensor, nn.Module)) and each is not part for each in _held(value)):
                return f"{prefix}.{name}" if prefix else name
    return ""


def is_registry(part: nn.Module, name: str) -> bool:
    """Whether an attribute holds parameters, buffers or submodules. An RNN keeps a second list of its parameters."""
    return name in REGISTERED or (name == "_flat_weights" and isinstance(part, nn.RNNBase))


def _held(value: Any) -> Iterator[Any]:
    """The contents of a container, what a method or a function refers to, the latter's globals, or the value."""
    if isinstance(value, FunctionType):
        yield from map(value.__globals__.get, value.__code__.co_names)
    if isinstance(value, FunctionType | MethodType):
        yield from referents(value) or ()
    elif isinstance(value, (*_MAPPINGS, *_SEQUENCES, tuple)):
        for each in parts_of(value):
            yield from _held(each)
    else:
        yield value
