"""Rollouts that Torch can differentiate: one `torch.autograd.Function` around a whole traced rollout."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict
from torch import Tensor
from torch.autograd.function import once_differentiable
from typing_extensions import override

from funcollect.core.env_params import of_one_lane
from funcollect.core.loops.over_jax import batch_of
from funcollect.core.lowered import lowered_for, run_in_jax
from funcollect.core.request import NO_VALUES, Request, Value, check_jax, check_state, exploration_values, with_values
from funcollect.core.routes import check_pair
from funcollect.core.state import CollectorState, origin_of
from funcollect.core.traced_step.columns import recorded_step
from funcollect.core.traced_step.step import Row, StepConfig, operations, run_keys
from funcollect.envs.jax_envs.jax_env import reset_lane, step_lane
from funcollect.interop.bridge import argument, torch_view
from funcollect.interop.jax_setup import compiled, import_jax
from funcollect.interop.memo import memo_of
from funcollect.protocols import JaxEnv, Policy, traced_values
from funcollect.specs import ExplorationType


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
    """Do what `rollout` does, so that Torch can differentiate the batch through all steps of environment and policy.

    All floating leaves of the batch (rewards, observations, actions, log-probabilities, other outputs) depend on the
    parameters that require grad, of the module or in `params`: the loss's ``backward()`` adds to their ``.grad``.
    Sampled continuous actions are differentiated with their noise fixed (reparametrised); discrete ones pass no
    gradient. Gradients end where the rollout begins, and where an episode ends. An environment that stops them at each
    step (`jax.lax.stop_gradient`) causes a warning.

    Arguments, noise, episodes and batch are those of `rollout`, up to rounding. All steps are kept in memory until the
    gradient has been computed. Each new `length` compiles a program.

    Raises:
        TypeError: unless the environment is written in JAX, and `torch_policy` or `tensordict_policy` made the policy.
        LoweringError: for a function, and for a module that cannot be lowered.

    >>> import gymnasium, jax, torch, funcollect as fc
    >>> class Push(fc.envs.JaxEnvBase):
    ...     observation_space = action_space = gymnasium.spaces.Box(-9, 9, (1,))
    ...     def reset(self, key, params):
    ...         return (jax.random.normal(key, (1,)),) * 2
    ...     def step(self, key, place, action, params):
    ...         place = place + action
    ...         return fc.envs.Transition(place, place, reward=-(place[0] ** 2), terminated=False, truncated=False)
    >>> env, policy = Push(num_envs=4), fc.torch_policy(torch.nn.Linear(1, 1))
    >>> state, batch = fc.differentiable_rollout(env, policy, fc.init(env, policy, seed=0), 8)
    >>> (-batch["next", "reward"].sum()).backward()
    >>> policy.module.weight.grad.shape
    torch.Size([1, 1])
    """
    check_pair(env, policy)
    check_state(env, state, "rollout")
    check_jax(env)
    _warn_if_gradients_stop(env, state)
    request = Request(length, params, exploration_type, exploration, max_frames_per_traj)
    lowered = lowered_for(env, policy, exploration_type)
    values = exploration_values(policy, exploration, state)
    tensors = lowered.source.tensors(lowered.source.prepare(params))
    options = request.step_options(env)
    cache_key = ("differentiable", origin_of(env), state.num_lanes, length, options)
    config = StepConfig.of(env, lowered, state.num_lanes, options)
    program = compiled(lowered, cache_key, partial(_forward, config, length))
    apply: Any = _Rollout.apply  # which Torch does not type

    def run(entered: CollectorState) -> tuple[CollectorState, TensorDict]:
        call = SimpleNamespace(policy=lowered, program=program, state=entered, values=traced_values(values))
        columns = apply(call, *(tensors[name] for name in lowered.lowered.names))
        return call.state, batch_of(env, lowered, state, dict(zip(call.paths, columns, strict=True)), request)

    after, batch = run_in_jax(lowered, state, run)
    return after, with_values(batch, values)


def _warn_if_gradients_stop(env: JaxEnv, state: CollectorState) -> None:
    """Warn, once for each environment, if its step stops the gradients of continuous actions."""
    memo, space = memo_of(env), env.action_space
    if "stops" in memo or not isinstance(space, spaces.Box):
        return
    jax, params = import_jax(), of_one_lane(state.env_params)
    key, action = jax.ShapeDtypeStruct((2,), np.uint32), jax.ShapeDtypeStruct(space.shape, space.dtype)
    begun, _ = jax.eval_shape(partial(reset_lane, env), key, params)
    step = jax.make_jaxpr(partial(step_lane, env))(key, begun, action, params)
    memo["stops"] = "stop_gradient" in operations(step.jaxpr)
    if memo["stops"]:
        what = f"{env} stops gradients in its step (jax.lax.stop_gradient), so they do not pass to the step before"
        warnings.warn(f"{what}: take an environment that lets them pass, such as brax's or your own", stacklevel=3)


class _Rollout(torch.autograd.Function):
    """A rollout as one operation of Torch: from the parameters to the columns [T, P, ...].

    `call` holds the program and its arguments. The rollout replaces its state, and sets its `paths`, the columns' keys.
    """

    @staticmethod
    @override
    def forward(ctx: Any, call: SimpleNamespace, *tensors: Tensor) -> tuple[Tensor, ...]:
        names = call.policy.lowered.names
        by_name = dict(zip(names, tensors, strict=True))
        trained, fixed = dict(call.policy.laid_out(by_name)), dict[str, Any]()
        for name in names:
            if not by_name[name].requires_grad and name in trained:
                fixed[name] = trained.pop(name)
        floating, others, call.state, ctx.pull = call.program(trained, fixed, call.values, call.state)
        columns = {path: torch_view(column).clone() for path, column in (floating | others).items()}
        ctx.call, ctx.floating, call.paths = call, list(floating), list(columns)
        ctx.mark_non_differentiable(*(leaf for leaf in columns.values() if not leaf.is_floating_point()))
        return tuple(columns.values())

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        policy, by_path = ctx.call.policy, dict(zip(ctx.call.paths, gradients, strict=True))
        of_columns = {path: argument(by_path[path].contiguous()) for path in ctx.floating}
        pull_back = compiled(policy, "back", lambda pull, of_columns: pull(of_columns)[0])
        of_parameters = policy.lowered.restore(pull_back(ctx.pull, of_columns))
        return None, *(of_parameters.get(name) for name in policy.lowered.names)


def _forward(config: StepConfig, length: int, trained: Any, fixed: Any, values: Any, state: CollectorState) -> Any:
    """Trace a rollout; return its floating columns, the others, the next state, and the pullback of the first."""
    jax = import_jax()
    keys = run_keys(state.key, state.lane)

    def columns(trained: Any) -> tuple[Row, tuple[Row, CollectorState]]:
        def body(state: CollectorState, _: None) -> tuple[CollectorState, Row]:
            return recorded_step(config, ({**trained, **fixed}, values), state, keys)

        after, rows = jax.lax.scan(body, state, None, length=length)
        floating = {path: column for path, column in rows.items() if jax.numpy.issubdtype(column.dtype, np.floating)}
        return floating, ({path: column for path, column in rows.items() if path not in floating}, after)

    floating, pull, (others, after) = jax.vjp(columns, trained, has_aux=True)
    return floating, others, after, pull
