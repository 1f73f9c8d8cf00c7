"""Populations: one policy with N versions of its parameters, each of which acts for an equal group of lanes."""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial, wraps
from itertools import pairwise
from operator import itemgetter
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDictBase
from torch import nn
from torch.func import functional_call
from typing_extensions import override

from funcollect.arguments import check_kind
from funcollect.errors import PolicyError
from funcollect.interop.jax_setup import import_jax
from funcollect.interop.memo import memo_of
from funcollect.keys import generator_states, set_generator_states
from funcollect.messages import shown
from funcollect.policies.jax_functions.jax_policy import JaxPolicy
from funcollect.policies.numerics import TORCH, jax_numerics
from funcollect.policies.torch_modules.settings import bare
from funcollect.policies.torch_modules.torch_backed import has_lazy_layers, named
from funcollect.policies.torch_modules.torch_policy import TorchPolicy
from funcollect.policies.weights import check_shapes, shapes_of
from funcollect.protocols import Policy

LaneIds = Sequence[int] | npt.NDArray[np.int64]  # consecutive ids

_Modes = tuple[bool, ...]  # `training` of each submodule; whether `vmap` takes a module may depend on it
_MAPPED: weakref.WeakKeyDictionary[nn.Module, dict[_Modes, bool]] = weakref.WeakKeyDictionary()  # if `vmap` takes it


def population(policy: Policy, params: Any) -> TorchPopulation | JaxPopulation:
    """A policy that acts with N versions of its parameters: lane ``l`` of L with number ``l * N // L``.

    L counts all lanes, over workers and actors too, and is a multiple of N (else a rollout raises PolicyError). So a
    batch [L, T] holds the members in N equal groups, one after the other, and each has the data of a separate run in
    these lanes, within rounding.

    Args:
        policy: one member: made by `torch_policy`, `jax_policy`, or `normalized`. It stays as it is.
        params: the parameters of all members, each leaf with a leading axis N. For a policy in JAX a pytree like
            ``policy.params``; for one in Torch tensors by dotted name, such as `torch.func.stack_module_state` returns,
            or a TensorDict. Buffers may be left out. The population has copies of them as its `params`; rollouts and
            collectors take other parameters of the same form.

    The members are one call under `jax.vmap`, or under `torch.func.vmap` where the module allows it, else a call for
    each. Buffers that a module writes in place keep their values, buffers that its `forward` assigns do not. Random
    numbers that a module or a function draws by itself differ from those of a separate run.

    Raises:
        TypeError: for another kind of policy, and for a scripted module.
        ValueError: for parameters that differ from the policy's own by more than the leading axis.

    >>> import torch, funcollect as fc
    >>> modules = [torch.nn.Linear(4, 2) for _ in range(4)]
    >>> params, _ = torch.func.stack_module_state(modules)
    >>> policy = fc.population(fc.torch_policy(modules[0], head=fc.heads.categorical), params)
    """
    if isinstance(policy, Population):
        raise TypeError("policy is a population already, expected one member: pass the policy below, and its params")
    if isinstance(policy, JaxPolicy):
        return JaxPopulation(policy, params)
    if isinstance(policy, TorchPolicy) and isinstance(policy.module, torch.jit.ScriptModule):
        raise TypeError("policy has a scripted module, whose parameters cannot be exchanged: pass the module itself")
    if isinstance(policy, TorchPolicy) and isinstance(policy.module, nn.Module):
        return TorchPopulation(policy, params)
    what = f"policy is {shown(policy)}"
    raise TypeError(f"{what}, expected one of funcollect.torch_policy over a module, or of jax_policy: make one")


