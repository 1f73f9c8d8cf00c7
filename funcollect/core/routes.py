"""Which loop runs an environment with a policy, and in which form the policy runs in it."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, get_args

import optree
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from funcollect.arguments import check_kind
from funcollect.core.request import check_state_kind
from funcollect.core.state import CollectorState
from funcollect.errors import LoweringError
from funcollect.interop.bridge import torch_view
from funcollect.interop.cuda_graph import can_capture
from funcollect.interop.jax_setup import default_device_type
from funcollect.interop.memo import memo_of
from funcollect.policies.heads.head import FromDistribution
from funcollect.policies.jax_functions.jax_policy import is_traceable
from funcollect.policies.population import Population, TorchPopulation
from funcollect.policies.tensordict_modules.tensordict_policy import TensorDictPolicy
from funcollect.policies.torch_in_jax import LoweredPolicy, Source, example
from funcollect.policies.torch_modules.torch_backed import TorchBacked, TorchPolicyState, has_lazy_layers, lanes_of
from funcollect.policies.torch_modules.torch_policy import TorchPolicy
from funcollect.protocols import Env, Policy
from funcollect.specs import ExplorationType, assemble
from funcollect.tree import moved

# A module whose attributes take more values than this is not lowered, since each value would compile again.
_MOST_SETTINGS = 4
_MOST_ROWS = 3  # of an example; a module treats all batch sizes other than 1 alike
_TOO_MANY_SETTINGS = LoweringError(
    f"its attributes were seen with {_MOST_SETTINGS} different values, and each would compile again: keep what changes "
    "in buffers"
)


class Route(NamedTuple):
    """A way to run a policy in an environment."""

    loop: str  # ``"host"``, ``"torch"``, ``"captured"``, ``"device"``, ``"fused"`` or ``"crossing"``
    policy: Policy  # that the loop runs: the user's, or the lowered one over the same module
    refusals: tuple[str, ...] = ()  # the routes that were rejected, each with the reason


def route_of(env: Env, policy: Policy, exploration_type: ExplorationType = ExplorationType.RANDOM) -> Route:
    """Return the route for this pair, cached for each kind of space and each setting of the module.

    Raises:
        LoweringError: for a policy that demands a route (``compile=``) which is impossible.
    """
    asked = policy.compiler if isinstance(policy, TorchBacked) else None
    if isinstance(policy, TorchBacked) and asked == "cudagraph":
        if env.backend != "torch" or not can_capture(env.device):
            where = f"runs on {env.device}" if env.backend == "torch" else "is not written in Torch"
            raise LoweringError(
                f"compile='cudagraph' captures the steps of a Torch environment on a CUDA device, and {env!r} {where}: "
                "make it there (device='cuda'), or leave compile out"
            )
        if (place := policy.run_device) not in (None, env.device):
            raise LoweringError(f"the policy runs on {place}, the environment on {env.device}: move the module")
        return Route("captured", policy)
    if env.backend != "jax":
        if asked != "xla":
            return Route(env.backend, policy)
    elif is_traceable(policy):
        return Route("fused", policy)
    if asked in ("eager", "inductor") or not isinstance(policy, TorchPolicy | TensorDictPolicy):
        return Route("crossing", policy)
    lowered = _lowered(env, policy, exploration_type)
    if not isinstance(lowered, LoweringError):
        return Route("fused" if env.backend == "jax" else env.backend, lowered)
    if asked is not None:
        raise lowered
    return Route("crossing", policy, (f"not lowered: {lowered}",))


def of_lanes(env: Env, policy: Policy, state: CollectorState) -> Policy:
    """Return the policy for the lanes of a state: for a population its members that act for these, else itself."""
    source = policy.source if isinstance(policy, LoweredPolicy) else policy
    if not isinstance(source, Population):
        return policy
    every, total = state.num_lanes, state.total_lanes
    own = source.of_lanes(range(total) if every == total else state.lane_ids, total)  # reading ids waits for a device
    return own if source is policy else route_of(env, own).policy


def lower_policy(policy: Policy, env: Env) -> LoweredPolicy:
    """Return a Torch policy as a JAX policy, its module lowered: for `funcollect.traced`, and for training in JAX.

    Its ``params`` are arrays by dotted name, read from the module at each access; ``load(params)`` writes such arrays
    into the module. `funcollect.rollout` lowers by itself.

    Raises:
        TypeError: for a policy that is not of `torch_policy` or `tensordict_policy`.
        LoweringError: for a module that cannot be lowered; it names the reason and the place in the module.

    >>> import jax, torch, funcollect as fc
    >>> env = fc.make_env("gymnax/CartPole-v1", num_envs=4)
    >>> policy = lower_policy(fc.torch_policy(torch.nn.Linear(4, 2), head=fc.heads.categorical), env)
    >>> state = fc.traced.init(env, policy, policy.params, key=jax.random.PRNGKey(0))
    >>> state, arrays = fc.traced.rollout(env, policy, policy.params, state, 8)
    >>> arrays["action_log_prob"].shape
    (8, 4)
    """
    check_kind("env", env, get_args(Env), "make one with funcollect.make_env")
    return lowered_for(env, policy, ExplorationType.RANDOM)


def lowered_for(env: Env, policy: Policy, exploration_type: ExplorationType) -> LoweredPolicy:
    """Do what `lower_policy` does, for a TensorDict policy under this exploration type."""
    if isinstance(policy, LoweredPolicy):
        return policy
    if not isinstance(policy, TorchPolicy | TensorDictPolicy):
        raise TypeError(
            f"policy is {type(policy).__name__}, expected one over a Torch module: make it with funcollect.torch_policy"
        )
    if isinstance(lowered := _lowered(env, policy, exploration_type), LoweringError):
        raise lowered
    return lowered


def _lowered(env: Env, source: Source, exploration_type: ExplorationType) -> LoweredPolicy | LoweringError:
    """Return the lowered policy, or the `LoweringError`. Cached for each kind of space and each setting."""
    known: dict[Any, LoweredPolicy | LoweringError] = memo_of(source).setdefault("lowered", {})
    if not isinstance(source, TensorDictPolicy):  # other modules do not depend on it: they do not sample
        exploration_type = ExplorationType.RANDOM
    try:
        which = (exploration_type, _seen_of(env), source.settings)
    except LoweringError as error:
        return error
    if which not in known:
        if sum(each[:2] == which[:2] for each in known) >= _MOST_SETTINGS:
            return _TOO_MANY_SETTINGS
        single = env.num_envs is None and isinstance(source, TensorDictPolicy)
        rows = source.lanes if isinstance(source, TorchPopulation) else min(env.num_envs or 1, _MOST_ROWS)
        try:
            _check_lowerable(source)
            given = example(env.observation_space, env.observation_leaves, rows)
            known[which] = LoweredPolicy(source, given, exploration_type, single=single)
        except LoweringError as error:
            known[which] = error.with_traceback(None)
    return known[which]


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
        seen = structure, env.observation_leaves, env.num_envs and min(env.num_envs, 2)
        known = memo["seen"] = space, seen
    return known[1]


def complete(env: Env, policy: Source) -> None:
    """Make the parameters of lazy layers, such as `torch.nn.LazyLinear`, by one call of the user's module.

    They are drawn from Torch's global generator, as by a call of the user's own. The module is in evaluation mode.
    """
    module = policy.module
    if not isinstance(module, nn.Module) or not has_lazy_layers(module):
        return
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


def run_in_jax(
    policy: LoweredPolicy, state: CollectorState, run: Callable[[CollectorState], tuple[CollectorState, TensorDict]]
) -> tuple[CollectorState, TensorDict]:
    """Run a rollout with a Torch policy's state as JAX takes it; return the state and the batch as Torch has them."""
    policy_state = state.policy_state
    check_state_kind(policy_state, TorchPolicyState)
    after, batch = run(state.replace(policy_state=policy.enter(policy_state, state.num_lanes)))
    if policy_state.recurrent is not None:
        step: Any = after.step
        fresh = (step if isinstance(step, Tensor) else torch_view(step)) == 0
        policy_state = policy.leave(after.policy_state, policy_state, fresh)
    return after.replace(policy_state=policy_state), policy.as_torch(batch)
