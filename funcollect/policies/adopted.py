"""Torch policies inside a loop that JAX runs.

For the caller they stay Torch policies, with parameters and a state of tensors; these cross at the border of each
rollout.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import optree
import torch
from torch import Tensor

from funcollect.interop.bridge import argument, torch_view
from funcollect.interop.jax_setup import import_jax
from funcollect.interop.lowering.structure import plain
from funcollect.policies.function_policy import FunctionPolicy
from funcollect.policies.opaque import TensorDictPolicy
from funcollect.policies.torch_policy import TorchPolicy, TorchPolicyState
from funcollect.specs import ExplorationType
from funcollect.tree import NAMESPACE

Source = TorchPolicy | TensorDictPolicy


class AdoptedPolicy(FunctionPolicy, ABC):
    """What the two ways of it share.

    Args:
        source: the Torch policy.
        exploration_type: what a TensorDict policy's distributions are told.
        apply: the traced call, see `FunctionPolicy`.
    """

    def __init__(self, source: Source, exploration_type: ExplorationType, apply: Callable[..., Any]) -> None:
        initial = plain(source.initial_state)
        arrays = optree.tree_map(lambda leaf: np.asarray(torch.as_tensor(leaf)), initial)
        super().__init__(apply, source.head, None if initial is None else arrays)
        self.source = source
        self.exploration_type = exploration_type
        self.dtypes: dict[str, torch.dtype] = {}  # of outputs whose dtypes JAX lacks

    @property
    def params(self) -> Any:
        """Parameters as the loop takes them."""
        return self.prepare(None)

    @abstractmethod
    def prepare(self, params: Any) -> Any:
        """Parameters as the loop takes them, from what the Torch policy takes; None for its own as they are now."""

    def enter(self, state: TorchPolicyState) -> Any:
        """The recurrent state for the loop, over the same memory."""
        asarray = import_jax().numpy.asarray
        return optree.tree_map(lambda leaf: asarray(argument(leaf)), plain(state.recurrent))

    def leave(self, recurrent: Any, before: TorchPolicyState) -> TorchPolicyState:
        """The state after the loop, in memory of its own and as it was `before`: structure, dtypes and devices."""
        leaves, treespec = optree.tree_flatten(before.recurrent, namespace=NAMESPACE)
        arrays = import_jax().tree.leaves(recurrent)
        after = [torch_view(new).to(old.device, old.dtype, copy=True) for new, old in zip(arrays, leaves, strict=True)]
        return before._replace(recurrent=optree.tree_unflatten(treespec, after))

    def running(self, state: TorchPolicyState) -> contextlib.AbstractContextManager[Any]:
        """The context of a whole rollout; the generator of `state`, a copy, is moved on by what draws from it."""
        return contextlib.nullcontext()


def named(answer: Any, source: Source) -> dict[str, Tensor]:
    """What of an answer is recorded by a name of its own."""
    if source.initial_state is not None:
        answer = answer[0]
    return {name: leaf for name, leaf in answer.items() if isinstance(leaf, Tensor)} if isinstance(answer, dict) else {}
