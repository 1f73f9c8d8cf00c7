"""Decides which loop runs a pair of environment and policy, and in which form the policy runs; `explain` reports it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, get_args

from funcollect.arguments import check_call, check_optional_positive
from funcollect.core.evaluate_actions import remember_spaces
from funcollect.core.loops.blocks import MOST_STEPS
from funcollect.core.loops.tensor import STEPS
from funcollect.core.lowered import complete, is_lowered, lowered
from funcollect.core.request import head_of
from funcollect.core.state import CollectorState
from funcollect.envs.host.host_env import seeding_of, statistics_of
from funcollect.errors import LoweringError
from funcollect.faulty_fusions import avoid_faulty_fusions
from funcollect.interop.cuda_graph import can_capture
from funcollect.interop.jax_setup import dispatch_note, import_jax
from funcollect.messages import kind_of
from funcollect.policies.base import HeadedPolicy, check_policy
from funcollect.policies.by_group import GroupPolicy
from funcollect.policies.by_player import PlayerPolicy
from funcollect.policies.jax_functions.jax_policy import check_sees_all, is_traceable
from funcollect.policies.normalized import Normalized, check_statistics
from funcollect.policies.population import Population
from funcollect.policies.tensordict_modules.tensordict_policy import TensorDictPolicy
from funcollect.policies.torch_in_jax import LoweredPolicy
from funcollect.policies.torch_modules.torch_backed import TorchBacked
from funcollect.policies.torch_modules.torch_policy import TorchPolicy
from funcollect.protocols import Backend, Env, Policy, is_env
from funcollect.specs import ActionSpec, ExplorationType, GroupedSpec

_CALL = "what funcollect.Policy has: (params, policy_state, observation, noise, spec, exploration)"


def check_pair(env: Any, policy: Any) -> None:
    """Raise unless `env` is an environment, `policy` is a policy, and they suit each other."""
    if not is_env(env):
        swapped = " (the policy is one: env comes first)" if is_env(policy) else ""
        raise TypeError(f"env is {kind_of(env)}, expected an Env{swapped}: make one with funcollect.make_env")
    check_policy(policy)
    check_call(f"{type(policy).__name__}.__call__", policy.__call__, _CALL, 6)
    if env.backend not in (backends := get_args(Backend)):
        raise TypeError(f"env has the backend {env.backend!r}, expected one of {sorted(backends)}")
    if env.backend in ("torch", "jax"):
        check_optional_positive(f"max_episode_steps of {env}", env.max_episode_steps)
    if isinstance(policy, HeadedPolicy):
        _check_one_kind(env, env.action_spec)
    policy.check(env.action_spec)
    if env.backend != "jax":
        check_sees_all(policy, repr(env))
    if isinstance(policy, PlayerPolicy):
        policy.check_players(env.observation_space)
    complete(env, policy)
    if isinstance(policy, Normalized):
        check_statistics(policy, env.observation_leaves)
    remember_spaces(policy, env.observation_space, env.observation_leaves, env.action_spec)
    if isinstance(policy, TorchBacked) and policy.compiler is not None:
        route_of(env, policy)  # raises now if the route that `compile` demands is impossible


def _check_one_kind(env: Env, spec: ActionSpec) -> None:
    """Raise ValueError for groups of discrete and of floating actions, of which one policy would choose the numbers."""
    if isinstance(spec, GroupedSpec) and any(map(spec.integers_of, spec.groups)):
        kinds = {name: str(group.action_space) for name, group in spec.groups.items()}
        what = f"{env} has groups with actions of different kinds, {kinds}, expected a policy for each"
        raise ValueError(f"{what}: pass funcollect.by_group({{name: policy, …}})")


class Route(NamedTuple):
    """A way to run a policy in an environment."""

    loop: str  # ``"host"``, ``"torch"``, ``"captured"``, ``"device"``, ``"fused"`` or ``"crossing"``
    policy: Policy  # that the loop runs: the user's, or the lowered one over the same module
    refusals: tuple[str, ...] = ()  # the routes that were rejected, each with the reason


def route_of(env: Env, policy: Policy, exploration_type: ExplorationType = ExplorationType.RANDOM) -> Route:
    """Return the route for this pair; LoweringError for a policy that demands (``compile=``) an impossible one."""
    asked = policy.compiler if isinstance(policy, TorchBacked) else None
    if isinstance(policy, TorchBacked) and asked == "cudagraph":
        if env.backend != "torch" or not can_capture(env.device):
            where = f"runs on {env.device}" if env.backend == "torch" else "is not written in Torch"
            what = f"compile='cudagraph' captures the steps of a Torch environment on a CUDA device, and {env!r}"
            raise LoweringError(f"{what} {where}: make it there (device='cuda'), or leave compile out")
        if (place := policy.run_device) not in (None, env.device):
            raise LoweringError(f"the policy runs on {place}, the environment on {env.device}: move the module")
        return Route("captured", policy)
    if env.backend != "jax":
        if asked != "xla":
            return Route(env.backend, policy)
    elif is_traceable(policy):
        return Route("fused", policy)
    if asked in ("eager", "inductor") or not isinstance(policy, TorchPolicy | TensorDictPolicy | GroupPolicy):
        return Route("crossing", policy)
    try:
        return Route("fused" if env.backend == "jax" else env.backend, lowered(env, policy, exploration_type))
    except LoweringError as error:
        if asked is not None:
            raise
        return Route("crossing", policy, (f"not lowered: {error.with_traceback(None)}",))  # cached, so without frames


def of_lanes(env: Env, policy: Policy, state: CollectorState) -> Policy:
    """Return the policy for the lanes of a state: of populations, only the members that act in these lanes."""
    source = policy.source if isinstance(policy, LoweredPolicy) else policy
    if not (isinstance(source, Population) or (isinstance(source, GroupPolicy) and source.has_populations)):
        return policy
    every, total = state.num_lanes, state.total_lanes
    acting = source.of_lanes(range(total) if every == total else state.lane_ids, total)  # reading ids may wait
    return acting if source is policy else route_of(env, acting).policy


_NOT_BY_CUT = "data depend on every step and reset since, not on how a run is cut into batches"
_SEEDING = {
    "episode": "each episode starts from a seed of its own, so data do not depend on how a run is cut into batches",
    "lane": f"each lane is seeded once, and its generator continues from episode to episode: {_NOT_BY_CUT}",
    "run": f"all lanes are seeded together, once, and their generators continue from episode to episode: {_NOT_BY_CUT}",
}
_IF_FOLLOWED = "if the simulator is a function of its seed and the actions, which funcollect.testing.check_env checks"
_FORKING = {
    "replay": "the environment is rebuilt and the episode replayed",
    "snapshot": "the environment is rebuilt, takes an earlier snapshot of the simulator, and repeats the steps since",
    "none": "impossible: the simulators can neither be replayed from a seed nor give a snapshot",
}
_NOISE = {
    "none": "the policy draws none",
    "unknown": "the policy asks for none; numbers that it draws by itself follow no seed of the run",
    "own": "the policy draws none ahead; Torch's global generator is run from the state's key and first lane, and put "
    "back: the numbers of a lane depend on the lanes beside it",
    "key": "one JAX key per call of the policy, a function of the state's key, the call's first lane and the step",
    "keys": "one JAX key per lane and step, a function of the state's key, the lane and the step",
}
_PLACES = {
    "host": "the environment lives in simulators on the host",
    "torch": "the environment is written in Torch and steps all lanes at once",
    "jax": "the environment is a JAX function",
    "device": "the simulators hold all lanes as tensors on one device",
}
_LOOPS = {  # by `Route.loop`, unless the policy is simply called at each step: how steps are made, what is copied
    "captured": (
        f"policy, environment and recording are CUDA graphs of {STEPS} steps, one launch each",
        f"parameters, buffers and random numbers into each graph of {STEPS} steps, its columns out of it",
    ),
    "crossing": (
        "the policy runs in Torch: each step is one call of the policy and one compiled call of the environment",
        "each observation into the columns, and to where the policy reads it; each action to the environment",
    ),
    "fused": (
        "all steps are one compiled loop",
        "nothing: the loop writes the batch's own columns, which Torch takes over by DLPack",
    ),
}
_ON_ACCELERATORS = {
    "crossing": "at every step each framework's stream waits for the other's, and the host for neither, unless starts "
    "of episodes are costly: then it reads whether a lane needs one",
    "fused": f"up to {MOST_STEPS} steps are one program, which adds no branch for which the host would wait; a "
    "collector lets it use the memory of its last state again",
}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How an environment and a policy run together; `str` shows one line per field.

    Attributes:
        env, policy: the arguments.
        loop, why: the name of the loop that runs, and the reason.
        copies: which data are copied, and when.
        seeding: how the environment is seeded, and what that guarantees.
        noise: where the policy's randomness comes from.
        forking: how `fork` copies a state.
        caution: a fault of the installed jaxlib and its remedy; empty if there is none or JAX is not used.

    >>> import funcollect as fc
    >>> env = fc.make_env("CartPole-v1", num_envs=8)
    >>> plan = fc.explain(env, fc.random_policy(env))
    >>> plan.loop, plan.forking
    ('host', 'the environment is rebuilt and the episode replayed')
    """

    env: str
    policy: str
    loop: str
    why: str
    copies: str
    seeding: str
    noise: str
    forking: str
    caution: str = ""

    def __str__(self) -> str:
        shown = {name: value for name, value in vars(self).items() if value}
        width = max(map(len, shown))
        return "\n".join(f"{name:<{width}}  {value}" for name, value in shown.items())

    @property
    def workers(self) -> str:
        """Removed; AttributeError."""
        raise AttributeError("a Plan has no estimate of workers any more: compare funcollect.profile with and without")


