"""The functional core: each function takes a state and returns the next one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, get_args

import torch
from tensordict import TensorDict
from torch import Tensor

from funcollect.arguments import check_call, check_kind, check_optional_positive
from funcollect.core.checks import check_state, check_untraced
from funcollect.core.evaluate_actions import remember_spaces
from funcollect.core.exploration import NO_VALUES, Value, exploration_values, with_values
from funcollect.core.loops import Loop, RunsRollouts, captured, crossing, device, fused, host, tensor
from funcollect.core.request import Request
from funcollect.core.routes import complete, of_lanes, route_of, run_in_jax
from funcollect.core.simulators.simulation import SimulatorHandle
from funcollect.core.state import Array, CollectorState, all_lanes
from funcollect.interop.memory import memory_for
from funcollect.keys import key_from_seed
from funcollect.messages import kind_of, shown
from funcollect.policies.base import check_policy
from funcollect.policies.normalized import Normalized, check_statistics
from funcollect.policies.population import Population
from funcollect.policies.torch_in_jax import LoweredPolicy, Source
from funcollect.policies.torch_modules.torch_backed import TorchBacked
from funcollect.protocols import Backend, Env, Policy, is_env
from funcollect.specs import ExplorationType
from funcollect.tree import without_time

_CALL = "what funcollect.Policy has: (params, policy_state, observation, noise, spec, exploration)"
# By `Route.loop` for rollouts, and by the environment's backend for functions that need no policy's route.
LOOPS: dict[str, Loop] = {
    "host": host,
    "torch": tensor,
    "captured": captured,
    "jax": fused,
    "fused": fused,
    "crossing": crossing,
    "device": device,
}


def init(env: Env, policy: Policy, *, seed: int | None) -> CollectorState:
    """Build and reset the environments, and return the first state of a collection.

    Args:
        env: an environment (see `make_env`).
        policy: a policy (see `torch_policy`, `jax_policy`, `random_policy`).
        seed: an int in [0, 2**64), from which all randomness follows. None draws one; ``state.seed`` holds it.

    Raises:
        TypeError: if `env` is no environment or `policy` no policy.
        ValueError: for a seed out of range, or a policy that does not suit the environment's spaces.
        EnvError: if an environment does not reset.

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
    """Do what `init` does for a checked pair, for the lanes ``first_lane … first_lane + P - 1`` of `total_lanes`."""
    check_untraced("init", seed)
    if isinstance(policy, Population):
        policy = policy.of_lanes(range(first_lane, first_lane + (env.num_envs or 1)), total_lanes)
    with memory_for(lambda: f"the first state of {env.num_envs or 1:,} environments"):
        return LOOPS[env.backend].init(env, policy, key_from_seed(seed), first_lane, total_lanes)


def check_pair(env: Any, policy: Any) -> None:
    """Raise unless `env` is an environment, `policy` is a policy, and they suit each other."""
    if not is_env(env):
        swapped = " (the policy is one: env comes first)" if is_env(policy) else ""
        raise TypeError(f"env is {kind_of(env)}, expected an Env{swapped}: make one with funcollect.make_env")
    check_policy(policy)
    check_call(f"{type(policy).__name__}.__call__", policy.__call__, _CALL, 6)
    if isinstance(policy, Source):
        complete(env, policy)
    if env.backend not in (backends := get_args(Backend)):
        raise TypeError(f"env has the backend {env.backend!r}, expected one of {sorted(backends)}")
    if env.backend in ("torch", "jax"):
        check_optional_positive(f"max_episode_steps of {env}", env.max_episode_steps)
    policy.check(env.action_spec)
    if isinstance(policy, Normalized):
        check_statistics(policy, env.observation_leaves)
    remember_spaces(policy, env.observation_space, env.observation_leaves, env.action_spec)
    if isinstance(policy, TorchBacked) and policy.compiler is not None:
        route_of(env, policy)  # raises now if the route that `compile` demands is impossible


