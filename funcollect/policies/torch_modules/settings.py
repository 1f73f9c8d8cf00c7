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
    """The contents of containers, by identity, and the versions of tensors and arrays; `holds` compares.

    Args:
        owners: objects whose classes may change.
        containers: dictionaries, lists and sets.
        tensors, arrays, cells: of tensors and arrays the contents count, of closure cells the object in them.
    """

    def __init__(
        self,
        owners: list[Any],
        containers: list[Any],
        tensors: Iterable[Tensor] = (),
        arrays: Iterable[Any] = (),
        cells: Iterable[Any] = (),
    ) -> None:
        self._owners, self._containers = owners, containers
        self._tensors, self._arrays, self._cells = list(tensors), list(arrays), list(cells)
        self._sizes, self._objects, self._versions = self._sizes_now(), self._objects_now(), self._versions_now()

    def holds(self) -> bool:
        """Whether all is as it was."""
        if self._sizes_now() != self._sizes:
            return False
        objects = self._objects_now()
        return (
            len(objects) == len(self._objects)
            and all(map(is_, objects, self._objects))
            and self._versions_now() == self._versions
        )

    def _sizes_now(self) -> list[int]:
        return list(map(len, self._containers))

    def _objects_now(self) -> list[Any]:
        objects: list[Any] = list(map(type, self._owners))
        for each in self._containers:
            if each:
                objects += each
                if isinstance(each, _MAPPINGS):
                    objects += each.values()
        objects += [content_of(cell) for cell in self._cells]
        return objects

    def _versions_now(self) -> list[Any]:
        versions: list[Any] = [version_of(tensor) for tensor in self._tensors]
        versions += [array.tobytes() for array in self._arrays]
        return versions


def version_of(tensor: Tensor) -> int:
    """How often a tensor was written in place; writes through ``.data`` do not count."""
    return 0 if tensor.is_inference() else tensor._version


def content_of(cell: Any) -> Any:
    """The object in a closure cell; None for an empty one."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


class _Itself:
    """An object that equals nothing but itself; it stays alive, so that its id is not used again."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and self._value is other._value

    def __hash__(self) -> int:
        return id(self._value)


class _Survey:
    """One walk over a module and all that its attributes lead to."""

    def __init__(self, module: Any) -> None:
        own = isinstance(module, nn.Module)
        self._registered = {id(each) for each in (*module.parameters(), *module.buffers())} if own else set()
        self._seen: dict[int, tuple[int, Any]] = {}  # by id: its number; and itself, so that the id stays its own
        self._owners: list[Any] = []
        self._containers: list[Any] = []
        self._tensors: list[Tensor] = []
        self._arrays: list[Any] = []
        self._cells: list[Any] = []
        self.settings = NO_SETTINGS
        self.error: LoweringError | None = None
        try:
            self.settings = Settings(self._setting(module))
        except LoweringError as error:
            self.error = error.with_traceback(None)

    def look(self) -> Look:
        """What was seen, to compare with later."""
        return Look(self._owners, self._containers, self._tensors, self._arrays, self._cells)

    def _setting(self, value: Any) -> Any:
        """The value as it can be compared: plain values with their types, since 1, 1.0 and True are equal."""
        if isinstance(value, PLAIN) and not isinstance(value, Enum):
            return type(value), value
        if isinstance(value, _ITSELF):
            return _Itself(value)
        if isinstance(value, (tuple, frozenset)):
            return type(value), tuple(map(self._setting, value))
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
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, TensorDictBase):  # whose own attributes change as it is read
            return tuple((path, self._setting(leaf)) for path, leaf in flatten(value).items())
        if isinstance(value, _MAPPINGS):
            self._containers.append(value)
            return tuple((self._setting(key), self._setting(each)) for key, each in value.items())
        if isinstance(value, _SEQUENCES):
            self._containers.append(value)
            return tuple(map(self._setting, value))
        if isinstance(value, np.ndarray | np.generic):
            self._arrays.append(value)
            return value.dtype.str, value.shape, value.tobytes()
        if isinstance(value, FunctionType):
            return self._function(value)
        return self._object(value)

    def _tensor(self, value: Tensor) -> Any:
        kind = (value.dtype, None if is_lazy(value) else tuple(value.shape), value.device)
        if id(value) in self._registered:
            return kind
        self._tensors.append(value)
        return (*kind, _Itself(value), version_of(value))

    def _function(self, value: FunctionType) -> Any:
        cells = value.__closure__ or ()
        self._cells += cells
        held = (*map(content_of, cells), value.__defaults__, value.__kwdefaults__)
        return value.__code__, tuple(map(self._setting, held))

    def _object(self, value: Any) -> Any:
        if isinstance(value, MethodType):
            return tuple(map(self._setting, (value.__func__, value.__self__)))
        if isinstance(value, partial):
            return tuple(map(self._setting, (value.func, value.args, value.keywords)))
        if isinstance(value, weakref.ref):
            return self._setting(value())
        attributes = getattr(value, "__dict__", None)
        if not isinstance(attributes, dict):
            return _Itself(value)
        self._owners.append(value)
        return self._setting(attributes)


