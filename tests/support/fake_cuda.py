"""Tensors of a GPU without one: they have shapes and devices, but no numbers, and record what waits for the host."""

from unittest import mock

import optree
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from funcollect.core.loops import eager
from funcollect.policies import base, random_policy
from funcollect.policies.tensordict_modules import tensordict_policy
from funcollect.policies.torch_modules import torch_policy
from funcollect.tree import NAMESPACE

CUDA = torch.device("cuda", 0)


class Linear(nn.Linear):
    """A layer that can be made on a device that is not there."""

    def reset_parameters(self):
        """Leave the parameters as they are."""


class FakeCuda(TorchFunctionMode):
    """Makes the CUDA device usable within ``with``.

    Attributes:
        waits: the names of the functions that brought numbers from the host to the device, or back, so far.
    """

    def __init__(self):
        super().__init__()
        self.waits = []
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._patches = [
            *(mock.patch.object(module, "memory_of", id) for module in (base, torch_policy)),  # there is no memory
            *(mock.patch.object(module, "draw_ahead", _noise) for module in (eager, random_policy)),  # no numbers
            *(mock.patch.object(each, "torch_generator", _no_generator) for each in (torch_policy, tensordict_policy)),
        ]

    def __enter__(self):
        for patch in self._patches:
            patch.start()
        self._fake.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error):
        super().__exit__(*error)
        self._fake.__exit__(*error)
        for patch in self._patches:
            patch.stop()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        if function in _READS and _on_cuda(args):
            self.waits.append(name)
            return _READS[function]
        answer = _STAND_INS.get(function, function)(*args, **(kwargs or {}))
        from_host = bool(_tensors(args)) and not _on_cuda((args, kwargs))
        if isinstance(answer, Tensor) and (from_host if answer.is_cuda else _on_cuda(args)):
            self.waits.append(name)
        return answer


def devices_of(tree):
    return {leaf.device for leaf in _tensors(tree)}


def _noise(noise, key, lanes, start, length, *_, **__):
    place = lanes.device if isinstance(lanes, Tensor) else "cpu"
    return torch.zeros(length, len(lanes), *([2] if noise.kind == "keys" else noise.shape), device=place)


def _no_generator(state, device):
    assert device == CUDA
    return torch.no_grad()


def _tensors(tree):
    return [leaf for leaf in optree.tree_leaves(tree, namespace=NAMESPACE) if isinstance(leaf, Tensor)]


def _on_cuda(tree):
    return CUDA in devices_of(tree)


def _selected(tensor, index):
    """What ``tensor[index]`` is, by operators, since Torch's own needs the library of the device."""
    parts = index if isinstance(index, tuple) else (index,)
    if any(isinstance(part, Tensor) for part in parts):
        return torch.ops.aten.index.Tensor(tensor, list(parts))
    if Ellipsis in parts:
        at, named = parts.index(Ellipsis), sum(part is not None for part in parts) - 1
        parts = (*parts[:at], *[slice(None)] * (tensor.ndim - named), *parts[at + 1 :])
    axis = 0
    for part in parts:
        if isinstance(part, int):
            tensor = tensor.select(axis, part)
            continue
        if part is None:
            tensor = tensor.unsqueeze(axis)
        else:
            start, stop, _ = part.indices(tensor.shape[axis])
            tensor = torch.narrow(tensor, axis, start, max(stop - start, 0))
        axis += 1
    return tensor


def _assign(tensor, index, value):
    if not tensor.is_cuda:
        tensor[index] = value
        return
    part = _selected(tensor, index)
    fill = torch.ops.aten.copy_.default if isinstance(value, Tensor) else torch.ops.aten.fill_.Scalar
    fill(part, value)


def _stacked(tensors, dim=0, *, out=None):
    stacked = torch.stack(tensors, dim)
    return stacked if out is None else torch.ops.aten.copy_.default(out, stacked)


_READS = {Tensor.item: 0.0, Tensor.__bool__: False, torch.equal: True}
_STAND_INS = {
    Tensor.__getitem__: _selected,
    Tensor.__setitem__: _assign,
    Tensor.copy_: torch.ops.aten.copy_.default,
    torch.stack: _stacked,
}
