"""Tests on the CPU and on a GPU, and code in which the host may not wait for the device."""

import contextlib
import warnings

import jax
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.captured_calls import waits

ON_A_GPU = pytest.param("cuda", marks=pytest.mark.gpu)
# JAX has one default device in a process, so where there is a GPU nothing runs on the CPU.
DEVICES = [ON_A_GPU] if torch.cuda.is_available() else ["cpu", ON_A_GPU]
each_device = pytest.mark.parametrize("device", DEVICES)


class NoReads(TorchDispatchMode):
    """Raises where the result of an operation has to be known on the host."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert not waits(function, args), f"{function} waits for the device"
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def no_waits(device):
    """Raise where Torch would wait for a GPU, or where JAX would copy to the host implicitly.

    On the CPU, only operations of Torch raise that would wait on a GPU.
    """
    if device == "cpu":
        with NoReads():
            yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
        try:
            with jax.transfer_guard_device_to_host("disallow"):
                yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


def forbid_waits(patch, owner, name, device):
    """Let a method of a class raise where it waits for the device; return a list with an entry for each call."""
    method, calls = getattr(owner, name), []

    def guarded(*args, **kwargs):
        calls.append(name)
        with no_waits(device):
            return method(*args, **kwargs)

    patch.setattr(owner, name, guarded)
    return calls