def rollout(
    env: Env,
    policy: Policy,
    state: CollectorState[Array],
    length: int,
    *,
    params: Any = None,
    exploration_type: ExplorationType = ExplorationType.RANDOM,
    exploration: Mapping[str, Value] = NO_VALUES,
    max_frames_per_traj: int | None = None,
) -> tuple[CollectorState[Array], TensorDict]:
    """Run `length` steps of every lane, and reset each lane whose episode ends.

    Args:
        env: the environment that `state` was made with.
        policy: the policy that `state` was made with.
        state: the state to continue from. Over simulators a state can be used once; see `fork`.
        length: the number of steps, T.
        params: the parameters to act with; None for the policy's own current ones.
        exploration_type: whether the policy samples or acts deterministically.
        exploration: other values for the numbers in `Policy.exploration`, such as ``{"epsilon": 0.1}``; the batch holds
            them. A function, such as an annealing schedule, is called with the number of frames of all lanes so far.
        max_frames_per_traj: steps after which a trajectory is truncated; None for no limit.

    Returns:
        The next state, and the batch: a locked TensorDict [P, T], or [T] for an environment without a batch
        dimension; its keys are listed under "What is in a batch".

    Raises:
        StaleStateError: if the state has been superseded by a later one.
        EnvError: if an environment raises, or returns other shapes or dtypes than its spaces have; the message names
            the lane. Whether numbers are within the bounds of a space is checked by `funcollect.testing.check_env`.
        PolicyError: for an action of the wrong shape or dtype, or NaN.

    >>> import funcollect as fc
    >>> env = fc.make_env("CartPole-v1", num_envs=2)
    >>> policy = fc.random_policy(env)
    >>> state = fc.init(env, policy, seed=0)
    >>> state, batch = fc.rollout(env, policy, state, 16)
    >>> batch["observation"].shape, batch["next", "reward"].shape
    (torch.Size([2, 16, 4]), torch.Size([2, 16, 1]))
    """
    request = Request(
        length=length,
        params=params,
        exploration_type=exploration_type,
        exploration=exploration,
        max_frames_per_traj=max_frames_per_traj,
    )
    return run(env, policy, state, request)


def run(
    env: Env,
    policy: Policy,
    state: CollectorState[Array],
    request: Request,
    function: str = "rollout",
    loops: Mapping[str, RunsRollouts] = LOOPS,
) -> tuple[CollectorState[Array], TensorDict]:
    """Do what `rollout` does, with every option, by one of `loops`.

    `function` is the name of the function that the user called.
    """
    check_policy(policy)
    check_state(env, state, function)
    check_untraced(function, policy.params if policy.backend == "jax" and request.params is None else request.params)
    policy = of_lanes(env, policy, state)
    values = exploration_values(policy, request.exploration, lambda: state.steps_made * state.total_lanes)
    if values is not request.exploration:
        request = replace(request, exploration=values)
    route = route_of(env, policy, request.exploration_type)
    run_loop, inner = loops[route.loop].run, route.policy
    with memory_for(lambda: f"a rollout of {request.length:,} steps of {state.num_lanes:,} environments"):
        if inner is policy or not isinstance(inner, LoweredPolicy):
            after, batch = run_loop(env, inner, state, request)
        else:
            after, batch = run_in_jax(inner, state, lambda entered: run_loop(env, inner, entered, request))
    return after, with_values(batch, values)


def step(
    env: Env,
    policy: Policy,
    state: CollectorState[Array],
    *,
    params: Any = None,
    exploration_type: ExplorationType = ExplorationType.RANDOM,
    exploration: Mapping[str, Value] = NO_VALUES,
) -> tuple[CollectorState[Array], TensorDict]:
    """Run one step of every lane: a rollout of length 1 without the time dimension, with its arguments and errors.

    >>> import funcollect as fc
    >>> env = fc.make_env("CartPole-v1", num_envs=2)
    >>> policy = fc.random_policy(env)
    >>> state, batch = fc.step(env, policy, fc.init(env, policy, seed=0))
    >>> batch["observation"].shape
    torch.Size([2, 4])
    """
    request = Request(length=1, params=params, exploration_type=exploration_type, exploration=exploration)
    state, batch = run(env, policy, state, request, "step")
    return state, without_time(batch).lock_()


