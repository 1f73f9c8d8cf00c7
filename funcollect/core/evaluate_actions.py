"""Log-probabilities, entropies and other outputs of a policy for the actions of a batch."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import optree
import torch
from tensordict import TensorDictBase
from tensordict.nn import (
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModuleBase,
    set_interaction_type,
)
from torch import Tensor

from funcollect.arguments import check_kind
from funcollect.core.exploration import EXPLORATION
from funcollect.core.lanes import where_lanes
from funcollect.core.state import flatten_part
from funcollect.interop.jax_setup import import_jax
from funcollect.interop.memo import memo_of
from funcollect.keys import key_from_seed
from funcollect.messages import kind_of, shown
from funcollect.policies.actors.actor import recurrent_names, split_answer
from funcollect.policies.actors.checks import check_parameters, check_recurrent, checked_lead
from funcollect.policies.jax_functions.function_policy import FunctionPolicy
from funcollect.policies.numerics import TORCH, jax_numerics
from funcollect.policies.populations.population import Population
from funcollect.policies.tensordict_modules.calling import paths_of
from funcollect.policies.tensordict_modules.tensordict_policy import TensorDictPolicy
from funcollect.policies.torch_in_jax import LoweredPolicy
from funcollect.policies.torch_modules.torch_backed import TorchBacked, TorchPolicyState
from funcollect.policies.torch_modules.torch_policy import TorchPolicy
from funcollect.protocols import Env, Policy, is_env
from funcollect.specs import ActionSpec, Leaf, Space, assemble
from funcollect.trajectories.split import LANE, STEP, TRAJECTORY_IDS
from funcollect.tree import NAMESPACE, Path, flatten, select, to_tensordict

_ACTION: Path = ("action",)
_LOG_PROB: Path = ("action_log_prob",)
_TIME_MAJOR = ("collector", "episode")  # a key that only batches of `funcollect.traced` have
_ANY = key_from_seed(0)  # initial states do not depend on keys

_Leaves = Mapping[Path, Any]  # the leaves of a batch, each [..., *shape]
_Forward = Callable[
    [_Leaves, Any], tuple[Any, Any]
]  # from inputs and the recurrent state to outputs and the next state

_Spaces = tuple[Space, Sequence[Leaf], ActionSpec]


@dataclass(frozen=True)
class _Framework:
    """What Torch and JAX do differently."""

    xp: Any  # the functions that heads need
    map: Callable[..., Any]  # over the leaves of pytrees
    cast: Callable[[Any, Any], Any]  # of an array to a dtype
    select: Callable[[Any, Any, Any], Any]  # the lanes of a mask [P] from one pytree, the rest from another
    scan: Callable[[Any, Any, Any], tuple[Any, Any]]  # `jax.lax.scan`


def _scan(step: Callable[[Any, Any], tuple[Any, Any]], carry: Any, rows: Any) -> tuple[Any, Any]:
    """Do what `jax.lax.scan` does, in Torch."""
    outputs = []
    for row in zip(*map(torch.unbind, optree.tree_leaves(rows, namespace=NAMESPACE)), strict=True):
        carry, output = step(carry, optree.tree_unflatten(optree.tree_structure(rows, namespace=NAMESPACE), row))
        outputs.append(output)
    return carry, optree.tree_map(lambda *leaves: torch.stack(leaves), *outputs, namespace=NAMESPACE)


_TORCH = _Framework(TORCH, partial(optree.tree_map, namespace=NAMESPACE), Tensor.to, select, _scan)


def _in_jax() -> _Framework:
    jax = import_jax()
    return _Framework(jax_numerics(), jax.tree.map, jax.numpy.astype, where_lanes, jax.lax.scan)


def remember_spaces(policy: Policy, space: Space, leaves: Sequence[Leaf], spec: ActionSpec) -> None:
    """Keep the spaces of an environment that a policy acts in, for `evaluate_actions`."""
    known: list[_Spaces] = memo_of(policy).setdefault("spaces", [])
    paths = [leaf.path for leaf in leaves]
    if not any(spec == other and [leaf.path for leaf in own] == paths for _, own, other in known):
        known.append((space, tuple(leaves), spec))


def evaluate_actions(
    policy: Policy, params: Any, batch: Mapping[str, Any], *, env: Env | None = None, policy_state: Any = None
) -> dict[str, Any]:
    """Return the log-probabilities and entropies of a batch's actions under the current parameters, differentiably.

    A recurrent policy runs again through the batch, step by step, from the recurrent state at its beginning, and
    from the initial state at each episode's first step. A batch holds the recurrent state if the policy was made with
    ``record_state=True``; then the recorded one is used wherever a frame does not follow on the one before it in time.

    Args:
        policy: a policy of `torch_policy` or `jax_policy` with a head, one that `normalized` or `lower_policy` made of
            such a policy, or one of TorchRL with a distribution.
        params: the parameters to act with; None for the policy's own.
        batch: a batch, a part of one, or samples of a buffer: a TensorDict [...] for a policy in Torch; for one in JAX
            `funcollect.interop.to_jax` of that, or what `funcollect.traced.rollout` returned. For a recurrent policy
            [*B, T], with any dimensions of lanes before time, or [T, P] of `funcollect.traced`.
        env: the environment, for its spaces. It is not needed if `init` or a collector in this process has used
            `policy` with this environment and with no other.
        policy_state: the policy's state before the rollout, ``state.policy_state``, if the batch does not hold it. The
            batch must then be the whole rollout in its order: all lanes, and all steps from the first one. A missing
            first step cannot be noticed. Batches of a policy on a TensorDict always hold its hidden states, so that
            this is not used.

    Returns:
        By name, each [...] in the shape of the batch: ``action_log_prob``, ``entropy`` in nats, if the head or the
        distribution has them, and all further outputs of the network. An ``epsilon`` or ``temperature`` is the batch's.

    Raises:
        TypeError: for a policy that has no head or distribution, or whose function draws random numbers itself.
        ValueError: for a batch without keys that are needed, or that does not fit `policy_state`.

    >>> import torch, funcollect as fc
    >>> env = fc.make_env("CartPole-v1", num_envs=2)
    >>> policy = fc.torch_policy(torch.nn.Linear(4, 2), head=fc.heads.categorical)
    >>> state, batch = fc.rollout(env, policy, fc.init(env, policy, seed=0), 8)
    >>> now = evaluate_actions(policy, None, batch)
    >>> torch.allclose(now["action_log_prob"], batch["action_log_prob"]), now["entropy"].shape
    (True, torch.Size([2, 8]))
    """
    check_kind("batch", batch, (Mapping, TensorDictBase), "pass a batch from rollout or a collector")
    if env is not None and not is_env(env):
        raise TypeError(f"env is {kind_of(env)}, expected an Env or None: pass the environment of the batch")
    rows = flatten(batch)
    if isinstance(policy.source if isinstance(policy, LoweredPolicy) else policy, Population):
        raise TypeError(
            "policy is a population, expected one member: pass that with its own parameters and lanes of the batch, "
            "for all members under jax.vmap or torch.func.vmap"
        )
    if isinstance(policy, TensorDictPolicy):
        return _by_distribution(policy, params, rows)
    if not isinstance(policy, TorchPolicy | FunctionPolicy) or policy.head is None:
        mend = "torch_policy(module, head=funcollect.heads.categorical), or another head"
        if isinstance(policy, TensorDictModuleBase):
            mend = "funcollect.tensordict_policy(module), as which it has collected the batch"
        raise TypeError(
            f"policy is {type(policy).__name__} without a head, expected one whose head or distribution scores "
            f"actions: pass {mend}"
        )
    space, leaves, spec = _spaces_of(policy, env)
    in_torch = isinstance(policy, TorchPolicy)
    exploration: list[Path] = [(*EXPLORATION, name) for name in policy.head.values]
    _check_rows(rows, [_ACTION, *(leaf.path for leaf in leaves), *exploration], Tensor if in_torch else None)
    framework = _TORCH if in_torch else _in_jax()
    rows = _beside(policy, rows)
    xp, network, action = framework.xp, _network(policy, params), rows[_ACTION]
    head = policy.head.at({path[-1]: rows[path] for path in exploration})

    def call(inputs: _Leaves, recurrent: Any) -> tuple[Any, Any]:
        answer, after = network(assemble(space, inputs), recurrent)
        inner, extras = split_answer(answer, head)
        parameters = head.parse(xp, inner, spec)
        check_parameters(head.names, parameters, len(next(iter(inputs.values()))))
        return (parameters, dict(extras)), after

    inputs = {leaf.path: rows[leaf.path] for leaf in leaves}
    lead = checked_lead(action, spec, {leaf: inputs[leaf.path].shape for leaf in leaves})
    action = action.long() if in_torch and spec.categories else action  # Torch takes no other integers for an index
    if policy.initial_state is None:
        parameters, outputs = _at_once(framework, call, inputs, lead)
    else:
        parameters, outputs = _in_order(framework, call, inputs, rows, lead, _recurrent(policy, rows, policy_state))
    if spec.dtype.is_floating_point and _LOG_PROB in rows:
        action, parameters = _as_recorded(framework, rows[_LOG_PROB].dtype, action, parameters)
    chosen = {name: rows.get((name,), value) for name, value in head.record(xp, action, spec).items()}
    chosen["action"] = action
    log_prob, entropy = head.log_prob(xp, parameters, chosen, spec), head.entropy(xp, parameters, spec)
    scores = {"action_log_prob": log_prob, "entropy": entropy}
    return {**outputs, **{name: score for name, score in scores.items() if score is not None}}


def _as_recorded(framework: _Framework, dtype: Any, action: Any, parameters: Any) -> tuple[Any, Any]:
    """The action in `dtype`, in which the rollout scored it, and parameters that are no narrower."""

    def widen(leaf: Any) -> Any:
        return framework.cast(leaf, dtype) if leaf.dtype.itemsize < dtype.itemsize else leaf

    return framework.cast(action, dtype), framework.map(widen, parameters)


def _spaces_of(policy: Policy, env: Env | None) -> _Spaces:
    """The spaces of `env`, or of the one environment that the policy acted in."""
    if env is not None:
        return env.observation_space, env.observation_leaves, env.action_spec
    known: list[_Spaces] = memo_of(policy).get("spaces", [])
    if len(known) != 1:
        found = f"{len(known)} environments with different actions or observations" if known else "no environment"
        raise ValueError(
            f"env is not given, and the policy has acted in {found} in this process: pass env=, that of the batch"
        )
    return known[0]


def _check_rows(rows: _Leaves, wanted: Sequence[Path], kind: type | None) -> None:
    """Raise ValueError for missing keys, and TypeError unless leaves are tensors; for None, unless they are not."""
    if missing := [".".join(path) for path in wanted if path not in rows]:
        raise ValueError(f"the batch lacks {missing}, expected {['.'.join(path) for path in wanted]}: pass all of it")
    given = rows[_ACTION]
    if isinstance(given, Tensor) is not (kind is Tensor):
        mend = "the TensorDict itself" if kind is Tensor else "funcollect.interop.to_jax(batch)"
        raise TypeError(
            f"the batch holds a {type(given).__name__}, expected what a policy in {'Torch' if kind else 'JAX'} takes: "
            f"pass {mend}"
        )


def _beside(policy: Policy, rows: _Leaves) -> dict[Path, Any]:
    """The rows on the device of a policy in Torch."""
    place = policy.run_device if isinstance(policy, TorchBacked) else None
    return {path: leaf if place is None else leaf.to(place) for path, leaf in rows.items()}


def _network(policy: TorchPolicy | FunctionPolicy, params: Any) -> _Forward:
    """The policy's module or function with these parameters, from an observation and the recurrent state, or None."""
    if isinstance(policy, TorchPolicy):
        module = policy.uncompiled(policy.prepare(params))

        def run(observation: Any, recurrent: Any) -> Any:
            return module(*policy.arguments(observation, recurrent))
    else:
        if policy.takes_key:
            raise TypeError(
                f"the policy's function draws random numbers from its parameter {policy.takes_key!r}, which a batch "
                "does not hold: leave the parameter out"
            )
        prepared = policy.params if params is None else params  # which may be traced

        def run(observation: Any, recurrent: Any) -> Any:
            return policy.apply(prepared, observation, *(() if recurrent is None else (recurrent,)))

    def call(observation: Any, recurrent: Any) -> tuple[Any, Any]:
        answer = run(observation, recurrent)
        if recurrent is None:
            return answer, None
        check_recurrent(answer, recurrent)
        return answer[0], answer[1]

    return call


