"""Torch policies inside a loop that JAX runs.

For the caller they stay Torch policies with parameters and a state of tensors, which are converted before and after
each rollout.
"""

from __future__ import annotations

import contextlib
import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import optree
import torch
from tensordict import TensorDict
from tensordict.nn import set_interaction_type
from torch import Tensor

from funcollect.errors import LoweringError
from funcollect.interop.bridge import argument, torch_view
from funcollect.interop.jax_setup import import_jax
from funcollect.interop.lowering.structure import jax_dtype, leaves_of, plain
from funcollect.keys import key_from_seed, torch_generator
from funcollect.policies.actors.checks import overlap
from funcollect.policies.jax_functions.jax_policy import FunctionPolicy
from funcollect.policies.tensordict_modules.calling import (
    INIT,
    by_path,
    may_be_read,
    names_of,
    outputs_of,
    reads_what_it_wrote,
    run_module,
)
from funcollect.policies.tensordict_modules.tensordict_policy import TensorDictPolicy
from funcollect.policies.torch_backed import TorchPolicyState, lanes_of
from funcollect.policies.torch_modules.torch_policy import TorchPolicy
from funcollect.specs import RESERVED, ExplorationType, Leaf, Space, assemble, disassemble
from funcollect.tree import NAMESPACE, Path, flatten, select

_ANY = key_from_seed(0)  # initial states do not depend on keys

Source = TorchPolicy | TensorDictPolicy


class EmbeddedPolicy(FunctionPolicy, ABC):
    """Base class of `LoweredPolicy` and `CallbackPolicy`, which are tried with an example `observation` [P, ...].

    LoweringError for a policy that cannot run in this way.
    """

    def __init__(
        self, source: Source, observation: Any, exploration_type: ExplorationType, *, single: bool = False
    ) -> None:
        initial_carry = source.initial_carry(observation)
        if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves_of(initial_carry)[0]):
            raise LoweringError("initial_state requires grad, so it may change: pass a constant one")
        initial = optree.tree_map(lambda leaf: np.asarray(torch.as_tensor(leaf).cpu()), plain(initial_carry))
        recorded = isinstance(source, TorchPolicy) and source.record_state
        super().__init__(self.traced, source.head, initial, record_state=recorded)
        self.source = source
        self.exploration_type = exploration_type  # the interaction type for a TensorDict policy's distributions
        self.single = single  # whether a TensorDict policy's module is called without a batch dimension; P is 1 then
        self.ties = isinstance(source, TensorDictPolicy)
        self._carries_init = isinstance(source, TensorDictPolicy) and INIT in (initial_carry or {})
        self.dtypes: dict[Path, torch.dtype] = {}  # of outputs whose dtypes JAX lacks
        self.nested: list[Path] = []  # outputs that the loop has under dotted names
        self._try(observation, lanes_of(initial_carry, len(leaves_of(observation)[0][0]), source.device))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.source})"

    @abstractmethod
    def _try(self, observation: Any, recurrent: Any) -> None:
        """Prepare the module to be called in the loop, and call it with this example."""

    @abstractmethod
    def traced(self, params: Any, observation: Any, state: Any = None) -> Any:
        """The module's answer in traced code; see `FunctionPolicy`."""

    @property
    def params(self) -> Any:
        """Parameters as the loop takes them."""
        return self.prepare(None)

    def begun(self, state: TorchPolicyState) -> TorchPolicyState:
        """The state that `running` may advance."""
        return state

    def enter(self, state: TorchPolicyState, num_lanes: int) -> Any:
        """The recurrent state for the loop, over the same memory.

        Its ``is_init`` is False. For lanes at step 0 the loop takes the initial state, in which ``is_init`` is True.
        """
        if state.recurrent is None and not self._carries_init:
            return None
        asarray = import_jax().numpy.asarray
        recurrent = optree.tree_map(lambda leaf: asarray(argument(leaf)), plain(state.recurrent))
        if not self._carries_init:
            return recurrent
        return {**(recurrent or {}), INIT: import_jax().numpy.zeros((num_lanes, 1), bool)}

    def leave(self, recurrent: Any, before: TorchPolicyState, fresh: Tensor) -> TorchPolicyState:
        """A copy of the state after the loop, with the structure, dtypes and devices that it had `before`.

        Lanes in `fresh` [P] are about to begin an episode. They get their initial state, as in a loop in Torch.
        """
        leaves, treespec = optree.tree_flatten(before.recurrent, namespace=NAMESPACE)
        if self._carries_init:
            recurrent = {path: leaf for path, leaf in recurrent.items() if path != INIT}
        arrays = import_jax().tree.leaves(recurrent)
        after = [torch_view(new).to(old.device, old.dtype, copy=True) for new, old in zip(arrays, leaves, strict=True)]
        if after and bool(fresh.any()):
            start = leaves_of(self.source.init(_ANY, len(fresh)).recurrent)[0]
            initial = [one.to(two.device, two.dtype) for one, two in zip(start, after, strict=True)]
            after = select(fresh.to(after[0].device), initial, after)
        return before._replace(recurrent=optree.tree_unflatten(treespec, after))

    def as_torch(self, batch: TensorDict) -> TensorDict:
        """A batch of the loop with the dtypes and nested keys of the Torch policy's outputs."""
        wide = {path: dtype for path, dtype in self.dtypes.items() if batch[".".join(path)].dtype != dtype}
        if not (wide or self.nested):
            return batch
        batch.unlock_()
        for path, dtype in wide.items():
            batch[".".join(path)] = batch[".".join(path)].to(dtype)
        for path in self.nested:
            batch.rename_key_(".".join(path), path)
        return batch.lock_()

    def to_outputs(self, answer: Any, recurrent: Any) -> Any:
        """The module's answer in the form that the loop takes; `recurrent` is the state that the module read.

        For a TensorDict policy these are the outputs by dotted name, since a loop knows no nested ones, and its hidden
        states.
        """
        if not isinstance(self.source, TensorDictPolicy):
            return answer
        outputs, after = self.source.recorded(answer, recurrent)
        named = {".".join(path): leaf for path, leaf in outputs.items()}
        return named if recurrent is None else (named, after)

    def note(self, answer: Any, observation: Any, recurrent: Any) -> None:
        """Remember the nested outputs, and those whose dtype JAX lacks, from the module's answer to an example.

        LoweringError for a nested output under a key of the batch, or a hidden state whose dtype changes in a step.
        """
        hidden: Mapping[Path, Any] = {}
        if isinstance(self.source, TensorDictPolicy):
            outputs, hidden = self.source.recorded(answer, recurrent)
        else:
            answer = answer if recurrent is None else answer[0]
            outputs = flatten(answer) if isinstance(answer, Mapping) else {}
        self.nested = [path for path in outputs if len(path) > 1]
        own = [path for path in self.nested if path[0] != "next" or path[1:] not in hidden]
        seen = by_path(observation)
        if taken := [path for path in own if path[0] in RESERVED or any(overlap(path, other) for other in seen)]:
            raise LoweringError(f"the out_keys {taken} stand where a batch has its own: rename them")
        if other := [path for path, leaf in hidden.items() if leaf.dtype != recurrent[path].dtype]:
            raise LoweringError(f"the hidden states {other} change their dtypes in a step: give initial ones like them")
        dtypes = {path: leaf.dtype for path, leaf in outputs.items() if isinstance(leaf, Tensor)}
        self.dtypes = {path: dtype for path, dtype in dtypes.items() if jax_dtype(dtype).itemsize < dtype.itemsize}

    def running(self, state: TorchPolicyState) -> contextlib.AbstractContextManager[Any]:
        """The context of a whole rollout; a module that draws random numbers advances the generator of `state`."""
        return contextlib.nullcontext()


