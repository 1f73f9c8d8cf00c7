"""Rollouts through which Torch differentiates: one `torch.autograd.Function` around a whole traced rollout."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor
from torch.autograd.function import once_differentiable

from funcollect.core.api import check_pair, check_state
from funcollect.core.loops.fused import FLAGS, batch_of
from funcollect.core.request import Request
from funcollect.core.routes import checked_state, leave_loop, lowered_for
from funcollect.core.state import CollectorState
from funcollect.core.traced_step.batch import cast, dtypes_of, widen
from funcollect.core.traced_step.keys import run_keys
from funcollect.core.traced_step.step import Row, StepConfig, make_step_config, step
from funcollect.interop.bridge import argument, torch_view
from funcollect.interop.jax_setup import compiled, import_jax
from funcollect.messages import shown
from funcollect.policies.torch_in_jax.lowered_policy import LoweredPolicy
from funcollect.protocols import JaxEnv, Policy
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
    max_frames_per_traj: int | None = None,
) -> tuple[CollectorState, TensorDict]:
    """A rollout whose batch Torch differentiates, through the environment and the policy of every step.

    What is a floating number in the batch (rewards, observations, actions, log-probabilities, what else the policy
    returned) depends on the parameters of the module that require grad, those of `params` where these are given: the
    loss's ``backward()`` adds to their ``.grad``. Sampled continuous actions are differentiated with their noise held
    (reparametrised); discrete ones pass no gradient. The state that comes in is a constant, so gradients end where a
    rollout begins; within it they end where an episode does. All steps are kept in memory until the gradient is taken.

    Noise, episodes and batch are those of `rollout`, within rounding. A call of its own, since what it costs, memory
    and a compiled program for each `length`, should not hang on whether a gradient happens to be recorded.

    Args:
        env: an environment written in JAX, whose steps JAX can differentiate.
        policy: a policy of `torch_policy` or `tensordict_policy`, whose module can be lowered.
        state: where to go on.
        length: T.
        params: parameters to act with; None for the module's own.
        exploration_type: whether heads sample or act deterministically.
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
    if not isinstance(env, JaxEnv):
        raise TypeError(f"env is {shown(env)}, expected one that is written in JAX: gradients pass no other")
    request = Request(length=length, exploration_type=exploration_type, max_frames_per_traj=max_frames_per_traj)
    lowered = lowered_for(env, policy, exploration_type)
    before = checked_state(state.policy_state)
    tensors = lowered.source.tensors(lowered.source.prepare(params))
    run = _JaxRollout(env, lowered, state.replace(policy_state=lowered.enter(before, state.num_lanes)), request)
    columns = _Rollout.apply(run, *(tensors[name] for name in lowered.lowered.names))  # type: ignore[no-untyped-call]
    leaves = cast(dict(zip(run.paths, columns, strict=True)), dtypes_of(env))
    return leave_loop(lowered, run.state, before), lowered.as_torch(batch_of(env, lowered, state, leaves))


class _JaxRollout:
    """One rollout in JAX: forward, and back with what it kept."""

    def __init__(self, env: JaxEnv, policy: LoweredPolicy, state: CollectorState, request: Request) -> None:
        config = make_step_config(env, policy, state.num_lanes, request)
        limits = (request.length, request.exploration_type, request.max_frames_per_traj)
        which = ("differentiable", env, state.num_lanes, *limits)
        self._forward = compiled(policy, which, partial(_forward, config, request.length))
        self._back = compiled(policy, "back", lambda pull, given: pull(given)[0])
        self.policy = policy
        self.state = state
        self.paths: list[Path] = []

    def forward(self, tensors: dict[str, Tensor]) -> dict[Path, Tensor]:
        """The columns [T, P, ...], in memory of their own."""
        prepared = self.policy.laid_out(tensors)
        trained = {name: array for name, array in prepared.items() if tensors[name].requires_grad}
        fixed = {name: array for name, array in prepared.items() if name not in trained}
        numbers, others, self.state, self._pull = self._forward(trained, fixed, self.state)
        self._numbers = list(numbers)
        columns = {path: torch_view(column).clone() for path, column in (numbers | others).items()}
        self.paths = list(columns)
        return columns

    def back(self, gradients: dict[Path, Tensor]) -> dict[str, Tensor]:
        """The gradients of the parameters, by name, from those of the columns."""
        given = {path: argument(gradients[path].contiguous()) for path in self._numbers}
        return self.policy.lowered.restore(self._back(self._pull, given))


class _Rollout(torch.autograd.Function):
    """A rollout as one operation of Torch."""

    @staticmethod
    def forward(ctx: Any, run: _JaxRollout, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The columns, in the order of ``run.paths``."""
        columns = run.forward(dict(zip(run.policy.lowered.names, tensors, strict=True)))
        ctx.run = run
        ctx.mark_non_differentiable(*(leaf for leaf in columns.values() if not leaf.is_floating_point()))
        return tuple(columns.values())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """None for the run, then the gradient of each parameter that requires one."""
        run: _JaxRollout = ctx.run
        found = run.back(dict(zip(run.paths, gradients, strict=True)))
        return None, *(found.get(name) for name in run.policy.lowered.names)


def _forward(config: StepConfig, length: int, trained: Any, fixed: Any, state: CollectorState) -> Any:
    """Traced: the columns that are floating numbers, the others, the state after, and the way back."""
    jax = import_jax()
    keys = run_keys(state.key, state.lane)

    def columns(trained: Any) -> tuple[Row, tuple[Row, CollectorState]]:
        def body(state: CollectorState, _: None) -> tuple[CollectorState, Row]:
            after, row = step(config, {**trained, **fixed}, state, keys)
            return after, widen(row, dtypes=dtypes_of(config.env), total_lanes=state.total_lanes)

        after, rows = jax.lax.scan(body, state, None, length=length)
        rows = {path: column for path, column in rows.items() if path not in FLAGS}
        numbers = {path: column for path, column in rows.items() if jax.numpy.issubdtype(column.dtype, np.floating)}
        return numbers, ({path: column for path, column in rows.items() if path not in numbers}, after)

    numbers, pull, (others, after) = jax.vjp(columns, trained, has_aux=True)
    return numbers, others, after, pull
