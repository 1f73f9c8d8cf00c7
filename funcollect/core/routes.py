"""Which loop drives an environment and a policy, and as what the policy runs in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

import optree
from tensordict import TensorDict
from torch import Tensor

from funcollect.arguments import check_kind
from funcollect.core.request import Request, check_state_kind
from funcollect.core.state import CollectorState
from funcollect.errors import LoweringError
from funcollect.interop.bridge import torch_view
from funcollect.interop.jax_setup import import_jax
from funcollect.policies.jax_functions.traced_policy import is_traceable
from funcollect.policies.tensordict_modules.tensordict_policy import TensorDictPolicy
from funcollect.policies.torch_backed import TorchBacked, TorchPolicyState
from funcollect.policies.torch_in_jax.callback_policy import CallbackPolicy, callback_policy
from funcollect.policies.torch_in_jax.embedded_policy import EmbeddedPolicy, Source, example
from funcollect.policies.torch_in_jax.lowered_policy import LoweredPolicy, lowered_policy
from funcollect.policies.torch_modules.settings import NO_SETTINGS
from funcollect.policies.torch_modules.torch_policy import TorchPolicy
from funcollect.protocols import Env, Policy
from funcollect.specs import ExplorationType, assemble

_MOST_SETTINGS = 4  # of a module's attributes for which it is lowered; one that changes them more often is called back

_RESTLESS = LoweringError(
    f"its attributes were seen with {_MOST_SETTINGS} different values, and each would compile again: keep what changes "
    "in buffers"
)
Make = Callable[..., EmbeddedPolicy]


@dataclass(frozen=True)
class Route:
    """A way to run a policy in an environment.

    Attributes:
        loop: ``"host"``, ``"torch"``, ``"fused"`` or ``"crossing"``.
        policy: what the loop runs: the policy itself, or a JAX policy in its place.
        refusals: what was tried before, and why it did not do.
    """

    loop: str
    policy: Policy
    refusals: tuple[str, ...] = ()


def route_of(env: Env, policy: Policy, exploration_type: ExplorationType = ExplorationType.RANDOM) -> Route:
    """The way for this pair; found once for each kind of space and each setting of the module.

    Raises:
        LoweringError: for a policy that demands a way (``compile=``) which is not to be had.
    """
    asked = policy.compiler if isinstance(policy, TorchBacked) else None
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


def lower_policy(policy: Policy, env: Env) -> LoweredPolicy:
    """A Torch policy as a JAX policy, its module lowered: for `funcollect.traced`, and for training in JAX.

    Its ``params`` are the module's own as they are when they are read, arrays by dotted name; ``load(params)`` writes
    such arrays into the module. `funcollect.rollout` lowers by itself.

    Args:
        policy: a policy of `torch_policy` or `tensordict_policy`.
        env: an environment, for its observations.

    Raises:
        TypeError: for another policy.
        LoweringError: for a module that cannot be lowered; says what stands in the way and where in the module.

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
    """`lower_policy`, of a TensorDict policy as it acts under an exploration type."""
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


def checked_state(policy_state: Any) -> TorchPolicyState:
    """A Torch policy's state, its generator a copy."""
    check_state_kind(policy_state, TorchPolicyState)
    state: TorchPolicyState = policy_state._replace(generator=policy_state.generator.clone())
    return state


def _found(env: Env, source: Source, asked: str | None, exploration_type: ExplorationType) -> Route:
    """The first way that there is, of all or of the one that is asked for."""
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
    """The policy prepared for one route, or the `LoweringError`. Cached per route and setting."""
    known = source.embedded
    if not isinstance(source, TensorDictPolicy):  # the others draw outside their module
        exploration_type = ExplorationType.RANDOM
    spaces = (optree.tree_structure(_placed(env)), env.observation_leaves, env.num_envs and min(env.num_envs, 2))
    try:
        which = (way, exploration_type, spaces, source.settings if way == "lowered" else NO_SETTINGS)
        if isinstance(callback := known.get(which), CallbackPolicy) and not callback.fits():
            del known[which]
    except LoweringError as error:
        return error
    if which not in known:
        others = [each for each in known if each[:3] == which[:3]]
        known[which] = _made(env, source, way, exploration_type) if len(others) < _MOST_SETTINGS else _RESTLESS
    embedded: EmbeddedPolicy | LoweringError = known[which]
    return embedded


def _placed(env: Env) -> Any:
    return assemble(env.observation_space, {leaf.path: 0 for leaf in env.observation_leaves})


def _made(env: Env, source: Source, way: str, exploration_type: ExplorationType) -> EmbeddedPolicy | LoweringError:
    make: Make = lowered_policy if way == "lowered" else callback_policy
    single = env.num_envs is None and isinstance(source, TensorDictPolicy)
    try:
        _check_place(source, way)
        given = example(env.observation_space, env.observation_leaves, env.num_envs or 1)
        return make(source, given, exploration_type, single=single)
    except LoweringError as error:
        return error.with_traceback(None)


def _check_place(source: TorchBacked, way: str) -> None:
    """Raise LoweringError for a policy that is to run on another kind of device than JAX does."""
    place = {"gpu": "cuda"}.get(import_jax().default_backend(), "cpu")
    run_device = source.run_device
    if way == "called back" and place != "cpu":
        raise LoweringError("a loop on a GPU would wait for Python at each step: it crosses instead")
    if run_device is None or (way == "lowered" and source.device is None and run_device.type == "cpu"):
        return
    if run_device.type != place:
        raise LoweringError(f"the policy runs on {run_device.type}, JAX on {place}: move the module there")


def run_embedded(
    run: Callable[..., tuple[CollectorState, TensorDict]],
    env: Env,
    policy: EmbeddedPolicy,
    state: Any,
    request: Request,
) -> tuple[CollectorState, TensorDict]:
    """One rollout by a loop's `run`, with the policy's state and outputs as Torch has them."""
    before = checked_state(state.policy_state)
    with policy.running(before):
        after, batch = run(env, policy, state.replace(policy_state=policy.enter(before, state.num_lanes)), request)
    return leave_loop(policy, after, before), policy.as_torch(batch)


def leave_loop(policy: EmbeddedPolicy, after: CollectorState, before: TorchPolicyState) -> CollectorState:
    """The state after a loop, its policy's as Torch has it; `before` is what it was."""
    if before.recurrent is None:
        return after.replace(policy_state=before)
    step: Any = after.step
    fresh = (step if isinstance(step, Tensor) else torch_view(step)) == 0
    return after.replace(policy_state=policy.leave(after.policy_state, before, fresh))
