"""The functional core: state in, state out."""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any, get_args

import torch
from tensordict import TensorDict
from torch import Tensor

from funcollect.core import traced
from funcollect.core.loops import crossing, fused, host, tensor
from funcollect.core.request import Request
from funcollect.core.routes import route_of, run_embedded
from funcollect.core.simulators.forking import fork_simulation
from funcollect.core.simulators.simulation import Simulation, SimulatorHandle
from funcollect.core.state import CollectorState, check_origin, fresh_counters, origin_of, policy_start
from funcollect.core.traced_step.checks import check_live, check_one_run, check_untraced
from funcollect.envs.jax_envs.jax_env import JaxEnv, JaxEnvState
from funcollect.interop.jax_setup import compiled
from funcollect.keys import Key, key_from_seed
from funcollect.messages import shown
from funcollect.policies.random_policy import RandomPolicy
from funcollect.policies.torch_in_jax.embedded_policy import EmbeddedPolicy
from funcollect.specs import Backend, Env, ExplorationType, Policy
from funcollect.tree import select

_LOOPS: dict[str, ModuleType] = {"host": host, "torch": tensor, "fused": fused, "crossing": crossing}


def init(env: Env, policy: Policy, *, seed: int | None) -> CollectorState:
    """The first state of a collection: environments built and reset, policy state made.

    Args:
        env: an environment (see `make_env`).
        policy: a policy (see `torch_policy`, `jax_policy`, `random_policy`).
        seed: an int in [0, 2**64), from which all randomness follows; None draws one, which ``state.seed`` tells.

    Raises:
        TypeError: for something that is no environment or no policy.
        ValueError: for a seed out of range, or a policy that does not suit the environment's spaces.
        EnvError: where an environment does not reset.

    >>> import funcollect as fc
    >>> env = fc.make_env("CartPole-v1", num_envs=2)
    >>> policy = fc.random_policy(env)
    >>> state = fc.init(env, policy, seed=0)
    >>> state, batch = fc.rollout(env, policy, state, 16)
    >>> batch.batch_size, state.frames
    (torch.Size([2, 16]), 32)
    """
    check_pair(env, policy)
    return init_lanes(env, policy, seed=seed, first_lane=0, total_lanes=env.num_envs or 1)


def init_lanes(env: Env, policy: Policy, *, seed: int | None, first_lane: int, total_lanes: int) -> CollectorState:
    """`init`, for a checked pair, of the lanes ``first_lane … first_lane + P - 1`` of `total_lanes`."""
    check_untraced("init", seed)
    key = key_from_seed(seed)
    count = env.num_envs or 1
    if env.backend == "jax":
        return _init_jax(env, policy, key, first_lane, total_lanes)  # type: ignore[arg-type]
    policy_state = policy_start(policy, key, count, first_lane)
    lane = torch.arange(first_lane, first_lane + count)
    counters = fresh_counters(count, getattr(env, "device", "cpu"))
    if env.backend == "host":
        simulation = Simulation(env, key, lane)  # type: ignore[arg-type]
        try:
            simulation.restart(range(count))
        except BaseException:
            simulation.close()
            raise
        env_state: Any = simulation.release()
        observation = simulation.observation()
    else:
        lane = lane.to(counters["episode"].device)
        env_state = env.reset(key, lane, counters["episode"])  # type: ignore[attr-defined]
        observation = tensor.root_of(env, env_state)  # type: ignore[arg-type]
        tensor.check_root(env, observation, count)  # type: ignore[arg-type]
    return CollectorState(
        env_state=env_state,
        observation=observation,
        policy_state=policy_state,
        key=key,
        lane=lane,
        total_lanes=total_lanes,
        origin=origin_of(env),
        **counters,
    )


def _init_jax(env: JaxEnv, policy: Policy, key: Key, first_lane: int, total_lanes: int) -> CollectorState:
    """The policy's state is made outside: it may hold tensors, and reads the key's number."""

    def first(key: Any, lane: Any) -> CollectorState:
        return traced.init(env, RandomPolicy(env.action_spec), None, key=key, first_lane=lane, total_lanes=total_lanes)

    state: CollectorState = compiled(env, ("init", total_lanes), first)(key, first_lane)
    return state.replace(policy_state=policy_start(policy, key, state.num_lanes, first_lane))


def check_pair(env: Any, policy: Any) -> None:
    """Raise unless `env` is an environment, `policy` a policy, and the one suits the other."""
    if not isinstance(env, Env):
        swapped = " (the policy is one: env comes first)" if isinstance(policy, Env) else ""
        raise TypeError(f"env is {type(env).__name__}, expected an Env{swapped}: make one with funcollect.make_env")
    check_policy(policy)
    if env.backend not in (backends := get_args(Backend)):
        raise TypeError(f"env has the backend {env.backend!r}, expected one of {sorted(backends)}")
    if taken := {leaf.path[0] for leaf in env.observation_leaves} & set(getattr(policy, "out_names", ())):
        raise ValueError(f"the policy's outputs {sorted(taken)} collide with the environment's keys: rename them")
    if hasattr(policy, "check"):
        policy.check(env.action_spec)
    if getattr(policy, "compiler", None) is not None:
        route_of(env, policy)  # a way that is demanded is there, or an error here


