"""JAX functions as policies."""

from __future__ import annotations

import dis
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from funcollect.arguments import check_arrays
from funcollect.errors import PolicyError
from funcollect.interop.jax_setup import import_jax, strong
from funcollect.messages import shown
from funcollect.policies.heads import Head, check_head
from funcollect.policies.jax_functions.function_policy import FunctionPolicy


def jax_policy(
    apply: Callable[..., Any], params: Any, *, head: Head | None = None, initial_state: Any = None
) -> JaxPolicy:
    """A policy from a JAX function.

    Args:
        apply: called under `jit` as ``apply(params, observation)`` with the batch dimension; `observation` is an array
            [P, ...], a dict of them for a Dict space, a tuple for a Tuple space. If it has a parameter `key`, it also
            gets a fresh ``uint32[2]`` key by that name. It returns what a Torch module does (see `torch_policy`).
        params: a pytree of arrays.
        head: one of `funcollect.heads`.
        initial_state: makes the policy recurrent: the state of one environment at the start of an episode, a pytree
            without a batch dimension. The call is then ``apply(params, observation, state) -> (answer, next_state)``.

    `apply` is compiled. Whatever else it reads (attributes, global variables, a closure) keeps the value that it had
    then, so pass what changes in `params`.

    Raises:
        TypeError: if `apply` cannot be called, or `head` is not a head.

    A rollout raises PolicyError if a variable that `apply` closes over has been set since it was compiled.

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
    check_head(head)
    if initial_state is not None:
        check_arrays("initial_state", import_jax().tree.leaves(initial_state))
    return JaxPolicy(apply, params, head, initial_state)


class JaxPolicy(FunctionPolicy):
    """See `jax_policy`. `params` may be set: the next rollout reads it."""

    def __init__(self, apply: Callable[..., Any], params: Any, head: Head | None, initial_state: Any) -> None:
        super().__init__(apply, head, initial_state)
        self.params = params
        self._prepared: tuple[list[Any], Any] | None = None
        self._cells = _cells_of(apply)
        self._closed_over: list[Any] | None = None  # their contents at the first rollout

    @override
    def prepare(self, params: Any, /) -> Any:
        """Parameters on the device, once per version; None stands for the policy's own, read at each rollout.

        Raises ValueError or TypeError for parameters unlike the policy's own, and for arrays that were donated.
        """
        jax = import_jax()
        self._check_closure()
        given = self.params if params is None else self._tree(params)
        leaves = jax.tree.leaves(given)
        if self._prepared and len(leaves) == len(self._prepared[0]) and all(map(_is_still, leaves, self._prepared[0])):
            return self._prepared[1]
        if params is not None:
            self._check_params(given)
        prepared = jax.tree_util.tree_map_with_path(_array, given)
        if all(isinstance(leaf, jax.Array) for leaf in leaves):
            self._prepared = (leaves, prepared)
        return prepared

    def _check_closure(self) -> None:
        now = [_content(cell) for _, cell in self._cells]
        if self._closed_over is None:
            self._closed_over = now
        pairs = zip(self._cells, now, self._closed_over, strict=True)
        if changed := [name for (name, _), value, before in pairs if not _is_same(value, before)]:
            raise PolicyError(
                f"the policy's function closes over {', '.join(changed)}, set since it was compiled, which has no "
                "effect: pass what changes in params, or make another policy with funcollect.jax_policy"
            )

    def _check_params(self, params: Any) -> None:
        own, given = ({name: np.shape(leaf) for name, leaf in _named(tree).items()} for tree in (self.params, params))
        if own != given:
            differing = sorted(key for key in own.keys() | given.keys() if own.get(key) != given.get(key))
            raise ValueError(
                f"params differ from the policy's own at {differing}: got {[given.get(key) for key in differing]}, "
                f"expected {[own.get(key) for key in differing]}: pass a pytree of the same structure and shapes"
            )

    def state_dict(self, params: Any = None) -> dict[str, Tensor]:
        """A copy of `params`, or of the policy's own, by path."""
        leaves = _named(self.params if params is None else params)
        return {name: torch.from_numpy(np.array(leaf)) for name, leaf in leaves.items()}

    def load(self, params: Any) -> None:
        """Act with `params`, a pytree or the result of `state_dict`, from the next rollout on."""
        self.params = self.prepare(self._tree(params))

    def _tree(self, params: Any) -> Any:
        """A pytree like the policy's own from the result of `state_dict`; anything else unchanged."""
        own, jax = _named(self.params), import_jax()
        if not isinstance(params, Mapping) or set(params) != set(own) or not own:
            return params
        leaves = [jax.numpy.array(np.asarray(params[name])) for name in own]
        return jax.tree.unflatten(jax.tree.structure(self.params), leaves)


def _cells_of(function: Any) -> list[tuple[str, Any]]:
    """The variables of an outer function that `function` reads and does not set itself, with their cells."""
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    if code is None or not cells:
        return []
    own = {each.argval for each in dis.get_instructions(code) if each.opname == "STORE_DEREF"}
    return [(name, cell) for name, cell in zip(code.co_freevars, cells, strict=True) if name not in own]


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None


def _named(tree: Any) -> dict[str, Any]:
    """The leaves of a pytree by their paths."""
    tools = import_jax().tree_util
    return {tools.keystr(path): leaf for path, leaf in tools.tree_leaves_with_path(tree)}


def _array(path: Any, leaf: Any) -> Any:
    """A live array of JAX without a weak type."""
    jax = import_jax()
    name = f"the parameter{jax.tree_util.keystr(path)}"
    if not isinstance(leaf, jax.Array):
        try:
            return strong(jax.numpy.array(leaf))
        except TypeError as error:
            raise TypeError(
                f"{name} is {type(leaf).__name__}, expected an array or a number: give the arrays alone as params, and "
                "what else a model holds to the function (equinox.partition tells them apart)"
            ) from error
    if leaf.is_deleted():
        raise ValueError(
            f"{name} was donated or deleted, expected a live array: set policy.params, or pass params=, to what the "
            "function that took it returned"
        )
    return strong(leaf)


def _is_same(one: Any, two: Any) -> bool:
    """Whether two contents of a closure are the same object, or equal numbers or strings."""
    return one is two or (type(one) is type(two) and isinstance(one, (bool, int, float, str)) and one == two)


def _is_still(one: Any, two: Any) -> bool:
    return one is two and not one.is_deleted()