def explain(env: Env, policy: Policy) -> Plan:
    """Report which loop runs for this pair and why, what is copied, and how it is seeded; errors are those of `init`.

    >>> import funcollect as fc
    >>> env = fc.make_env("CartPole-v1", num_envs=8)
    >>> explain(env, fc.random_policy(env)).loop
    'host'
    """
    check_pair(env, policy)
    route = route_of(env, policy)
    lanes = "one environment without a batch dimension" if env.num_envs is None else f"a batch of {env.num_envs}"
    head_name = f" with the head {head.name}" if (head := head_of(policy)) else ""
    compiler = f", compiled by {policy.compiler}" if isinstance(policy, TorchBacked) and policy.compiler else ""
    in_jax = "jax" in (env.backend, route.policy.backend)
    default = "the policy is one call per step for all lanes", "each observation once, into the batch"
    steps, copies = _LOOPS.get(route.loop, default)
    return Plan(
        env=f"{env!r}, {lanes}",
        policy=f"{type(policy).__name__}{head_name} ({policy.backend}{compiler})",
        loop=route.loop,
        why="; ".join([_PLACES[env.backend], *_reasons(route, steps, in_jax), *route.refusals]),
        copies=_copies(env, route, copies),
        seeding=_seeding(env),
        noise=_noise(env, policy, route),
        forking=_forking(env),
        caution=avoid_faulty_fusions() if in_jax else "",
    )


