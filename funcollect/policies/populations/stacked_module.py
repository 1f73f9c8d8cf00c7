"""A Torch module whose parameters have a leading axis, and which acts with each of them for its own rows."""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any

import optree
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from funcollect.keys import device_states, set_device_states
from funcollect.policies.populations.members import MemberLanes, Tools, answers
from funcollect.policies.torch_modules.skeleton import bare

_CALLED = Tools(optree.tree_leaves, optree.tree_map, torch.cat, None)  # type: ignore[arg-type]
_MAPPED = replace(_CALLED, vmap=partial(vmap, randomness="different"))
_Modes = tuple[bool, ...]  # `training` of each part; what a module allows may depend on it, as its `forward` does
_TOOLS: weakref.WeakKeyDictionary[nn.Module, dict[_Modes, Tools]] = weakref.WeakKeyDictionary()  # that a module allows


def stacked_module(module: Any, tensors: Mapping[str, Tensor], size: int) -> Any:
    """A copy of the module with these parameters and buffers."""
    made = copy.deepcopy(module)
    known: dict[int, tuple[Any, Any]] = {}  # by its id the member's, which may have two names, and all members'
    for prefix, part in made.named_modules():
        for slots in (part._parameters, part._buffers):
            for key, before in list(slots.items()):
                if before is None:
                    continue
                if id(before) not in known:
                    tensor = tensors[f"{prefix}.{key}" if prefix else key].detach().clone()
                    is_parameter = isinstance(before, nn.Parameter)
                    made_of = nn.Parameter(tensor, before.requires_grad) if is_parameter else tensor
                    known[id(before)] = before, made_of
                setattr(part, key, known[id(before)][1])
    made.__class__ = _members_of(module.__class__)
    made._group = MemberLanes(0, (1,) * size)
    return made


class _Members:
    """The class of a module whose tensors have a leading axis of N, in front of the class of the one it was made of.

    A subclass of both, so that parameters keep their names.
    """

    _member: type[nn.Module]
    _group: MemberLanes

    def __call__(self, *inputs: Any) -> Any:
        return self.forward(*inputs)  # hooks of the module run in the calls for members

    def forward(self, *inputs: Any) -> Any:
        module: Any = self
        one: Any = bare(self._member)
        one.__dict__ = vars(self)
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}

        def call(own: Any, rows: Any) -> Any:
            return functional_call(one, own, rows)

        allowed = _TOOLS.setdefault(module, {})
        modes = tuple(part.training for part in module.modules())
        if modes in allowed:
            return answers(allowed[modes], self._group, call, tensors, inputs)
        place = next(iter(tensors.values())).device
        drawn, before = torch.get_rng_state(), {name: leaf.clone() for name, leaf in module.named_buffers()}
        drawn_on_device = device_states(place)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("error", "There is a performance drop")  # slower than a call for each
                answer = answers(_MAPPED, self._group, call, tensors, inputs)
        except (RuntimeError, ValueError, UserWarning):  # such as a branch that depends on data
            torch.set_rng_state(drawn)
            set_device_states(place, drawn_on_device)
            for name, leaf in module.named_buffers():
                leaf.copy_(before[name])
            answer = answers(_CALLED, self._group, call, tensors, inputs)
            allowed[modes] = _CALLED
        else:
            allowed[modes] = _MAPPED
        return answer

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _bare_members, (self._member,), vars(self).copy()


@cache
def _members_of(kind: Any) -> Any:
    return type(f"PopulationOf{kind.__name__}", (_Members, kind), {"_member": kind})


def _bare_members(kind: Any) -> Any:
    return bare(_members_of(kind))
