"""Which loop runs an environment with a policy, and in which form the policy runs in it."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, get_args

import optree
import torch
from torch import Tensor, nn

from funcollect.arguments import check_kind
from funcollect.core.loops.captured import check_capture
from funcollect.core.request import check_state_kind
from funcollect.core.state import CollectorState
from funcollect.errors import LoweringError
from funcollect.interop.bridge import torch_view
from funcollect.interop.jax_setup import default_device_type
from funcollect.interop.memo import memo_of
from funcollect.policies.heads.distributions import FromDistribution
from funcollect.policies.jax_functions.traced_policy import is_traceable
from funcollect.policies.population import Population, TorchPopulation
from funcollect.policies.tensordict_modules.tensordict_policy import TensorDictPolicy
from funcollect.policies.torch_backed import TorchBacked, TorchPolicyState, has_lazy_layers, lanes_of
from funcollect.policies.torch_in_jax.callback_policy import CallbackPolicy
from funcollect.policies.torch_in_jax.embedded_policy import EmbeddedPolicy, Source, example
from funcollect.policies.torch_in_jax.lowered_policy import LoweredPolicy
from funcollect.policies.torch_modules.settings import NO_SETTINGS
from funcollect.policies.torch_modules.torch_policy import TorchPolicy
from funcollect.protocols import Env, Policy
from funcollect.specs import ExplorationType, assemble
from funcollect.tree import moved

# A module whose attributes take more values than this is called back, since each value would compile again.
_MOST_SETTINGS = 4
_MOST_ROWS = 3  # of an example; a module treats all batch sizes other than 1 alike
_TOO_MANY_SETTINGS = LoweringError(
    f"its attributes were seen with {_MOST_SETTINGS} different values, and each would compile again: keep what changes "
    "in buffers"
)


@dataclass(frozen=True)
class Route:
    """A way to run a policy in an environment.

    Attributes:
        loop: ``"host"``, ``"torch"``, ``"captured"``, ``"device"``, ``"fused"`` or ``"crossing"``.
        policy: the policy that the loop runs: the user's, or a JAX policy over the same module.
        refusals: the routes that were rejected, each with the reason.
    """

    loop: str
    policy: Policy
    refusals: tuple[str, ...] = ()


def route_of(env: Env, policy: Policy, exploration_type: ExplorationType = ExplorationType.RANDOM) -> Route:
    """Return the route for this pair, cached for each kind of space and each setting of the module.

    Raises:
        LoweringError: for a policy that demands a route (``compile=``) which is impossible.
    """
    asked = policy.compiler if isinstance(policy, TorchBacked) else None
    if asked == "cudagraph":
        check_capture(env, policy)
        return Route("captured", policy)
    if env.backend != "jax":
        if asked == "callback":
            raise LoweringError(
                f"compile='callback' calls the module inside a loop over a JAX environment, and {env!r} is none: "
                "leave it out, or use compile='xla'"
            )
        if asked != "xla":
            return Route(env.backend, policy)
    elif is_traceable(policy):
        return Route("fused", policy)
    if asked in ("eager", "inductor") or not isinstance(policy, TorchPolicy | TensorDictPolicy):
        return Route("crossing", policy)
    return _found(env, policy, asked, exploration_type)


def of_lanes(env: Env, policy: Policy, state: CollectorState) -> Policy:
    """Return the policy for the lanes of a state: for a population its members that act for these, else itself.

    PolicyError if the run's lanes do not divide among the members.
    """
    source = policy.source if isinstance(policy, EmbeddedPolicy) else policy
    if not isinstance(source, Population):
        return policy
    every, total = state.num_lanes, state.total_lanes
    own = source.of_lanes(range(total) if every == total else state.lane_ids, total)  # reading ids waits for a device
    return own if source is policy else route_of(env, own).policy


def lower_policy(policy: Policy, env: Env) -> LoweredPolicy:
    """Return a Torch policy as a JAX policy, its module lowered: for `funcollect.traced`, and for training in JAX.

    Its ``params`` are arrays by dotted name, read from the module at each access; ``load(params)`` writes such arrays
    into the module. `funcollect.rollout` lowers by itself.

    Args:
        policy: a policy of `torch_policy` or `tensordict_policy`.
        env: an environment, for its observations.

    Raises:
        TypeError: for another policy.
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
    lowered = _embedded(env, policy, "lowered", exploration_type)
    if isinstance(lowered, LoweringError):
        raise lowered
    assert isinstance(lowered, LoweredPolicy)
    return lowered