class MemberLanes(NamedTuple):
    """Consecutive members of a population, and for how many lanes each one acts."""

    first: int  # the number of the first member
    lanes: tuple[int, ...]  # how many, by member

    @classmethod
    def of_lanes(cls, size: int, lanes: LaneIds, total: int) -> Self:
        """The members of a population that act for these lanes out of `total`."""
        if total % size:
            mend = "change num_envs"
            raise PolicyError(f"a population of {size} acts in {total} lanes, expected a multiple of {size}: {mend}")
        members = np.asarray(lanes) * size // total
        if members[-1] >= size:
            mend = "begin with all collectors"
            raise PolicyError(f"a population of {size} acts in {total} lanes, not in lanes added later: {mend}")
        return cls(int(members[0]), tuple(np.bincount(members - members[0]).tolist()))

    def rows(self, count: int) -> tuple[int, ...]:
        """How many of `count` rows each member has: one for each lane, or equally many if lanes have several rows."""
        members = len(self.lanes)
        if count == sum(self.lanes):
            return self.lanes
        if len(set(self.lanes)) > 1 or count % members:
            given = f"{members} members of a population were given {count} rows"
            raise PolicyError(f"{given}, expected as many for each: pass a multiple")
        return (count // members,) * members

    def answers(self, xp: Any, call: Callable[..., Any], params: Any, inputs: Any, *, mapped: bool) -> Any:
        """The answers [P, ...] of ``call(params, inputs)`` by each member for its own rows, in one call if `mapped`."""
        rows = self.rows(len(xp.leaves(inputs)[0]))
        if mapped and len(set(rows)) == 1:
            of_members = xp.map(itemgetter(slice(self.first, self.first + len(rows))), params)
            folded = xp.map(lambda leaf: leaf.reshape(len(rows), rows[0], *leaf.shape[1:]), inputs)
            return xp.map(lambda leaf: leaf.reshape(sum(rows), *leaf.shape[2:]), xp.vmap(call)(of_members, folded))
        ends = pairwise(np.cumsum((0, *rows)).tolist())
        answers = [
            call(xp.map(itemgetter(member), params), xp.map(itemgetter(slice(start, end)), inputs))
            for member, (start, end) in enumerate(ends, self.first)
        ]
        return xp.map(lambda *leaves: xp.join(leaves), *answers)


def _size_of(leaves: Iterable[Any]) -> int:
    """N, the first axis of all parameters."""
    sizes = {np.shape(leaf)[0] if np.ndim(leaf) else None for leaf in leaves}
    if len(sizes) != 1 or None in sizes or 0 in sizes:
        what = f"params have the first axes {sorted(sizes, key=str)}"
        mend = "stack the parameters of the members, as torch.func.stack_module_state or jax.tree.map(jnp.stack, …) do"
        raise ValueError(f"{what}, expected the same one, the number of members: {mend}")
    size: Any = sizes.pop()
    return int(size)


class Population:
    """Base class of populations in Torch and in JAX; see `population`."""

    size: int  # N

    def of_lanes(self, lanes: LaneIds, total: int) -> Self:
        """This policy for some lanes out of `total`, made once; PolicyError if they do not divide."""
        group = MemberLanes.of_lanes(self.size, lanes, total)
        known: dict[Any, Self] = memo_of(self)
        twin = known[group] = known.get(group) or copy.copy(self)
        twin._act_for(self, group)
        return twin

    def _act_for(self, whole: Any, group: MemberLanes) -> None:
        """Act for a group with the current parameters of `whole`, the population that this is a copy of."""
        raise NotImplementedError


class JaxPopulation(Population, JaxPolicy):
    """See `population`. `params` may be set: the next rollout reads them."""

    def __init__(self, policy: JaxPolicy, params: Any) -> None:
        self.size = _size_of(import_jax().tree.leaves(params))
        expected = {name: (self.size, *shape) for name, shape in shapes_of(policy.params, "jax").items()}
        check_shapes(expected, shapes_of(params, "jax"))
        self._member, self._group = policy.apply, MemberLanes(0, (1,) * self.size)
        self.take_over(policy, apply=self._members(self._group), params=params)

    def _members(self, group: MemberLanes) -> Callable[..., Any]:
        jax, member, size = import_jax(), self._member, self.size

        @wraps(member)  # since its signature shows whether it takes keys
        def apply(params: Any, *inputs: Any, key: Any = None, **keys: Any) -> Any:
            # The one key of a call is that of its first lane; the keys of members are derived from it.
            derived = {} if key is None else {"key": jax.vmap(partial(jax.random.fold_in, key))(jax.numpy.arange(size))}

            def call(of_member: Any, of_rows: Any) -> Any:
                (params, derived), (inputs, keys) = of_member, of_rows
                return member(params, *inputs, **derived, **keys)

            return group.answers(jax_numerics(), call, (params, derived), (inputs, keys), mapped=True)

        return apply

    @override
    def _act_for(self, whole: Any, group: MemberLanes) -> None:
        size = _size_of(import_jax().tree.leaves(whole.params))
        if size != self.size:
            raise ValueError(f"params have {size} members, expected {self.size}: make another population for that many")
        if group != self._group:
            self._group, self.apply = group, self._members(group)
        self.params = whole.params


class TorchPopulation(Population, TorchPolicy):
    """See `population`. The `module` has the parameters of all members."""

    def __init__(self, policy: TorchPolicy, params: Any) -> None:
        module: Any = policy.module
        check_kind(
            "params", params, (Mapping, TensorDictBase), "pass {**params, **buffers} of torch.func.stack_module_state"
        )
        if has_lazy_layers(module):
            what = "policy has lazy layers, whose parameters have no shapes yet, expected layers with parameters"
            raise ValueError(f"{what}: call the module once with an observation before")
        parts = [part for _, part in module.named_modules(remove_duplicate=False)]
        if len(parts) > len({*parts}):
            what = "policy has a module that holds one submodule in two places, expected one place for each"
            raise ValueError(f"{what}: hold it once, and pass it to the others when they are called")
        tensors = {name: torch.as_tensor(leaf) for name, leaf in named(params).items()}
        self.size = _size_of(tensors.values())
        own = policy.tensors(None)
        stacked = {name: leaf.expand(self.size, *leaf.shape) for name, leaf in module.named_buffers()}
        stacked |= {name: leaf.to(own[name].dtype) if name in own else leaf for name, leaf in tensors.items()}
        needed = {*dict(module.named_parameters()), *stacked}  # one name is enough for a tensor that has two
        check_shapes(
            {name: (self.size, *own[name].shape) for name in own if name in needed},
            {name: tuple(leaf.shape) for name, leaf in stacked.items()},
        )
        copies: dict[int, Any] = {}  # the population's tensor by the id of the member's: a memo for `deepcopy`
        for name, before in (*module.named_parameters(), *module.named_buffers()):
            leaf = stacked[name].detach().clone()
            copies[id(before)] = nn.Parameter(leaf, before.requires_grad) if isinstance(before, nn.Parameter) else leaf
        members = copy.deepcopy(module, copies)
        members.__class__, members._group = _members_of(module.__class__), MemberLanes(0, (1,) * self.size)
        self.take_over(policy, _warned=False)
        self.replace(members)

    @property
    def lanes(self) -> int:
        """The number of lanes for which it acts; its module can be called with so many rows."""
        return sum(vars(self.module)["_group"].lanes)

    @override
    def _act_for(self, whole: Any, group: MemberLanes) -> None:
        attributes = {**vars(whole.module), "_group": group}
        if self.module is whole.module:
            module = bare(type(whole.module))  # type: ignore[arg-type]
            module.__dict__ = attributes
            self.replace(module)
        own = vars(self.module)
        own.update(attributes)  # since the module of `whole` may have changed
        for name in own.keys() - attributes.keys():
            del own[name]


class _Members:
    """Mixed into a module's class: calls each member for its rows. Tensors have a leading axis N and the same names."""

    _member: type[nn.Module]
    _group: MemberLanes

    def __call__(self, *inputs: Any) -> Any:
        return self.forward(*inputs)  # hooks of the module run in the calls for members

    def forward(self, *inputs: Any) -> Any:
        module: Any = self
        member: Any = bare(self._member)
        member.__dict__ = vars(self)
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        act = partial(self._group.answers, TORCH, partial(functional_call, member), tensors, inputs)
        allowed = _MAPPED.setdefault(module, {})
        modes = tuple(part.training for part in module.modules())
        if modes in allowed:
            return act(mapped=allowed[modes])
        place, buffers = next(iter(tensors.values())).device, list(module.buffers())
        drawn, before = generator_states(place), [leaf.clone() for leaf in buffers]
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("error", "There is a performance drop")  # slower than a call for each
                answer, allowed[modes] = act(mapped=True), True
        except (RuntimeError, ValueError, UserWarning):  # such as a branch that depends on data
            set_generator_states(place, drawn)
            for leaf, content in zip(buffers, before, strict=True):
                leaf.copy_(content)
            answer, allowed[modes] = act(mapped=False), False
        return answer

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _bare_members, (self._member,), vars(self).copy()


@cache
def _members_of(kind: Any) -> Any:
    return type(f"PopulationOf{kind.__name__}", (_Members, kind), {"_member": kind})


def _bare_members(kind: Any) -> Any:
    return bare(_members_of(kind))
