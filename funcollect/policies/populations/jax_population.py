"""Populations of policies in JAX."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import numpy as np

from funcollect.interop.jax_setup import import_jax
from funcollect.interop.memo import memo_of
from funcollect.policies.jax_functions.jax_policy import JaxPolicy
from funcollect.policies.populations.members import LaneIds, MemberLanes, Tools, answers, size_of
from funcollect.policies.weights import check_shapes, shapes_of


class JaxPopulation(JaxPolicy):
    """See `population`. `params` may be set: the next rollout reads them."""

    def __init__(self, policy: JaxPolicy, params: Any) -> None:
        leaves = import_jax().tree.leaves(params)
        self.size = size_of([np.shape(leaf) for leaf in leaves])
        own = {name: (self.size, *shape) for name, shape in shapes_of(policy.params, "jax").items()}
        check_shapes(own, shapes_of(params, "jax"))
        self._member = policy.apply
        apply = self._of(MemberLanes(0, (1,) * self.size))
        super().__init__(apply, params, policy.head, policy.initial_state, record_state=policy.record_state)
        self._variables = policy._variables

    def _of(self, group: MemberLanes) -> Callable[..., Any]:
        """The function for the rows of a group."""
        jax, member, size = import_jax(), self._member, self.size
        tools = Tools(jax.tree.leaves, jax.tree.map, jax.numpy.concatenate, jax.vmap)

        @wraps(member)  # it is asked for its parameters: whether it takes keys
        def apply(params: Any, *inputs: Any, key: Any = None, **keys: Any) -> Any:
            # The one key of a call is that of its first lane: a member's follows from it.
            own = {} if key is None else {"key": jax.vmap(partial(jax.random.fold_in, key))(jax.numpy.arange(size))}

            def call(mine: Any, rows: Any) -> Any:
                (params, own), (inputs, keys) = mine, rows
                return member(params, *inputs, **own, **keys)

            return answers(tools, group, call, (params, own), (inputs, keys))

        return apply

    def of_lanes(self, lanes: LaneIds, total: int) -> JaxPopulation:
        """This policy for some lanes out of `total`, made once; PolicyError if they do not divide."""
        group = MemberLanes.of_lanes(self.size, lanes, total)
        if (size := size_of([np.shape(leaf) for leaf in import_jax().tree.leaves(self.params)])) != self.size:
            raise ValueError(f"params have {size} members, expected {self.size}: make another population for that many")
        known: dict[Any, JaxPopulation] = memo_of(self)
        if group not in known:
            known[group] = copy.copy(self)
            known[group].apply = self._of(group)
        known[group].params = self.params
        return known[group]
