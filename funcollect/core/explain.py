"""A description of how an environment and a policy will run together, and why."""

from __future__ import annotations

from dataclasses import dataclass, fields

from funcollect.core.api import check_pair
from funcollect.core.loops.blocks import MOST_STEPS
from funcollect.core.loops.tensor import STEPS
from funcollect.core.request import head_of
from funcollect.core.routes import Route, route_of
from funcollect.envs.host.host_env import seeding_of, statistics_of
from funcollect.faulty_fusions import avoid_faulty_fusions
from funcollect.interop.jax_setup import dispatch_note, import_jax
from funcollect.policies.torch_in_jax import LoweredPolicy
from funcollect.policies.torch_modules.torch_backed import TorchBacked
from funcollect.protocols import Env, Policy

_NOT_BY_CUT = "data depend on every step and reset since, not on how a run is cut into batches"
_SEEDING = {
    "episode": "each episode starts from a seed of its own, so data do not depend on how a run is cut into batches",
    "lane": f"each lane is seeded once, and its generator continues from episode to episode: {_NOT_BY_CUT}",
    "run": f"all lanes are seeded together, once, and their generators continue from episode to episode: {_NOT_BY_CUT}",
}
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
    "device": "the simulators hold all lanes as tensors on one device, and reset them themselves",
}
_IN_TORCH = "the policy runs in Torch: each step is one call of the policy and one compiled call of the environment"
_ON_STREAMS = (
    "at every step each framework's stream waits for the other's, and the host for neither, unless starts of episodes "
    "are costly: then it reads whether a lane needs one"
)
_IN_BLOCKS = (
    f"up to {MOST_STEPS} steps are one compiled program, which adds no branch for which the host would wait; a "
    "collector lets it use the memory of its last state again"
)
_OWN_COLUMNS = "the loop writes the batch's own columns, which Torch takes over by DLPack"


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
        shown = [field.name for field in fields(self) if getattr(self, field.name)]
        width = max(map(len, shown))
        return "\n".join(f"{name:<{width}}  {getattr(self, name)}" for name in shown)

    @property
    def workers(self) -> str:
        """Removed; AttributeError."""
        raise AttributeError("a Plan has no estimate of workers any more: compare funcollect.profile with and without")


def explain(env: Env, policy: Policy) -> Plan:
    """Report which loop runs for this pair and why, what is copied, and how it is seeded.

    Raises:
        TypeError: if `env` is no environment or `policy` no policy.
        ValueError: for a policy that does not suit the environment's spaces.

    >>> import funcollect as fc
    >>> env = fc.make_env("CartPole-v1", num_envs=8)
    >>> explain(env, fc.random_policy(env)).loop
    'host'
    """
    check_pair(env, policy)
    route = route_of(env, policy)
    lanes = "one environment without a batch dimension" if env.num_envs is None else f"a batch of {env.num_envs}"
    head = f" with the head {own.name}" if (own := head_of(policy)) else ""
    compiler = f", compiled by {policy.compiler}" if isinstance(policy, TorchBacked) and policy.compiler else ""
    return Plan(
        env=f"{env!r}, {lanes}",
        policy=f"{type(policy).__name__}{head} ({policy.backend}{compiler})",
        loop=route.loop,
        why="; ".join((*_why(env, route), *route.refusals)),
        copies=_copies(env, route),
        seeding=_seeding(env),
        noise=_noise(env, policy, route),
        forking=_forking(env),
        caution=avoid_faulty_fusions() if _in_jax(env, route) else "",
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
    return _FORKING[env.forking]


def _seeding(env: Env) -> str:
    seeding = seeding_of(env)
    if env.backend == "jax" and env.starts == "cached":
        return "episode: all episodes of a lane begin as its first one, whose key is its own (starts='cached')"
    if kept := statistics_of(env):
        return (
            f"{seeding}, but {kept}: data depend on every step since init, not on how a run is cut into batches; each "
            "worker has its own statistics, and new simulators (init, a resumed collector) begin without any"
        )
    return f"{seeding}: {_SEEDING[seeding]}"


def _in_jax(env: Env, route: Route) -> bool:
    return "jax" in (env.backend, route.policy.backend)


def _why(env: Env, route: Route) -> list[str]:
    """Return why this loop runs: where the environment lives, and how the policy is called."""
    on_cpu = not _in_jax(env, route) or import_jax().default_backend() == "cpu"
    parts = [_PLACES[env.backend]]
    if isinstance(route.policy, LoweredPolicy):
        parts.append("the policy's module is lowered to one JAX function (its torch.export graph in jax.numpy)")
    if route.loop == "captured":
        parts.append(f"policy, environment and recording are CUDA graphs of {STEPS} steps, one launch each")
    elif route.loop == "crossing":
        parts += [_IN_TORCH, dispatch_note() if on_cpu else _ON_STREAMS]
    elif route.loop == "fused":
        parts.append("all steps are one compiled loop" if on_cpu else _IN_BLOCKS)
    elif route.policy.backend == "torch":
        parts.append("the policy is one call per step for all lanes")
    else:
        parts += ["the policy is one jitted call per step", dispatch_note()]
    return parts


def _copies(env: Env, route: Route) -> str:
    """Describe what is copied on this route, and when."""
    policy, once = route.policy, "each observation once, into the batch"
    if isinstance(policy, LoweredPolicy):
        columns = _OWN_COLUMNS if route.loop == "fused" else once
        return f"parameters and buffers into JAX's layout, at every rollout; {columns}"
    if route.loop == "fused":
        return f"nothing: {_OWN_COLUMNS}"
    if route.loop == "captured":
        return f"parameters, buffers and random numbers into each graph of {STEPS} steps, its columns out of it"
    crossing = "each observation into the columns, and to where the policy reads it; each action to the environment"
    parts = [crossing if route.loop == "crossing" else once]
    place = env.device if env.backend in ("torch", "device") else "cpu"
    run_device, device = (policy.run_device, policy.device) if isinstance(policy, TorchBacked) else (None, None)
    if run_device is not None and str(run_device) != str(place):
        parts.append(f"each observation to {run_device} and each action back, at every step")
    elsewhere = "parameters to the policy's device, at every rollout, if they are elsewhere"
    return "; ".join((*parts, "no parameters" if device is None else elsewhere))
