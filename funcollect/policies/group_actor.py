"""Actors that call those of several policies: of groups of agents, or of players."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import optree
import torch
from torch import Tensor
from typing_extensions import override

from funcollect.interop.jax_setup import import_jax
from funcollect.policies.base import lane_mask
from funcollect.protocols import Actor, ActorInputs, Columns
from funcollect.specs import PRESENT, ActionSpec


def joined(actions: Sequence[Any], spec: ActionSpec) -> Any:
    """The actions [..., A] of all groups as one array."""
    if len(actions) == 1:
        return actions[0].to(spec.dtype) if isinstance(actions[0], Tensor) else actions[0]
    if all(isinstance(action, np.ndarray) for action in actions):
        return np.concatenate(actions, -1, dtype=spec.space.dtype, casting="same_kind")
    if any(isinstance(action, Tensor) for action in actions):
        tensors = (one if isinstance(one, Tensor) else torch.from_numpy(np.array(one)) for one in actions)
        return torch.cat([tensor.to(spec.dtype) for tensor in tensors], -1)
    return import_jax().numpy.concatenate(actions, -1)


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf.copy()


def _zeros_for(observed: Any, own: Any, mask: Any) -> Callable[[], Any]:
    """A function that copies observations [P, n, ...] to `own`, with zeros where the mask [P, n] is False."""
    mask = mask.reshape(*mask.shape, *[1] * (observed.ndim - mask.ndim))  # a view
    if not isinstance(own, Tensor):
        return lambda: np.copyto(own, np.where(mask, observed, np.zeros((), own.dtype)))
    return partial(torch.where, mask, observed, torch.zeros((), dtype=own.dtype, device=own.device), out=own)


class PartsActor(Actor):
    """Base class of actors that call the actors of several policies, `_actors` by name."""

    def __init__(self, policy: Any, inputs: ActorInputs) -> None:
        self._policy = policy
        self._actors = {name: self._actor_of(name, part) for name, part in self._begin(inputs).items()}

    def _begin(self, inputs: ActorInputs) -> dict[str, ActorInputs]:
        """Begin a rollout; return the inputs of each actor."""
        raise NotImplementedError

    def _actor_of(self, name: str, inputs: ActorInputs) -> Actor:
        return self._policy.policies[name].actor(inputs)  # type: ignore[no-any-return]

    @override
    def again(self, inputs: ActorInputs, /) -> bool:
        by_name = self._begin(inputs)
        return all(actor.again(by_name[name]) for name, actor in self._actors.items())

    @override
    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for actor in self._actors.values():
                stack.enter_context(actor.running())
            yield


class GroupActor(PartsActor):
    """The actors of all groups, which read views of the loop's observations, or copies with zeros for absent agents."""

    def __init__(self, policy: Any, inputs: ActorInputs) -> None:
        self._parts = policy.parts(inputs.spec)
        self._rows: dict[str, Any] = {}  # what each policy reads: the same memory at all steps
        self._masked: list[Callable[[], Any]] = []
        for name, part in self._parts.items():
            observed = inputs.observation[name]["observation"]
            if part.comes_and_goes:
                own = optree.tree_map(_copied, observed)
                mask, trees = inputs.observation[name][PRESENT], (observed, own)
                pairs = zip(*map(optree.tree_leaves, trees), strict=True)
                self._masked += (_zeros_for(leaf, copy, mask) for leaf, copy in pairs)
                observed = own
            self._rows[name] = part.flat(observed)
        super().__init__(policy, inputs)

    @override
    def _begin(self, inputs: ActorInputs) -> dict[str, ActorInputs]:
        self._inputs = inputs
        return {name: self._of_group(part, inputs) for name, part in self._parts.items()}

    def _of_group(self, part: Any, inputs: ActorInputs) -> ActorInputs:
        noise = part.noise(inputs.noise)
        of_group: ActorInputs = self._policy.inputs_of(part.name, inputs, self._rows[part.name], noise)
        return of_group._replace(spec=part.spec, num_envs=inputs.num_envs * max(part.n, 1), single=False)

    @override
    def act(self, t: int) -> Any:
        for copy_with_zeros in self._masked:
            copy_with_zeros()
        rows = self._inputs.num_envs
        return joined([actor.act(t).reshape(rows, -1) for actor in self._actors.values()], self._inputs.spec)

    @override
    def restart(self, lanes: Sequence[int] | Tensor) -> None:
        mask = lane_mask(lanes, self._inputs.num_envs)
        for name, part in self._parts.items():
            self._actors[name].restart(mask.repeat_interleave(part.n) if part.n else mask)

    @override
    def finish(self) -> tuple[Any, Columns]:
        states, columns, actions = {}, Columns(), []
        lead, num_envs = (self._inputs.length,), self._inputs.num_envs
        for name, part in self._parts.items():
            states[name], outputs = self._actors[name].finish()
            actions.append(outputs.pop(("action",)).reshape(*lead, num_envs, -1))
            columns |= {(name, *path): part.by_agent(column, num_envs, lead) for path, column in outputs.items()}
        return states, {("action",): joined(actions, self._inputs.spec), **columns}
