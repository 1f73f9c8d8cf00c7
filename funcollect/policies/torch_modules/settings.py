"""The attributes of a Torch module that a lowered program bakes in: everything but its parameters and buffers."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from functools import partial
from operator import is_
from types import BuiltinFunctionType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from funcollect.errors import LoweringError
from funcollect.policies.weights import weights_of
from funcollect.tree import flatten

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
REGISTERED = ("_parameters", "_buffers", "_modules")

_MAPPINGS = (dict, MappingProxyType)
_SEQUENCES = (list, set, deque)
_ITSELF = (type, BuiltinFunctionType, ModuleType, Enum)  # compared by identity
_MOST_OBJECTS = 2_000


class Settings:
    """Equal for modules that one program serves: the values in a nested tuple, hashed once."""

    __slots__ = ("_hash", "_values")

    def __init__(self, values: Any = ()) -> None:
        self._values = values
        self._hash = hash(values)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Settings) and self._values == other._values)

    def __hash__(self) -> int:
        return self._hash


NO_SETTINGS = Settings()


class Look:
    """Records the state of objects in `take`, and compares it with their later state in `holds`.

    It shows cheaply whether a module may have changed, so that its settings are read again only then.
    """

    def __init__(self, owners: Iterable[Any] = (), containers: Iterable[Any] = ()) -> None:
        self.owners = list(owners)  # objects whose classes may change
        self.containers = list(containers)  # dictionaries, lists and sets, whose contents are compared by identity
        self.cells: list[Any] = []  # of closures, also compared by identity
        self.tensors: list[Tensor] = []  # compared by how often they were written
        self.arrays: list[Any] = []  # compared by their contents

    def take(self) -> Look:
        """Record the current state."""
        self._sizes = list(map(len, self.containers))
        self._objects, self._versions = self._objects_now(), self._versions_now()
        return self

    def holds(self) -> bool:
        """Whether the state is still the recorded one."""
        if list(map(len, self.containers)) != self._sizes:
            return False
        objects = self._objects_now()
        return (
            len(objects) == len(self._objects)
            and all(map(is_, objects, self._objects))
            and self._versions_now() == self._versions
        )

    def _objects_now(self) -> list[Any]:
        """Everything that is compared by identity: classes, the contents of containers, and of closure cells."""
        objects: list[Any] = list(map(type, self.owners))
        for each in self.containers:
            if each:
                objects += each
                if isinstance(each, _MAPPINGS):
                    objects += each.values()
        objects += [content_of(cell) for cell in self.cells]
        return objects

    def _versions_now(self) -> list[Any]:
        return [*map(_version_of, self.tensors), *(array.tobytes() for array in self.arrays)]


def _version_of(tensor: Tensor) -> int:
    """How often a tensor was written in place; writes through ``.data`` do not count."""
    return 0 if tensor.is_inference() else tensor._version


def content_of(cell: Any) -> Any:
    """The object in a closure cell; None for an empty one."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def referents(value: Any) -> tuple[Any, ...] | None:
    """The objects that a method, a partial or a function with a closure refers to; None for anything else."""
    if isinstance(value, MethodType):
        return value.__func__, value.__self__
    if isinstance(value, partial):
        return value.func, value.args, value.keywords
    if isinstance(value, FunctionType):
        return *map(content_of, value.__closure__ or ()), value.__defaults__, value.__kwdefaults__
    return None