def _noise(env: Env, policy: Policy, route: Route) -> str:
    noise, in_jax = policy.noise(env.action_spec), route.policy.backend == "jax"
    kind: str = noise.kind if noise else "none" if in_jax else "unknown"
    if isinstance(policy, TorchBacked) and not in_jax and kind in ("key", "keys", "unknown"):
        kind = "own"  # distributions of Torch take no keys
    drawn = "drawn inside the loop" if route.loop == "fused" else "drawn ahead for a whole rollout"
    return _NOISE.get(kind, f"{kind} noise, a function of the state's key, the lane and the step, {drawn}")


def _forking(env: Env) -> str:
    if env.backend not in ("host", "device"):
        return "states are values: a fork is the state itself"
    if kept := statistics_of(env):
        return f"impossible: {kept}, which are no part of a state"
    if env.forking == "none" and env.seeding == "episode":
        return "impossible: no actions are kept to replay (replayable=False)"
    return _FORKING["none" if env.forking == "replay" and env.seeding != "episode" else env.forking]


def _seeding(env: Env) -> str:
    seeding = seeding_of(env)
    if env.backend == "jax" and env.starts == "cached":
        return "episode: all episodes of a lane begin as its first one, whose key is its own (starts='cached')"
    if kept := statistics_of(env):
        own = "each worker has its own statistics, and new simulators (init, a resumed collector) begin without any"
        return f"{seeding}, but {kept}: {_NOT_BY_CUT}; {own}"
    followed = "" if env.backend != "host" or seeding == "run" else f", {_IF_FOLLOWED}"
    return f"{seeding}: {_SEEDING[seeding]}{followed}"


def _reasons(route: Route, steps: str, in_jax: bool) -> Iterator[str]:
    if is_lowered(route.policy):
        yield "the policy's module is lowered to one JAX function (its torch.export graph in jax.numpy)"
    yield steps
    if in_jax and import_jax().default_backend() != "cpu" and route.loop in _ON_ACCELERATORS:
        yield _ON_ACCELERATORS[route.loop]
    elif in_jax and route.loop != "fused":
        yield dispatch_note()


def _copies(env: Env, route: Route, copies: str) -> str:
    policy = route.policy
    if is_lowered(policy):
        return f"parameters and buffers into JAX's layout, at every rollout; {copies.removeprefix('nothing: ')}"
    if route.loop in ("fused", "captured"):
        return copies
    parts, place = [copies], env.device if env.backend in ("torch", "device") else "cpu"
    run_device, device = (policy.run_device, policy.device) if isinstance(policy, TorchBacked) else (None, None)
    if run_device is not None and str(run_device) != str(place):
        parts.append(f"each observation to {run_device} and each action back, at every step")
    elsewhere = "parameters to the policy's device, at every rollout, if they are elsewhere"
    return "; ".join((*parts, "no parameters" if device is None else elsewhere))
