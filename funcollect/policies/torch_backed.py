"""Base class, state and arguments that all policies over a Torch module share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from typing_extensions import override

from funcollect.messages import shown
from funcollect.policies.base import PolicyBase
from funcollect.policies.torch_modules.binding import Binding
from funcollect.policies.torch_modules.settings import Settings, SettingsCache

Compiler = Literal["xla", "callback", "eager", "inductor"]


class TorchPolicyState(NamedTuple):
    """What a Torch policy carries from step to step."""

    recurrent: Any  # a pytree of tensors [P, ...], or None
    generator: Tensor  # uint8: the state of Torch's global generator, for modules that draw from it
    carried: Any = None  # by path, what a policy on a TensorDict wrote and may read at its next step, each [P, ...]


def check_compiler(compiler: str | None, without: str = "") -> None:
    """Raise ValueError unless `compiler` is None, or names a way of running other than `without`."""
    names = [name for name in get_args(Compiler) if name != without]
    if compiler is not None and compiler not in names:
        raise ValueError(f"compile is {compiler!r}, expected one of {names}, or None: pass 'xla'")


def check_callable(module: Any, expected: str) -> None:
    """Raise TypeError unless `module` is an instance that can be called; `expected` says what it should be."""
    if isinstance(module, type) or not callable(module):
        raise TypeError(f"module is {shown(module)}, expected {expected}: pass an instance")


def replaced(policy: Any, subject: Any) -> Any:
    """The policy over another module or function; `subject` itself where that is a policy as well."""
    if not isinstance(policy, TorchBacked):
        return subject
    policy.replace(subject)
    return policy


class TorchBacked(PolicyBase):
    """What the policies over a Torch module, or over a plain function, share: parameters, device, checkpoints.

    Args:
        module: the user's; a plain function has no parameters.
        device: where it is to run; None for where it is.
    """

    backend: Literal["torch"] = "torch"
    compiler: Compiler | None = None  # the way of running that is demanded

    def __init__(self, module: Callable[..., Any], device: torch.device | None = None) -> None:
        self.device = device
        self.embedded: dict[Any, Any] = {}  # as what it runs in a loop of JAX, by `core.routes`
        self.replace(module)

    def replace(self, module: Callable[..., Any]) -> None:
        """Run another module, or function, from now on."""
        self._module = module
        self._binding = Binding(module, self.device) if isinstance(module, nn.Module) else None
        self._settings_cache = SettingsCache(module if isinstance(module, nn.Module) else None)

    def __getstate__(self) -> dict[str, Any]:
        """Compiled code stays in its process."""
        return vars(self) | {"embedded": {}}

    @property
    def module(self) -> Callable[..., Any]:
        """The user's module or function. To change it, change the module itself, or make another policy."""
        return self._module

    @property
    def run_device(self) -> torch.device | None:
        """The device on which the policy runs; None for a function without one."""
        return self._binding.run_device if self._binding else self.device

    @property
    def settings(self) -> Settings:
        """The module's settings as they are now; none of a function."""
        return self._settings_cache.settings

    @property
    def params(self) -> Any:
        """The module's current parameters and buffers, a TensorDict; None for a function."""
        return self._binding.params if self._binding else None

    @override
    def prepare(self, params: Any, /) -> dict[str, Tensor] | None:
        """Parameters by name, checked; None stands for the module's own, read at each rollout."""
        if self._binding:
            return self._binding.prepare(params)
        if params is not None:
            raise ValueError("params were given to a policy that is a plain function: pass a torch.nn.Module")
        return None

    @override
    def remembers(self, policy_state: TorchPolicyState, /) -> bool:
        return policy_state.recurrent is not None

    def bound(self, prepared: dict[str, Tensor] | None) -> Callable[..., Any]:
        """The callable over these parameters."""
        return self._binding.bind(prepared) if self._binding else self.module

    def tensors(self, prepared: dict[str, Tensor] | None) -> dict[str, Tensor]:
        """Parameters and buffers by name, `prepared` or else the module's own; none for a function."""
        return self._binding.tensors(prepared) if self._binding else {}

    def state_dict(self, params: Any = None) -> dict[str, Tensor]:
        """A copy of `params`, or of the module's own, by name: what `load` and `prepare` take."""
        return self._binding.state_dict(params) if self._binding else {}

    def load(self, params: Any) -> None:
        """Write `params` into the user's module."""
        if self._binding:
            self._binding.load(params)