def _at_once(framework: _Framework, call: _Forward, inputs: _Leaves, lead: Sequence[int]) -> Any:
    """The outputs [*lead, ...] of one call for all rows."""
    flat = {path: leaf.reshape(-1, *leaf.shape[len(lead) :]) for path, leaf in inputs.items()}
    return framework.map(lambda leaf: leaf.reshape(*lead, *leaf.shape[1:]), call(flat, None)[0])


def _in_order(
    framework: _Framework, call: _Forward, inputs: _Leaves, rows: _Leaves, lead: Sequence[int], recurrent: _Recurrent
) -> Any:
    """The outputs of one call per step, each in the shape of the batch."""
    _check_rows(rows, [LANE, STEP, *recurrent.paths], Tensor if framework is _TORCH else None)
    turn, back = _turning(rows, lead)
    lane, step = turn(rows[LANE]), turn(rows[STEP])
    if recurrent.given:
        _check_whole(lane, step, len(recurrent.given[0]))
    apart = lane[1:] != lane[:-1]
    if recurrent.given is None:  # the batch has the state of each row, and may be a sample, such as slices in a row
        apart = apart | (step[1:] != step[:-1] + 1)
    if recurrent.given is None and TRAJECTORY_IDS in rows:
        ids = turn(rows[TRAJECTORY_IDS])
        other = ids[1:] != ids[:-1]
        apart = apart | (other if other.ndim == apart.ndim else other.any(-1))  # in JAX 64 bits may be two words
    changes = framework.xp.concatenate([(lane[:1] == lane[:1]).T, apart.T]).T  # the first row, and those after a gap
    if recurrent.given is None:
        starts = [turn(rows[path]) for path in recurrent.paths]
    else:
        starts = [framework.xp.broadcast_to(leaf, (len(step), *leaf.shape)) for leaf in recurrent.given]

    def advance(carry: Any, row: Any) -> tuple[Any, Any]:
        inputs, changes, fresh, start = row
        carry = framework.select(changes, recurrent.treedef.unflatten(start), carry)
        outputs, carry = call(inputs, framework.select(fresh, recurrent.initial, carry))
        return carry, outputs

    turned = {path: turn(leaf) for path, leaf in inputs.items()}
    carry = recurrent.treedef.unflatten([leaf[0] for leaf in starts])
    return framework.map(back, framework.scan(advance, carry, (turned, changes, step == 0, starts))[1])


