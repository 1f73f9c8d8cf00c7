"""Parameters bound to a private skeleton of a Torch module.

The skeleton is a shallow copy whose tensors are whichever were bound last. The user's module is only read, so a trainer
may go on using it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from funcollect.policies.torch_modules.skeleton import Skeleton
from funcollect.tree import flatten

TensorSlots = dict[str, tuple[dict[str, Any], dict[str, Any], str]]  # name: the module's dict, the skeleton's, its key


class Binding:
    """A module and its skeleton on `device` (None: wherever the module is)."""

    def __init__(self, module: nn.Module, device: torch.device | None = None) -> None:
        self.module = module
        self.device = device
        self._skeleton = Skeleton(module)
        self._parameters, self._buffers = self._slots("_parameters"), self._slots("_buffers")
        tensors = (*module.parameters(), *module.buffers())
        if device is not None and any(tensor.device != device for tensor in tensors):
            self._check_apart(f"the policy cannot be copied to {device}", "move it there before")

    def _check_apart(self, consequence: str, way: str) -> None:
        """Raise ValueError where the module would use its own tensors all the same."""
        if name := self._skeleton.entangled:
            raise ValueError(
                f"{consequence}: {name!r} of {type(self.module).__name__} refers to a submodule or a parameter of the "
                f"module itself, expected no such reference: {way}, or pass policy_factory, a function that builds it"
            )

    def _slots(self, kind: str) -> TensorSlots:
        slots: TensorSlots = {}
        for name, source, target in self._skeleton.parts():
            for key, tensor in getattr(source, kind).items():
                if tensor is not None:
                    slots[f"{name}.{key}" if name else key] = (getattr(source, kind), getattr(target, kind), key)
        return slots

    def _follow(self) -> None:
        """Take over what has been set in the module since the last call."""
        if self._skeleton.follow():
            self._parameters, self._buffers = self._slots("_parameters"), self._slots("_buffers")

    @property
    def run_device(self) -> torch.device | None:
        """Where the skeleton runs; None for a module without parameters."""
        if self.device is not None:
            return self.device
        return next((parameter.device for parameter in self.module.parameters()), None)

    @property
    def params(self) -> TensorDict:
        """The module's own current parameters and buffers, nested as its submodules are."""
        return TensorDict.from_module(self.module)

    def state_dict(self, params: Any) -> dict[str, Tensor]:
        """A copy of `params`, or of the module's own, by dotted name."""
        if isinstance(params, nn.Module):
            params = TensorDict.from_module(params)
        given = flatten(self.params if params is None else params)
        return {".".join(path): value.detach().clone() for path, value in given.items()}

    def load(self, params: Any) -> None:
        """Write `params` into the user's module, which a caller that loads a checkpoint asks for."""
        with torch.no_grad():
            for name, value in self.matched(params).items():
                source, _, key = (self._parameters | self._buffers)[name]
                source[key].copy_(value)

    def prepare(self, params: Any) -> dict[str, Tensor] | None:
        """Parameters by dotted name, checked against the module's; None stands for the module's own.

        Raises:
            TypeError: for something that holds no tensors by name.
            ValueError: for a missing, unknown or misshapen parameter, or a module that would use its own all the same.
        """
        if params is None:
            return None
        matched = self.matched(params)
        self._check_apart("params= cannot act", "pass params=None")
        return matched

    def matched(self, params: Any) -> dict[str, Tensor]:
        """`params` by dotted name, checked against the module's."""
        if isinstance(params, nn.Module):
            params = TensorDict.from_module(params)
        if not isinstance(params, (Mapping, TensorDictBase)):
            raise TypeError(
                f"params is {type(params).__name__}, expected a TensorDict or a state dict of the module: pass "
                "policy.params or module.state_dict()"
            )
        self._follow()
        given = {".".join(path): value for path, value in flatten(params).items()}
        return {name: self._checked(name, given, slot[0][slot[2]]) for name, slot in self._named(given).items()}

    def _named(self, given: Mapping[str, Any]) -> TensorSlots:
        slots = {**self._parameters, **self._buffers}
        if unknown := sorted(set(given) - set(slots)):
            raise ValueError(f"params holds {unknown}, expected only what the module has, {sorted(slots)}: drop them")
        if missing := sorted(set(self._parameters) - set(given)):
            raise ValueError(
                f"params holds {sorted(given)} and lacks {missing}: pass every parameter of the module, as "
                "policy.params does"
            )
        return {name: slot for name, slot in slots.items() if name in given}

    def _checked(self, name: str, given: Mapping[str, Any], own: Tensor) -> Tensor:
        value = given[name]
        if not isinstance(value, Tensor) or value.shape != own.shape:
            got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(
                f"parameter {name!r} of params is {got}, the module wants a tensor of shape {tuple(own.shape)}: pass "
                "the parameters of a module like it"
            )
        return value

    def tensors(self, prepared: dict[str, Tensor] | None) -> dict[str, Tensor]:
        """The module's own parameters and buffers as they are now, those of `prepared` in their place."""
        self._follow()
        own = {name: source[key] for name, (source, _, key) in (self._parameters | self._buffers).items()}
        return own | (prepared or {})

    def bind(self, prepared: dict[str, Tensor] | None) -> nn.Module:
        """The skeleton over the given tensors or, for None, over the module's own as they are now.

        What has been set in the module since is set there, too: attributes, submodules, hooks, training mode.
        Parameters are shared, not copied. Buffers are copied, so that a forward pass that writes them (batch
        statistics in training mode) leaves the user's module as it is.
        """
        self._follow()
        for name, (source_slot, target_slot, key) in self._parameters.items():
            tensor = source_slot[key] if prepared is None else prepared[name]
            target_slot[key] = tensor if self.device is None else tensor.to(self.device)
        for name, (source_slot, target_slot, key) in self._buffers.items():
            own: Tensor = source_slot[key]
            buffer = own if prepared is None else prepared.get(name, own)
            target_slot[key] = buffer.detach().to(self.device or buffer.device, copy=True)
        return self._skeleton.root
