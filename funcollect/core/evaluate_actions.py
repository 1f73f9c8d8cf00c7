"""Log-probabilities, entropies and other outputs of a policy for the actions of a batch."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from tensordict import TensorDictBase
from tensordict import nn as tensordict_nn
from torch import Tensor

from funcollect.arguments import check_kind
from funcollect.core.request import EXPLORATION
from funcollect.interop.jax_setup import import_jax
from funcollect.interop.memo import memo_of
from funcollect.keys import key_from_seed
from funcollect.messages import kind_of, shown
from funcollect.policies.base import policies_of, read_answer, recurrent_names, split_recurrent
from funcollect.policies.by_group import GroupPolicy
from funcollect.policies.by_player import PlayerPolicy
from funcollect.policies.checks import checked_lead
from funcollect.policies.heads.head import Head
from funcollect.policies.jax_functions.jax_policy import FunctionPolicy
from funcollect.policies.numerics import TORCH, jax_numerics
from funcollect.policies.population import Population
from funcollect.policies.tensordict_modules.calling import INIT, paths_of
from funcollect.policies.tensordict_modules.tensordict_policy import TensorDictPolicy
from funcollect.policies.torch_in_jax import LoweredPolicy
from funcollect.policies.torch_modules.torch_backed import TorchBacked, TorchPolicyState
from funcollect.policies.torch_modules.torch_policy import TorchPolicy
from funcollect.protocols import Env, Policy, is_env
from funcollect.specs import ActionSpec, GroupedSpec, Leaf, Space, assemble, observation_leaves
from funcollect.trajectories.split import IS_FIRST, LANE, STEP, TRAJECTORY_IDS
from funcollect.tree import Path, flatten, moved, to_tensordict

_ACTION: Path = ("action",)
_LOG_PROB: Path = ("action_log_prob",)
TIME_MAJOR = ("collector", "episode")  # a key that only batches of `funcollect.traced` have
_ANY = key_from_seed(0)  # initial states do not depend on keys

Leaves = Mapping[Path, Any]  # the leaves of a batch, each [..., *shape]
_Forward = Callable[[Leaves, Any], tuple[Any, Any]]  # from inputs and recurrent state to outputs and the next state
Spaces = tuple[Space, Sequence[Leaf], ActionSpec]
_SCORING = tensordict_nn.ProbabilisticTensorDictModule | tensordict_nn.ProbabilisticTensorDictSequential


def remember_spaces(policy: Policy, space: Space, leaves: Sequence[Leaf], spec: ActionSpec) -> None:
    """Remember the spaces that a policy acts in, for `evaluate_actions`; for a group's policy, those of one agent."""
    if isinstance(policy, GroupPolicy) and isinstance(spec, GroupedSpec):
        for name, member in policy.policies.items():
            whole: Any = space
            seen = whole[name]["observation"] if name in policy.together else spec.groups[name].observation_space
            remember_spaces(member, seen, observation_leaves(seen), policy.spec_of(name, spec))
    for player in policy.policies.values() if isinstance(policy, PlayerPolicy) else ():
        remember_spaces(player, space, leaves, spec)
    known: list[Spaces] = memo_of(policy).setdefault("spaces", [])
    form = _form(space, leaves)
    if not any(spec == known_spec and _form(seen, parts) == form for seen, parts, known_spec in known):
        known.append((space, tuple(leaves), spec))


def _form(space: Space, leaves: Sequence[Leaf]) -> Any:
    """What matters of a space here: its structure, and the number of dimensions of each leaf."""
    return assemble(space, {leaf.path: len(leaf.shape) for leaf in leaves})


