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
from tensordict.nn import set_interaction_type
from torch import Tensor

from funcollect.errors import LoweringError
from funcollect.interop.bridge import argument, torch_view
from funcollect.interop.jax_setup import import_jax
from funcollect.interop.lowering.structure import plain
from funcollect.keys import key_from_seed, torch_generator
from funcollect.policies.jax_functions.function_policy import FunctionPolicy
from funcollect.policies.tensordict_modules.calling import by_path, may_be_read, names_of, outputs_of, run_module
from funcollect.policies.tensordict_modules.hidden_states import INIT, reads_what_it_wrote
from funcollect.policies.tensordict_modules.tensordict_policy import TensorDictPolicy
from funcollect.policies.torch_backed import TorchPolicyState
from funcollect.policies.torch_modules.torch_policy import TorchPolicy
from funcollect.specs import RESERVED, ExplorationType
from funcollect.tree import NAMESPACE, Path, flatten, select

_ANY = key_from_seed(0)  # initial states do not depend on keys

Source = TorchPolicy | TensorDictPolicy


class EmbeddedPolicy(FunctionPolicy, ABC):
    """Base class of `LoweredPolicy` and `CallbackPolicy`.

    Args:
        source: the Torch policy.
        exploration_type: what a TensorDict policy's distributions are told.
        apply: the traced call, see `FunctionPolicy`.
        initial_carry: what the loop carries, in one environment at the start of an episode, or None.
        single: whether the module is called without a batch dimension.
    """

    def __init__(
        self,
        source: Source,
        exploration_type: ExplorationType,
        apply: Callable[..., Any],
        initial_carry: Any,
        single: bool,
    ) -> None:
        initial = optree.tree_map(lambda leaf: np.asarray(torch.as_tensor(leaf)), plain(initial_carry))
        super().__init__(apply, source.head, initial)
        self.source = source
        self.single = single
        self.ties = isinstance(source, TensorDictPolicy)
        self._tells_init = isinstance(source, TensorDictPolicy) and INIT in (initial_carry or {})
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

    def enter(self, state: TorchPolicyState, num_lanes: int) -> Any:
        """The recurrent state for the loop, over the same memory.

        ``is_init`` is False in it: a loop gives the lanes at step 0 their initial state, where it is True.
        """
        asarray = import_jax().numpy.asarray
        recurrent = optree.tree_map(lambda leaf: asarray(argument(leaf)), plain(state.recurrent))
        if not self._tells_init:
            return recurrent
        return {**(recurrent or {}), INIT: import_jax().numpy.zeros((num_lanes, 1), bool)}

    def leave(self, recurrent: Any, before: TorchPolicyState, fresh: Tensor) -> TorchPolicyState:
        """The state after the loop, in memory of its own and as it was `before`: structure, dtypes and devices.

        The lanes of `fresh` [P], about to begin an episode, have their initial one, as a loop in Torch leaves it.
        """
        leaves, treespec = optree.tree_flatten(before.recurrent, namespace=NAMESPACE)
        if self._tells_init:
            recurrent = {path: leaf for path, leaf in recurrent.items() if path != INIT}
        arrays = import_jax().tree.leaves(recurrent)
        after = [torch_view(new).to(old.device, old.dtype, copy=True) for new, old in zip(arrays, leaves, strict=True)]
        recurrent = optree.tree_unflatten(treespec, after)
        if after and bool(fresh.any()):
            initial = self.source.init(_ANY, len(fresh)).recurrent
            initial = optree.tree_map(
                lambda one, two: one.to(two.device, two.dtype), initial, recurrent, namespace=NAMESPACE
            )
            recurrent = select(fresh.to(after[0].device), initial, recurrent)
        return before._replace(recurrent=recurrent)

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

    def to_outputs(self, answer: Any, recurrent: Any) -> Any:
        """What a module answered to `recurrent`, as the loop takes it.

        Of a TensorDict policy by dotted names, since a loop knows no nested outputs, beside its hidden states.
        """
        if not isinstance(self.source, TensorDictPolicy):
            return answer
        outputs, after = _recorded(answer, recurrent, self.source.written)
        named = {".".join(path): leaf for path, leaf in outputs.items()}
        return named if recurrent is None else (named, after)

    def note(self, answer: Any, observation: Any, recurrent: Any, lacks: Callable[[torch.dtype], bool]) -> None:
        """Keep what an answer of the module says about its outputs.

        Args:
            answer: as `source.call_module` gives it for `observation` and `recurrent`.
            observation: an example.
            recurrent: likewise.
            lacks: whether JAX lacks a dtype.

        Raises:
            LoweringError: for nested outputs whose places a batch uses itself, or a hidden state in another dtype than
                it was read in.
        """
        hidden: Mapping[Path, Any] = {}
        if isinstance(self.source, TensorDictPolicy):
            outputs, hidden = _recorded(answer, recurrent, self.source.written)
        else:
            answer = answer if recurrent is None else answer[0]
            outputs = flatten(answer) if isinstance(answer, Mapping) else {}
        self.nested = [path for path in outputs if len(path) > 1]
        own = [path for path in self.nested if path[0] != "next" or path[1:] not in hidden]
        seen = by_path(observation)
        if taken := [path for path in own if path[0] in RESERVED or any(_overlap(path, other) for other in seen)]:
            raise LoweringError(f"the out_keys {taken} stand where a batch has its own: rename them")
        if other := [path for path, leaf in hidden.items() if leaf.dtype != recurrent[path].dtype]:
            raise LoweringError(f"the hidden states {other} change their dtypes in a step: give initial ones like them")
        tensors = {path: leaf for path, leaf in outputs.items() if isinstance(leaf, Tensor)}
        self.dtypes = {path: leaf.dtype for path, leaf in tensors.items() if lacks(leaf.dtype)}

    def running(self, state: TorchPolicyState) -> contextlib.AbstractContextManager[Any]:
        """The context of a whole rollout; the generator of `state`, a copy, is moved on by what draws from it."""
        return contextlib.nullcontext()


