"""Torch policies whose module runs in Torch, called from inside a JAX loop on the device's own buffers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor
from typing_extensions import override

from funcollect.errors import LoweringError, PolicyError
from funcollect.interop.bridge import torch_view
from funcollect.interop.jax_setup import import_jax
from funcollect.interop.lowering.structure import jax_dtype, plain
from funcollect.interop.memory import fixed
from funcollect.keys import torch_generator
from funcollect.policies.actors.checks import check_tensor
from funcollect.policies.torch_backed import TorchPolicyState
from funcollect.policies.torch_in_jax.embedded_policy import EmbeddedPolicy, check_forgets
from funcollect.tree import NAMESPACE

_LEAF: Any = 0
_ALONE = optree.tree_structure(_LEAF, namespace=NAMESPACE)  # of an answer that is one tensor

_Form = tuple[Any, list[tuple[torch.Size, torch.dtype]]]  # an answer's structure, and its leaves' shapes and dtypes


class _OutputBuffers(NamedTuple):
    """The memory in which the module reads inputs of some shapes, and the form of its answer to them."""

    inputs: list[Tensor]  # always the same: Torch's bits depend on their addresses
    given: tuple[Any, Any]  # the inputs as observation and recurrent state
    form: _Form


class CallbackPolicy(EmbeddedPolicy):
    """A Torch policy whose module is called back, by `jax.experimental.buffer_callback`, on one thread at a time.

    `prepare` binds the parameters; the program is the same for all.
    """

    @override
    def _try(self, observation: Any, recurrent: Any) -> None:
        self._call = buffer_callback()
        leaves, treedef = import_jax().tree.flatten(plain((observation, recurrent)))
        self._reads = [leaf.dtype for leaf in leaves]  # the dtypes of Torch
        self._answers: dict[Any, _OutputBuffers] = {}
        self._module: Any = None
        self._settings = self.source.settings
        self._error: BaseException | None = None
        check_forgets(self, self.source.bound(None), observation, recurrent)
        treespec, kinds = self.answer_to(treedef, leaves).form
        zeros = [torch.zeros(shape, dtype=dtype) for shape, dtype in kinds]
        self.note(optree.tree_unflatten(treespec, zeros), observation, recurrent)

    @override
    def prepare(self, params: Any) -> dict[str, Any]:
        """Bind parameters, a TensorDict or None for the module's own, for the calls from now on."""
        self._module = self.source.bound(self.source.prepare(params))
        return {}

    def fits(self) -> bool:
        """Whether the module, if it has been changed, still returns the same keys, shapes and dtypes."""
        if self.source.settings != self._settings:
            self._settings = self.source.settings
            self.prepare(None)
            for answer in self._answers.values():
                with torch_generator(torch.get_rng_state()):
                    if self._call_module(answer.given)[1] != answer.form:
                        return False
        return True

    @override
    def begun(self, state: TorchPolicyState) -> TorchPolicyState:
        return state._replace(generator=state.generator.clone())

    @override
    @contextlib.contextmanager
    def running(self, state: TorchPolicyState) -> Iterator[None]:
        """Run Torch's global generator from `state`, and raise errors of the module in their original form."""
        self._error = None
        with torch_generator(state.generator):
            try:
                yield
            except Exception:
                if self._error is None:
                    raise
                raise self._error from None

    @override
    def traced(self, params: Any, observation: Any, state: Any = None) -> Any:
        jax = import_jax()
        leaves, treedef = jax.tree.flatten((observation, state))
        answer = self.answer_to(treedef, leaves)
        treespec, kinds = answer.form
        shapes = [jax.ShapeDtypeStruct(tuple(shape), jax_dtype(dtype)) for shape, dtype in kinds]
        outputs = self._call(partial(self._serve, answer), shapes, has_side_effect=True)(*leaves)
        return self.to_outputs(optree.tree_unflatten(treespec, outputs), state)

    def answer_to(self, treedef: Any, leaves: list[Any]) -> _OutputBuffers:
        """The form of the answer to such inputs, for which the module is called once with zeros.

        LoweringError for dtypes that JAX lacks.
        """
        which = (treedef, *(tuple(leaf.shape) for leaf in leaves))
        if which not in self._answers:
            kinds = zip(leaves, self._reads, strict=True)
            inputs = [fixed(torch.zeros(tuple(leaf.shape), dtype=dtype)) for leaf, dtype in kinds]
            given = import_jax().tree.unflatten(treedef, inputs)
            with torch_generator(torch.get_rng_state()):
                outputs, form = self._call_module(given)
            for leaf in outputs:
                check_tensor(leaf)
                jax_dtype(leaf.dtype)
            self._answers[which] = _OutputBuffers(inputs, given, form)
        return self._answers[which]

    def _call_module(self, given: tuple[Any, Any]) -> tuple[list[Any], _Form]:
        """The leaves of the module's answer, and their form."""
        if self._module is None:
            self.prepare(None)
        with torch.no_grad():
            answer: Any = self.source.call_module(self._module, *given, self.exploration_type, single=self.single)
        leaves, treespec = [answer], _ALONE
        if not isinstance(answer, Tensor):
            leaves, treespec = optree.tree_flatten(plain(answer), namespace=NAMESPACE)
        try:
            return leaves, (treespec, [(leaf.shape, leaf.dtype) for leaf in leaves])
        except AttributeError:
            for leaf in leaves:
                check_tensor(leaf)
            raise

    def _serve(self, answer: _OutputBuffers, context: Any, outputs: list[Any], *buffers: Any) -> None:
        """One call from inside the loop. No view of a buffer outlives it."""
        try:
            for own, buffer in zip(answer.inputs, buffers, strict=True):
                own.copy_(torch_view(buffer))
            leaves, form = self._call_module(answer.given)
            if form != answer.form:
                raise _changed(form, answer.form)
            for leaf, buffer in zip(leaves, outputs, strict=True):
                torch_view(buffer).copy_(_narrowed(leaf))
        except BaseException as error:
            self._error = error
            raise


def buffer_callback() -> Callable[..., Any]:
    """JAX's own, which is experimental; LoweringError if this version of JAX has none."""
    try:
        from jax.experimental.buffer_callback import buffer_callback as call
    except ImportError as error:
        raise LoweringError("this version of JAX has no jax.experimental.buffer_callback") from error
    return call


def _narrowed(leaf: Tensor) -> Tensor:
    """The same numbers in the dtype that JAX has for the leaf."""
    if leaf.dtype != torch.int64 or jax_dtype(leaf.dtype).itemsize == leaf.itemsize:
        return leaf
    narrow = leaf.to(torch.int32)
    if not torch.equal(narrow.long(), leaf):
        raise PolicyError(
            f"the policy returned {leaf[narrow != leaf].flatten()[0].item()}, expected numbers that 32 bits hold, "
            "as JAX has them: return smaller ones, or use torch_policy(compile='eager')"
        )
    return narrow


def _changed(now: _Form, before: _Form) -> PolicyError:
    got, expected = ([f"{dtype} {list(shape)}" for shape, dtype in kinds] for _, kinds in (now, before))
    return PolicyError(
        f"the policy returned {got} after {expected}: keep the keys, shapes and dtypes of its outputs the same"
    )
