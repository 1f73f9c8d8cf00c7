"""A policy's module, function or object on its way to another process, without its weights."""

from __future__ import annotations

import io
import pickle
from typing import Any

import cloudpickle
import torch
from torch import nn

from funcollect.errors import LoweringError
from funcollect.messages import shown
from funcollect.policies.torch_modules.settings import Settings, SettingsCache
from funcollect.policies.torch_modules.skeleton import bare


class PolicyChanges:
    """Notices when a policy is no longer what its workers were built from, in anything but its weights.

    Args:
        policy: None, or what `funcollect.policies.as_policy` takes.
        sent: the policy as its workers have it, packed, unless they have it from their job.
    """

    def __init__(self, policy: Any, sent: bytes | None = None) -> None:
        self._subject = None if getattr(policy, "backend", None) == "jax" else getattr(policy, "module", policy)
        self._settings = SettingsCache(self._subject)
        self._known = self._now()
        self.sent = sent

    def _now(self) -> Settings | None:
        try:
            return self._settings.settings
        except LoweringError:  # too large to compare, so it may have changed
            return None

    def packed(self) -> bytes | None:
        """The policy as it is now; None if the workers' job has the same.

        Raises:
            TypeError: for one that cannot be sent.
        """
        now = self._now()
        if now is None or now != self._known:
            self.sent, self._known = pack(self._subject), now
        return self.sent


def dumps(value: Any) -> bytes:
    """`value` as bytes, by value, for `cloudpickle.loads`."""
    file = io.BytesIO()
    ByValue(file).dump(value)
    return file.getvalue()


def pack(subject: Any) -> bytes:
    """`subject` as bytes, by value; of a module's parameters and buffers only shapes and dtypes.

    Raises:
        TypeError: for what cannot be sent.
    """
    file = io.BytesIO()
    try:
        _WithoutWeights(file, subject).dump(subject)
    except Exception as error:
        raise TypeError(
            f"the policy has changed and cannot be sent to the workers ({shown(error, 200)}): keep what it holds "
            "picklable"
        ) from error
    return file.getvalue()


def unpack(data: bytes) -> Any:
    """What was packed; the parameters and buffers of a module are zeros."""
    return _Unpacker(io.BytesIO(data)).load()


class ByValue(cloudpickle.Pickler):  # type: ignore[misc]
    """Cloudpickle, for modules with parametrizations as well, which refuse to be pickled."""

    def reducer_override(self, value: Any) -> Any:
        """How a module with parametrizations is made again: of its class, which goes by value, and its attributes."""
        if isinstance(value, nn.Module) and "parametrizations" in vars(value).get("_modules", ()):
            return bare, (type(value),), vars(value)
        return super().reducer_override(value)


class _WithoutWeights(ByValue):
    def __init__(self, file: io.BytesIO, subject: Any) -> None:
        super().__init__(file)
        own = isinstance(subject, nn.Module)
        tensors = [*subject.parameters(), *subject.buffers()] if own else []
        self._number = {id(tensor): number for number, tensor in enumerate(tensors)}

    def persistent_id(self, value: Any) -> Any:
        """What stands for a weight."""
        if (number := self._number.get(id(value))) is None:
            return None
        trained = value.requires_grad if isinstance(value, nn.Parameter) else None
        return number, tuple(value.shape), value.dtype, str(value.device), trained


class _Unpacker(pickle.Unpickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._tensors: dict[int, torch.Tensor] = {}

    def persistent_load(self, pid: Any) -> torch.Tensor:
        """A tensor like the weight."""
        number, shape, dtype, device, trained = pid
        if number not in self._tensors:
            zeros = torch.zeros(shape, dtype=dtype, device=device)
            self._tensors[number] = zeros if trained is None else nn.Parameter(zeros, requires_grad=trained)
        return self._tensors[number]