def constant(initial_carry: Any) -> Any:
    """`initial_carry`, of an episode, which a program keeps; LoweringError for one that a trainer may change."""
    leaves = optree.tree_leaves(initial_carry, namespace=NAMESPACE)
    if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves):
        raise LoweringError("initial_state requires grad, so it may change: pass a constant one")
    return initial_carry


def check_forgets(policy: EmbeddedPolicy, module: Any, observation: Any, recurrent: Any) -> None:
    """Raise LoweringError for a policy on a TensorDict that reads what it wrote there at the step before.

    A loop of JAX carries hidden states that are announced. So the module is called twice, the second time with what it
    wrote the first time, and has to answer the same.
    """
    source, single = policy.source, policy.single
    if not isinstance(source, TensorDictPolicy) or not reads_what_it_wrote(source.module):
        return
    inputs, read = source.inputs_of(observation, recurrent)
    answers: list[dict[Path, Any]] = []
    for _ in range(2):
        carried = {path: leaf for path, leaf in answers[0].items() if may_be_read(path)} if answers else {}
        with torch.no_grad(), set_interaction_type(policy.exploration_type), torch_generator(torch.get_rng_state()):
            answer = run_module(module, inputs | carried, source.device, single=single)
            answers.append(outputs_of(answer, read, single=single))
    one, two = answers
    others = [path for path, leaf in two.items() if path not in one or not _same(one[path], leaf)]
    if others:
        raise LoweringError(
            f"its {names_of(others)} depend on what it wrote at the step before: give these keys a start with "
            "funcollect.tensordict_policy(policy, initial_state={...}), and name them in the in_keys and out_keys"
        )


def _same(one: Any, two: Any) -> bool:
    return one is two or (isinstance(one, Tensor) and torch.equal(one, two))


def _recorded(
    answer: Any, recurrent: Mapping[Path, Any] | None, written: Mapping[Path, Path]
) -> tuple[dict[Path, Any], dict[Path, Any]]:
    """What one call of a TensorDict policy leaves in a batch, and what it carries on: of what it read, the next.

    `written` has, by the path of each hidden state, that of its next value.
    """
    read = recurrent or {}
    outputs = {**flatten(answer), **{path: leaf for path, leaf in read.items() if written.get(path) != path}}
    if INIT in read:
        outputs["next", *INIT] = read[INIT] != read[INIT]  # False, of Torch or of JAX
    return outputs, {path: outputs[written.get(path, ("next", *path))] for path in read}


def _overlap(one: Path, two: Path) -> bool:
    return one[: len(two)] == two[: len(one)]
