"""Compares and packs a Torch module without its weights: has it changed since it was compiled, or sent to workers?"""

from __future__ import annotations

import io
import pickle
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from functools import partial
from itertools import chain, count, islice
from operator import is_
from types import BuiltinFunctionType, CodeType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any, Self

import cloudpickle
import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from funcollect.errors import LoweringError
from funcollect.interop.memo import content_of
from funcollect.messages import shown
from funcollect.policies.base import HeadedPolicy
from funcollect.policies.weights import weights_of
from funcollect.protocols import Policy
from funcollect.tree import flatten, version_of

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
REGISTERED = ("_parameters", "_buffers", "_modules")
MOST_OBJECTS = 2_000  # that are compared for one module

_LEAVES = (*PLAIN, Enum, type, BuiltinFunctionType, CodeType, ModuleType)  # not looked into
_MAPPINGS = (dict, MappingProxyType)
CONTAINERS = (*_MAPPINGS, list, set, deque)  # whose contents may change
_COMPARED = (dict, list, tuple, deque, weakref.ref, MethodType, partial, FunctionType)  # equal if their parts are
_MOST_LOOKS = 8  # for one module; it is lowered for half as many settings
_NO_ACCELERATORS = ("cpu", "meta")


def walk(root: Any, closed: tuple[type, ...] = (Tensor,)) -> Iterator[Any]:
    """All objects that `root` leads to, itself first, except plain values and the contents of `closed` kinds."""
    seen: dict[int, Any] = {}  # by id; kept, so that no other object takes the id
    queue = deque([root])
    while queue:
        value = queue.popleft()
        if isinstance(value, _LEAVES) or id(value) in seen:
            continue
        seen[id(value)] = value
        yield value
        if not isinstance(value, closed):
            queue += parts_of(value)


def parts_of(value: Any) -> Iterable[Any]:
    """The contents of a container, the referents of a function, or the dict of an object's attributes."""
    if isinstance(value, TensorDictBase):  # its attributes change when it is read
        return flatten(value).values()
    if isinstance(value, _MAPPINGS):
        return chain(value, value.values())
    if isinstance(value, (*CONTAINERS, tuple, frozenset)):
        return value
    if isinstance(value, weakref.ref):
        return (value(),)
    attributes = getattr(value, "__dict__", None)
    return referents(value) or ((attributes,) if isinstance(attributes, dict) else ())


def referents(value: Any) -> tuple[Any, ...]:
    """The objects that a method, a partial or a function with a closure refers to; empty for anything else."""
    if isinstance(value, MethodType):
        return value.__func__, value.__self__
    if isinstance(value, partial):
        return value.func, value.args, value.keywords
    if isinstance(value, FunctionType):
        return *map(content_of, value.__closure__ or ()), value.__defaults__, value.__kwdefaults__
    return ()


class Look:
    """Records the state of objects. `holds` shows cheaply whether it is still the same, `alike` whether it is equal."""

    error: LoweringError | None = None  # why not all objects are recorded

    def __init__(self, values: Iterable[Any], weights: Iterable[Tensor] = ()) -> None:
        self._weights = {id(tensor): tensor for tensor in weights}
        self._owners: list[Any] = []  # objects whose classes may change
        self._containers: list[Any] = []
        self._cells: list[Any] = []  # of closures
        self._arrays: list[Any] = []
        self._tensors: list[Tensor] = []  # whose writes Torch counts, but for those through ``.data``
        for value in values:
            if isinstance(value, Tensor):
                if id(value) not in self._weights:
                    self._tensors.append(value)
            elif isinstance(value, np.ndarray | np.generic):
                self._arrays.append(value)
            elif isinstance(value, CONTAINERS):
                self._containers.append(value)
            elif isinstance(value, FunctionType):
                self._cells += value.__closure__ or ()
            elif hasattr(value, "__dict__"):
                self._owners.append(value)
        self._state = self._now()

    @classmethod
    def at(cls, module: Any) -> Self:
        """A look at all of a module except its weights, globals, ``__slots__`` and attributes in C."""
        found = list(islice(walk(module), MOST_OBJECTS + 1))
        look = cls(found[:MOST_OBJECTS], weights_of(module))
        if len(found) > MOST_OBJECTS:
            what = f"its attributes lead to more than {MOST_OBJECTS:,} objects, too many to look at before each rollout"
            look.error = LoweringError(f"{what}: keep environments, buffers and the like out of the module")
        return look

    def _now(self) -> tuple[list[Any], list[Any]]:
        """Objects (classes, contents of containers and cells) and numbers (sizes, tensors' versions, arrays' bytes)."""
        objects: list[Any] = list(map(type, self._owners))
        for container in self._containers:
            if container:
                objects += container
                if isinstance(container, _MAPPINGS):
                    objects += container.values()
        objects += map(content_of, self._cells)
        numbers: list[Any] = list(map(len, self._containers))
        numbers += map(version_of, self._tensors)
        numbers += [(array.dtype, array.shape, array.tobytes()) for array in self._arrays]
        return objects, numbers

    def holds(self, same: Callable[[Any, Any], bool] = is_) -> bool:
        """Whether the state is the recorded one: the same objects, and no tensor or array was written."""
        (objects, numbers), before = self._now(), self._state
        return numbers == before[1] and all(map(same, objects, before[0]))

    def alike(self) -> bool:
        """Whether the state is equal to the recorded one: plain values are equal, and weights have the same form."""
        return self.holds() or self.holds(self._equal)

    def _equal(self, now: Any, before: Any) -> bool:
        if now is before:
            return True
        if id(before) in self._weights:
            return isinstance(now, Tensor) and _form(now) == _form(before)
        if type(now) is not type(before):  # 1, 1.0 and True are equal
            return False
        if not isinstance(now, _COMPARED):
            return isinstance(now, PLAIN) and bool(now == before)
        one, two = list(parts_of(now)), list(parts_of(before))
        same_code = getattr(now, "__code__", None) == getattr(before, "__code__", None)
        return same_code and len(one) == len(two) and all(map(self._equal, one, two))


