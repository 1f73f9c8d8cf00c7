"""The loop over a JAX environment with a policy that can be traced: one compiled call per rollout."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import nullcontext
from functools import partial
from typing import Any

from tensordict import TensorDict
from torch import Tensor

from funcollect.core import traced
from funcollect.core.batch import REWARD, ROOT_FLAGS, checked_batch
from funcollect.core.checks import is_live
from funcollect.core.lanes import run_keys
from funcollect.core.loops.blocks import OPTIONS as BLOCKS
from funcollect.core.loops.blocks import BlockLoop, BlockOptions
from funcollect.core.request import Request, StepOptions, check_state_kind, step_options
from funcollect.core.state import CollectorState, all_lanes, origin_of, policy_start
from funcollect.core.traced_step.columns import bucket, constant_columns, empty_columns, recorded_step, typed, write_row
from funcollect.core.traced_step.step import Row, make_step_config
from funcollect.envs.jax_envs.jax_env import check_unchanged
from funcollect.interop.bridge import follow_torch, torch_followed, torch_view
from funcollect.interop.jax_setup import compiled, import_jax
from funcollect.interop.memo import memo_of
from funcollect.interop.memory import reads_together
from funcollect.keys import Key
from funcollect.policies.random_policy import RandomPolicy
from funcollect.policies.torch_in_jax import LoweredPolicy
from funcollect.policies.torch_modules.torch_backed import TorchPolicyState
from funcollect.protocols import BoundParams, JaxEnv, Policy, traced_values
from funcollect.tree import Path


def init(env: JaxEnv, policy: Policy, key: Key, first_lane: int, total_lanes: int) -> CollectorState:
    """Implement `funcollect.init`. The policy's state, which may hold tensors, is made outside the program."""
    check_unchanged(env)
    state = _begun(env, key, first_lane, total_lanes, env.params)
    return state.replace(policy_state=policy_start(policy, key, state.num_lanes, first_lane))


def _begun(env: JaxEnv, key: Any, first_lane: int, total_lanes: int, env_params: Any) -> CollectorState:
    first = partial(traced.init, env, RandomPolicy(env.action_spec), None, total_lanes=total_lanes)
    begin: Callable[..., CollectorState] = compiled(env, ("init", total_lanes), first)
    follow_torch(import_jax().local_devices()[0])
    return begin(key=key, first_lane=first_lane, env_params=env_params)


def reset(env: JaxEnv, state: CollectorState, lanes: Tensor) -> CollectorState:
    """Implement `funcollect.reset` of the lanes of a mask [P]."""
    place = place_of(state)
    restart = compiled(env, "reset", partial(traced.reset, env), place=place)
    follow_torch(*place.device_set)
    after: CollectorState = restart(state.replace(policy_state=None), lanes.numpy())
    return after.replace(policy_state=state.policy_state)


def recover(env: JaxEnv, state: CollectorState) -> CollectorState:
    """Implement `funcollect.recover`. States are values and never stale, unless an interrupted collector used it up."""
    if not is_live(state):
        begun = _begun(env, state.key, int(state.lane_ids[0]), state.total_lanes, state.env_params)
        state = state.replace(env_state=begun.env_state.with_used_starts(), observation=begun.observation)
    return reset(env, state, all_lanes(state))


def fork(env: JaxEnv, state: CollectorState) -> CollectorState:
    """Implement `funcollect.fork`: the state itself, which is a value, or a copy where a collector would use it up."""
    place = place_of(state)
    if not waits_for_host(place):
        return state
    follow_torch(*place.device_set)
    env_state, observation = import_jax().tree.map(import_jax().numpy.copy, (state.env_state, dict(state.observation)))
    return state.replace(env_state=env_state, observation=observation)  # the other parts are never used up


