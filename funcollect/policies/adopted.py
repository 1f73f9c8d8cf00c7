"""Torch policies inside a loop that JAX runs.

For the caller they stay Torch policies, with parameters and a state of tensors; these cross at the border of each
rollout.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import optree
import torch
from tensordict import TensorDict
from torch import Tensor

from funcollect.errors import LoweringError
from funcollect.interop.bridge import argument, torch_view
from funcollect.interop.jax_setup import import_jax
from funcollect.interop.lowering.structure import plain
from funcollect.policies.function_policy import FunctionPolicy
from funcollect.policies.opaque import TensorDictPolicy
from funcollect.policies.torch_policy import TorchPolicy, TorchPolicyState
from funcollect.specs import RESERVED, ExplorationType
from funcollect.tree import NAMESPACE, Path, flatten

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
        self.dtypes: dict[Path, torch.dtype] = {}  # of outputs whose dtypes JAX lacks
        self.nested: list[Path] = []  # outputs that the loop has under dotted names

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

    def as_torch(self, batch: TensorDict) -> TensorDict:
        """A batch of the loop with the outputs as Torch gave them: their dtypes, nested ones in their places."""
        wide = {path: dtype for path, dtype in self.dtypes.items() if batch[".".join(path)].dtype != dtype}
        if not (wide or self.nested):
            return batch
        batch.unlock_()
        for path, dtype in wide.items():
            batch[".".join(path)] = batch[".".join(path)].to(dtype)
        for path in self.nested:
            batch.rename_key_(".".join(path), path)
        return batch.lock_()

    def note(self, answer: Any, lacks: Callable[[torch.dtype], bool]) -> None:
        """Keep what an answer of the module says about its outputs.

        Args:
            answer: as `source.ask` gives it.
            lacks: whether JAX lacks a dtype.

        Raises:
            LoweringError: for nested outputs whose places a batch uses itself.
        """
        if self.source.initial_state is not None:
            answer = answer[0]
        outputs = flatten(answer) if isinstance(answer, Mapping) else {}
        self.nested = [path for path in outputs if len(path) > 1]
        if taken := [path for path in self.nested if path[0] in RESERVED]:
            raise LoweringError(f"the out_keys {taken} stand where a batch has its own: rename them")
        tensors = {path: leaf for path, leaf in outputs.items() if isinstance(leaf, Tensor)}
        self.dtypes = {path: leaf.dtype for path, leaf in tensors.items() if lacks(leaf.dtype)}

    def running(self, state: TorchPolicyState) -> contextlib.AbstractContextManager[Any]:
        """The context of a whole rollout; the generator of `state`, a copy, is moved on by what draws from it."""
        return contextlib.nullcontext()


def dotted(answer: Any, source: Source) -> Any:
    """What a module answered, traced; of a TensorDict policy by dotted names, since a loop knows no nested outputs."""
    if not isinstance(source, TensorDictPolicy):
        return answer
    return {".".join(path): leaf for path, leaf in flatten(answer).items()}