def _kind(given: Any) -> str:
    return f"the class {given.__name__}" if isinstance(given, type) else type(given).__name__


def check_policy(policy: Any) -> None:
    """Raise TypeError unless `policy` is a policy."""
    if isinstance(policy, type) or not all(hasattr(policy, name) for name in ("backend", "noise", "init", "prepare")):
        raise TypeError(
            f"policy is {_kind(policy)}, expected a Policy: wrap a module with funcollect.torch_policy, "
            "a JAX function with funcollect.jax_policy"
        )


def rollout(
    env: Env,
    policy: Policy,
    state: CollectorState,
    length: int,
    *,
    params: Any = None,
    exploration_type: ExplorationType = ExplorationType.RANDOM,
    max_frames_per_traj: int | None = None,
) -> tuple[CollectorState, TensorDict]:
    """`length` steps of every lane, each lane reset where its episode ends.

    Args:
        env: the environment with which `state` was made.
        policy: the policy with which `state` was made.
        state: where to go on. Over real simulators a state is good for one use; see `fork`.
        length: T.
        params: parameters to act with; None for the policy's own, as they are now.
        exploration_type: whether heads sample or act deterministically.
        max_frames_per_traj: steps after which a trajectory is truncated; None for no limit.

    Returns:
        The next state, and the batch: a locked TensorDict [P, T], or [T] for an environment without a batch
        dimension, with the keys of the README's table.

    Raises:
        StaleStateError: if the state has been superseded by a later one.
        EnvError: for an environment that raises or breaks its own spaces; names the lane.
        PolicyError: for an action of the wrong shape or dtype, or NaN.
    """
    request = Request(
        length=length, params=params, exploration_type=exploration_type, max_frames_per_traj=max_frames_per_traj
    )
    return run(env, policy, state, request)


def run(
    env: Env, policy: Policy, state: CollectorState, request: Request, function: str = "rollout"
) -> tuple[CollectorState, TensorDict]:
    """`rollout` with every option; `function` is what the user has called."""
    check_policy(policy)
    check_state(env, state, function)
    check_untraced(function, policy.params if policy.backend == "jax" and request.params is None else request.params)
    route = route_of(env, policy, request.exploration_type)
    loop = _LOOPS[route.loop].run
    if isinstance(route.policy, EmbeddedPolicy) and route.policy is not policy:
        return run_embedded(loop, env, route.policy, state, request)
    result: tuple[CollectorState, TensorDict] = loop(env, route.policy, state, request)
    return result


def step(
    env: Env,
    policy: Policy,
    state: CollectorState,
    *,
    params: Any = None,
    exploration_type: ExplorationType = ExplorationType.RANDOM,
) -> tuple[CollectorState, TensorDict]:
    """One step of every lane: a rollout of length 1 without its time dimension. Arguments and errors as there."""
    request = Request(length=1, params=params, exploration_type=exploration_type)
    state, batch = run(env, policy, state, request, "step")
    return state, batch[..., 0].lock_()


def reset(env: Env, state: CollectorState, mask: Tensor | None = None) -> CollectorState:
    """A state in which the lanes of `mask`, or all of them, begin another episode under a new trajectory id.

    Args:
        env: the environment with which `state` was made.
        state: where to go on. Over real simulators a state is good for one use; see `fork` and `recover`.
        mask: [P] bool; None for all lanes.

    Raises:
        ValueError: for a mask of another shape or dtype.
        StaleStateError: if the state has been superseded by a later one.
    """
    return _begin_episodes(env, state, mask)


def recover(env: Env, state: CollectorState) -> CollectorState:
    """A state in which all lanes begin another episode, also from a stale state: the way back after an exception.

    Over real simulators, trajectory ids go on from the highest ones that were used, whichever state is given. States
    over JAX and Torch environments are values and never stale: for them this is `reset`.

    Args:
        env: the environment with which `state` was made.
        state: any state of the run.

    >>> import funcollect as fc
    >>> env = fc.make_env("CartPole-v1")
    >>> policy = fc.random_policy(env)
    >>> old = fc.init(env, policy, seed=0)
    >>> state, batch = fc.rollout(env, policy, old, 8, max_frames_per_traj=4)
    >>> recovered = fc.recover(env, old)
    >>> state.traj_ids.tolist(), recovered.traj_ids.tolist()
    ([2], [3])
    """
    return _begin_episodes(env, state, None, stale=True)