def evaluate_actions(
    policy: Policy, params: Any, batch: Mapping[str, Any], *, env: Env | None = None, policy_state: Any = None
) -> dict[str, Any]:
    """Return the log-probabilities and entropies of a batch's actions under the current parameters, differentiably.

    A recurrent policy runs through the batch again, step by step. It starts from the recurrent state before the batch,
    and from the initial state at each episode's first step. If the policy was made with ``record_state=True``, the
    batch holds recurrent states, which are used wherever a frame does not continue the one before it in time.

    Args:
        policy: the result of `torch_policy` or `jax_policy` with a head, or of `normalized` or `lower_policy` over one,
            or a TorchRL policy with a distribution.
        params: the parameters to act with; None for the policy's own.
        batch: a batch, a part of one, or samples of a buffer: a TensorDict [...] for a policy in Torch; for one in JAX,
            `funcollect.interop.to_jax` of that, or the result of `funcollect.traced.rollout`. For a recurrent policy
            [*B, T], with any dimensions of lanes before time, or [T, P] from `funcollect.traced`.
        env: the environment, for its spaces; not needed if `policy` has acted in no other in this process.
        policy_state: ``state.policy_state`` from before the rollout, if the batch holds no recurrent states. The batch
            must then be the whole rollout in its order; a missing first step cannot be detected.

    Returns:
        By name, each in the shape [...] of the batch: ``action_log_prob``, ``entropy`` in nats, if the head or the
        distribution defines them, and all other network outputs. ``epsilon`` and ``temperature`` are the batch's.

    Raises:
        TypeError: for a policy that has no head or distribution, or whose function draws random numbers itself or
            reads the environment's state.
        ValueError: for a batch that lacks a needed key, or does not fit `policy_state`.

    >>> import torch, funcollect as fc
    >>> env = fc.make_env("CartPole-v1", num_envs=2)
    >>> policy = fc.torch_policy(torch.nn.Linear(4, 2), head=fc.heads.categorical)
    >>> state, batch = fc.rollout(env, policy, fc.init(env, policy, seed=0), 8)
    >>> now = evaluate_actions(policy, None, batch)
    >>> torch.allclose(now["action_log_prob"], batch["action_log_prob"]), now["entropy"].shape
    (True, torch.Size([2, 8]))
    """
    check_arguments(policy, batch, env)
    if isinstance(policy, TensorDictPolicy):
        return _by_distribution(policy, params, flatten(batch))
    if not isinstance(policy, TorchPolicy | FunctionPolicy) or policy.head is None:
        mend = "torch_policy(module, head=funcollect.heads.categorical), or another head"
        if isinstance(policy, tensordict_nn.TensorDictModuleBase):
            mend = "funcollect.tensordict_policy(module), as which it has collected the batch"
        what = f"policy is {type(policy).__name__} without a head, expected one whose head or distribution scores"
        raise TypeError(f"{what} actions: pass {mend}")
    return _by_head(policy, policy.head, params, flatten(batch), spaces_of(policy, env), policy_state)


def check_arguments(policy: Policy, batch: Any, env: Env | None) -> None:
    """Raise TypeError if `batch` is no batch or `env` no environment, and for a population or a policy of policies."""
    check_kind("batch", batch, (Mapping, TensorDictBase), "pass a batch from rollout or a collector")
    if env is not None and not is_env(env):
        raise TypeError(f"env is {kind_of(env)}, expected an Env or None: pass the environment of the batch")
    if isinstance(policy.source if isinstance(policy, LoweredPolicy) else policy, Population):
        mend = "pass that with its own parameters and lanes of the batch, all under jax.vmap or torch.func.vmap"
        raise TypeError(f"policy is a population, expected one member: {mend}")
    if policies_of(policy)[0] is not policy:
        mend = "pass policy.policies[group] with agents_as_rows(batch, group), or a player's with player_trajectories"
        raise TypeError(f"policy is made of policies, expected the one of a group or a player: {mend}")


