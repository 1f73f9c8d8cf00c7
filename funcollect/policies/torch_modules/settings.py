"""The attributes of a Torch module that a lowered program bakes in: everything but its parameters and buffers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import is_
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

Settings = tuple[Any, ...]  # equal for modules that a program serves alike

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_REGISTERED = ("_parameters", "_buffers", "_modules")


def settings_of(module: nn.Module) -> Settings:
    """The plain attributes of each submodule: training mode, rates, flags; and how many hooks it has.

    >>> module = torch.nn.Dropout(0.1)
    >>> before = settings_of(module)
    >>> before == settings_of(module.eval()), before == settings_of(module.train())
    (False, True)
    """
    return tuple(
        (type(part), tuple((name, _setting(value)) for name, value in vars(part).items() if name not in _REGISTERED))
        for part in module.modules()
    )


class _Look(NamedTuple):
    """What was seen of a module, and its settings then."""

    parts: list[nn.Module]
    containers: list[Any]
    objects: list[Any]
    sizes: list[int]
    settings: Settings


class SettingsCache:
    """A module's settings, gone through again only where something has been set since.

    Args:
        module: the module; None for what has no settings.
    """

    def __init__(self, module: nn.Module | None) -> None:
        self._module = module
        self._last: _Look | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return SettingsCache, (self._module,)

    @property
    def settings(self) -> Settings:
        """`settings_of` the module as it is now."""
        if self._module is None:
            return ()
        last = self._last
        if last is None or not _same(last):
            self._last = last = _looked_at(self._module)
        return last.settings


def _looked_at(module: nn.Module) -> _Look:
    parts = list(module.modules())
    values = [value for part in parts for value in vars(part).values()]
    containers = [value for value in values if isinstance(value, (Mapping, list, set))]
    objects, sizes = _objects(parts, containers), list(map(len, containers))
    return _Look(parts, containers, objects, sizes, settings_of(module))  # last: what changes meanwhile is seen then


def _same(last: _Look) -> bool:
    objects, sizes = _objects(last.parts, last.containers), list(map(len, last.containers))
    return sizes == last.sizes and len(objects) == len(last.objects) and all(map(is_, objects, last.objects))


def _objects(parts: list[nn.Module], containers: list[Any]) -> list[Any]:
    """All that settings are made of, but for the number of things in a container; and the submodules."""
    objects: list[Any] = list(map(type, parts))
    for part in parts:
        attributes = vars(part)
        objects += attributes
        objects += attributes.values()
        objects += part._modules.values()
    for each in containers:
        if isinstance(each, list):
            objects += each
    return objects


def _setting(value: Any) -> Any:
    """A plain value, with its type, since 1, 1.0 and True are equal; the length of a container; a type of any other."""
    if isinstance(value, PLAIN):
        return type(value), value
    if isinstance(value, (tuple, list)) and all(isinstance(each, PLAIN) for each in value):
        return tuple(map(_setting, value))
    return (type(value), len(value)) if isinstance(value, (Mapping, tuple, list, set)) else type(value)


def unregistered(module: nn.Module) -> str:
    """Where `module` refers to a tensor or a module that is no parameter, buffer or submodule; empty if nowhere.

    >>> module = torch.nn.Identity()
    >>> module.mean = torch.zeros(3)
    >>> unregistered(module)
    'mean'
    """
    for prefix, part in module.named_modules():
        held = {name: value for name, value in vars(part).items() if name not in _REGISTERED}
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
