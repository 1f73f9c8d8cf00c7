"""Populations: one policy with N versions of its parameters, each of which acts for an equal group of lanes."""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial, wraps
from itertools import pairwise
from operator import itemgetter
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import optree
import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.func import functional_call, vmap

from funcollect.arguments import check_kind
from funcollect.errors import PolicyError
from funcollect.interop.jax_setup import import_jax
from funcollect.interop.memo import memo_of
from funcollect.messages import shown
from funcollect.policies.jax_functions.jax_policy import JaxPolicy
from funcollect.policies.torch_modules.skeleton import bare
from funcollect.policies.torch_modules.torch_policy import TorchPolicy
from funcollect.policies.weights import check_shapes, shapes_of
from funcollect.protocols import Policy
from funcollect.tree import flatten

LaneIds = Sequence[int] | npt.NDArray[np.int64]  # neighbouring ids


def population(policy: Policy, params: Any) -> TorchPopulation | JaxPopulation:
    """A policy that acts with N versions of its parameters: lane ``l`` of L with number ``l * N // L``.

    L counts all lanes, over workers and actors too, and is a multiple of N. So a batch [L, T] holds the members in N
    equal groups, one after the other, and each has the data of a run of its own in these lanes, within rounding.

    Args:
        policy: one member: made by `torch_policy`, `jax_policy`, or `normalized`. It stays as it is.
        params: the parameters of all members, each leaf with a leading axis N. For a policy in JAX a pytree like
            ``policy.params``; for one in Torch tensors by dotted name, such as `torch.func.stack_module_state` returns,
            or a TensorDict. Buffers may be left out. Copies of them are the `params` of the population: rollouts and
            collectors take others like them.

    In JAX the members are one call under `jax.vmap`; in Torch one under `torch.func.vmap` where the module allows it,
    else a call for each.

    A module keeps what it writes into buffers in place, not a buffer that its `forward` assigns. Random numbers that a
    module or a function draws by itself are others than in a run of its own.

    Raises:
        TypeError: for another kind of policy.
        ValueError: for parameters unlike the policy's own behind the leading axis.

    A rollout raises PolicyError for a number of lanes that is not a multiple of N.

    >>> import torch, funcollect as fc
    >>> modules = [torch.nn.Linear(4, 2) for _ in range(4)]
    >>> params, _ = torch.func.stack_module_state(modules)
    >>> policy = fc.population(fc.torch_policy(modules[0], head=fc.heads.categorical), params)
    >>> env = fc.make_env("CartPole-v1", num_envs=8)
    >>> state, batch = fc.rollout(env, policy, fc.init(env, policy, seed=0), 16)
    >>> batch["next", "reward"].reshape(4, -1).sum(-1)
    tensor([32., 32., 32., 32.])
    """
    if isinstance(policy, Population):
        raise TypeError("policy is a population already, expected one member: pass the policy below, and its params")
    if isinstance(policy, TorchPolicy) and isinstance(policy.module, nn.Module):
        return TorchPopulation(policy, params)
    if isinstance(policy, JaxPolicy):
        return JaxPopulation(policy, params)
    raise TypeError(
        f"policy is {shown(policy)}, expected one of funcollect.torch_policy over a module, or of "
        "funcollect.jax_policy: make one of them"
    )


