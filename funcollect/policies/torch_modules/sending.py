"""Sends a policy's module, function or object to another process, without its weights."""

from __future__ import annotations

import io
import pickle
from typing import Any

import cloudpickle
import torch
from torch import Tensor, nn

from funcollect.errors import LoweringError
from funcollect.messages import shown
from funcollect.policies.torch_modules.settings import ModuleSettings
from funcollect.policies.torch_modules.skeleton import bare
from funcollect.policies.torch_modules.torch_backed import TorchBacked
from funcollect.policies.weights import weights_of
from funcollect.protocols import Policy

_NO_ACCELERATORS = ("cpu", "meta")


class PolicyChanges:
    """Notices when a policy differs, in anything but its weights, from the one that its workers have.

    `sent` is that policy, packed; None if the workers have it from their job.
    """

    def __init__(self, policy: Policy | None, sent: bytes | None = None) -> None:
        subject = policy.module if isinstance(policy, TorchBacked) else policy
        self._subject = None if policy is None or policy.backend == "jax" else subject
        self._settings = ModuleSettings(self._subject)
        self._known = self._now()
        self.sent = sent

    def _now(self) -> int | None:
        """The number of the current settings; None if they are too many to compare: the policy may have changed."""
        try:
            return self._settings.number
        except LoweringError:
            return None

    def packed(self) -> bytes | None:
        """The current policy, packed; None if the workers' job has the same. TypeError if it cannot be sent."""
        now = self._now()
        if now is None or now != self._known:
            self.sent, self._known = pack(self._subject), now
        return self.sent


def dumps(value: Any, *, on_cpu: bool = False) -> bytes:
    """`value` as bytes for `cloudpickle.loads`, functions and classes by value; for `on_cpu`, all on the CPU."""
    file = io.BytesIO()
    (_OnCpu if on_cpu else ByValue)(file).dump(value)
    return file.getvalue()


def pack(subject: Any) -> bytes:
    """`subject` as bytes, with only shapes and dtypes of a module's weights; TypeError if it cannot be sent."""
    file = io.BytesIO()
    try:
        _WithoutWeights(file, subject).dump(subject)
    except Exception as error:
        raise TypeError(
            f"the policy has changed and cannot be sent to the workers ({shown(error, 200)}): make all "
            "of its attributes picklable"
        ) from error
    return file.getvalue()


def unpack(data: bytes) -> Any:
    """The subject that `pack` packed; the parameters and buffers of a module are zeros."""
    return _Unpacker(io.BytesIO(data)).load()


class ByValue(cloudpickle.Pickler):  # type: ignore[misc]
    """Cloudpickle that also takes modules with parametrizations, which refuse to be pickled."""

    def reducer_override(self, value: Any) -> Any:
        """Pickle a module with parametrizations as its class, by value, and its attributes."""
        if isinstance(value, nn.Module) and "parametrizations" in vars(value).get("_modules", ()):
            return bare, (type(value),), vars(value)
        return super().reducer_override(value)


class _OnCpu(ByValue):
    """Puts what lies on an accelerator on the CPU: the memory of tensors, and the devices that objects name."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.TypedStorage):
            memory: Any = value._untyped_storage  # methods of `value` warn that it is deprecated
            if memory.device.type not in _NO_ACCELERATORS:
                typed: Any = torch.TypedStorage
                return typed(wrap_storage=memory.cpu(), dtype=value.dtype, _internal=True).__reduce__()
        if isinstance(value, torch.device) and value.type not in _NO_ACCELERATORS:
            return torch.device, ("cpu",)
        return super().reducer_override(value)


class _WithoutWeights(ByValue):
    """Pickles `subject` with a record of its shape and dtype in place of each weight."""

    def __init__(self, file: io.BytesIO, subject: Any) -> None:
        super().__init__(file)
        self._weights = weights_of(subject)  # kept, so that no other tensor takes an id
        self._number = {id(tensor): number for number, tensor in enumerate(self._weights)}

    def persistent_id(self, value: Any) -> Any:
        if (number := self._number.get(id(value))) is None:
            return None
        trained = value.requires_grad if isinstance(value, nn.Parameter) else None
        return number, tuple(value.shape), value.dtype, str(value.device), trained


class _Unpacker(pickle.Unpickler):
    """Makes zeros shaped like each weight. A weight that occurs twice becomes one tensor."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._tensors: dict[int, Tensor] = {}

    def persistent_load(self, pid: Any) -> Tensor:
        number, shape, dtype, device, trained = pid
        if number not in self._tensors:
            zeros = torch.zeros(shape, dtype=dtype, device=device)
            self._tensors[number] = zeros if trained is None else nn.Parameter(zeros, requires_grad=trained)
        return self._tensors[number]
