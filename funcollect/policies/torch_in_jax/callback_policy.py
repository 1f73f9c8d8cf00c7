"""Torch policies whose module runs in Torch, called from inside a JAX loop on the device's own buffers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from funcollect.errors import LoweringError, PolicyError
from funcollect.interop.bridge import torch_view
from funcollect.interop.jax_setup import import_jax
from funcollect.interop.lowering.dtypes import jax_dtype
from funcollect.interop.lowering.structure import plain
from funcollect.interop.memory import fixed
from funcollect.keys import torch_generator
from funcollect.policies.actors.checks import check_tensor
from funcollect.policies.torch_backed import TorchPolicyState
from funcollect.policies.torch_in_jax.embedded_policy import EmbeddedPolicy, Source, check_forgets, constant
from funcollect.policies.torch_modules.torch_policy import lanes_of
from funcollect.specs import ExplorationType
from funcollect.tree import NAMESPACE

_LEAF: Any = 0
_ALONE = optree.tree_structure(_LEAF, namespace=NAMESPACE)  # of an answer that is one tensor

Kind = tuple[torch.Size, torch.dtype]


class _OutputBuffers(NamedTuple):
    """What the module answers to inputs of some shapes, and the memory in which it reads them."""

    inputs: list[Tensor]  # which stay: Torch's bits depend on where they are
    given: tuple[Any, Any]  # these, as the observation and the recurrent state
    treespec: Any
    kinds: list[Kind]


class CallbackPolicy(EmbeddedPolicy):
    """A Torch policy by `jax.experimental.buffer_callback`, on one thread at a time.

    `prepare` binds the parameters; the program is the same for all.

    Args:
        source: the Torch policy.
        exploration_type: what a TensorDict policy's distributions are told.
        reads: the dtypes, in Torch, of the leaves of its observation and recurrent state.
        initial_carry, single: see `EmbeddedPolicy`.
    """

    def __init__(
        self,
        source: Source,
        exploration_type: ExplorationType,
        reads: list[torch.dtype],
        initial_carry: Any,
        single: bool,
    ) -> None:
        super().__init__(source, exploration_type, self._traced, initial_carry, single)
        self._call = buffer_callback()
        self._reads = reads
        self._answers: dict[Any, _OutputBuffers] = {}
        self._module: Any = None
        self._settings = source.settings
        self._error: BaseException | None = None

    def prepare(self, params: Any) -> dict[str, Any]:
        """Bind parameters, a TensorDict or None for the module's own, for the calls from now on."""
        self._module = self.source.bound(self.source.prepare(params))
        return {}

    def fits(self) -> bool:
        """Whether the module, if it has been changed, still answers with the keys, shapes and dtypes that it had."""
        if self.source.settings != self._settings:
            self._settings = self.source.settings
            self.prepare(None)
            for answer in self._answers.values():
                with torch_generator(torch.get_rng_state()):
                    outputs, treespec = self._asked(answer.given)
                if treespec != answer.treespec or [(leaf.shape, leaf.dtype) for leaf in outputs] != answer.kinds:
                    return False
        return True

    @contextlib.contextmanager
    def running(self, state: TorchPolicyState) -> Iterator[None]:
        """Torch's global generator running from `state`, and errors of the module as they were raised."""
        self._error = None
        with torch_generator(state.generator):
            try:
                yield
            except Exception:
                if self._error is None:
                    raise
                raise self._error from None

    def _traced(self, params: Any, observation: Any, state: Any = None) -> Any:
        jax = import_jax()
        leaves, treedef = jax.tree.flatten((observation, state))
        answer = self.answer_to(treedef, leaves)
        shapes = [jax.ShapeDtypeStruct(tuple(shape), jax_dtype(dtype)) for shape, dtype in answer.kinds]
        outputs = self._call(partial(self._serve, answer), shapes, has_side_effect=True)(*leaves)
        return self.to_outputs(optree.tree_unflatten(answer.treespec, outputs), state)

    def answer_to(self, treedef: Any, leaves: list[Any]) -> _OutputBuffers:
        """The shapes of the answer to such inputs, for which the module is called once with zeros.

        Raises:
            LoweringError: for dtypes that JAX lacks.
        """
        which = (treedef, *(tuple(leaf.shape) for leaf in leaves))
        if which not in self._answers:
            kinds = zip(leaves, self._reads, strict=True)
            inputs = [fixed(torch.zeros(tuple(leaf.shape), dtype=dtype)) for leaf, dtype in kinds]
            given = import_jax().tree.unflatten(treedef, inputs)
            with torch_generator(torch.get_rng_state()):
                outputs, treespec = self._asked(given)
            for leaf in outputs:
                check_tensor(leaf)
                jax_dtype(leaf.dtype)
            self._answers[which] = _OutputBuffers(
                inputs, given, treespec, [(leaf.shape, leaf.dtype) for leaf in outputs]
            )
        return self._answers[which]

    def _asked(self, given: tuple[Any, Any]) -> tuple[list[Any], Any]:
        if self._module is None:
            self.prepare(None)
        with torch.no_grad():
            answer = self.source.call_module(self._module, *given, self.exploration_type, single=self.single)
        if isinstance(answer, Tensor):
            return [answer], _ALONE
        return optree.tree_flatten(plain(answer), namespace=NAMESPACE)

    def _serve(self, answer: _OutputBuffers, context: Any, outputs: list[Any], *buffers: Any) -> None:
        """One call from inside the loop; no view of a buffer outlives it."""
        try:
            for own, buffer in zip(answer.inputs, buffers, strict=True):
                own.copy_(torch_view(buffer))
            leaves, treespec = self._asked(answer.given)
            if treespec != answer.treespec or [(leaf.shape, leaf.dtype) for leaf in leaves] != answer.kinds:
                raise _changed(leaves, answer)
            for leaf, buffer in zip(leaves, outputs, strict=True):
                torch_view(buffer).copy_(_narrowed(leaf))
        except BaseException as error:
            self._error = error
            raise


