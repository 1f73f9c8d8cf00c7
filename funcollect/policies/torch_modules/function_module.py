"""A function that refers to Torch modules, as a module that has their weights."""

from __future__ import annotations

import contextlib
import dis
import inspect
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, count, islice
from types import BuiltinFunctionType, CodeType, FunctionType, MappingProxyType, ModuleType
from typing import Any

from torch import Tensor, nn

from funcollect.policies.torch_modules.settings import PLAIN, content_of, referents

_MOST_OBJECTS = 1_000  # that are looked through for one function
_TENSORS = ("_parameters", "_buffers")
_CONTAINERS = (dict, list, tuple, deque)  # not sets, whose order differs between processes
_NO_MODULES = (*PLAIN, Tensor, type, ModuleType, BuiltinFunctionType)
_LIBRARIES = {"torch", "jax", "jaxlib", "numpy", "tensordict", "funcollect", *sys.stdlib_module_names}


def as_module(function: Callable[..., Any]) -> Callable[..., Any]:
    """A `FunctionModule` for a function, a method or an object that refers to modules; anything else as it is."""
    if isinstance(function, nn.Module) or not (found := modules_of(function)):
        return function
    return FunctionModule(function, found)


class FunctionModule(nn.Module):
    """Calls `function`. The modules that it refers to are the submodules, by the names that they have there.

    The skeleton of a policy has other submodules, shallow copies with tensors of their own. During a call the modules
    that the function itself refers to have those tensors.
    """

    def __init__(self, function: Callable[..., Any], found: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.function = function
        for name, module in found.items():
            self.add_module(f"{name}_" if hasattr(self, name) else name, module)
        self._referred = MappingProxyType(dict(found))  # a skeleton copies modules in other containers

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_referred"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Find the modules again: in another process a function that is imported refers to modules made there."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._referred = MappingProxyType(modules_of(self.function))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        with _lent(self.children(), self._referred.values()):
            return self.function(*args, **kwargs)


@contextlib.contextmanager
def _lent(owners: Iterable[nn.Module], users: Iterable[nn.Module]) -> Iterator[None]:
    """Give the tensors of each owner, and of its parts, to the user in the same place."""
    each = (chain.from_iterable(module.modules() for module in part) for part in (owners, users))
    pairs = [(vars(owner), vars(user)) for owner, user in zip(*each, strict=True) if owner is not user]
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

    So with the functions to which it refers, except those of Torch, JAX, NumPy and Python's own library. Raises
    TypeError for a tensor beside them that is trained: nothing could save it, or send it to a worker.
    """
    found: dict[str, nn.Module] = {}
    names = {"__wrapped__"}  # of the attributes that are looked at
    seen: dict[int, Any] = {}  # by id; kept, so that no other object takes the id
    queue: deque[tuple[str, Any]] = deque([("module", function)])
    while queue and len(seen) < _MOST_OBJECTS:
        name, value = queue.popleft()
        if isinstance(value, Tensor) and value.requires_grad:
            raise TypeError(
                f"the policy's function refers to the tensor {name!r}, which requires a gradient, expected modules "
                "with such tensors: make it a parameter of an nn.Module, so that it is saved and sent to workers"
            )
        if id(value) in seen or isinstance(value, _NO_MODULES):
            continue
        seen[id(value)] = value
        if isinstance(value, nn.Module):
            free = (f"{name.replace('.', '_')}{f'_{number}' if number else ''}" for number in count())
            found[next(each for each in free if each not in found)] = value
        elif isinstance(value, FunctionType):
            if str(value.__module__).partition(".")[0] not in _LIBRARIES:
                names.update(*(code.co_names for code in _codes(value.__code__)))
                queue += _referents(value)
        elif (parts := referents(value)) is not None:
            queue += [(name, part) for part in parts]
        elif isinstance(value, _CONTAINERS):
            items = islice(value.items() if isinstance(value, dict) else enumerate(value), _MOST_OBJECTS)
            queue += [(f"{name}_{key}", each) for key, each in items]
        else:
            call = inspect.getattr_static(type(value), "__call__", None)
            names.update(getattr(getattr(call, "__code__", None), "co_names", ()))
            attributes = getattr(value, "__dict__", {})
            queue += [(name, call), *((each, part) for each, part in attributes.items() if each in names)]
    return found


def _referents(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function refers to, by name."""
    steps = chain.from_iterable(map(dis.get_instructions, _codes(function.__code__)))
    read = [step.argval for step in steps if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")]
    yield from ((name, function.__globals__[name]) for name in dict.fromkeys(read) if name in function.__globals__)
    yield from zip(function.__code__.co_freevars, map(content_of, function.__closure__ or ()), strict=True)
    yield from (("default", each) for each in (function.__defaults__, function.__kwdefaults__))


def _codes(code: CodeType) -> list[CodeType]:
    """The code, and that of the functions inside."""
    return [code, *(inner for each in code.co_consts if isinstance(each, CodeType) for inner in _codes(each))]
