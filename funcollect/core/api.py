"""The functional core: each function takes a state and returns the next one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from funcollect.arguments import check_function, check_kind
from funcollect.core.loops import device, host, over_jax, own_pace, tensor
from funcollect.core.lowered import is_lowered, run_in_jax
from funcollect.core.request import NO_VALUES, Request, Value, check_eager, check_state, exploration_values, with_values
from funcollect.core.routes import check_pair as check_pair
from funcollect.core.routes import of_lanes, route_of
from funcollect.core.simulators import SimulatorHandle
from funcollect.core.state import Array, CollectorState
from funcollect.envs.agents import presented
from funcollect.interop.memory import memory_for
from funcollect.keys import key_from_seed
from funcollect.messages import shown
from funcollect.policies.base import check_policy
from funcollect.policies.by_group import GroupPolicy
from funcollect.policies.population import Population
from funcollect.protocols import Env, Policy, SimulatorsOfLanes
from funcollect.specs import ExplorationType, GroupedSpec, TurnSpec

_BACKENDS: dict[str, Any] = {"host": host, "torch": tensor, "jax": over_jax, "device": device}  # for init, reset, fork
RunLoop = Callable[[Any, Policy, CollectorState, Request], tuple[CollectorState, TensorDict]]
LOOPS: dict[str, RunLoop] = {  # by `Route.loop`
    "host": own_pace.run,
    "torch": tensor.run,
    "device": device.run,
    "captured": tensor.run_captured,
    "fused": over_jax.run,
    "crossing": over_jax.run_crossing,
}


def init(env: Env, policy: Policy, *, seed: int | None) -> CollectorState:
    """Build and reset the environments, and return the first state of a collection.

    All randomness follows from `seed`, an int in [0, 2**64). None draws one; ``state.seed`` holds it.

    Raises:
        TypeError: if `env` is no environment (see `make_env`) or `policy` no policy (see `torch_policy`, `jax_policy`).
        ValueError: for a seed out of range, or a policy that does not suit the environment's spaces.
        EnvError: if an environment does not reset.

    >>> import funcollect as fc
    >>> env = fc.make_env("CartPole-v1", num_envs=2)
    >>> state = fc.init(env, fc.random_policy(env), seed=3)
    >>> state.seed, state.frames
    (3, 0)
    """
    check_pair(env, policy)
    return init_lanes(env, policy, seed=seed, first_lane=0, total_lanes=env.num_envs or 1)


def init_lanes(env: Env, policy: Policy, *, seed: int | None, first_lane: int, total_lanes: int) -> CollectorState:
    """Implement `init` for a checked pair, for the lanes ``first_lane … first_lane + P - 1`` of `total_lanes`."""
    check_eager("init", seed)
    if isinstance(policy, Population | GroupPolicy):
        policy = policy.of_lanes(range(first_lane, first_lane + (env.num_envs or 1)), total_lanes)
    with memory_for(lambda: f"the first state of {env.num_envs or 1:,} environments"):
        state: CollectorState = _BACKENDS[env.backend].init(env, policy, key_from_seed(seed), first_lane, total_lanes)
        return state


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
        exploration: values to use instead of those in `Policy.exploration`, such as ``{"epsilon": 0.1}``: numbers,
            tensors [L] with one per lane of the whole run, or functions of its frames so far. The batch holds them.
        max_frames_per_traj: steps after which a trajectory is truncated; None for no limit.

    Returns:
        The next state, and the batch: a locked TensorDict [P, T], or [T] for an environment without a batch
        dimension; its keys are listed under "What is in a batch".

    Raises:
        StaleStateError: if the state has been superseded by a later one.
        EnvError: if an environment raises, or returns other shapes or dtypes than its spaces have
            (`funcollect.testing.check_env` also checks their bounds).
        PolicyError: for an action of the wrong shape or dtype, or NaN.

    >>> import funcollect as fc
    >>> env = fc.make_env("CartPole-v1", num_envs=2)
    >>> policy = fc.random_policy(env)
    >>> state, batch = fc.rollout(env, policy, fc.init(env, policy, seed=0), 16)
    >>> state.frames, batch.batch_size, batch["observation"].shape, batch["next", "reward"].shape
    (32, torch.Size([2, 16]), torch.Size([2, 16, 4]), torch.Size([2, 16, 1]))
    """
    request = _request(length, params, exploration_type, exploration, max_frames_per_traj, True)
    return run(env, policy, state, request)