def buffer_callback() -> Callable[..., Any]:
    """JAX's own, which is experimental.

    Raises:
        LoweringError: where this version of JAX has none.
    """
    try:
        from jax.experimental.buffer_callback import buffer_callback as call
    except ImportError as error:
        raise LoweringError("this version of JAX has no jax.experimental.buffer_callback") from error
    return call


def callback_policy(
    source: Source, observation: Any, exploration_type: ExplorationType, *, single: bool = False
) -> CallbackPolicy:
    """A policy whose module is called back.

    Args:
        source: the Torch policy.
        observation: an example [P, ...], in the space's structure.
        exploration_type: what a TensorDict policy's distributions are told.
        single: whether a TensorDict policy is called without a batch dimension; P is 1 then.

    Raises:
        LoweringError: for a policy whose inputs or answers JAX does not have.
    """
    tree = import_jax().tree
    initial_carry = constant(source.initial_carry(observation))
    recurrent = lanes_of(initial_carry, len(tree.leaves(observation)[0]), source.device)
    leaves, treedef = tree.flatten(plain((observation, recurrent)))
    policy = CallbackPolicy(source, exploration_type, [leaf.dtype for leaf in leaves], initial_carry, single)
    check_forgets(policy, source.bound(None), observation, recurrent)
    answer = policy.answer_to(treedef, leaves)
    zeros = [torch.zeros(shape, dtype=dtype) for shape, dtype in answer.kinds]
    given = (optree.tree_unflatten(answer.treespec, zeros), observation, recurrent)
    policy.note(*given, lambda dtype: jax_dtype(dtype).itemsize < dtype.itemsize)
    return policy


def _narrowed(leaf: Tensor) -> Tensor:
    """A leaf as JAX has it, its numbers the same."""
    if leaf.dtype != torch.int64 or jax_dtype(leaf.dtype).itemsize == leaf.itemsize:
        return leaf
    narrow = leaf.to(torch.int32)
    if not torch.equal(narrow.long(), leaf):
        raise PolicyError(
            f"the policy answered with {leaf[narrow != leaf].flatten()[0].item()}, expected numbers that 32 bits hold, "
            "as JAX has them: return smaller ones, or use torch_policy(compile='eager')"
        )
    return narrow


def _changed(leaves: list[Any], answer: _OutputBuffers) -> PolicyError:
    def words(kinds: list[Kind]) -> list[str]:
        return [f"{dtype} {list(shape)}" for shape, dtype in kinds]

    got = words([(leaf.shape, leaf.dtype) for leaf in leaves])
    return PolicyError(
        f"the policy answered {got} after {words(answer.kinds)}: keep the keys, shapes and dtypes of its outputs the "
        "same"
    )