class _Itself:
    """An object that equals nothing but itself. It is kept alive, so that its id is not used again."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and self._value is other._value

    def __hash__(self) -> int:
        return id(self._value)


class _Survey:
    """One walk over a module and everything that its attributes lead to. `look` records the objects on the way."""

    def __init__(self, module: Any) -> None:
        self._weights = weights_of(module)  # kept, so that no other tensor takes an id
        self._registered = set(map(id, self._weights))
        self._seen: dict[int, tuple[int, Any]] = {}  # by id: its number; and itself, so that no other takes the id
        self.look = Look()

    def setting(self, value: Any) -> Any:
        """The value as it can be compared: plain values with their types, since 1, 1.0 and True are equal."""
        if isinstance(value, PLAIN) and not isinstance(value, Enum):
            return type(value), value
        if isinstance(value, _ITSELF):
            return _Itself(value)
        if isinstance(value, (tuple, frozenset)):
            return type(value), tuple(map(self.setting, value))
        if id(value) in self._seen:
            return "seen", self._seen[id(value)][0]
        if len(self._seen) == _MOST_OBJECTS:
            raise LoweringError(
                f"its attributes lead to more than {_MOST_OBJECTS:,} objects, too many to look at before each rollout: "
                "keep environments, buffers and the like out of the module"
            )
        self._seen[id(value)] = len(self._seen), value
        return type(value), self._contents(value)

    def _contents(self, value: Any) -> Any:
        """A comparable form of a value's content. Objects that can change without being replaced go into `look`."""
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, TensorDictBase):  # whose own attributes change as it is read
            return tuple((path, self.setting(leaf)) for path, leaf in flatten(value).items())
        if isinstance(value, _MAPPINGS):
            self.look.containers.append(value)
            return tuple((self.setting(key), self.setting(each)) for key, each in value.items())
        if isinstance(value, _SEQUENCES):
            self.look.containers.append(value)
            return tuple(map(self.setting, value))
        if isinstance(value, np.ndarray | np.generic):
            self.look.arrays.append(value)
            return value.dtype.str, value.shape, value.tobytes()
        return self._object(value)

    def _tensor(self, value: Tensor) -> Any:
        kind = (value.dtype, None if is_lazy(value) else tuple(value.shape), value.device)
        if id(value) in self._registered:
            return kind
        self.look.tensors.append(value)
        return (*kind, _Itself(value), _version_of(value))

    def _object(self, value: Any) -> Any:
        if isinstance(value, FunctionType):
            self.look.cells += value.__closure__ or ()
        if (parts := referents(value)) is not None:
            return getattr(value, "__code__", None), tuple(map(self.setting, parts))
        if isinstance(value, weakref.ref):
            return self.setting(value())
        attributes = getattr(value, "__dict__", None)
        if not isinstance(attributes, dict):
            return _Itself(value)
        self.look.owners.append(value)
        return self.setting(attributes)


def settings_of(module: Any) -> Settings:
    """Everything that a module is, except the contents of its parameters and buffers, as far as Python shows it.

    These are its submodules and their classes, hooks, the names, shapes and dtypes of tensors, and the values of
    attributes, with all that these refer to. Not seen are global variables that a function reads, attributes in
    ``__slots__`` or in C, and writes through ``.data`` to other tensors. LoweringError for more than 2,000 objects.

    >>> module = torch.nn.Dropout(0.1)
    >>> before = settings_of(module)
    >>> before == settings_of(module.eval()), before == settings_of(module.train())
    (False, True)
    """
    return SettingsCache(module).settings


class SettingsCache:
    """The settings of a module (None has none), read again only after a change of an attribute or a container."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._look: Look | None = None
        self._settings: Settings | LoweringError = NO_SETTINGS

    def __reduce__(self) -> tuple[Any, ...]:
        return SettingsCache, (self._module,)

    @property
    def settings(self) -> Settings:
        """The module's current settings; see `settings_of`."""
        if self._module is not None and (self._look is None or not self._look.holds()):
            survey = _Survey(self._module)
            try:
                settings = Settings(survey.setting(self._module))
                self._settings = self._settings if settings == self._settings else settings
            except LoweringError as error:
                self._settings = error.with_traceback(None)
            self._look = survey.look.take()
        if isinstance(self._settings, LoweringError):
            raise self._settings
        return self._settings


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
    """The contents of a container, the object of a method, the closure and globals of a function, or the value."""
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if isinstance(value, MethodType):
        yield value.__self__
    elif isinstance(value, FunctionType):
        yield from map(content_of, value.__closure__ or ())
        yield from map(value.__globals__.get, value.__code__.co_names)
    elif isinstance(value, (tuple, list, set)):
        for each in value:
            yield from _held(each)
    else:
        yield value
