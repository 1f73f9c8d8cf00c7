"""Policies of Torch in the form in which loops of JAX run them: their modules lowered, their states brought over."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable
from typing import Any, get_args

import optree
import torch
from torch import Tensor

from funcollect.arguments import check_kind
from funcollect.core.request import Rollout, check_state_kind
from funcollect.core.state import CollectorState
from funcollect.envs.jax_envs.jax_env import as_delivered
from funcollect.errors import LoweringError
from funcollect.interop.bridge import torch_view
from funcollect.interop.jax_setup import default_device_type
from funcollect.interop.memo import memo_of
from funcollect.policies.by_group import GroupPolicy, parts_of
from funcollect.policies.heads.head import FromDistribution
from funcollect.policies.jax_functions.jax_policy import is_traceable
from funcollect.policies.population import TorchPopulation
from funcollect.policies.tensordict_modules.tensordict_policy import TensorDictPolicy
from funcollect.policies.torch_in_jax import LoweredPolicy, Source, example
from funcollect.policies.torch_modules.torch_backed import TorchBacked, TorchPolicyState, has_lazy_layers, lanes_of
from funcollect.policies.torch_modules.torch_policy import TorchPolicy
from funcollect.protocols import Env, Policy
from funcollect.specs import ExplorationType, Space, assemble, observation_leaves
from funcollect.tree import moved

# A module whose attributes take more values than this is not lowered, since each value would compile again.
_MOST_SETTINGS = 4
_MOST_ROWS = 3  # of an example; a module treats all batch sizes other than 1 alike


def lower_policy(policy: Policy, env: Env) -> LoweredPolicy | GroupPolicy:
    """Return a Torch policy as a JAX policy, its module lowered: for `funcollect.traced`, and for training in JAX.

    One by group or by player is one of the same kind, whose policies of Torch are lowered.

    Its ``params`` are arrays by dotted name, read from the module at each access; ``load(params)`` writes such arrays
    into the module. `funcollect.rollout` lowers by itself.

    Raises:
        TypeError: for a policy that is not of `torch_policy` or `tensordict_policy`.
        LoweringError: for a module that cannot be lowered, with the reason and the place in the module.

    >>> import jax, torch, funcollect as fc
    >>> env = fc.make_env("gymnax/CartPole-v1", num_envs=4)
    >>> policy = lower_policy(fc.torch_policy(torch.nn.Linear(4, 2), head=fc.heads.categorical), env)
    >>> state = fc.traced.init(env, policy, policy.params, key=jax.random.PRNGKey(0))
    >>> state, arrays = fc.traced.rollout(env, policy, policy.params, state, 8)
    >>> arrays["action_log_prob"].shape
    (8, 4)
    """
    check_kind("env", env, get_args(Env), "make one with funcollect.make_env")
    return lowered(env, policy, ExplorationType.RANDOM)


def lowered(env: Env, policy: Policy, exploration_type: ExplorationType) -> LoweredPolicy | GroupPolicy:
    """Return a policy whose modules, or those of its parts, are lowered; kept for the lowered parts."""
    if not isinstance(policy, GroupPolicy):
        return lowered_for(env, policy, exploration_type)
    parts: dict[str, Policy] = {}
    for name, part in policy.policies.items():
        if is_traceable(part):
            parts[name] = part
        elif isinstance(part, TorchBacked) and part.compiler in ("eager", "inductor"):
            raise LoweringError(f"the policy of {name!r} has compile={part.compiler!r}")
        else:
            parts[name] = lowered_for(_seen_by(env, policy, name), part, exploration_type)
    known: dict[Any, GroupPolicy] = memo_of(policy).setdefault("lowered", {})
    which = tuple(map(id, parts.values()))  # which are kept
    if which not in known:
        known[which] = copy.copy(policy)
        known[which].policies, known[which].backend = parts, "jax"
    return known[which]


class _OfGroup:
    """What the policy of a group sees of an environment, as far as it is lowered for that."""

    def __init__(self, env: Any, space: Space, rows: int) -> None:
        self.backend, self.num_envs, self.observation_space = env.backend, (env.num_envs or 1) * rows, space
        self.observation_leaves = observation_leaves(space)


def _seen_by(env: Any, policy: GroupPolicy, name: str) -> Any:
    groups = getattr(env.action_spec, "groups", {})
    if name not in groups:  # a player, who observes what the environment shows
        return env
    group, which = groups[name], ("group", name, name in policy.together)
    memo = memo_of(env)
    if which not in memo:
        whole = env.observation_space[name]["observation"]
        rows = (whole, 1) if which[2] else (as_delivered(group.observation_space), group.n)
        memo[which] = _OfGroup(env, *rows)
    return memo[which]


def is_lowered(policy: Policy) -> bool:
    """Whether a policy, or a part of it, is a lowered one."""
    return any(isinstance(part, LoweredPolicy) for part in parts_of(policy))


def lowered_for(env: Env, policy: Policy, exploration_type: ExplorationType) -> LoweredPolicy:
    """Do what `lower_policy` does, for a TensorDict policy under this type. Cached for each space and setting."""
    if isinstance(policy, LoweredPolicy):
        return policy
    if not isinstance(policy, TorchPolicy | TensorDictPolicy):
        wanted = "one over a Torch module: make it with funcollect.torch_policy"
        raise TypeError(f"policy is {type(policy).__name__}, expected {wanted}")
    known: dict[Any, LoweredPolicy | LoweringError] = memo_of(policy).setdefault("lowered", {})
    in_tensordicts = isinstance(policy, TensorDictPolicy)  # other modules do not depend on the type: they do not sample
    which = (exploration_type if in_tensordicts else ExplorationType.RANDOM, _seen_of(env), policy.settings)
    if which not in known:
        if sum(each[:2] == which[:2] for each in known) >= _MOST_SETTINGS:
            what = f"its attributes were seen with {_MOST_SETTINGS} different values, and each would compile again"
            raise LoweringError(f"{what}: keep what changes in buffers")
        rows = policy.lanes if isinstance(policy, TorchPopulation) else min(env.num_envs or 1, _MOST_ROWS)
        try:
            _check_lowerable(policy)
            given = example(env.observation_space, env.observation_leaves, rows)
            known[which] = LoweredPolicy(policy, given, which[0], single=env.num_envs is None and in_tensordicts)
        except LoweringError as error:
            known[which] = error.with_traceback(None)
    found = known[which]
    if isinstance(found, LoweringError):
        raise found
    return found


def _check_lowerable(source: TorchBacked) -> None:
    if isinstance(source.head, FromDistribution):
        raise LoweringError(f"the head {source.head.name} samples in Torch: use another head, or funcollect.jax_policy")
    own, place = source.run_device, default_device_type()
    if own is not None and own.type != place and (source.device is not None or own.type != "cpu"):
        raise LoweringError(f"the policy runs on {own.type}, JAX on {place}: move the module there")


def _seen_of(env: Env) -> Hashable:
    """What a module can see of an environment; equal for those that differ in nothing else."""
    memo, space = memo_of(env), env.observation_space
    known: tuple[Any, Hashable] = memo.get("seen", (None, None))
    if known[0] is not space:
        structure = optree.tree_structure(assemble(space, {leaf.path: 0 for leaf in env.observation_leaves}))
        known = memo["seen"] = space, (structure, env.observation_leaves, env.num_envs and min(env.num_envs, 2))
    return known[1]


def complete(env: Env, policy: Policy) -> None:
    """Make the parameters of lazy layers, such as `torch.nn.LazyLinear`, by one call of the module in evaluation mode.

    They are drawn from Torch's global generator, as by a call of the user's own. The policy was checked.
    """
    if isinstance(policy, GroupPolicy):
        for name, part in policy.policies.items():
            complete(_seen_by(env, policy, name), part)
    if not isinstance(policy, Source) or not has_lazy_layers(policy.module):
        return
    module: Any = policy.module
    single = env.num_envs is None and isinstance(policy, TensorDictPolicy)
    rows = example(env.observation_space, env.observation_leaves, 1)
    observation = moved(rows, policy.run_device or torch.device("cpu"))
    recurrent = lanes_of(policy.initial_carry(observation), 1, policy.device)
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        with torch.no_grad():
            policy.call_module(module, observation, recurrent, ExplorationType.DETERMINISTIC, single=single)
    finally:
        for part, training in modes.items():
            part.training = training
    policy.replace(module)


def run_in_jax(policy: Policy, state: CollectorState, run: Callable[[CollectorState], Rollout]) -> Rollout:
    """Run a rollout with the state of a Torch policy, or of its parts, as JAX takes it; return it as Torch has it."""
    before = state.policy_state
    after, batch = run(state.replace(policy_state=_entered(policy, before, state.num_lanes)))
    step: Any = after.step
    return after.replace(policy_state=_left(policy, after.policy_state, before, step)), batch


def _entered(policy: Policy, state: Any, rows: int) -> Any:
    if isinstance(policy, GroupPolicy):
        check_state_kind(state, dict)
        parts = policy.policies.items()
        return {name: _entered(part, state[name], rows * policy.rows_in_lane(name)) for name, part in parts}
    if not isinstance(policy, LoweredPolicy):
        return state
    check_state_kind(state, TorchPolicyState)
    return policy.enter(state, rows)


def _left(policy: Policy, after: Any, before: Any, step: Any, rows: int = 1) -> Any:
    """The state after a loop, of parts with so many rows for each lane, whose steps in their trajectories are [P]."""
    if isinstance(policy, GroupPolicy):
        parts = policy.policies.items()
        return {
            name: _left(part, after[name], before[name], step, rows * policy.rows_in_lane(name)) for name, part in parts
        }
    if not isinstance(policy, LoweredPolicy):
        return after
    if before.recurrent is None:
        return before
    fresh = (step if isinstance(step, Tensor) else torch_view(step)) == 0
    return policy.leave(after, before, fresh.repeat_interleave(rows) if rows > 1 else fresh)
