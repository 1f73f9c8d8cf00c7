"""The loop over a JAX environment with a policy that can be traced: one compiled call per rollout."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict

from funcollect.core.deliver import check_apart
from funcollect.core.fused_step import Row, Setting, step
from funcollect.core.request import Request
from funcollect.core.state import CollectorState
from funcollect.envs.jax_env import JaxEnv
from funcollect.interop import words
from funcollect.interop.bridge import torch_view
from funcollect.interop.jax_setup import compiled, import_jax
from funcollect.policies.actor import Columns
from funcollect.policies.checks import finished
from funcollect.policies.traced_policy import traced_policy
from funcollect.specs import Policy
from funcollect.tree import to_tensordict

_FLAGS = [("terminated",), ("truncated",)]


def run(env: JaxEnv, policy: Policy, state: CollectorState, request: Request) -> tuple[CollectorState, TensorDict]:
    """`rollout` for a JAX environment."""
    program = _program(env, policy, state.num_lanes, request)
    after, columns = program(policy.prepare(request.params), state, request.length)
    leaves = {path: torch_view(column)[: request.length] for path, column in columns.items()}
    names = [path for path in leaves if len(path) == 1 and path not in _FLAGS and path not in state.observation]
    outputs = {path: leaves.pop(path) for path in names}
    if env.action_spec.dtype == torch.int64:
        outputs[("action",)] = words.as_int64(outputs[("action",)])
    return after, deliver(env, state, leaves, finished(outputs, env.action_spec), request)


def bucket(length: int) -> int:
    """The rows that are reserved for `length`: lengths within an eighth share a compiled program.

    >>> [bucket(length) for length in (1, 7, 64, 100, 2000)]
    [1, 7, 64, 104, 2048]
    """
    grain = 1 << max(length.bit_length() - 4, 0)
    return -(-length // grain) * grain


def _program(env: JaxEnv, policy: Policy, num_envs: int, request: Request) -> Callable[..., Any]:
    """The compiled loop: one for what is static in a request."""
    capacity = bucket(request.length)
    setting = Setting(
        env=env,
        answer=traced_policy(policy, env.action_spec, num_envs, request.exploration_type),
        max_frames_per_traj=request.max_frames_per_traj,
        random_steps=request.random_steps,
        reset_when_done=request.reset_when_done,
    )
    which = (
        "rollout",
        num_envs,
        capacity,
        request.exploration_type,
        *(getattr(setting, name) for name in ("env", "max_frames_per_traj", "random_steps", "reset_when_done")),
    )
    return compiled(policy, which, partial(_loop, setting, capacity))


def _loop(setting: Setting, capacity: int, params: Any, state: CollectorState, length: Any) -> Any:
    """The trip count is traced: XLA treats a loop of one step otherwise, and would round it otherwise."""
    jax = import_jax()
    jnp = jax.numpy

    def row(state: CollectorState) -> tuple[CollectorState, Row]:
        after, recorded = step(setting, params, state)
        return after, narrowed(setting, recorded)

    def body(t: Any, carry: tuple[CollectorState, Row]) -> tuple[CollectorState, Row]:
        state, columns = carry
        state, recorded = row(state)
        write = jax.lax.dynamic_update_index_in_dim
        return state, {path: write(column, recorded[path], t, 0) for path, column in columns.items()}

    _, shapes = jax.eval_shape(row, state)
    columns = {path: jnp.zeros((capacity, *leaf.shape), leaf.dtype) for path, leaf in shapes.items()}
    return jax.lax.fori_loop(0, length, body, (state, columns))


def narrowed(setting: Setting, row: Row) -> Row:
    """Without what is constant in a rollout; numbers of 64 bits as words."""
    dropped = set(_FLAGS) if setting.reset_when_done else set()
    wide = {("collector", "step")} | ({("action",)} if setting.env.action_spec.dtype == torch.int64 else set())
    done = row[("next", "terminated")] | row[("next", "truncated")]
    kept = {path: value for path, value in row.items() if path not in dropped} | {("next", "done"): done}
    return {path: words.sign_extended(value) if path in wide else value for path, value in kept.items()}


def deliver(env: JaxEnv, state: CollectorState, columns: Columns, outputs: Columns, request: Request) -> TensorDict:
    """The batch of a rollout that began in `state`, from columns [T, P, ...] and the policy's checked outputs."""
    check_apart(outputs, state.observation)
    leaves = columns | outputs
    for name in ("traj_ids", "step"):
        leaves[("collector", name)] = words.as_int64(leaves[("collector", name)])
    ended = leaves[("next", "terminated")]
    shape, device = ended.shape, ended.device
    for path in _FLAGS:
        leaves.setdefault(path, torch.zeros(shape, dtype=torch.bool, device=device))
    leaves[("done",)] = leaves[("terminated",)] | leaves[("truncated",)]
    lane = torch_view(state.lane).long()
    leaves[("collector", "lane")] = lane.expand(shape)
    leaves[("collector", "policy_version")] = torch.tensor(int(state.policy_version), device=device).expand(shape)
    last = [(*prefix, name) for prefix in ((), ("next",)) for name in ("terminated", "truncated", "done")]
    for path in [*last, ("next", "reward")]:
        if leaves[path].ndim == 2:
            leaves[path] = leaves[path].unsqueeze(-1)
    if env.num_envs is None:
        return to_tensordict({path: leaf[:, 0] for path, leaf in leaves.items()}, (request.length,)).lock_()
    batch_size = (state.num_lanes, request.length)
    return to_tensordict({path: leaf.transpose(0, 1) for path, leaf in leaves.items()}, batch_size).lock_()