@dataclass(frozen=True)
class _MemberLanes:
    """Members in their order: the number of the first one, and for each the lanes for which it acts."""

    first: int
    lanes: tuple[int, ...]

    @classmethod
    def of_lanes(cls, size: int, lanes: LaneIds, total: int) -> Self:
        """The members of a population that act for these lanes out of `total`."""
        if total % size:
            raise PolicyError(
                f"a population of {size} acts in {total} lanes, expected a multiple of {size}: change num_envs, or the "
                "number of workers"
            )
        members = np.asarray(lanes) * size // total
        return cls(int(members[0]), tuple(np.bincount(members - members[0]).tolist()))

    def rows(self, count: int) -> tuple[int, ...]:
        """How many rows each member has, out of `count`: of these lanes, or more for each of as many members."""
        members = len(self.lanes)
        if count == sum(self.lanes):
            return self.lanes
        if len(set(self.lanes)) > 1 or count % members:
            raise PolicyError(
                f"{members} members of a population were given {count} rows, expected as many for each: pass a multiple"
            )
        return (count // members,) * members


@dataclass(frozen=True)
class _Tools:
    """What `_answers` needs of a framework."""

    leaves: Callable[[Any], list[Any]]
    map: Callable[..., Any]  # over the leaves of pytrees
    join: Callable[[Sequence[Any]], Any]  # along the first axis
    vmap: Callable[..., Any] | None  # None for a call for each member


_CALLED = _Tools(optree.tree_leaves, optree.tree_map, torch.cat, None)  # type: ignore[arg-type]
_MAPPED = replace(_CALLED, vmap=partial(vmap, randomness="different"))
_TOOLS: weakref.WeakKeyDictionary[nn.Module, _Tools] = weakref.WeakKeyDictionary()  # which of them a module allows


def _answers(tools: _Tools, group: _MemberLanes, call: Callable[..., Any], params: Any, inputs: Any) -> Any:
    """What ``call(params, inputs)`` answers for the rows of each member of a group: inputs and answers are [P, ...]."""
    rows = group.rows(len(tools.leaves(inputs)[0]))
    members = range(group.first, group.first + len(rows))
    if tools.vmap and len(set(rows)) == 1:
        own = tools.map(lambda leaf: leaf[members.start : members.stop], params)
        folded = tools.map(lambda leaf: leaf.reshape(len(rows), rows[0], *leaf.shape[1:]), inputs)
        answers = tools.vmap(call)(own, folded)
        return tools.map(lambda leaf: leaf.reshape(sum(rows), *leaf.shape[2:]), answers)
    ends = np.cumsum((0, *rows)).tolist()
    parts = [
        call(tools.map(itemgetter(member), params), tools.map(itemgetter(slice(start, end)), inputs))
        for member, (start, end) in zip(members, pairwise(ends), strict=True)
    ]
    return tools.map(lambda *leaves: tools.join(leaves), *parts)


class JaxPopulation(JaxPolicy):
    """See `population`. `params` may be set: the next rollout reads them."""

    def __init__(self, policy: JaxPolicy, params: Any) -> None:
        leaves = import_jax().tree.leaves(params)
        self.size = _size([np.shape(leaf) for leaf in leaves])
        own = {name: (self.size, *shape) for name, shape in shapes_of(policy.params, "jax").items()}
        check_shapes(own, shapes_of(params, "jax"))
        self._member = policy.apply
        apply = self._of(_MemberLanes(0, (1,) * self.size))
        super().__init__(apply, params, policy.head, policy.initial_state, record_state=policy.record_state)
        self._cells = policy._cells

    def _of(self, group: _MemberLanes) -> Callable[..., Any]:
        """The function for the rows of a group."""
        jax, member, size = import_jax(), self._member, self.size
        tools = _Tools(jax.tree.leaves, jax.tree.map, jax.numpy.concatenate, jax.vmap)

        @wraps(member)  # it is asked for its parameters: whether it takes keys
        def apply(params: Any, *inputs: Any, key: Any = None, **keys: Any) -> Any:
            # The one key of a call is that of its first lane: a member's follows from it.
            own = {} if key is None else {"key": jax.vmap(partial(jax.random.fold_in, key))(jax.numpy.arange(size))}

            def call(mine: Any, rows: Any) -> Any:
                (params, own), (inputs, keys) = mine, rows
                return member(params, *inputs, **own, **keys)

            return _answers(tools, group, call, (params, own), (inputs, keys))

        return apply

    def of_lanes(self, lanes: LaneIds, total: int) -> JaxPopulation:
        """This policy for some lanes out of `total`, made once; PolicyError if they do not divide."""
        group = _MemberLanes.of_lanes(self.size, lanes, total)
        if (size := _size([np.shape(leaf) for leaf in import_jax().tree.leaves(self.params)])) != self.size:
            raise ValueError(f"params have {size} members, expected {self.size}: make another population for that many")
        known: dict[Any, JaxPopulation] = memo_of(self)
        if group not in known:
            known[group] = copy.copy(self)
            known[group].apply = self._of(group)
        known[group].params = self.params
        return known[group]


class _Members:
    """The class of a module whose tensors have a leading axis of N, in front of the class of the one it was made of.

    A subclass of both, so that parameters keep their names.
    """

    _member: type[nn.Module]
    _group: _MemberLanes

    def __call__(self, *inputs: Any) -> Any:
        return self.forward(*inputs)  # hooks of the module run in the calls for members

    def forward(self, *inputs: Any) -> Any:
        module: Any = self
        one: Any = bare(self._member)
        one.__dict__ = vars(self)
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}

        def call(own: Any, rows: Any) -> Any:
            return functional_call(one, own, rows)

        if module not in _TOOLS:
            drawn, before = torch.get_rng_state(), {name: leaf.clone() for name, leaf in module.named_buffers()}
            try:
                with warnings.catch_warnings():
                    warnings.filterwarnings("error", "There is a performance drop")  # slower than a call for each
                    answer = _answers(_MAPPED, self._group, call, tensors, inputs)
            except (RuntimeError, ValueError, UserWarning):  # such as a branch that depends on data
                torch.set_rng_state(drawn)
                for name, leaf in module.named_buffers():
                    leaf.copy_(before[name])
                answer = _answers(_CALLED, self._group, call, tensors, inputs)
                _TOOLS[module] = _CALLED
            else:
                _TOOLS[module] = _MAPPED
            return answer
        return _answers(_TOOLS[module], self._group, call, tensors, inputs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _bare_members, (self._member,), vars(self).copy()


@cache
def _members_of(kind: Any) -> Any:
    return type(f"PopulationOf{kind.__name__}", (_Members, kind), {"_member": kind})


def _bare_members(kind: Any) -> Any:
    return bare(_members_of(kind))


class TorchPopulation(TorchPolicy):
    """See `population`. The `module` has the parameters of all members."""

    def __init__(self, policy: TorchPolicy, params: Any) -> None:
        module: Any = policy.module
        check_kind(
            "params", params, (Mapping, TensorDictBase), "pass {**params, **buffers} of torch.func.stack_module_state"
        )
        given = {".".join(path): torch.as_tensor(leaf) for path, leaf in flatten(params).items()}
        self.size = _size([tuple(leaf.shape) for leaf in given.values()])
        buffers = {name: leaf.expand(self.size, *leaf.shape) for name, leaf in module.named_buffers()}
        every = policy.tensors(None)
        cast = {name: leaf.to(every[name].dtype) if name in every else leaf for name, leaf in given.items()}
        stacked = buffers | cast
        once = {name for name, _ in module.named_parameters()} | buffers.keys()  # a parameter may have two names
        check_shapes(
            {name: (self.size, *every[name].shape) for name in every if name in once | given.keys()},
            {name: tuple(leaf.shape) for name, leaf in stacked.items()},
        )
        self.take_over(policy, _stacked(module, stacked, self.size))

    @property
    def lanes(self) -> int:
        """A number of rows for which it can be called."""
        group: _MemberLanes = vars(self.module)["_group"]
        return sum(group.lanes)

    def of_lanes(self, lanes: LaneIds, total: int) -> TorchPopulation:
        """This policy for some lanes out of `total`, made once; PolicyError if they do not divide."""
        group = _MemberLanes.of_lanes(self.size, lanes, total)
        known: dict[Any, tuple[TorchPopulation, Any]] = memo_of(self)
        kind, attributes = type(self.module), {**vars(self.module), "_group": group}
        if group not in known:
            module = bare(kind)  # type: ignore[arg-type]
            module.__dict__ = attributes
            known[group] = copy.copy(self), module
            known[group][0].replace(module)
        policy, module = known[group]
        vars(module).update(attributes)  # it may have been changed
        return policy


Population = TorchPopulation | JaxPopulation


def _size(shapes: Sequence[tuple[int, ...]]) -> int:
    """N, the first axis of all parameters."""
    sizes = {shape[0] if shape else None for shape in shapes}
    if len(sizes) != 1 or None in sizes or 0 in sizes:
        raise ValueError(
            f"params have the first axes {sorted(sizes, key=str)}, expected the same one, the number of members: stack "
            "the parameters of the members, as torch.func.stack_module_state or jax.tree.map(jnp.stack, …) do"
        )
    (size,) = sizes
    assert size is not None
    return size


def _stacked(module: Any, tensors: Mapping[str, Tensor], size: int) -> Any:
    """A copy of the module with these parameters and buffers."""
    made = copy.deepcopy(module)
    known: dict[int, tuple[Any, Any]] = {}  # by its id the member's, which may have two names, and all members'
    for prefix, part in made.named_modules():
        for slots in (part._parameters, part._buffers):
            for key, before in list(slots.items()):
                if before is None:
                    continue
                if id(before) not in known:
                    tensor = tensors[f"{prefix}.{key}" if prefix else key].detach().clone()
                    is_parameter = isinstance(before, nn.Parameter)
                    made_of = nn.Parameter(tensor, before.requires_grad) if is_parameter else tensor
                    known[id(before)] = before, made_of
                setattr(part, key, known[id(before)][1])
    made.__class__ = _members_of(module.__class__)
    made._group = _MemberLanes(0, (1,) * size)
    return made