def _by_head(
    policy: TorchPolicy | FunctionPolicy, head: Head, params: Any, rows: Leaves, spaces: Spaces, policy_state: Any
) -> dict[str, Any]:
    space, leaves, spec = spaces
    xp = TORCH if isinstance(policy, TorchPolicy) else jax_numerics()
    exploration = {name: _path_of(name, rows) for name in head.values}
    check_keys(xp, rows, [_ACTION, *(leaf.path for leaf in leaves), *exploration.values()])
    rows = moved(rows, policy.run_device) if isinstance(policy, TorchPolicy) and policy.run_device else rows
    network, action = network_of(policy, params), rows[_ACTION]
    head = head.at({name: rows[path] for name, path in exploration.items()})

    def call(inputs: Leaves, recurrent: Any) -> tuple[Any, Any]:
        answer, after = network(assemble(space, inputs), recurrent)
        parameters, extras = read_answer(xp, head, answer, spec, len(next(iter(inputs.values()))))
        return (parameters, dict(extras)), after

    inputs = {leaf.path: rows[leaf.path] for leaf in leaves}
    lead = checked_lead(action, spec, {leaf: inputs[leaf.path].shape for leaf in leaves})
    recurrent = None if policy.initial_state is None else _recurrent(xp, policy, rows, policy_state)
    parameters, outputs = _outputs(xp, call, inputs, rows, lead, recurrent)
    action = action.long() if xp is TORCH and spec.categories else action  # Torch takes no other integers for an index
    if spec.dtype.is_floating_point and _LOG_PROB in rows:  # in the precision in which the rollout scored, or a higher
        dtype = rows[_LOG_PROB].dtype
        action, size = xp.cast(action, dtype), dtype.itemsize
        parameters = tuple(xp.cast(leaf, dtype) if leaf.dtype.itemsize < size else leaf for leaf in parameters)
    chosen = {name: rows.get((name,), value) for name, value in head.record(xp, action, spec).items()}
    log_prob = head.log_prob(xp, parameters, chosen | {"action": action}, spec)
    scores = {"action_log_prob": log_prob, "entropy": head.entropy(xp, parameters, spec)}
    return {**outputs, **{name: score for name, score in scores.items() if score is not None}}


def _path_of(name: str, rows: Leaves) -> Path:
    """The path of an exploration value, which has a prefix in a batch of several players."""
    of_players = [path for path in rows if path[:-1] == EXPLORATION and path[-1].endswith(f".{name}")]
    path = (*EXPLORATION, name)
    return of_players[0] if path not in rows and len(of_players) == 1 else path


def spaces_of(policy: Policy, env: Env | None) -> Spaces:
    """Return the spaces of `env`, or of the one environment that `policy` has acted in; ValueError if there is none."""
    if env is not None:
        return env.observation_space, env.observation_leaves, env.action_spec
    known: list[Spaces] = memo_of(policy).get("spaces", [])
    if len(known) == 1:
        return known[0]
    found = f"{len(known)} environments with different actions or observations" if known else "no environment"
    raise ValueError(f"env is not given, the policy has acted in {found} in this process: pass env=, that of the batch")


def check_keys(xp: Any, rows: Leaves, wanted: Sequence[Path]) -> None:
    """Raise ValueError for missing keys, and TypeError unless the leaves are those of the policy's framework."""
    if missing := [".".join(path) for path in wanted if path not in rows]:
        raise ValueError(f"the batch lacks {missing}, expected {['.'.join(path) for path in wanted]}: pass all of it")
    if isinstance(first := rows[wanted[0]], Tensor) is not (xp is TORCH):
        name, mend = ("Torch", "the TensorDict itself") if xp is TORCH else ("JAX", "funcollect.interop.to_jax(batch)")
        raise TypeError(f"the batch has a {type(first).__name__}, expected what a policy in {name} takes: pass {mend}")


def network_of(policy: TorchPolicy | FunctionPolicy, params: Any) -> _Forward:
    """The policy's module or function with these parameters; it takes an observation, and a recurrent state or None."""
    if isinstance(policy, FunctionPolicy):
        if policy.takes_key:
            what = f"the policy's function draws random numbers from its parameter {policy.takes_key!r}"
            raise TypeError(f"{what}, which a batch does not hold: leave the parameter out")
        if policy.reads_env_state:
            what = "the policy reads the environment's state (reads_env_state=True), which a batch does not hold"
            raise TypeError(f"{what}: train one that reads observations alone on the batch's actions and other outputs")
        return partial(policy.called, policy.params if params is None else params)  # which may be traced
    module = TorchBacked.bound(policy, policy.prepare(params))  # not compiled: Torch differentiates it
    return lambda observation, recurrent: split_recurrent(module(*policy.arguments(observation, recurrent)), recurrent)