_checked = lru_cache(maxsize=256)(Request)  # so that plain values are checked once


def _request(length: Any, params: Any, exploration_type: Any, exploration: Any, limit: Any, with_time: bool) -> Request:
    plain = exploration is NO_VALUES and type(length) is int and type(exploration_type) is ExplorationType
    if plain and (limit is None or type(limit) is int):
        return _checked(length, None, exploration_type, max_frames_per_traj=limit, with_time=with_time).given(params)
    return Request(length, params, exploration_type, exploration, limit, with_time=with_time)


def run(
    env: Env,
    policy: Policy,
    state: CollectorState[Array],
    request: Request,
    function: str = "rollout",
    loops: Mapping[str, RunLoop] = LOOPS,
) -> tuple[CollectorState[Array], TensorDict]:
    """Implement `rollout` with every option, by one of `loops`; errors name the `function` that the user called."""
    opened = state.opened if type(state) is CollectorState and loops is LOOPS else None

    def description() -> str:
        return f"a rollout of {request.length:,} steps of {state.num_lanes:,} environments"

    if opened is not None and (repeated := opened.repeated(policy, request)) is not None:
        check_eager(function)
        with memory_for(description):
            result = opened.rollout(env, policy, state, repeated)
        if result is not None:
            return result[0], _presented(env, with_values(result[1], repeated.exploration))
    check_policy(policy)
    params = policy.params if policy.backend == "jax" and request.params is None else request.params
    check_state(env, state, function, params)
    user_policy, user_request = policy, request
    policy = of_lanes(env, policy, state)
    values = exploration_values(policy, request.exploration, state)
    if values is not request.exploration:
        request = replace(request, exploration=values)
    route = route_of(env, policy, request.exploration_type)
    run_loop, run_policy = loops[route.loop], route.policy
    with memory_for(description):
        if run_policy is policy or not is_lowered(run_policy):
            after, batch = run_loop(env, run_policy, state, request)
        else:
            after, batch = run_in_jax(run_policy, state, lambda entered: run_loop(env, run_policy, entered, request))
    if after.opened is not None:
        after.opened.remember(user_policy, user_request, request if run_policy is user_policy else None)
    return after, _presented(env, with_values(batch, values))


def _presented(env: Env, batch: TensorDict) -> TensorDict:
    """Return the batch with the columns of several agents by group or player."""
    spec = env.action_spec
    return presented(batch, spec) if isinstance(spec, (GroupedSpec, TurnSpec)) else batch


def step(
    env: Env,
    policy: Policy,
    state: CollectorState[Array],
    *,
    params: Any = None,
    exploration_type: ExplorationType = ExplorationType.RANDOM,
    exploration: Mapping[str, Value] = NO_VALUES,
) -> tuple[CollectorState[Array], TensorDict]:
    """Run one step of every lane, as a `rollout` of length 1 whose batch has no time dimension; errors are the same.

    >>> import funcollect as fc
    >>> env = fc.make_env("CartPole-v1", num_envs=2)
    >>> policy = fc.random_policy(env)
    >>> fc.step(env, policy, fc.init(env, policy, seed=0))[1]["observation"].shape
    torch.Size([2, 4])
    """
    return run(env, policy, state, _request(1, params, exploration_type, exploration, None, False), "step")


