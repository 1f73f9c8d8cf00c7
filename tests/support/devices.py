"""Tests on the CPU and on a GPU, code in which the host may not wait for the device, and CUDA graphs without a GPU."""

import contextlib
import warnings

import jax
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from funcollect.core import routes
from funcollect.core.loops import tensor
from funcollect.interop import cuda_graph
from funcollect.keys import LaneKeys, fold
from funcollect.policies import numerics
from funcollect.threefry import hashed

READS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal")  # wait for an accelerator


def waits(function, args):
    """Whether the host has to know the result of an operation on an accelerator."""
    name = function.overloadpacket.__name__
    filling = name == "index_put_" and args[2].numel() == 1  # which Torch does by `masked_fill_`
    if name not in ("index", "index_put_") or filling:
        return name in READS
    return any(each is not None and each.dtype == torch.bool for each in args[1])


class Recording(TorchDispatchMode):
    """Records operations; all their tensors are kept, so that no memory is used twice."""

    def __init__(self):
        super().__init__()
        self._calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if waits(function, args) or name == "lift_fresh":  # of `torch.tensor(…)`, which copies from the host
            raise RuntimeError(f"operation not permitted when stream is capturing ({name})")
        result = function(*args, **(kwargs or {}))
        self._calls.append((function, args, kwargs or {}, tree_leaves(result)))
        return result

    def replay(self):
        for function, args, kwargs, results in self._calls:
            for before, after in zip(results, tree_leaves(function(*args, **kwargs)), strict=True):
                if isinstance(before, torch.Tensor) and before.data_ptr() != after.data_ptr():
                    before.copy_(after)


def capture(function, device):
    function()
    try:
        with (recording := Recording()):
            result = function()
    except RuntimeError as error:
        raise cuda_graph.CaptureError(str(error)) from error

    def replay():
        with torch.no_grad():
            recording.replay()

    return replay, result


def capture_on_the_cpu(patch):
    """Make the CPU a device on which work can be captured, and is not read; return the captures from now on."""
    captures = []

    def counted(function, device):
        captures.append(device)
        return capture(function, device)

    def keys_of(key, purpose, lanes, numbers):
        return LaneKeys(lanes, hashed(fold(key, purpose), 0, lanes), numbers)

    patch.setattr(cuda_graph, "capture", counted)
    patch.setattr(routes, "can_capture", lambda device: True)
    patch.setattr(tensor, "reads_wait", lambda device: True)
    # What runs in NumPy on the CPU, and would not be recorded.
    patch.setattr(tensor, "fixed", torch.Tensor.clone)
    kept = lambda value, device: numerics._kept(value.tobytes(), value.dtype.str, value.shape, device)  # noqa: E731
    patch.setattr(numerics, "_constant", kept)
    patch.setattr(tensor.LaneKeys, "of", keys_of)
    return captures


ON_A_GPU = pytest.param("cuda", marks=pytest.mark.gpu)
# JAX has one default device in a process, so where there is a GPU nothing runs on the CPU.
DEVICES = [ON_A_GPU] if torch.cuda.is_available() else ["cpu", ON_A_GPU]
each_device = pytest.mark.parametrize("device", DEVICES)
# On the CPU other tests prove the same of every pair, such as those of paths.
GPU_FIRST = [pytest.param(each, marks=pytest.mark.evening) if each == "cpu" else each for each in DEVICES]


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