def _form(tensor: Tensor) -> Any:
    return tensor.dtype, None if is_lazy(tensor) else tensor.shape, tensor.device


class ModuleSettings:
    """Numbers the settings of a module: all of it except its weights, see `Look.at`."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._looks: dict[int, Look] = {}  # by their numbers, the latest first; replaced as a whole
        self._numbers = count(1)

    def __reduce__(self) -> tuple[Any, ...]:
        return ModuleSettings, (self._module,)

    @property
    def number(self) -> int:
        """The number of the current settings, the same whenever they are equal; LoweringError for too many objects."""
        looks = self._looks
        number = next((number for number, look in looks.items() if look.holds()), 0)
        if not number:
            number = next((number for number, look in looks.items() if look.alike()), 0) or next(self._numbers)
            others = [item for item in looks.items() if item[0] != number]
            self._looks = looks = dict([(number, Look.at(self._module)), *others][:_MOST_LOOKS])
        if error := looks[number].error:
            raise error
        return number


def own_attributes(part: nn.Module) -> dict[str, Any]:
    """The attributes except the registries, an RNN's second list of its parameters, and `torch.compile`'s forward."""
    omitted = (*REGISTERED, "_flat_weights", *(["forward"] if is_compiled(part) else []))
    return {name: value for name, value in vars(part).items() if name not in omitted}


def is_compiled(part: nn.Module) -> bool:
    """Whether `torch.compile` returned this module; checked by name, since importing its class takes seconds."""
    kind = type(part)
    return kind.__name__ == "OptimizedModule" and kind.__module__.startswith("torch._dynamo")


class PolicyChanges:
    """Notices when a policy differs from `sent`, the packed policy of its workers; None if their job has the policy."""

    def __init__(self, policy: Policy | None, sent: bytes | None = None) -> None:
        subject: Any = None if policy is None or policy.backend == "jax" else policy
        self._subject: Any = getattr(subject, "module", None) if isinstance(subject, HeadedPolicy) else subject
        self._look, self.sent = Look.at(self._subject), sent

    def packed(self) -> bytes | None:
        """The current policy, packed; None if the workers' job has the same. TypeError if it cannot be sent."""
        before = self._look
        if before.error or not before.holds():
            if before.error or not before.alike():  # a policy too large to compare may have changed
                self.sent = pack(self._subject)
            self._look = Look.at(self._subject)
        return self.sent


def dumps(value: Any, *, on_cpu: bool = False, without: Iterable[Tensor] = ()) -> bytes:
    """`value` as bytes for `cloudpickle.loads`, functions and classes by value; `on_cpu` moves all to the CPU.

    Parameters and buffers in `without` are replaced by zeros.
    """
    file = io.BytesIO()
    ByValue(file, on_cpu, without).dump(value)
    return file.getvalue()


def pack(subject: Any) -> bytes:
    """`subject` as bytes, with zeros for a module's weights; TypeError if it cannot be sent."""
    try:
        return dumps(subject, without=weights_of(subject))
    except Exception as error:
        what = f"the policy has changed and cannot be sent to the workers ({shown(error, 200)})"
        raise TypeError(f"{what}: make it picklable") from error


def bare(kind: type[nn.Module]) -> nn.Module:
    """A module without attributes. `copy.copy` would refuse modules with parametrizations."""
    made: nn.Module = object.__new__(kind)
    return made


def unpack(data: bytes) -> Any:
    """The subject that `pack` packed; the parameters and buffers of a module are zeros."""
    return pickle.loads(data)


class ByValue(cloudpickle.Pickler):  # type: ignore[misc]
    """Cloudpickle with the options of `dumps`."""

    def __init__(self, file: io.BytesIO, on_cpu: bool, without: Iterable[Tensor]) -> None:
        super().__init__(file)
        self._on_cpu, self._without = on_cpu, {id(tensor): tensor for tensor in without}

    def reducer_override(self, value: Any) -> Any:
        """How to pickle what cloudpickle would refuse, or pickle otherwise."""
        if isinstance(value, nn.Module) and "parametrizations" in vars(value).get("_modules", ()):
            return bare, (type(value),), vars(value)  # cloudpickle sends the class by value
        if id(value) in self._without:
            trained = value.requires_grad if isinstance(value, nn.Parameter) else None
            return _zeros, (tuple(value.shape), value.dtype, str(value.device), trained)
        if self._on_cpu and isinstance(value, torch.TypedStorage):
            memory: Any = value._untyped_storage  # methods of `value` warn that it is deprecated
            if memory.device.type not in _NO_ACCELERATORS:
                typed: Any = torch.TypedStorage
                return typed(wrap_storage=memory.cpu(), dtype=value.dtype, _internal=True).__reduce__()
        if self._on_cpu and isinstance(value, torch.device) and value.type not in _NO_ACCELERATORS:
            return torch.device, ("cpu",)
        return super().reducer_override(value)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: str, trained: bool | None) -> Tensor:
    made = torch.zeros(shape, dtype=dtype, device=device)
    return made if trained is None else nn.Parameter(made, requires_grad=trained)