def reset(
    env: Env,
    state: CollectorState[Array],
    mask: Tensor | None = None,
    *,
    to: Any = None,
    options: Mapping[str, Any] | None = None,
) -> CollectorState[Array]:
    """Return a state in which the lanes of `mask`, or all lanes, begin another episode under a new trajectory id.

    Args:
        env: the environment that `state` was made with.
        state: the state to continue from.
        mask: [P] bool; None for all lanes.
        to: over environments in JAX or Torch, the states where these episodes begin: a pytree [P, ...] like
            ``state.env_state`` (in JAX, its field ``current``), read only in the lanes of `mask`; or a pair of such
            states and their observations, if the environment has no function `observation_of`.
        options: over single Gymnasium environments, the options of the environment's own `reset`, for this call only.
            `fork` repeats them; `save` needs ``episodes="restart"`` while such an episode runs.

    Raises:
        TypeError: for `to` or `options` in an environment that does not take them.
        ValueError: for a mask that is not bool [P], or `to` of other structure, shapes or dtypes.
        EnvError: for a mask, over simulators that only reset all lanes together.
        StaleStateError: over simulators, as `rollout` does; see `fork` and `recover`.

    >>> import funcollect as fc
    >>> env = fc.make_env("CartPole-v1", num_envs=2)
    >>> policy = fc.random_policy(env)
    >>> state, _ = fc.rollout(env, policy, fc.init(env, policy, seed=0), 4)
    >>> state = fc.reset(env, state, torch.tensor([True, False]))
    >>> state.step.tolist(), state.traj_ids.tolist()
    ([0, 4], [2, 1])
    """
    check_state(env, state, "reset", (mask, to))
    starts = {name: value for name, value in {"to": to, "options": options}.items() if value is not None}
    accepted = {"host": "options", "torch": "to", "jax": "to"}.get(env.backend)
    if starts.keys() - {accepted}:
        raise TypeError(f"{shown([*starts])} is not for {env!r}, expected {accepted or 'neither'}: leave the other out")
    if options is not None:
        check_kind("options", options, Mapping, "pass the dict that the environments' reset takes")
    return _reset(env, state, mask, **starts)


def _reset(env: Env, state: CollectorState, mask: Any, *, stale: bool = False, **starts: Any) -> CollectorState:
    place = state.lane.device if isinstance(state.lane, Tensor) else torch.device("cpu")  # over JAX, too
    count = state.num_lanes
    lanes = torch.ones(count, dtype=torch.bool, device=place) if mask is None else checked_mask(mask, count, place)
    with memory_for(lambda: f"a reset of {state.num_lanes:,} environments"):
        after: CollectorState = _BACKENDS[env.backend].reset(env, state, lanes, stale=stale, **starts)
        return after


def checked_mask(mask: Any, lanes: int, place: torch.device | None = None) -> Tensor:
    """A mask [lanes], tensor, array or list, as a tensor; ValueError for another shape or dtype."""
    try:
        flags = torch.as_tensor(mask, device=place)
        got = f"{flags.dtype} {tuple(flags.shape)}"
    except (TypeError, ValueError, RuntimeError):  # such as a ragged list
        got = shown(mask)
    if got != f"torch.bool {(lanes,)}":
        raise ValueError(f"mask is {got}, expected bool {(lanes,)}: pass one flag per lane")
    return flags


def recover(env: Env, state: CollectorState[Array]) -> CollectorState[Array]:
    """Return a state in which all lanes begin another episode. `state` may be stale, for example after an exception.

    Over simulators, trajectory ids continue from the highest ones used, whichever state of the run is passed. Over JAX
    and Torch, states are values and never stale: for them this is `reset`. Raises EnvError if an environment raises.

    >>> import funcollect as fc
    >>> env = fc.make_env("CartPole-v1")
    >>> old = fc.init(env, fc.random_policy(env), seed=0)
    >>> state, batch = fc.rollout(env, fc.random_policy(env), old, 8, max_frames_per_traj=4)
    >>> state.traj_ids.tolist(), fc.recover(env, old).traj_ids.tolist()
    ([2], [3])
    """
    check_state(env, state, "reset", live=False)
    return _reset(env, state, None, stale=True)