def reset(env: Env, state: CollectorState[Array], mask: Tensor | None = None) -> CollectorState[Array]:
    """Return a state in which the lanes of `mask`, or all lanes, begin another episode under a new trajectory id.

    Args:
        env: the environment that `state` was made with.
        state: the state to continue from. Over simulators a state can be used once; see `fork` and `recover`.
        mask: [P] bool; None for all lanes.

    Raises:
        ValueError: for a mask of another shape or dtype.
        StaleStateError: if the state has been superseded by a later one.

    >>> import funcollect as fc
    >>> env = fc.make_env("CartPole-v1", num_envs=2)
    >>> policy = fc.random_policy(env)
    >>> state, _ = fc.rollout(env, policy, fc.init(env, policy, seed=0), 4)
    >>> state = fc.reset(env, state, torch.tensor([True, False]))
    >>> state.step.tolist(), state.traj_ids.tolist()
    ([0, 4], [2, 1])
    """
    check_state(env, state, "reset")
    check_untraced("reset", mask)
    with memory_for(lambda: f"a reset of {state.num_lanes:,} environments"):
        return LOOPS[env.backend].reset(env, state, _checked_mask(mask, state))


def recover(env: Env, state: CollectorState[Array]) -> CollectorState[Array]:
    """Return a state in which all lanes begin another episode, also from a stale state, such as after an exception.

    Over simulators, trajectory ids continue from the highest ones used, whichever state is given. States over JAX and
    Torch environments are values and never stale: for them this is `reset`.

    Args:
        env: the environment that `state` was made with.
        state: any state of the run.

    Raises:
        EnvError: if an environment raises as it is reset.
        TypeError: for something else than an environment and a state.

    >>> import funcollect as fc
    >>> env = fc.make_env("CartPole-v1")
    >>> policy = fc.random_policy(env)
    >>> old = fc.init(env, policy, seed=0)
    >>> state, batch = fc.rollout(env, policy, old, 8, max_frames_per_traj=4)
    >>> recovered = fc.recover(env, old)
    >>> state.traj_ids.tolist(), recovered.traj_ids.tolist()
    ([2], [3])
    """
    check_state(env, state, "reset", live=False)
    with memory_for(lambda: f"a reset of {state.num_lanes:,} environments"):
        return LOOPS[env.backend].recover(env, state)


def _checked_mask(mask: Tensor | None, state: CollectorState) -> Tensor:
    every = all_lanes(state)
    if mask is None:
        return every
    try:
        mask = torch.as_tensor(mask, device=every.device)
        if (mask.dtype, mask.shape) == (every.dtype, every.shape):
            return mask
        given = f"{mask.dtype} {tuple(mask.shape)}"
    except (TypeError, ValueError, RuntimeError):  # such as a ragged list
        given = shown(mask)
    raise ValueError(f"mask is {given}, expected bool {tuple(every.shape)}: pass one flag per lane")


def fork(env: Env, state: CollectorState[Array]) -> CollectorState[Array]:
    """Return an independent copy of a state. `state` can still be used.

    Over simulators the environment is rebuilt and the episode is replayed from its seed and actions. Simulators that
    support it (ALE) are copied by a snapshot instead.

    Raises:
        ReplayError: for an environment that supports neither (EnvPool, TorchRL's, ``replayable=False``), for an episode
            with more than 128 MiB of actions of all lanes, and if the new simulator does not return the same
            observation.
        EnvError: if an environment raises during the replay. Lanes of a vector environment are stepped together, also
            those whose episode has not begun, so one that refuses illegal actions may raise.
        StaleStateError: if the state has been superseded by a later one.
        ValueError: for an environment instance that cannot be rebuilt.

    >>> import funcollect as fc
    >>> env = fc.make_env("CartPole-v1", num_envs=2)
    >>> policy = fc.random_policy(env)
    >>> state, _ = fc.rollout(env, policy, fc.init(env, policy, seed=0), 4)
    >>> copy = fc.fork(env, state)
    >>> (_, one), (_, two) = fc.rollout(env, policy, state, 4), fc.rollout(env, policy, copy, 4)
    >>> bool((one["observation"] == two["observation"]).all())
    True
    """
    check_state(env, state, "fork")
    with memory_for(lambda: f"a copy of the state of {state.num_lanes:,} environments"):
        return LOOPS[env.backend].fork(env, state)


def close(state: CollectorState) -> None:
    """Free the simulators of a state now, rather than when Python collects it. Does nothing for other states.

    >>> import funcollect as fc
    >>> env = fc.make_env("CartPole-v1", num_envs=2)
    >>> policy = fc.random_policy(env)
    >>> state = fc.init(env, policy, seed=0)
    >>> fc.close(state)
    """
    check_kind("state", state, CollectorState, "pass the state that rollout returned")
    if isinstance(state.env_state, SimulatorHandle):
        state.env_state.simulation.close()