@dataclass(frozen=True)
class _Recurrent:
    """Where the recurrent state comes from."""

    initial: Any  # at the start of an episode, [1, ...]
    treedef: Any  # its structure
    paths: list[Path]  # the batch's keys that hold it
    given: list[Any] | None  # at the beginning of the batch, [P, ...], if the user gave it


def _recurrent(policy: TorchPolicy | FunctionPolicy, rows: _Leaves, policy_state: Any) -> _Recurrent:
    initial = policy.init(_ANY, 1)
    if isinstance(policy, TorchPolicy):
        initial = initial.on(rows[_ACTION].device).recurrent
    leaves, treedef = flatten_part(initial)
    if policy_state is None:
        paths: list[Path] = [(name,) for name in recurrent_names(leaves)]
        if any(path not in rows for path in paths):
            raise ValueError(
                f"the batch lacks {['.'.join(path) for path in paths]}, the recurrent state before each step, and "
                "policy_state is not given: make the policy with record_state=True, or pass the state.policy_state "
                "from before the rollout"
            )
        return _Recurrent(initial, treedef, paths, None)
    if isinstance(policy_state, TorchPolicyState):
        policy_state = policy_state.on(rows[_ACTION].device).recurrent
    given = flatten_part(policy_state)[0]
    if [leaf.shape[1:] for leaf in given] != [leaf.shape[1:] for leaf in leaves]:
        raise ValueError(
            f"policy_state has leaves of the shapes {[tuple(leaf.shape) for leaf in given]}, expected those of a state "
            f"of this policy, {[('P', *leaf.shape[1:]) for leaf in leaves]}: pass state.policy_state"
        )
    return _Recurrent(initial, treedef, [], given)