def _begin_episodes(env: Env, state: CollectorState, mask: Tensor | None, *, stale: bool = False) -> CollectorState:
    check_state(env, state, "reset")
    check_untraced("reset", mask)
    lanes = _checked_mask(mask, state)
    if env.backend == "host":
        return _reset_host(state, lanes, stale=stale)
    if env.backend == "jax":
        return _reset_jax(env, state, lanes)  # type: ignore[arg-type]
    episode = state.episode + lanes
    fresh = env.reset(state.key, state.lane, episode)  # type: ignore[attr-defined]
    root = tensor.root_of(env, fresh)  # type: ignore[arg-type]
    return state.replace(
        env_state=select(lanes, fresh, state.env_state),
        observation=select(lanes, root, dict(state.observation)),
        **_reset_counters(state, lanes, episode),
    )


def _reset_jax(env: JaxEnv, state: CollectorState, lanes: Tensor) -> CollectorState:
    restart = compiled(env, "reset", partial(traced.reset, env), place=fused.place_of(state))
    after: CollectorState = restart(state.replace(policy_state=None), lanes.numpy())
    return after.replace(policy_state=state.policy_state)


def _checked_mask(mask: Tensor | None, state: CollectorState) -> Tensor:
    device = state.lane.device if isinstance(state.lane, Tensor) else "cpu"
    if mask is None:
        return torch.ones(state.num_lanes, dtype=torch.bool, device=device)
    try:
        mask = torch.as_tensor(mask, device=device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"mask is {shown(mask)}, expected bool {tuple(state.lane.shape)}: one flag per lane"
        ) from error
    if mask.dtype != torch.bool or mask.shape != state.lane.shape:
        raise ValueError(
            f"mask is {mask.dtype} {tuple(mask.shape)}, expected bool {tuple(state.lane.shape)}: pass one flag per lane"
        )
    return mask


def _reset_counters(state: CollectorState, lanes: Tensor, episode: Tensor) -> dict[str, Tensor]:
    wide = lanes.reshape(-1, *[1] * (state.returns.ndim - 1))
    return {
        "episode": episode,
        "step": torch.where(lanes, 0, state.step),
        "returns": torch.where(wide, 0.0, state.returns),
        "terminated": state.terminated & ~lanes,
        "truncated": state.truncated & ~lanes,
    }


def _reset_host(state: CollectorState, lanes: Tensor, *, stale: bool) -> CollectorState:
    simulation: Simulation = state.env_state.claim(stale=stale)
    simulation.simulators.rows.set(state.observation)
    simulation.restart(lanes.nonzero()[:, 0].tolist())
    simulation.action_log.ages = torch.where(lanes, 0, simulation.action_log.ages)
    return state.replace(
        env_state=simulation.release(),
        observation=simulation.observation(),
        steps=max(simulation.steps, state.steps),
        **_reset_counters(state, lanes, torch.tensor(simulation.episodes)),
    )


def fork(env: Env, state: CollectorState) -> CollectorState:
    """An independent copy of a state, which goes its own way from here; `state` stays good.

    Over real simulators the environment is rebuilt, and the episode replayed from its seed and actions, or the whole
    state of the simulator put into it where it gives one (ALE).

    Raises:
        ReplayError: for an environment that allows neither (EnvPool, ALE in processes of its own), and where the
            new simulator does not show the same observation.
        StaleStateError: if the state has been superseded by a later one.
        ValueError: for an environment instance that cannot be rebuilt.
    """
    check_state(env, state, "fork")
    if env.backend != "host":
        return state
    handle: SimulatorHandle = state.env_state
    handle.check()
    return state.replace(env_state=fork_simulation(handle.simulation, state))


def close(state: CollectorState) -> None:
    """Free the simulators behind a state now, rather than when it is collected. Does nothing for values."""
    if not isinstance(state, CollectorState):
        raise TypeError(f"state is {type(state).__name__}, expected a CollectorState: pass what rollout returned")
    if isinstance(state.env_state, SimulatorHandle):
        state.env_state.simulation.close()


def check_state(env: Env, state: CollectorState, function: str) -> None:
    """Raise unless `state` is a state of `env`."""
    if not isinstance(state, CollectorState):
        raise TypeError(
            f"state is {type(state).__name__}, expected a CollectorState: pass what init or rollout returned (after "
            "env and policy)"
        )
    if not hasattr(env, "observation_leaves"):
        raise TypeError(f"env is {type(env).__name__}, expected an Env: pass the env that the state was made with")
    check_untraced(function, state.lane)
    if isinstance(state.env_state, JaxEnvState):
        check_one_run(state)
        check_live(state)
    if state.num_lanes != (env.num_envs or 1):
        raise ValueError(f"the state has {state.num_lanes} lanes, {env!r} has {env.num_envs or 1}: pass its own env")
    check_origin(env, state)