def fork(env: Env, state: CollectorState[Array]) -> CollectorState[Array]:
    """Return an independent copy of a state, which can still be used.

    Simulators are rebuilt, and the episode is replayed from its seed and actions; some (ALE) are copied by a snapshot.

    Raises:
        ReplayError: for an environment that supports neither (EnvPool, TorchRL's, wrappers with running statistics,
            ``replayable=False``), for an episode with more than 128 MiB of actions over all lanes, and if a new
            simulator returns another observation.
        EnvError: if an environment raises during the replay, as a vector environment may that refuses illegal actions:
            it steps all its lanes together, also those whose episode has not begun yet.
        StaleStateError: if the state has been superseded by a later one.
        ValueError: for an environment instance that cannot be rebuilt.

    >>> import funcollect as fc
    >>> env = fc.make_env("CartPole-v1")
    >>> policy = fc.random_policy(env)
    >>> state = fc.init(env, policy, seed=0)
    >>> one, two = (fc.rollout(env, policy, each, 4)[1]["action"] for each in (fc.fork(env, state), state))
    >>> torch.equal(one, two)
    True
    """
    check_state(env, state, "fork")
    if env.backend == "torch":
        return state  # which is a value
    with memory_for(lambda: f"a copy of the state of {state.num_lanes:,} environments"):
        copied: CollectorState[Array] = _BACKENDS[env.backend].fork(env, state)
        return copied


def apply(
    env: Env, state: CollectorState[Array], function: Callable[..., Any], *args: Any
) -> tuple[CollectorState[Array], list[Any]]:
    """Call ``function(lane_env, *args)`` for every lane of Gymnasium's or TorchRL's single environments.

    `lane_env` is the environment as the factory returned it. With `num_workers`, cloudpickle sends the function, its
    arguments and its results. Changes act from the next step on, and in all later episodes; the root observation of
    the next frame stays as it is. `fork` repeats the calls on its copies, and so do processes that replace lost ones.
    Calls are not saved: after one, `save` needs ``episodes="restart"``, and you call the function again after `load`.
    `evaluate` runs environments as they were made.

    Returns:
        The next state (`state` is stale), and the results in the order of lanes.

    Raises:
        TypeError: for an environment without an object for each lane, and for a function, arguments or results that
            cannot be sent. `state` can still be used. If only the results cannot be sent, the calls were made.
        StaleStateError: if the state has been superseded by a later one.
        EnvError: if the function raises, or a process is lost. `recover` begins new episodes. Some lanes may be
            changed by then, so let the function set values rather than add to them, and call it again.

    >>> import funcollect as fc
    >>> env = fc.make_env("CartPole-v1", num_envs=2)
    >>> state = fc.init(env, fc.random_policy(env), seed=0)
    >>> state, forces = fc.apply(env, state, lambda lane: lane.unwrapped.force_mag)
    >>> forces
    [10.0, 10.0]
    """
    check_state(env, state, "apply")
    check_function("function", function, "a function of one lane's environment and args", 1 + len(args))
    handle = state.env_state
    if not isinstance(handle, SimulatorHandle) or not isinstance(handle.simulation.simulators, SimulatorsOfLanes):
        mend = "over JAX use funcollect.set_env_params, over Torch state.replace(env_params=...)"
        raise TypeError(f"{env} has no object for each lane, as Gymnasium's or TorchRL's single ones have: {mend}")
    simulation = handle.claim()
    try:
        results = simulation.apply(function, args)
    except TypeError:  # the function was called in all lanes, or in none
        simulation.version, simulation.busy = handle.version, False  # the handle can be used after all
        raise
    return state.changed(env_state=simulation.release()), results


def close(state: CollectorState) -> None:
    """Free the simulators of a state now, rather than when Python collects it. Does nothing for other states.

    >>> import funcollect as fc
    >>> env = fc.make_env("CartPole-v1")
    >>> fc.close(fc.init(env, fc.random_policy(env), seed=0))
    """
    check_kind("state", state, CollectorState, "pass the state that rollout returned")
    if isinstance(state.env_state, SimulatorHandle):
        state.env_state.simulation.close()