def _check_whole(lane: Any, step: Any, lanes: int) -> None:
    """Raise ValueError unless rows [T, P] can be a whole rollout, for a state of so many lanes before it.

    In traced code only the number of lanes is known.
    """
    mend = "pass the whole rollout in its order, or make the policy with record_state=True"
    if lane.shape[1] != lanes:
        raise ValueError(f"the batch has {lane.shape[1]} lanes, expected {lanes}, as policy_state has: {mend}")
    if not isinstance(lane, Tensor) and isinstance(lane, import_jax().core.Tracer):
        return
    mixed = (lane != lane[:1]).any() | (lane[0, 1:] <= lane[0, :-1]).any()
    if bool(mixed | (step[1:] - step[:-1] > 1).any()):
        raise ValueError(
            f"the batch has the lanes {shown(lane[0].tolist())} at first, expected increasing ones with consecutive "
            f"steps, to continue from policy_state: {mend}"
        )


def _turning(rows: _Leaves, lead: Sequence[int]) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """Functions that make a leaf [*B, T, ...] or [T, P, ...] of a batch time-major, [T, L, ...]; and back."""
    traced = _TIME_MAJOR in rows
    if not lead or (traced and len(lead) != 2):
        wanted = "[T, P]: pass one run, or several under jax.vmap" if traced else "[*B, T]: pass whole rows of time"
        raise ValueError(f"the batch has {len(lead)} dimensions, but a recurrent policy needs {wanted}")
    if traced:
        return (lambda leaf: leaf), (lambda leaf: leaf)
    lanes = len(lead) - 1

    def turn(leaf: Any) -> Any:
        return leaf.reshape(math.prod(lead[:-1]), *leaf.shape[lanes:]).swapaxes(0, 1)

    def back(leaf: Any) -> Any:
        leaf = leaf.swapaxes(0, 1)
        return leaf.reshape(*lead, *leaf.shape[2:])

    return turn, back