def _found(env: Env, source: Source, asked: str | None, exploration_type: ExplorationType) -> Route:
    """Return the first possible route of all, or of the one that is asked for."""
    loop = "fused" if env.backend == "jax" else env.backend
    ways = {None: ["lowered", "called back"], "xla": ["lowered"], "callback": ["called back"]}[asked]
    refusals: list[str] = []
    for way in ways:
        embedded = _embedded(env, source, way, exploration_type)
        if not isinstance(embedded, LoweringError):
            return Route(loop, embedded, tuple(refusals))
        if asked is not None:
            raise embedded
        refusals.append(f"not {way}: {embedded}")
    return Route("crossing", source, tuple(refusals))


def _embedded(env: Env, source: Source, way: str, exploration_type: ExplorationType) -> EmbeddedPolicy | LoweringError:
    """Return the policy prepared for one route, or the `LoweringError`. Cached per route and setting."""
    known: dict[Any, EmbeddedPolicy | LoweringError] = memo_of(source).setdefault("embedded", {})
    if not isinstance(source, TensorDictPolicy):  # other modules do not depend on it: they do not sample
        exploration_type = ExplorationType.RANDOM
    try:
        which = (way, exploration_type, _seen_of(env), source.settings if way == "lowered" else NO_SETTINGS)
        if isinstance(callback := known.get(which), CallbackPolicy) and not callback.fits():
            del known[which]
    except LoweringError as error:
        return error
    if which not in known:
        others = [each for each in known if each[:3] == which[:3]]
        full = len(others) >= _MOST_SETTINGS
        known[which] = _TOO_MANY_SETTINGS if full else _made(env, source, way, exploration_type)
    return known[which]


def _seen_of(env: Env) -> Hashable:
    """What a module can see of an environment; equal for those that differ in nothing else."""
    memo, space = memo_of(env), env.observation_space
    known: tuple[Any, Hashable] = memo.get("seen", (None, None))
    if known[0] is not space:
        structure = optree.tree_structure(assemble(space, {leaf.path: 0 for leaf in env.observation_leaves}))
        seen = structure, env.observation_leaves, env.num_envs and min(env.num_envs, 2)
        known = memo["seen"] = space, seen
    return known[1]


def _made(env: Env, source: Source, way: str, exploration_type: ExplorationType) -> EmbeddedPolicy | LoweringError:
    """Do what `_embedded` does, without a cache."""
    kind: type[EmbeddedPolicy] = LoweredPolicy if way == "lowered" else CallbackPolicy
    single = env.num_envs is None and isinstance(source, TensorDictPolicy)
    try:
        _check_place(source, way)
        rows = source.lanes if isinstance(source, TorchPopulation) else min(env.num_envs or 1, _MOST_ROWS)
        given = example(env.observation_space, env.observation_leaves, rows)
        return kind(source, given, exploration_type, single=single)
    except LoweringError as error:
        return error.with_traceback(None)


def complete(env: Env, policy: Source) -> None:
    """Make the parameters of lazy layers, such as `torch.nn.LazyLinear`, by one call of the user's module.

    They are drawn from Torch's global generator, as by a call of the user's own. The module is in evaluation mode.
    """
    module = policy.module
    if not isinstance(module, nn.Module) or not has_lazy_layers(module):
        return
    single = env.num_envs is None and isinstance(policy, TensorDictPolicy)
    observation = example(env.observation_space, env.observation_leaves, 1)
    observation = moved(observation, policy.run_device or torch.device("cpu"))
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


def _check_place(source: TorchBacked, way: str) -> None:
    """Raise LoweringError for a policy that runs on another kind of device than JAX."""
    if isinstance(source.head, FromDistribution):
        raise LoweringError(f"the head {source.head.name} samples in Torch: use another head, or funcollect.jax_policy")
    place = default_device_type()
    run_device = source.run_device
    if way == "called back" and place != "cpu":
        raise LoweringError("a loop on a GPU would wait for Python at each step: leave compile out, and it crosses")
    if run_device is None or (way == "lowered" and source.device is None and run_device.type == "cpu"):
        return
    if run_device.type != place:
        raise LoweringError(f"the policy runs on {run_device.type}, JAX on {place}: move the module there")


def enter_loop(policy: EmbeddedPolicy, state: CollectorState) -> tuple[TorchPolicyState, CollectorState]:
    """Return the Torch policy's state, and the state that a loop starts from."""
    check_state_kind(state.policy_state, TorchPolicyState)
    before = policy.begun(state.policy_state)
    return before, state.replace(policy_state=policy.enter(before, state.num_lanes))


def leave_loop(policy: EmbeddedPolicy, after: CollectorState, before: TorchPolicyState) -> CollectorState:
    """Return the state after a loop, with the Torch policy's state, which was `before` at the beginning."""
    if before.recurrent is None:
        return after.replace(policy_state=before)
    step: Any = after.step
    fresh = (step if isinstance(step, Tensor) else torch_view(step)) == 0
    return after.replace(policy_state=policy.leave(after.policy_state, before, fresh))