class _Recurrent(NamedTuple):
    initial: Any  # at the start of an episode, a pytree [1, ...]
    recorded: bool  # whether the batch holds the state before each row
    start: Any  # before each row [...] if recorded, else before the first ones [P, ...]


def _recurrent(xp: Any, policy: TorchPolicy | FunctionPolicy, rows: Leaves, policy_state: Any) -> _Recurrent:
    states, action = (policy.init(_ANY, 1), policy_state), rows[_ACTION]
    initial, start = (one.on(action.device).recurrent if isinstance(one, TorchPolicyState) else one for one in states)
    if policy_state is None:
        names = recurrent_names(xp.leaves(initial))
        if any((name,) not in rows for name in names):
            what = f"the batch lacks {names}, the recurrent state before each step, and policy_state is not given"
            raise ValueError(f"{what}: make the policy with record_state=True, or pass policy_state from before it")
        columns = iter(names)
        return _Recurrent(initial, True, xp.map(lambda _: rows[next(columns),], initial))
    given, initials = ([tuple(leaf.shape) for leaf in xp.leaves(state)] for state in (start, initial))
    if [shape[1:] for shape in given] != [shape[1:] for shape in initials]:
        wanted = [("P", *shape[1:]) for shape in initials]
        raise ValueError(f"policy_state has leaves of the shapes {given}, expected {wanted}: pass state.policy_state")
    return _Recurrent(initial, False, start)


def _outputs(
    xp: Any, call: _Forward, inputs: Leaves, rows: Leaves, lead: Sequence[int], recurrent: _Recurrent | None
) -> Any:
    """The outputs in the shape of the batch, by one call for all rows, or by one per step for a recurrent policy."""
    if recurrent is None:
        flat = {path: leaf.reshape(-1, *leaf.shape[len(lead) :]) for path, leaf in inputs.items()}
        return xp.map(lambda leaf: leaf.reshape(*lead, *leaf.shape[1:]), call(flat, None)[0])
    check_keys(xp, rows, [LANE, STEP])
    turn, back = turning(rows, lead)
    lane, step = turn(rows[LANE]), turn(rows[STEP])
    apart = lane[1:] != lane[:-1]
    if recurrent.recorded:
        starts = xp.map(turn, recurrent.start)
        apart = breaks(turn, rows)
    else:
        starts = xp.map(lambda leaf: xp.broadcast_to(leaf, (len(step), *leaf.shape)), recurrent.start)
        for leaf in xp.leaves(recurrent.start)[:1]:
            _check_whole(lane, step, len(leaf))
    changes = xp.join([lane[:1] == lane[:1], apart])  # the first row, and those after a gap

    def advance(carry: Any, row: Any) -> tuple[Any, Any]:
        inputs, changes, fresh, start = row
        carry = xp.select(changes, start, carry)
        outputs, carry = call(inputs, xp.select(fresh, recurrent.initial, carry))
        return carry, outputs

    turned = {path: turn(leaf) for path, leaf in inputs.items()}
    first = xp.map(lambda leaf: leaf[0], starts)
    return xp.map(back, xp.scan(advance, first, (turned, changes, step == 0, starts))[1])


def _check_whole(lane: Any, step: Any, lanes: int) -> None:
    """Raise ValueError unless rows [T, P] may be a whole rollout from a state of so many `lanes`."""
    mend = "pass the whole rollout in its order, or make the policy with record_state=True"
    if lane.shape[1] != lanes:
        raise ValueError(f"the batch has {lane.shape[1]} lanes, expected {lanes}, as policy_state has: {mend}")
    if not isinstance(lane, Tensor) and isinstance(lane, import_jax().core.Tracer):
        return  # only the number of lanes is known
    mixed = (lane != lane[:1]).any() | (lane[0, 1:] <= lane[0, :-1]).any()
    if bool(mixed | (step[1:] - step[:-1] > 1).any()):
        what = f"the batch has the lanes {shown(lane[0].tolist())} at first, expected increasing ones"
        raise ValueError(f"{what} with consecutive steps, to continue from policy_state: {mend}")


