"""A JAX policy's step as one jitted call: few arguments in, one array out, since each costs a microsecond or more."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from funcollect.errors import PolicyError
from funcollect.interop.jax_setup import import_jax
from funcollect.policies.actors.checks import check_action
from funcollect.policies.jax_functions.packing import PackedInputs, PackedVector, layout, pack
from funcollect.protocols import ActorInputs

TracedCall = Callable[[Any, Any, Any, Any], tuple[Any, dict[str, Any]]]  # params, policy_state, observation, noise

PROBE = "what the head reads"  # NaN where that is, for a head without a log-probability that would show it


class StepProgram:
    """The jitted step of a policy for one action space and number of lanes.

    32-bit observations and the noise travel in one buffer; the others are arguments of their own. Small parameters
    travel as one vector. A `plain` policy, with neither state nor other observations, is ``step(params, buffer)`` and
    returns its packed outputs; any other is ``step(params, buffer, policy_state, others)`` and returns both.

    Args:
        answer: the policy's traced step.
        actor_inputs: any rollout of the kind: its shapes are what counts.
    """

    def __init__(self, answer: TracedCall, actor_inputs: ActorInputs) -> None:
        jax = import_jax()
        noise = None if actor_inputs.noise is None else actor_inputs.noise[0].numpy()
        _, shapes = jax.eval_shape(
            answer, actor_inputs.params, actor_inputs.policy_state, actor_inputs.observation, noise
        )
        if not hasattr(shapes["action"], "shape"):
            kind = type(shapes["action"]).__name__
            raise PolicyError(f"the policy's action is {kind}, expected an array: return one")
        check_action(shapes["action"], actor_inputs.spec, actor_inputs.num_envs)
        self.fields = layout(shapes, actor_inputs.num_envs)
        self._vector = PackedVector(actor_inputs.params)
        self._packed: tuple[Any, Any] | None = None
        inputs, _, treedef = self.inputs(actor_inputs)
        wide = [_is_word(leaf) for leaf in jax.tree.leaves(actor_inputs.observation)]

        def step(params: Any, buffer: Any, policy_state: Any, others: list[Any]) -> tuple[Any, Any]:
            arrays, rest = iter(inputs.unpack(buffer)), iter(others)
            leaves = [next(arrays) if word else next(rest) for word in wide]
            observation = jax.tree.unflatten(treedef, leaves)
            drawn = None if noise is None else next(arrays)
            policy_state, outputs = answer(self._unpacked(params), policy_state, observation, drawn)
            return policy_state, pack(outputs, self.fields)

        self.plain = actor_inputs.policy_state is None and all(wide)
        self.step = jax.jit(lambda params, buffer: step(params, buffer, None, [])[1]) if self.plain else jax.jit(step)

    def params(self, prepared: Any) -> Any:
        """The parameters as `step` takes them, laid out once per version."""
        if not self._vector.worth_it:
            return prepared
        if self._packed is None or self._packed[0] is not prepared:
            self._packed = (prepared, self._vector.pack(prepared))
        return self._packed[1]

    def _unpacked(self, params: Any) -> Any:
        return self._vector.unpack(params) if self._vector.worth_it else params

    def inputs(self, actor_inputs: ActorInputs) -> tuple[PackedInputs, list[npt.NDArray[Any]], Any]:
        """The buffer of a rollout, the observation's leaves that travel beside it, and its structure."""
        leaves, treedef = import_jax().tree.flatten(actor_inputs.observation)
        noise = [] if actor_inputs.noise is None else [actor_inputs.noise[0].numpy()]
        others = [leaf for leaf in leaves if not _is_word(leaf)]
        return PackedInputs([leaf for leaf in leaves if _is_word(leaf)], noise), others, treedef


def _is_word(leaf: Any) -> bool:
    return bool(np.dtype(leaf.dtype).itemsize == 4)


@cache
def select_program() -> Callable[[Any, Any, Any], Any]:
    """Jitted: the lanes of a mask [P] from one pytree, the rest from another."""
    jax = import_jax()

    def pick(mask: Any, one: Any, two: Any) -> Any:
        return jax.numpy.where(mask.reshape(-1, *[1] * (one.ndim - 1)), one, two)

    return jax.jit(  # type: ignore[no-any-return]
        lambda mask, chosen, other: jax.tree.map(lambda one, two: pick(mask, one, two), chosen, other)
    )