def settings_of(module: Any) -> Settings:
    """All that a module is, but for the contents of its parameters and buffers, as far as Python shows it.

    These are its submodules and their classes, hooks, the names, shapes and dtypes of tensors, and the values of
    attributes: numbers, containers, functions and what they close over, tensors, arrays and other objects with their
    attributes. Not seen: global variables that a function reads, attributes in ``__slots__`` or in C, and tensors
    written through ``.data`` that are no parameters or buffers.

    Raises:
        LoweringError: for a module whose attributes lead to more than 2,000 objects.

    >>> module = torch.nn.Dropout(0.1)
    >>> before = settings_of(module)
    >>> before == settings_of(module.eval()), before == settings_of(module.train())
    (False, True)
    """
    return SettingsCache(module).settings


class SettingsCache:
    """A module's settings, gone through again only where something has been set since.

    Args:
        module: the module; None for what has no settings.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self._look: Look | None = None
        self._settings = NO_SETTINGS
        self._error: LoweringError | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return SettingsCache, (self._module,)

    @property
    def settings(self) -> Settings:
        """`settings_of` the module as it is now."""
        if self._module is not None and (self._look is None or not self._look.holds()):
            survey = _Survey(self._module)
            self._look, self._error = survey.look(), survey.error
            if survey.settings != self._settings:
                self._settings = survey.settings
        if self._error is not None:
            raise self._error
        return self._settings


def unregistered(module: nn.Module) -> str:
    """Where `module` refers to a tensor or a module that is no parameter, buffer or submodule; empty if nowhere.

    >>> module = torch.nn.Identity()
    >>> module.mean = torch.zeros(3)
    >>> unregistered(module)
    'mean'
    """
    for prefix, part in module.named_modules():
        held = {name: value for name, value in vars(part).items() if name not in REGISTERED}
        if isinstance(part, nn.RNNBase):
            held.pop("_flat_weights", None)  # its parameters once more, which it lists anew when they are others
        for name, value in {**held, "forward": type(part).forward}.items():
            if any(isinstance(each, (Tensor, nn.Module)) and each is not part for each in _held(value)):
                return f"{prefix}.{name}" if prefix else name
    return ""


def _held(value: Any) -> Iterator[Any]:
    """A value, or what stands in it where it is a container, or what it refers to where it is a function."""
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if isinstance(value, MethodType):
        yield value.__self__
    elif isinstance(value, FunctionType):
        yield from (cell.cell_contents for cell in value.__closure__ or () if cell.cell_contents is not value)
        yield from (value.__globals__.get(name) for name in value.__code__.co_names)
    elif isinstance(value, (tuple, list, set)):
        for each in value:
            yield from _held(each)
    else:
        yield value
