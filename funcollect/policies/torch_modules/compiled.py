"""A Torch module run through `torch.compile`."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from typing import Any

import torch

from funcollect.errors import PolicyError

_OPTIONS: dict[str, dict[str, Any]] = {"inductor": {"cpp_wrapper": True}}  # half the cost of a call of a small network


class CompiledCall:
    """Calls a module compiled: the same graph whichever tensors stand in for its parameters."""

    def __init__(self, compiler: str) -> None:
        self._compiler = compiler
        self._module: Callable[..., Any] | None = None
        self._call: Callable[..., Any] | None = None

    def __call__(self, module: Callable[..., Any], run_device: torch.device) -> Callable[..., Any]:
        """The compiled `module`; it is compiled when it is first called, and once as long as it is the same object.

        Raises:
            PolicyError: where there is no C++ compiler, which Inductor needs on the CPU.
        """
        if self._call is None or self._module is not module:
            _check_toolchain(run_device)
            self._module = module
            self._call = torch.compile(module, backend=self._compiler, options=_OPTIONS.get(self._compiler))
        return self._call

    @staticmethod
    def watching_hooks() -> contextlib.AbstractContextManager[Any]:
        """The context of calls: Torch compiles again where a hook has come or gone, which it would not do by itself."""
        context: contextlib.AbstractContextManager[Any] = torch._dynamo.config.patch(skip_nnmodule_hook_guards=False)
        return context

    def __reduce__(self) -> Any:
        """Compiled code stays in its process."""
        return CompiledCall, (self._compiler,)


def _check_toolchain(run_device: torch.device) -> None:
    program = os.environ.get("CXX", "g++")
    if run_device.type == "cpu" and shutil.which(program) is None:
        raise PolicyError(
            f"compile='inductor' needs a C++ compiler, and {program!r} is not there: install g++, set CXX to the one "
            "there is, or leave compile out"
        )