def example(space: Space, leaves: Sequence[Leaf], rows: int) -> Any:
    """Observations [rows, ...] to try a policy with.

    Integers are drawn from the space, as far as they have 32 bits, which JAX has; floating numbers are normal.

    >>> from gymnasium import spaces
    >>> from funcollect.specs import observation_leaves
    >>> space = spaces.Box(0, 1, (4,))
    >>> example(space, observation_leaves(space), 3).shape
    torch.Size([3, 4])
    """
    space = copy.deepcopy(space)
    space.seed(0)
    drawn = np.random.default_rng(0)
    samples = [disassemble(space, space.sample()) for _ in range(rows)]
    flat = {}
    for leaf, column in zip(leaves, map(np.stack, zip(*samples, strict=True)), strict=True):
        values = drawn.standard_normal(column.shape) if leaf.dtype.kind == "f" else column
        if values.dtype in (np.int64, np.uint64):
            values = values.clip(1 - 2**31 if values.dtype == np.int64 else 0, 2**31 - 1)
        flat[leaf.path] = torch.from_numpy(values.astype(leaf.dtype))
    return assemble(space, flat)


def check_forgets(policy: EmbeddedPolicy, module: Any, observation: Any, recurrent: Any) -> None:
    """Raise LoweringError for a policy on a TensorDict that reads its own outputs of the step before.

    A loop of JAX only carries hidden states that are declared. So the module is called twice, the second time with its
    first outputs, and has to return the same.
    """
    source = policy.source
    if not isinstance(source, TensorDictPolicy) or not reads_what_it_wrote(source.module):
        return
    inputs, read = source.inputs_of(observation, recurrent)

    def outputs_from(given: dict[Path, Any]) -> dict[Path, Any]:
        with (
            torch.no_grad(),
            torch_generator(torch.get_rng_state(), source.run_device),
            set_interaction_type(policy.exploration_type),
        ):
            answer = run_module(module, given, source.device, single=policy.single)
            return outputs_of(answer, read, single=policy.single)

    first = outputs_from(inputs)
    second = outputs_from(inputs | {path: leaf for path, leaf in first.items() if may_be_read(path)})
    if others := [path for path, leaf in second.items() if not _same(first.get(path), leaf)]:
        raise LoweringError(
            f"its {names_of(others)} depend on its outputs of the step before: give these keys a start with "
            "funcollect.tensordict_policy(policy, initial_state={...}), and name them in the in_keys and out_keys"
        )


def _same(one: Any, two: Any) -> bool:
    return one is two or (isinstance(one, Tensor) and torch.equal(one, two))