def _by_distribution(policy: TensorDictPolicy, params: Any, rows: _Leaves) -> dict[str, Any]:
    """What the distribution of a TensorDict policy thinks of the actions, and the other outputs, by dotted name."""
    module = policy.bound(policy.prepare(params))
    if not isinstance(module, ProbabilisticTensorDictModule | ProbabilisticTensorDictSequential):
        raise TypeError(
            f"policy is a {type(module).__name__}, expected one with a distribution, such as TorchRL's "
            "ProbabilisticActor: pass that"
        )
    _check_rows(rows, [_ACTION, *paths_of(module, "in_keys")], Tensor)
    rows = _beside(policy, rows)
    inputs = {path: rows[path] for path in paths_of(module, "in_keys")}
    lead = rows["next", "done"].shape[:-1] if ("next", "done") in rows else rows[_ACTION].shape[:1]

    def call(inputs: _Leaves, recurrent: Any) -> tuple[Any, Any]:
        read = {path: leaf for path, leaf in inputs.items() if path != _ACTION} | (recurrent or {})
        given = to_tensordict(read, next(iter(read.values())).shape[:1])
        with set_interaction_type(InteractionType.DETERMINISTIC):
            distribution = module.get_dist(given)
        found = {path: leaf for path, leaf in flatten(given).items() if path not in read}
        found["action_log_prob",] = distribution.log_prob(inputs[_ACTION])
        with contextlib.suppress(NotImplementedError):  # Torch defines no entropy for some distributions
            found["entropy",] = distribution.entropy()
        after = {path: found.pop(policy.written[path]) for path in recurrent or {}}
        return found, after

    inputs[_ACTION] = rows[_ACTION]
    if not policy.hidden_states:
        outputs = _at_once(_TORCH, call, inputs, lead)
    else:
        initial = {path: leaf[None] for path, leaf in policy.hidden_states.items()}
        recurrent = _Recurrent(initial, flatten_part(initial)[1], sorted(initial), None)
        inputs = {path: leaf for path, leaf in inputs.items() if path not in initial}
        outputs = _in_order(_TORCH, call, inputs, rows, lead, recurrent)
    return {".".join(path): leaf for path, leaf in outputs.items()}
