"""The loop over a JAX environment with a policy that can be traced: one compiled call per rollout."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from tensordict import TensorDict
from torch import Tensor

from funcollect.core import traced
from funcollect.core.loops.delivery import REWARD, ROOT_FLAGS, as_batch
from funcollect.core.request import Request
from funcollect.core.state import CollectorState, all_lanes, origin_of, policy_start
from funcollect.core.traced_step.batch import cast, dtypes_of, recorded_step
from funcollect.core.traced_step.keys import run_keys
from funcollect.core.traced_step.step import Row, StepConfig, make_step_config
from funcollect.envs.host.host_env import check_rewards
from funcollect.interop import words
from funcollect.interop.bridge import torch_view
from funcollect.interop.jax_setup import compiled, import_jax
from funcollect.interop.memory import naming_memory
from funcollect.keys import Key
from funcollect.policies.random_policy import RandomPolicy
from funcollect.protocols import BoundParams, JaxEnv, Policy, traced_values
from funcollect.tree import Path

_CONSTANT = [("collector", "lane"), ("collector", "policy_version")]


def init(env: JaxEnv, policy: Policy, key: Key, first_lane: int, total_lanes: int) -> CollectorState:
    """Implement `funcollect.init`. The policy's state, which may hold tensors, is made outside the program."""
    first = partial(traced.init, env, RandomPolicy(env.action_spec), None, total_lanes=total_lanes)
    begin = compiled(env, ("init", total_lanes), first)
    state: CollectorState = begin(key=key, first_lane=first_lane, env_params=env.params)
    return state.replace(policy_state=policy_start(policy, key, state.num_lanes, first_lane))


def reset(env: JaxEnv, state: CollectorState, lanes: Tensor) -> CollectorState:
    """Implement `funcollect.reset` of the lanes of a mask [P]."""
    restart = compiled(env, "reset", partial(traced.reset, env), place=place_of(state))
    after: CollectorState = restart(state.replace(policy_state=None), lanes.numpy())
    return after.replace(policy_state=state.policy_state)


def recover(env: JaxEnv, state: CollectorState) -> CollectorState:
    """Implement `funcollect.recover`: states are values and never stale."""
    return reset(env, state, all_lanes(state))


def fork(env: JaxEnv, state: CollectorState) -> CollectorState:
    """Implement `funcollect.fork`: the state itself, which is a value."""
    return state


def run(env: JaxEnv, policy: Policy, state: CollectorState, request: Request) -> tuple[CollectorState, TensorDict]:
    """Implement `funcollect.rollout`."""
    loop = program(env, policy, state, request)
    with naming_memory(f"a rollout of {request.length:,} steps of {state.num_lanes:,} environments"):
        bound = policy.prepare(request.params), traced_values(request.exploration)
        after, columns = loop(bound, state, request.length)
        leaves = {path: torch_view(column) for path, column in columns.items()}
        if bucket(request.length) > request.length:
            leaves = {path: leaf[: request.length] for path, leaf in leaves.items()}
        return after, batch_of(env, policy, state, cast(leaves, dtypes_of(env)))


def bucket(length: int) -> int:
    """Return the number of rows to reserve for `length`. Lengths within an eighth share a compiled program.

    It is at least two: XLA turns a write into a single row into a copy, and may then round the step differently.

    >>> [bucket(length) for length in (1, 7, 64, 100, 2000)]
    [2, 7, 64, 104, 2048]
    """
    grain = 1 << max(length.bit_length() - 4, 0)
    return max(-(-length // grain) * grain, 2)


def program(env: JaxEnv, policy: Policy, state: CollectorState, request: Request) -> Callable[..., Any]:
    """Return the compiled loop for the static part of a request."""
    capacity = bucket(request.length)
    config = make_step_config(env, policy, state.num_lanes, request)
    limits = (config.limit, config.random_steps, config.reset_when_done)
    which = ("rollout", origin_of(env), state.num_lanes, capacity, request.exploration_type, *limits)
    return compiled(policy, which, partial(_loop, config, capacity), place=place_of(state))


def place_of(state: CollectorState) -> Any:
    """Return the sharding of a state; raise ValueError if it lies on several devices, since Torch cannot read it."""
    place = state.lane.sharding
    if len(place.device_set) > 1:
        raise ValueError(
            f"the state lies on {len(place.device_set)} devices, expected one: call funcollect.traced.rollout in your "
            "own shard_map and funcollect.deliver on what it returns, or gather the state with jax.device_put"
        )
    return place


def _loop(config: StepConfig, capacity: int, bound: BoundParams, state: CollectorState, length: Any) -> Any:
    """Trace the loop. The trip count is traced, since XLA would round a loop of one step differently."""
    jax = import_jax()
    jnp = jax.numpy
    keys = run_keys(state.key, state.lane)

    def body(t: Any, carry: tuple[CollectorState, Row]) -> tuple[CollectorState, Row]:
        state, row = recorded_step(config, bound, carry[0], keys)
        return state, write_row(carry[1], row, t)

    _, row = jax.eval_shape(partial(recorded_step, config), bound, state, keys)
    columns = empty_columns({path: leaf for path, leaf in row.items() if path not in _CONSTANT}, capacity)
    after, columns = jax.lax.fori_loop(0, length, body, (state, columns))
    for path in _CONSTANT:
        columns[path] = jnp.broadcast_to(words.int64(getattr(state, path[-1])), (capacity, *row[path].shape))
    return after, columns


def empty_columns(row: Row, capacity: int) -> Row:
    """Trace columns of zeros for rows of these shapes and dtypes."""
    return {path: import_jax().numpy.zeros((capacity, *leaf.shape), leaf.dtype) for path, leaf in row.items()}


def write_row(columns: Row, row: Row, t: Any) -> Row:
    """Trace the columns with row `t` written; a row may have keys without a column."""
    write = import_jax().lax.dynamic_update_index_in_dim
    return {path: write(column, row[path], t, 0) for path, column in columns.items()}


def batch_of(env: JaxEnv, policy: Policy, state: CollectorState, leaves: dict[Path, Tensor]) -> TensorDict:
    """Return the batch of columns [T, P, ...], checked."""
    names = [path for path in leaves if len(path) == 1 and path not in ROOT_FLAGS and path not in state.observation]
    return to_batch(env, leaves, policy.finish({path: leaves.pop(path) for path in names}, env.action_spec))


def to_batch(env: JaxEnv, leaves: dict[Path, Tensor], outputs: dict[Path, Tensor]) -> TensorDict:
    """Return the batch of an environment's columns [T, P, ...] and a policy's outputs; the rewards are checked here."""
    reward = leaves[REWARD].detach()
    if math.isnan(reward.sum().item()):  # or a sum of both infinities
        check_rewards(reward.reshape(*reward.shape[:2], -1).sum(-1).cpu().numpy())
    done = leaves["next", "done"]
    if ROOT_FLAGS[0] not in leaves:
        leaves |= dict(zip(ROOT_FLAGS, done.new_zeros(len(ROOT_FLAGS), *done.shape).unbind(), strict=True))
    return as_batch(leaves | outputs, single=env.num_envs is None)