def breaks(turn: Callable[[Any], Any], rows: Leaves) -> Any:
    """Whether each row from the second on, [T - 1, L], does not continue the one before it."""
    lane, step = turn(rows[LANE]), turn(rows[STEP])
    apart = (lane[1:] != lane[:-1]) | (step[1:] != step[:-1] + 1)  # as between two slices that a sampler joined
    if TRAJECTORY_IDS in rows:
        ids = turn(rows[TRAJECTORY_IDS])
        other = ids[1:] != ids[:-1]
        apart = apart | (other if other.ndim == apart.ndim else other.any(-1))  # in JAX 64 bits may be two words
    return apart


def turning(rows: Leaves, lead: Sequence[int]) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """A function that makes a leaf [*B, T, ...] or [T, P, ...] of a batch time-major, [T, L, ...], and its inverse."""
    traced = TIME_MAJOR in rows
    if not lead or (traced and len(lead) != 2):
        wanted = "[T, P]: pass one run, or several under jax.vmap" if traced else "[*B, T]: pass whole rows of time"
        raise ValueError(f"the batch has {len(lead)} dimensions, but time has to be among them: {wanted}")
    if traced:
        return (lambda leaf: leaf), (lambda leaf: leaf)
    lane_dims, num_lanes = len(lead) - 1, math.prod(lead[:-1])
    return (
        lambda leaf: leaf.reshape(num_lanes, *leaf.shape[lane_dims:]).swapaxes(0, 1),
        lambda leaf: leaf.swapaxes(0, 1).reshape(*lead, *leaf.shape[2:]),
    )


def _by_distribution(policy: TensorDictPolicy, params: Any, rows: Leaves) -> dict[str, Any]:
    module = policy.bound(policy.prepare(params))
    if not isinstance(module, _SCORING):
        wanted = "one with a distribution, such as TorchRL's ProbabilisticActor: pass that"
        raise TypeError(f"policy is a {type(module).__name__}, expected {wanted}")
    in_keys = paths_of(module, "in_keys")
    check_keys(TORCH, rows, [_ACTION, *in_keys])
    rows = moved(rows, policy.run_device) if policy.run_device else rows
    lead = rows["next", "done"].shape[:-1] if ("next", "done") in rows else rows[_ACTION].shape[:1]
    if {INIT, IS_FIRST, STEP} <= rows.keys():  # slices mark is_init, too, where a module would reset its state
        begins = (rows[STEP] == 0) | ~rows[IS_FIRST]
        rows = {**rows, INIT: rows[INIT] & begins.reshape(rows[INIT].shape)}

    def call(inputs: Leaves, recurrent: Any) -> tuple[Any, Any]:
        read = {path: leaf for path, leaf in inputs.items() if path != _ACTION} | (recurrent or {})
        given = to_tensordict(read, next(iter(read.values())).shape[:1])
        with tensordict_nn.set_interaction_type(tensordict_nn.InteractionType.DETERMINISTIC):
            distribution = module.get_dist(given)
        found = {path: leaf for path, leaf in flatten(given).items() if path not in read}
        found["action_log_prob",] = distribution.log_prob(inputs[_ACTION])
        with contextlib.suppress(NotImplementedError):  # Torch defines no entropy for some distributions
            found["entropy",] = distribution.entropy()
        after = {path: found.pop(policy.written[path]) for path in recurrent or {}}
        return found, after

    recurrent = None
    if policy.hidden_states:
        initial = {path: leaf[None] for path, leaf in policy.hidden_states.items()}
        recurrent = _Recurrent(initial, True, {path: rows[path] for path in initial})
    inputs = {path: rows[path] for path in (*in_keys, _ACTION) if path not in policy.hidden_states}
    outputs = _outputs(TORCH, call, inputs, rows, lead, recurrent)
    return {".".join(path): leaf for path, leaf in outputs.items()}
