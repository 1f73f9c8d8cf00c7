"""Rollouts through which Torch differentiates: one `torch.autograd.Function` around a whole traced rollout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor
from torch.autograd.function import once_differentiable
from typing_extensions import override

from funcollect.core.api import check_pair, check_state
from funcollect.core.exploration import NO_VALUES, Value, exploration_values, with_values
from funcollect.core.loops.fused import batch_of
from funcollect.core.request import Request
from funcollect.core.routes import enter_loop, leave_loop, lowered_for
from funcollect.core.state import CollectorState, origin_of
from funcollect.core.traced_step.batch import cast, dtypes_of, recorded_step
from funcollect.core.traced_step.checks import check_jax_env
from funcollect.core.traced_step.keys import run_keys
from funcollect.core.traced_step.step import Row, StepConfig, make_step_config
from funcollect.interop.bridge import argument, torch_view
from funcollect.interop.jax_setup import compiled, import_jax
from funcollect.policies.torch_in_jax.lowered_policy import LoweredPolicy
from funcollect.protocols import JaxEnv, Policy, traced_values
from funcollect.specs import ExplorationType
from funcollect.tree import Path


def differentiable_rollout(
    env: JaxEnv,
    policy: Policy,
    state: CollectorState,
    length: int,
    *,
    params: Any = None,
    exploration_type: ExplorationType = ExplorationType.RANDOM,
    exploration: Mapping[str, Value] = NO_VALUES,
    max_frames_per_traj: int | None = None,
) -> tuple[CollectorState, TensorDict]:
    """Do what `rollout` does, and let Torch differentiate the batch through every step of environment and policy.

    All floating leaves of the batch (rewards, observations, actions, log-probabilities, other outputs) depend on the
    parameters that require grad, those of the module or of `params`: the loss's ``backward()`` adds to their ``.grad``.
    Sampled continuous actions are differentiated with their noise fixed (reparametrised); discrete ones pass no
    gradient. The given state is a constant, so gradients end where the rollout begins, and where an episode ends.

    Noise, episodes and batch are the same as in `rollout`, within rounding. All steps are kept in memory until the
    gradient is taken, and each `length` compiles a program, so this is a separate function.

    Args:
        env: an environment written in JAX, whose steps JAX can differentiate.
        policy: a policy of `torch_policy` or `tensordict_policy`, whose module can be lowered.
        state: the state to continue from.
        length: the number of steps, T.
        params: the parameters to act with; None for the module's own.
        exploration_type: whether the policy samples or acts deterministically.
        exploration: other values for the numbers in `Policy.exploration`, as for `rollout`.
        max_frames_per_traj: steps after which a trajectory is truncated; None for no limit.

    Raises:
        TypeError: for an environment that is not written in JAX, or a policy without a Torch module.
        LoweringError: for a module that cannot be lowered.

    >>> import torch, funcollect as fc
    >>> env = fc.make_env("gymnax/Pendulum-v1", num_envs=4)
    >>> module = torch.nn.Linear(3, 2)
    >>> policy = fc.torch_policy(module, head=fc.heads.normal)
    >>> state, batch = fc.differentiable_rollout(env, policy, fc.init(env, policy, seed=0), 8)
    >>> (-batch["next", "reward"].sum()).backward()
    >>> module.weight.grad.shape
    torch.Size([2, 3])
    """
    check_pair(env, policy)
    check_state(env, state, "rollout")
    check_jax_env(env)
    request = Request(length=length, exploration_type=exploration_type, max_frames_per_traj=max_frames_per_traj)
    lowered = lowered_for(env, policy, exploration_type)
    values = exploration_values(policy, exploration, lambda: state.steps_made * state.total_lanes)
    before, entered = enter_loop(lowered, state)
    tensors = lowered.source.tensors(lowered.source.prepare(params))
    config = make_step_config(env, lowered, state.num_lanes, request)
    which = ("differentiable", origin_of(env), state.num_lanes, length, exploration_type, max_frames_per_traj)
    run = _Run(lowered, compiled(lowered, which, partial(_forward, config, length)), entered, traced_values(values))
    columns = _Rollout.apply(run, *(tensors[name] for name in lowered.lowered.names))  # type: ignore[no-untyped-call]
    leaves = cast(dict(zip(run.paths, columns, strict=True)), dtypes_of(env))
    batch = lowered.as_torch(batch_of(env, lowered, state, leaves))
    return leave_loop(lowered, run.state, before), with_values(batch, values)


@dataclass
class _Run:
    """A rollout: the compiled program, and the state, which the rollout replaces. `paths` are the columns' keys."""

    policy: LoweredPolicy
    program: Callable[..., Any]
    state: CollectorState
    values: Mapping[str, Any]
    paths: list[Path] = field(default_factory=list)


class _Rollout(torch.autograd.Function):
    """A rollout as one operation of Torch: from the parameters to the columns [T, P, ...]."""

    @staticmethod
    @override
    def forward(ctx: Any, run: _Run, *tensors: Tensor) -> tuple[Tensor, ...]:
        names = run.policy.lowered.names
        prepared = run.policy.laid_out(dict(zip(names, tensors, strict=True)))
        trained_names = [name for name, tensor in zip(names, tensors, strict=True) if tensor.requires_grad]
        trained = {name: array for name, array in prepared.items() if name in trained_names}
        fixed = {name: array for name, array in prepared.items() if name not in trained_names}
        numbers, others, run.state, ctx.pull = run.program(trained, fixed, run.values, run.state)
        columns = {path: torch_view(column).clone() for path, column in (numbers | others).items()}
        ctx.run, ctx.numbers, run.paths = run, list(numbers), list(columns)
        ctx.mark_non_differentiable(*(leaf for leaf in columns.values() if not leaf.is_floating_point()))
        return tuple(columns.values())

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        policy, by_path = ctx.run.policy, dict(zip(ctx.run.paths, gradients, strict=True))
        given = {path: argument(by_path[path].contiguous()) for path in ctx.numbers}
        pull_back = compiled(policy, "back", lambda pull, given: pull(given)[0])
        found = policy.lowered.restore(pull_back(ctx.pull, given))
        return None, *(found.get(name) for name in policy.lowered.names)


def _forward(config: StepConfig, length: int, trained: Any, fixed: Any, values: Any, state: CollectorState) -> Any:
    """Trace the rollout: its floating columns, the other columns, the state after, and the pullback of the first."""
    jax = import_jax()
    keys = run_keys(state.key, state.lane)

    def columns(trained: Any) -> tuple[Row, tuple[Row, CollectorState]]:
        def body(state: CollectorState, _: None) -> tuple[CollectorState, Row]:
            return recorded_step(config, ({**trained, **fixed}, values), state, keys)

        after, rows = jax.lax.scan(body, state, None, length=length)
        numbers = {path: column for path, column in rows.items() if jax.numpy.issubdtype(column.dtype, np.floating)}
        return numbers, ({path: column for path, column in rows.items() if path not in numbers}, after)

    numbers, pull, (others, after) = jax.vjp(columns, trained, has_aux=True)
    return numbers, others, after, pull
