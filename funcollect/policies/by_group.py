"""Combines policies into one, with a policy for each group of agents."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import optree
import torch
from torch import Tensor
from typing_extensions import override

from funcollect.arguments import check_keys, check_kind
from funcollect.errors import PolicyError
from funcollect.interop.jax_setup import import_jax
from funcollect.interop.memo import memo_of
from funcollect.keys import Key, Noise
from funcollect.policies.base import PolicyBase, check_policy, device_of, lane_mask
from funcollect.policies.checks import check_action
from funcollect.policies.jax_functions.jax_policy import FunctionPolicy, check_sees_all
from funcollect.policies.numerics import of_kind
from funcollect.policies.population import LaneIds, Population
from funcollect.policies.torch_modules.torch_backed import apart
from funcollect.protocols import Actor, ActorInputs, Columns, Exploration, Policy
from funcollect.specs import PRESENT, ActionSpec, ExplorationType, GroupedSpec
from funcollect.tree import NAMESPACE, there


def by_group(policies: Mapping[str, Policy], *, together: Sequence[str] = ()) -> GroupPolicy:
    """A policy made of policies, by the names of an environment's groups.

    The policy of a group is called with a row for each of its n agents, observations ``[P * n, ...]``, and each row has
    its own recurrent state. Outputs are recorded under ``(group, …)``, ``[*B, T, n, ...]``: an action, and its
    log-probability, for each agent. The policy of a group in `together` gets ``[P, n, ...]``, and its head reads the
    parameters of n actions; it has one log-probability for all, ``[*B, T]``.

    The noise of an agent follows from its lane, its step, and its place among all agents of the environment. Parameters
    are a dict by group, exploration has names such as ``"adversary.epsilon"``.

    Raises TypeError for anything but policies, ValueError for names with dots, as `funcollect.init` for other groups.

    >>> import torch, funcollect as fc
    >>> env = fc.make_env("pettingzoo/mpe/simple_tag_v3", num_envs=2)
    >>> heads = {"adversary": torch.nn.Linear(16, 5), "agent": torch.nn.Linear(14, 5)}
    >>> policy = by_group({name: fc.torch_policy(net, head=fc.heads.categorical) for name, net in heads.items()})
    >>> _, batch = fc.rollout(env, policy, fc.init(env, policy, seed=0), 8)
    >>> batch["adversary", "action"].shape, batch["adversary", "action_log_prob"].shape
    (torch.Size([2, 8, 3]), torch.Size([2, 8, 3]))
    """
    check_kind("policies", policies, Mapping, 'pass for example {"adversary": p, "agent": q}')
    for policy in policies.values():
        check_policy(policy)
        check_sees_all(policy, "a policy by_group", "one that acts alone, for every agent")
    if dotted := [name for name in policies if "." in name]:
        raise ValueError(f"policies has the names {dotted}, expected no dots: give the environment other groups=")
    check_keys("together", together, "agent")
    if unknown := sorted({*together} - policies.keys()):
        raise ValueError(f"together names {unknown}, expected groups out of {[*policies]}: correct the names")
    return GroupPolicy(policies, together)


class GroupPolicy(PolicyBase):
    """See `by_group`."""

    def __init__(self, policies: Mapping[str, Policy], together: Sequence[str]) -> None:
        self.policies, self.together = apart(policies), frozenset(together)
        self._sizes: dict[str, int] = {}  # rows of each group in a lane, once they are known
        self.backend = "jax" if {policy.backend for policy in policies.values()} == {"jax"} else "torch"

    @property
    @override
    def params(self) -> Any:
        return {name: policy.params for name, policy in self.policies.items()}

    @property
    @override
    def exploration(self) -> Mapping[str, float]:  # type: ignore[override]
        by_name = ((name, policy.exploration) for name, policy in self.policies.items())
        return {f"{name}.{key}": value for name, values in by_name for key, value in values.items()}

    def inputs_of(self, name: str, inputs: ActorInputs, observation: Any, noise: Any) -> ActorInputs:
        """The inputs of the actor of one policy, which sees this observation and has this noise."""
        return inputs._replace(
            observation=self.seen_by(name, observation),
            params=inputs.params[name],
            policy_state=inputs.policy_state[name],
            initial_state=inputs.initial_state[name],
            noise=noise,
            exploration=self.of_group(name, inputs.exploration),
        )

    def seen_by(self, name: str, observation: Any) -> Any:
        """The observation as a policy reads it: NumPy views of the tensors for one in JAX beside policies in Torch."""
        in_numpy = self.policies[name].backend == "jax" and self.backend == "torch"
        if in_numpy and device_of(observation).type == "cpu":
            return optree.tree_map(lambda leaf: leaf.numpy(), observation, namespace=NAMESPACE)
        return observation

    def of_group(self, name: str, exploration: Exploration) -> Exploration:
        """How the policy of a group explores; a value for each lane [P] becomes one for each of its rows [P * n]."""
        prefix, n = f"{name}.", self.rows_in_lane(name)
        own = {key.removeprefix(prefix): value for key, value in exploration.values.items() if key.startswith(prefix)}
        for key, value in own.items():
            if n > 1 and not isinstance(value, float) and value.ndim:
                own[key] = value.repeat_interleave(n) if isinstance(value, Tensor) else value.repeat(n)
        return exploration._replace(values=own)

    @override
    def prepare(self, params: Any, /) -> Any:
        by_name = self._params_by_name(params)
        return {name: policy.prepare(by_name[name]) for name, policy in self.policies.items()}

    def _params_by_name(self, params: Any) -> Mapping[str, Any]:
        """The parameters of each policy, from a dict of them, the result of `state_dict`, or None."""
        if params is None:
            return dict.fromkeys(self.policies)
        check_kind("params", params, Mapping, f"pass a dict with the keys {[*self.policies]}")
        if params.keys() == self.policies.keys():
            return dict(params)
        parts: dict[str, dict[str, Any]] = {name: {} for name in self.policies}
        for path, leaf in params.items():
            name, _, rest = path.partition(".")
            if name not in parts:
                raise ValueError(f"params have the key {path!r}, expected {[*self.policies]}: pass parameters by group")
            parts[name][rest] = leaf
        return {name: part or None for name, part in parts.items()}

    @override
    def state_dict(self, params: Any = None) -> dict[str, Tensor]:
        by_name = self._params_by_name(params)
        parts = {name: policy.state_dict(by_name[name]) for name, policy in self.policies.items()}
        return {f"{name}.{path}": leaf for name, part in parts.items() for path, leaf in part.items()}

    @override
    def load(self, params: Any) -> None:
        for name, part in self._params_by_name(params).items():
            self.policies[name].load(part)

    def spec_of(self, name: str, spec: GroupedSpec) -> ActionSpec:
        """The action spec that the policy of a group gets: that of one agent, or of all together."""
        group = spec.groups[name]
        return ActionSpec(group.joint_space) if name in self.together else group.action_spec

    @override
    def check(self, spec: Any, /) -> None:
        groups = getattr(spec, "groups", {})
        if not groups or groups.keys() != self.policies.keys():
            had = f"the groups {[*groups]}" if groups else "no groups of agents"
            what = f"a policy by_group acts for {[*self.policies]}, and the environment has {had}"
            raise ValueError(f"{what}, expected the same names: correct them")
        sizes = {name: 1 if name in self.together else group.n for name, group in groups.items()}
        recurrent = any(getattr(policy, "initial_state", None) is not None for policy in self.policies.values())
        if recurrent and self._sizes not in ({}, sizes):
            what = f"a recurrent policy by_group acts for {self._sizes} agents, and the environment has {sizes}"
            raise ValueError(f"{what}, expected the same: make another one")
        self._sizes = sizes
        for name, policy in self.policies.items():
            policy.check(self.spec_of(name, spec))
        self.parts(spec)  # which refuses policies that take keys

    @override
    def noise(self, spec: Any, /) -> Noise | None:
        places = [place for part in self.parts(spec).values() for place in part.places]
        return Noise(kind="uniform", shape=(max(places) + 1,)) if places else None

    @override
    def init(self, key: Key, num_envs: int, /) -> Any:
        return {name: policy.init(key, num_envs * self.rows_in_lane(name)) for name, policy in self.policies.items()}

    @override
    def remembers(self, policy_state: Any, /) -> bool:
        return any(policy.remembers(policy_state[name]) for name, policy in self.policies.items())

    def rows_in_lane(self, name: str) -> int:
        """The number of rows of a policy for each lane, once the environment is known."""
        return self._sizes.get(name, 1)

    @property
    def has_populations(self) -> bool:
        """Whether `of_lanes` may return another policy."""
        return any(isinstance(policy, Population) for policy in self.policies.values())

    def of_lanes(self, lanes: LaneIds, total: int) -> GroupPolicy:
        """This policy for some lanes out of `total`, in which populations have only the members that act for these."""
        if not self.has_populations:
            return self
        parts = {
            name: policy.of_lanes(lanes, total) if isinstance(policy, Population) else policy
            for name, policy in self.policies.items()
        }
        known: dict[Any, GroupPolicy] = memo_of(self).setdefault("lanes", {})
        ids = tuple(map(id, parts.values()))  # populations keep the policies that they return
        if ids not in known:
            known[ids] = copy.copy(self)
            known[ids].policies = parts
        return known[ids]

    @override
    def actor(self, inputs: ActorInputs, /) -> Actor:
        return GroupActor(self, inputs)

    @override
    def finish(self, columns: Columns, spec: Any, /) -> Columns:
        """The outputs of a traced loop, which have dotted names, each finished by the policy of its group."""
        action, outputs = columns["action",].to(spec.dtype), Columns()
        lead = action.shape[:2]
        for name, part in self.parts(spec).items():
            prefix = f"{name}."
            own: Columns = {("action",): spec.of_group(name, action)}
            own |= {(key.removeprefix(prefix),): leaf for (key,), leaf in columns.items() if key.startswith(prefix)}
            rows = {path: leaf.flatten(1, 2) if part.n else leaf for path, leaf in own.items()}
            finished = part.policy.finish(rows, part.spec)
            outputs |= {(name, *path): part.by_agent(leaf, lead[1], lead[:1]) for path, leaf in finished.items()}
            del outputs[name, "action"]
        return {("action",): action, **outputs}

    @override
    def __call__(
        self, params: Any, state: Any, observation: Any, noise: Any, spec: Any, exploration: Exploration, /
    ) -> tuple[Any, Mapping[str, Any]]:
        after, outputs, actions = dict[str, Any](), dict[str, Any](), []
        num_envs = len(optree.tree_leaves(observation, namespace=NAMESPACE)[0])
        for name, part in self.parts(spec).items():
            rows, values = part.rows(observation), self.of_group(name, exploration)
            after[name], found = part.answer(params[name], state[name], rows, part.noise(noise), values)
            check_action(found["action"], part.spec, num_envs * max(part.n, 1))
            actions.append(found["action"].reshape(num_envs, -1))
            outputs |= {f"{name}.{key}": part.by_agent(leaf, num_envs) for key, leaf in found.items()}
            del outputs[f"{name}.action"]
        return after, {"action": joined(actions, spec), **outputs}

    def parts(self, spec: Any) -> dict[str, _Part]:
        """The part of each group, in the order in which actions are joined."""
        parts = {}
        for name, group in spec.groups.items():
            policy, own, n = self.policies[name], self.spec_of(name, spec), 0 if name in self.together else group.n
            kind = policy.noise(own)
            if kind is not None and kind.kind in ("key", "keys"):
                what = f"the policy of the group {name!r} takes keys of JAX"
                raise PolicyError(f"{what}, expected noise of a head: give it a head")
            # An agent's numbers do not depend on how many the others need.
            agents, words = [spec.order.index(agent) for agent in group.names[: n or 1]], kind.words if kind else 0
            places = [agent + word * len(spec.order) for agent in agents for word in range(words)]
            parts[name] = _Part(name, policy, own, n, group.comes_and_goes, kind, places)
        return parts


class _Part(NamedTuple):
    """The policy of a group, and the conversions between its rows and the arrays of all groups."""

    name: str
    policy: Policy
    spec: ActionSpec
    n: int  # the number of agents, each of which has a row; 0 if they act together
    comes_and_goes: bool
    kind: Noise | None
    places: Sequence[int]  # the indices of its noise in that of all groups

    def rows(self, observation: Any) -> Any:
        """The observations [P * n, ...] of its agents, or [P, n, ...] if they act together; absent ones have zeros."""
        observed = observation[self.name]["observation"]
        return self.flat(there(observed, observation[self.name][PRESENT]) if self.comes_and_goes else observed)

    def flat(self, observed: Any) -> Any:
        """A view of observations [P, n, ...] as its policy reads them."""
        if not self.n:
            return observed
        return optree.tree_map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), observed, namespace=NAMESPACE)

    def answer(self, params: Any, state: Any, observation: Any, noise: Any, exploration: Exploration) -> Any:
        """One traced step of its policy: its next state and its outputs, with the probe for NaN if it has one."""
        if not isinstance(self.policy, FunctionPolicy):
            return self.policy(params, state, observation, noise, self.spec, exploration)
        stochastic = exploration.type is ExplorationType.RANDOM
        return self.policy.answer(self.spec, stochastic, (params, exploration.values), state, observation, noise)

    def noise(self, uniform: Any) -> Any:
        """Its noise [..., P * n, *shape], from uniform numbers [..., P, m] for all agents; None if it has none."""
        if self.kind is None or uniform is None:
            return None
        drawn = of_kind(self.kind, uniform[..., list(self.places)])
        return drawn.reshape(*drawn.shape[:-2], drawn.shape[-2] * max(self.n, 1), *self.kind.shape)

    def by_agent(self, value: Any, num_envs: int, lead: Sequence[int] = ()) -> Any:
        """An output [*lead, P * n, ...] as [*lead, P, n, ...]."""
        return value.reshape(*lead, num_envs, self.n, *value.shape[len(lead) + 1 :]) if self.n else value


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


def _zeros_for(mask: Any, observed: Any, own: Any) -> Callable[[], Any]:
    """A function that copies observations [P, n, ...] to `own`, with zeros where the mask [P, n] is False."""
    mask = mask.reshape(*mask.shape, *[1] * (observed.ndim - mask.ndim))  # a view
    if not isinstance(own, Tensor):
        return lambda: np.copyto(own, np.where(mask, observed, np.zeros((), own.dtype)))
    return partial(torch.where, mask, observed, torch.zeros((), dtype=own.dtype, device=own.device), out=own)


class PartsActor(Actor):
    """Base class of actors that call the actors of several policies, `_actors` by name."""

    def __init__(self, policy: GroupPolicy, inputs: ActorInputs) -> None:
        self._policy = policy
        self._actors = {name: self._actor_of(name, part) for name, part in self._begin(inputs).items()}

    def _begin(self, inputs: ActorInputs) -> dict[str, ActorInputs]:
        """Begin a rollout; return the inputs of each actor."""
        raise NotImplementedError

    def _actor_of(self, name: str, inputs: ActorInputs) -> Actor:
        return self._policy.policies[name].actor(inputs)

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

    def __init__(self, policy: GroupPolicy, inputs: ActorInputs) -> None:
        self._parts = policy.parts(inputs.spec)
        self._rows: dict[str, Any] = {}  # what each policy reads: the same memory at all steps
        self._masked: list[Callable[[], Any]] = []
        for name, part in self._parts.items():
            observed = inputs.observation[name]["observation"]
            if part.comes_and_goes:
                own = optree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf.copy(), observed)
                zeros = partial(_zeros_for, inputs.observation[name][PRESENT])
                self._masked += optree.tree_leaves(optree.tree_map(zeros, observed, own))
                observed = own
            self._rows[name] = part.flat(observed)
        super().__init__(policy, inputs)

    @override
    def _begin(self, inputs: ActorInputs) -> dict[str, ActorInputs]:
        self._inputs, by_name = inputs, {}
        for name, part in self._parts.items():
            of_group = self._policy.inputs_of(name, inputs, self._rows[name], part.noise(inputs.noise))
            num_envs = inputs.num_envs * max(part.n, 1)
            by_name[name] = of_group._replace(spec=part.spec, num_envs=num_envs, single=False)
        return by_name

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