def run(env: JaxEnv, policy: Policy, state: CollectorState, request: Request) -> tuple[CollectorState, TensorDict]:
    """Implement `funcollect.rollout`."""
    check_unchanged(env)
    if isinstance(state.policy_state, TorchPolicyState):  # of another policy; JAX cannot take it as an argument
        check_state_kind(state.policy_state, type(policy.init(state.key, state.num_lanes)))
    done, place = None, place_of(state)
    wait = waits_for_host(place)
    with torch_followed(*place.device_set) if wait else nullcontext():
        bound = bound_params(policy, request)
        blocks = block_loop(env, policy, state, request) if wait else None
    if blocks:
        done = blocks(bound, state, request.length, owned=request.owned)
    if done is None:
        after, columns = program(env, policy, state, request)(bound, state, request.length)
        done = after, {path: torch_view(column) for path, column in columns.items()}
    after, leaves = done
    if len(leaves[REWARD]) > request.length:
        leaves = {path: leaf[: request.length] for path, leaf in leaves.items()}
    with reads_together() if wait else nullcontext():
        return after, batch_of(env, policy, state, leaves)


def bound_params(policy: Policy, request: Request) -> BoundParams:
    """Return what a rollout's program reads; it has read it before the rollout ends."""
    prepare = policy.lend if isinstance(policy, LoweredPolicy) else policy.prepare
    return prepare(request.params), traced_values(request.exploration)


def waits_for_host(place: Any) -> bool:
    """Whether branches, and loops to a traced length, wait for the host on the devices of this sharding."""
    return any(device.platform != "cpu" for device in place.device_set)


def program(env: JaxEnv, policy: Policy, state: CollectorState, request: Request) -> Callable[..., Any]:
    """Return the compiled loop, with branches, for the static part of a request."""
    capacity, options = bucket(request.length), step_options(env, request)
    which = ("rollout", origin_of(env), state.num_lanes, options, capacity)
    return compiled(policy, which, partial(_loop, env, policy, options, capacity), place=place_of(state))


def block_loop(
    env: JaxEnv, policy: Policy, state: CollectorState, request: Request, options: BlockOptions = BLOCKS
) -> BlockLoop:
    """Return the loop in blocks for the static part of a request, made once for a policy."""
    fixed, place = step_options(env, request), place_of(state)
    which = (origin_of(env), state.num_lanes, fixed, options.key)
    made: dict[Hashable, BlockLoop] = memo_of(policy).setdefault("blocks", {})
    if (which, place) not in made:
        config = make_step_config(env, policy, state.num_lanes, fixed, branches=False)
        bound = bound_params(policy, request)
        made[which, place] = BlockLoop(config, bound, state, which, place=place, options=options)
    return made[which, place]


def place_of(state: CollectorState) -> Any:
    """Return the sharding of a state; raise ValueError if it lies on several devices, since Torch cannot read it."""
    place = state.lane.sharding
    if len(place.device_set) > 1:
        raise ValueError(
            f"the state lies on {len(place.device_set)} devices, expected one: call funcollect.traced.rollout in your "
            "own shard_map and funcollect.deliver on its result, or gather the state with jax.device_put"
        )
    return place


def _loop(
    env: JaxEnv, policy: Policy, options: StepOptions, capacity: int, bound: BoundParams, state: Any, length: Any
) -> Any:
    """Trace the loop. The trip count is traced, since XLA would round a loop of one step differently."""
    config = make_step_config(env, policy, state.num_lanes, options)
    bound, keys = opened(bound), run_keys(state.key, state.lane)

    def body(t: Any, carry: tuple[CollectorState, Row]) -> tuple[CollectorState, Row]:
        state, row = recorded_step(config, bound, carry[0], keys)
        return state, write_row(carry[1], row, t)

    columns = empty_columns(config, bound, state, capacity)
    after, columns = import_jax().lax.fori_loop(0, length, body, (state, columns))
    return after, columns | constant_columns(state, capacity)


def batch_of(env: JaxEnv, policy: Policy, state: CollectorState, leaves: dict[Path, Tensor]) -> TensorDict:
    """Return the batch of columns [T, P, ...], checked."""
    leaves = typed(leaves, env)
    names = [path for path in leaves if len(path) == 1 and path not in ROOT_FLAGS and path not in state.observation]
    outputs = policy.finish({path: leaves.pop(path) for path in names}, env.action_spec)
    return checked_batch(env, leaves | outputs)
