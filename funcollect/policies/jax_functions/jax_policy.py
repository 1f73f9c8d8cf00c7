"""JAX functions as policies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from typing_extensions import override

from funcollect.arguments import check_arrays, check_call, check_flags
from funcollect.errors import PolicyError
from funcollect.interop.jax_setup import import_jax
from funcollect.interop.memo import set_since_use, variables_of
from funcollect.messages import shown
from funcollect.policies.heads.head import Head, check_head
from funcollect.policies.jax_functions.function_policy import FunctionPolicy, random_parameter
from funcollect.policies.weights import jax_arrays, matched


def jax_policy(
    apply: Callable[..., Any],
    params: Any,
    *,
    head: Head | None = None,
    initial_state: Any = None,
    record_state: bool = False,
) -> JaxPolicy:
    """A policy from a JAX function.

    Args:
        apply: called under `jit` as ``apply(params, observation)`` with the batch dimension; `observation` is an array
            [P, ...], a dict of them for a Dict space, a tuple for a Tuple space. If it has a parameter `keys`, it also
            gets fresh keys, ``uint32[P, 2]``, each a function of its lane and step. By the name `key` it gets the first
            lane's, ``uint32[2]``. It returns what a Torch module does (see `torch_policy`).
        params: a pytree of arrays.
        head: one of `funcollect.heads`.
        initial_state: makes the policy recurrent: the state of one environment at the start of an episode, a pytree
            without a batch dimension. The call is then ``apply(params, observation, state) -> (answer, next_state)``.
        record_state: records the recurrent state before each step, as ``recurrent``, or ``recurrent_0``,
            ``recurrent_1``, … of its leaves, those of a dict in the order of sorted keys: `evaluate_actions` can then
            begin anywhere in a batch.

    `apply` is compiled. Whatever else it reads (attributes, global variables, a closure) keeps the value that it had
    then, so pass what changes in `params`.

    Raises:
        TypeError: if `apply` cannot be called, or takes other arguments; or if `head` is not a head.

    A rollout raises PolicyError if a variable that `apply` reads has been set since it was compiled: any variable of
    its closure, and numbers, strings and arrays of its module. A change within a variable's object is not noticed:
    pass what changes in `params`.

    >>> import jax.numpy as jnp, funcollect as fc
    >>> policy = jax_policy(lambda params, x: x @ params, jnp.ones((4, 2)), head=fc.heads.categorical)
    >>> env = fc.make_env("CartPole-v1", num_envs=3)
    >>> state, batch = fc.rollout(env, policy, fc.init(env, policy, seed=0), 5)
    >>> batch["action_log_prob"].shape
    torch.Size([3, 5])
    """
    if isinstance(apply, (type, torch.nn.Module)) or not callable(apply):
        raise TypeError(
            f"apply is {shown(apply)}, expected a function (params, observation) -> answer: pass one, or wrap a Torch "
            "module with funcollect.torch_policy"
        )
    recurrent = initial_state is not None
    named = random_parameter(apply)
    inputs = f"(params, observation{', state' * recurrent}{f', {named}' if named else ''})"
    mend = "" if recurrent else " (a recurrent one: initial_state=)"
    check_call("apply", apply, f"a function {inputs} -> answer{mend}", 2 + recurrent, *([named] if named else []))
    check_head(head)
    if initial_state is not None:
        check_arrays("initial_state", import_jax().tree.leaves(initial_state))
    check_flags(record_state=record_state)
    return JaxPolicy(apply, params, head, initial_state, record_state=record_state)


class JaxPolicy(FunctionPolicy):
    """See `jax_policy`. `params` may be set: the next rollout reads it."""

    def __init__(
        self,
        apply: Callable[..., Any],
        params: Any,
        head: Head | None,
        initial_state: Any,
        *,
        record_state: bool = False,
    ) -> None:
        super().__init__(apply, head, initial_state, record_state=record_state)
        self.params = params
        self._prepared: tuple[list[Any], Any] | None = None
        self._variables = variables_of(apply)

    @override
    def prepare(self, params: Any, /) -> Any:
        """Parameters on the device, once per version; None stands for the policy's own, read at each rollout.

        Raises ValueError or TypeError for parameters unlike the policy's own, and for arrays that were donated.
        """
        jax = import_jax()
        self._check_variables()
        given = self.params if params is None else params
        leaves = jax.tree.leaves(given)
        if self._prepared and len(leaves) == len(self._prepared[0]) and all(map(_is_still, leaves, self._prepared[0])):
            return self._prepared[1]
        prepared = jax_arrays(given if params is None else matched(self.params, given, self.backend))
        if all(isinstance(leaf, jax.Array) for leaf in leaves):
            self._prepared = (leaves, prepared)
        return prepared

    def _check_variables(self) -> None:
        """Raise PolicyError if a variable that the function refers to has been set since the first rollout."""
        if changed := set_since_use(self, self._variables):
            raise PolicyError(
                f"the policy's function refers to {', '.join(changed)}, set since it was compiled, which has no "
                "effect: pass changing values in params, or make another policy with funcollect.jax_policy"
            )


def _is_still(one: Any, two: Any) -> bool:
    return one is two and not one.is_deleted()


def as_given(policy: Any, saved: Mapping[str, Any] | None) -> Any:
    """The result of a policy's `state_dict` in the form in which parameters are given: a pytree like its own in JAX."""
    return matched(policy.params, saved, policy.backend) if saved and isinstance(policy, JaxPolicy) else saved
