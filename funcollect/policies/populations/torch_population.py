"""Populations of policies over Torch modules."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDictBase

from funcollect.arguments import check_kind
from funcollect.interop.memo import memo_of
from funcollect.policies.populations.members import LaneIds, MemberLanes, size_of
from funcollect.policies.populations.stacked_module import stacked_module
from funcollect.policies.torch_modules.skeleton import bare
from funcollect.policies.torch_modules.torch_policy import TorchPolicy
from funcollect.policies.weights import check_shapes
from funcollect.tree import flatten


class TorchPopulation(TorchPolicy):
    """See `population`. The `module` has the parameters of all members."""

    def __init__(self, policy: TorchPolicy, params: Any) -> None:
        module: Any = policy.module
        check_kind(
            "params", params, (Mapping, TensorDictBase), "pass {**params, **buffers} of torch.func.stack_module_state"
        )
        given = {".".join(path): torch.as_tensor(leaf) for path, leaf in flatten(params).items()}
        self.size = size_of([tuple(leaf.shape) for leaf in given.values()])
        buffers = {name: leaf.expand(self.size, *leaf.shape) for name, leaf in module.named_buffers()}
        every = policy.tensors(None)
        cast = {name: leaf.to(every[name].dtype) if name in every else leaf for name, leaf in given.items()}
        stacked = buffers | cast
        once = {name for name, _ in module.named_parameters()} | buffers.keys()  # a parameter may have two names
        check_shapes(
            {name: (self.size, *every[name].shape) for name in every if name in once | given.keys()},
            {name: tuple(leaf.shape) for name, leaf in stacked.items()},
        )
        self.take_over(policy, stacked_module(module, stacked, self.size))

    @property
    def lanes(self) -> int:
        """A number of rows for which it can be called."""
        group: MemberLanes = vars(self.module)["_group"]
        return sum(group.lanes)

    def of_lanes(self, lanes: LaneIds, total: int) -> TorchPopulation:
        """This policy for some lanes out of `total`, made once; PolicyError if they do not divide."""
        group = MemberLanes.of_lanes(self.size, lanes, total)
        known: dict[Any, tuple[TorchPopulation, Any]] = memo_of(self)
        kind, attributes = type(self.module), {**vars(self.module), "_group": group}
        if group not in known:
            module = bare(kind)  # type: ignore[arg-type]
            module.__dict__ = attributes
            known[group] = copy.copy(self), module
            known[group][0].replace(module)
        policy, module = known[group]
        vars(module).update(attributes)  # it may have been changed
        return policy
