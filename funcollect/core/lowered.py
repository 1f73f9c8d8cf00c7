"""Prepares Torch policies for the loops in JAX: lowers their modules, and converts their states there and back."""

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
from funcollect.policies.base import policies_of
from funcollect.policies.by_group import GroupPolicy
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
_MOST_ROWS = 3  # of an example: a module treats all batch sizes other than 1 alike


def lower_policy(policy: Policy, env: Env) -> LoweredPolicy | GroupPolicy:
    """Return a Torch policy as a JAX policy, its module lowered: for `funcollect.traced`, and for training in JAX.

    A policy by group or by player stays one, and its Torch policies are lowered.

    Its ``params`` are arrays by dotted name, read from the module at each access; ``load(params)`` writes such arrays
    into the module. `funcollect.rollout` lowers by itself.

    Raises:
        TypeError: for a policy that neither `torch_policy` nor `tensordict_policy` made.
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
    """Return a policy whose module is lowered, or the modules of its parts; cached as long as these are the same."""
    if not isinstance(policy, GroupPolicy):
        return lowered_for(env, policy, exploration_type)
    parts: dict[str, Policy] = {}
    for name, part in policy.policies.items():
        if is_traceable(part):
            parts[name] = part
        elif isinstance(part, TorchBacked) and part.compiler in ("eager", "inductor"):
            raise LoweringError(f"the policy of {name!r} has compile={part.compiler!r}")
        else:
            parts[name] = lowered_for(_env_seen_by(env, policy, name), part, exploration_type)
    known: dict[Any, GroupPolicy] = memo_of(policy).setdefault("lowered", {})
    ids = tuple(map(id, parts.values()))  # of objects that the cached policies keep alive
    if ids not in known:
        known[ids] = copy.copy(policy)
        known[ids].policies, known[ids].backend = parts, "jax"
    return known[ids]


class _EnvOfGroup:
    """An environment as the policy of one group sees it, with the attributes that lowering reads."""

    def __init__(self, env: Any, space: Space, rows: int) -> None:
        self.backend, self.num_envs, self.observation_space = env.backend, (env.num_envs or 1) * rows, space
        self.observation_leaves = observation_leaves(space)


def _env_seen_by(env: Any, policy: GroupPolicy, name: str) -> Any:
    groups = getattr(env.action_spec, "groups", {})
    if name not in groups:  # a player, who sees the environment's observation
        return env
    group, together = groups[name], name in policy.together
    memo, cache_key = memo_of(env), ("group", name, together)
    if cache_key not in memo:
        whole = env.observation_space[name]["observation"]
        space, rows = (whole, 1) if together else (as_delivered(group.observation_space), group.n)
        memo[cache_key] = _EnvOfGroup(env, space, rows)
    return memo[cache_key]


def is_lowered(policy: Policy) -> bool:
    """Whether a policy, or a part of it, is a lowered one."""
    return any(isinstance(part, LoweredPolicy) for part in policies_of(policy))


def lowered_for(env: Env, policy: Policy, exploration_type: ExplorationType) -> LoweredPolicy:
    """Do what `lower_policy` does; a TensorDict policy acts as of this type. Cached for each space and setting."""
    if isinstance(policy, LoweredPolicy):
        return policy
    if not isinstance(policy, TorchPolicy | TensorDictPolicy):
        wanted = "one over a Torch module: make it with funcollect.torch_policy"
        raise TypeError(f"policy is {type(policy).__name__}, expected {wanted}")
    known: dict[Any, LoweredPolicy | LoweringError] = memo_of(policy).setdefault("lowered", {})
    in_tensordicts = isinstance(policy, TensorDictPolicy)  # other modules do not depend on the type: they do not sample
    acts = exploration_type if in_tensordicts else ExplorationType.RANDOM
    # Objects by their ids, since what is cached keeps them, and tensors by how often they were written, too.
    start = [(id(leaf), getattr(leaf, "_version", 0)) for leaf in optree.tree_leaves(policy.initial_state)]
    cache_key = acts, _observed_form(env), policy.settings.number, id(policy.head), tuple(start)
    if cache_key not in known:
        if sum(other[:2] == cache_key[:2] for other in known) >= _MOST_SETTINGS:
            what = f"its attributes were seen with {_MOST_SETTINGS} different values, and each would compile again"
            raise LoweringError(f"{what}: keep what changes in buffers")
        count = policy.lanes if isinstance(policy, TorchPopulation) else min(env.num_envs or 1, _MOST_ROWS)
        try:
            _check_lowerable(policy)
            rows = example(env.observation_space, env.observation_leaves, count)
            known[cache_key] = LoweredPolicy(policy, rows, cache_key[0], single=in_tensordicts and env.num_envs is None)
        except LoweringError as error:
            known[cache_key] = error.with_traceback(None)
            vars(error)["of"] = policy.head, policy.initial_state
    found = known[cache_key]
    if isinstance(found, LoweringError):
        raise found
    return found


def _check_lowerable(source: TorchBacked) -> None:
    if isinstance(source.head, FromDistribution):
        raise LoweringError(f"the head {source.head.name} samples in Torch: use another head, or funcollect.jax_policy")
    device, place = source.run_device, default_device_type()
    if device is not None and device.type != place and (source.device is not None or device.type != "cpu"):
        raise LoweringError(f"the policy runs on {device.type}, JAX on {place}: move the module there")


def _observed_form(env: Env) -> Hashable:
    """A description of the observations that a module gets from an environment: whether it can be lowered alike."""
    memo, space = memo_of(env), env.observation_space
    known: tuple[Any, Hashable] = memo.get("seen", (None, None))
    if known[0] is not space:
        structure = optree.tree_structure(assemble(space, {leaf.path: 0 for leaf in env.observation_leaves}))
        known = memo["seen"] = space, (structure, env.observation_leaves, env.num_envs and min(env.num_envs, 2))
    return known[1]


def complete(env: Env, policy: Policy) -> None:
    """Make the parameters of lazy layers, such as `torch.nn.LazyLinear`, by one call of the module in evaluation mode.

    They are drawn from Torch's global generator, as in a call by the user. The policy has been checked.
    """
    if isinstance(policy, GroupPolicy):
        for name, part in policy.policies.items():
            complete(_env_seen_by(env, policy, name), part)
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
    """Run a rollout of a lowered policy, with its part of the state converted to JAX before and to Torch after it."""
    before = state.policy_state
    after, batch = run(state.replace(policy_state=_state_in_jax(policy, before, state.num_lanes)))
    return after.replace(policy_state=_state_in_torch(policy, after.policy_state, before, after.step)), batch


def _state_in_jax(policy: Policy, state: Any, rows: int) -> Any:
    """The state of a policy with so many `rows`; that of a lowered policy, or part, converted to JAX."""
    if isinstance(policy, GroupPolicy):
        check_state_kind(state, dict)
        parts = policy.policies.items()
        return {name: _state_in_jax(part, state[name], rows * policy.rows_in_lane(name)) for name, part in parts}
    if not isinstance(policy, LoweredPolicy):
        return state
    check_state_kind(state, TorchPolicyState)
    return policy.enter(state, rows)


def _state_in_torch(policy: Policy, after: Any, before: Any, step: Any, rows: int = 1) -> Any:
    """The state `after` a loop, of the kind of `before`. A part has `rows` for each lane; lanes are at `step` [P]."""
    if isinstance(policy, GroupPolicy):
        parts = [(*item, rows * policy.rows_in_lane(item[0])) for item in policy.policies.items()]
        return {name: _state_in_torch(part, after[name], before[name], step, count) for name, part, count in parts}
    if not isinstance(policy, LoweredPolicy):
        return after
    if before.recurrent is None:
        return before
    fresh = (step if isinstance(step, Tensor) else torch_view(step)) == 0
    return policy.leave(after, before, fresh.repeat_interleave(rows) if rows > 1 else fresh)
