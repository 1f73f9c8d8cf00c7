"""One step of all lanes of a JAX environment, traced: the body of every fused loop."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from funcollect.core.batch import NEXT_FLAGS, ROOT_FLAGS
from funcollect.core.checks import check_next_state, check_policy_state
from funcollect.core.env_params import call_in_lanes, of_restarted, recorded_params
from funcollect.core.exploration import head_of
from funcollect.core.lanes import RunKeys, varying, where_lanes
from funcollect.core.request import StepOptions
from funcollect.core.traced_step.starts import Traced, restarted
from funcollect.envs.jax_envs.jax_env import step_lane
from funcollect.interop import words
from funcollect.interop.jax_setup import import_jax, without_weak_types
from funcollect.keys import Purpose
from funcollect.policies.checks import check_apart
from funcollect.policies.jax_functions.jax_policy import match_log_prob, traced_policy, traced_random
from funcollect.policies.jax_functions.program import TracedCall, drawing
from funcollect.policies.numerics import jax_numerics
from funcollect.protocols import BoundParams, JaxEnv, Policy, Transition
from funcollect.specs import assemble, disassemble
from funcollect.tree import Path

Row = dict[Path, Any]  # each [P, ...]

_MOST_STEPS = 2**31 - 1  # of one trajectory: step counters saturate here


@dataclass(frozen=True, kw_only=True)
class StepConfig:
    """The values that are fixed when a loop is compiled."""

    env: JaxEnv
    policy: Policy
    answer: TracedCall  # the policy's traced step, whose parameters are bound ones
    options: StepOptions
    branches: bool = True  # whether branches are cheap; on a GPU or TPU each waits for the host


def make_step_config(
    env: JaxEnv, policy: Policy, num_lanes: int, options: StepOptions, *, branches: bool = True
) -> StepConfig:
    """Return the configuration for the options of a request."""
    answer = traced_policy(policy, env.action_spec, num_lanes, options.exploration_type)
    return StepConfig(env=env, policy=policy, answer=answer, options=options, branches=branches)


def step(config: StepConfig, bound: BoundParams, state: Traced, keys: RunKeys) -> tuple[Traced, Row]:
    """Return the next state and the recorded row; `keys` are those of the state's run."""
    env = config.env
    policy_state, outputs = _act(config, bound, state, keys)
    check_apart([(name,) for name in outputs], state.observation)
    moved = _move(config, state, outputs["action"], keys)
    live = state.step < _MOST_STEPS  # the lanes whose step counter still counts
    if not config.options.reset_when_done:
        finished = state.terminated | state.truncated
        moved, live = _keep(env, state, moved, finished), live & ~finished
    nexts = by_path(env, moved.observation)
    row: Row = {
        **state.observation,
        **{(name,): value for name, value in outputs.items()},
        **{("next", *path): value for path, value in nexts.items()},
        **{("next", "info", name): value for name, value in moved.info.items()},
        ("next", "reward"): moved.reward,
        **dict(zip(NEXT_FLAGS, (moved.terminated, moved.truncated, moved.terminated | moved.truncated), strict=True)),
        **dict(zip(ROOT_FLAGS, (state.terminated, state.truncated, state.terminated | state.truncated), strict=True)),
        **{("collector", name): getattr(state, name) for name in ("episode", "step", "lane")},
        **recorded_params(env, state.env_params, state.num_lanes),
        ("collector", "policy_version"): import_jax().numpy.broadcast_to(state.policy_version, state.lane.shape),
    }
    after = state.replace(
        env_state=state.env_state._replace(current=moved.env_state),
        observation=nexts,
        policy_state=policy_state,
        step=state.step + live.astype(state.step.dtype),
        returns=state.returns + moved.reward,
        steps=words.add(state.steps, 1),
    )
    if config.options.reset_when_done:
        return restart(env, after, keys, moved.terminated | moved.truncated), row
    return after.replace(terminated=moved.terminated, truncated=moved.truncated), row


def _act(config: StepConfig, bound: BoundParams, state: Traced, keys: RunKeys) -> tuple[Any, dict[str, Any]]:
    """Return the policy's next state and its outputs; at the start of an episode it acts from its initial state."""
    observation = assemble(config.env.observation_space, state.observation)
    initial = config.policy.init(state.key, state.num_lanes)
    check_policy_state(initial, state.policy_state)
    remembered = where_lanes(state.step == 0, initial, state.policy_state)
    policy_state, outputs = config.answer(bound, remembered, observation, drawing(keys.of(Purpose.NOISE), state.steps))
    policy_state = varying(state.lane, without_weak_types(policy_state))
    check_next_state(remembered, policy_state)
    if config.options.random_steps:
        outputs = _random_start(config, state, keys, observation, outputs)
    return policy_state, outputs


def _random_start(
    config: StepConfig, state: Traced, keys: RunKeys, observation: Any, outputs: dict[str, Any]
) -> dict[str, Any]:
    """Replace the actions in the first `random_steps` steps. The policy still runs, for its other outputs."""

    def randomly() -> dict[str, Any]:
        draw = drawing(keys.of(Purpose.RANDOM_ACTION), state.steps)
        action, log_prob = traced_random(config.env.action_spec, draw, observation)
        head = head_of(config.policy)
        beside = {"action": action} if head is None else head.record(jax_numerics(), action, config.env.action_spec)
        drawn = {name: value.astype(outputs[name].dtype) for name, value in beside.items()}
        if "action_log_prob" in outputs:
            drawn["action_log_prob"] = match_log_prob(log_prob, outputs["action_log_prob"])
        return outputs | drawn

    early = (state.steps[1] == 0) & (state.steps[0] < np.uint32(config.options.random_steps))
    if not config.branches:
        return {name: import_jax().numpy.where(early, value, outputs[name]) for name, value in randomly().items()}
    acted: dict[str, Any] = import_jax().lax.cond(early, randomly, lambda: outputs)
    return acted


def _move(config: StepConfig, state: Traced, action: Any, keys: RunKeys) -> Transition:
    """Step the environment in all lanes, and truncate those that reach the limit."""
    own = keys.at(Purpose.DYNAMICS, state.steps[1], state.steps[0]), state.env_state.current, action
    moved: Transition = call_in_lanes(partial(step_lane, config.env), state.env_params, *own)
    truncated = moved.truncated
    if (limit := config.options.limit) is not None:
        truncated = truncated | (state.step >= min(limit, _MOST_STEPS) - 1)
    return moved._replace(env_state=without_weak_types(moved.env_state), truncated=truncated)


def _keep(env: JaxEnv, state: Traced, moved: Transition, finished: Any) -> Transition:
    """Return the transition in which the `finished` lanes [P] repeat their last state, without reward."""
    before = moved._replace(
        env_state=state.env_state.current,
        observation=assemble(env.observation_space, state.observation),
        reward=import_jax().numpy.zeros_like(moved.reward),
        terminated=state.terminated,
        truncated=state.truncated,
    )
    kept: Transition = where_lanes(finished, before, moved)
    return kept


def restart(env: JaxEnv, state: Traced, keys: RunKeys, mask: Any) -> Traced:
    """Return the state in which the lanes of `mask` [P] begin another episode."""
    jnp = import_jax().numpy
    env_state, roots = restarted(env, state, keys, mask)
    return state.replace(
        env_state=env_state,
        env_params=of_restarted(state.env_params, mask),
        observation=where_lanes(mask, by_path(env, roots), dict(state.observation)),
        episode=state.episode + mask.astype(state.episode.dtype),
        step=jnp.where(mask, 0, state.step),
        returns=where_lanes(mask, jnp.zeros_like(state.returns), state.returns),
        terminated=state.terminated & ~mask,
        truncated=state.truncated & ~mask,
    )


def by_path(env: JaxEnv, observation: Any) -> dict[Path, Any]:
    """Return an observation's leaves by their keys in a batch, in the batch's dtypes, or their 32-bit ones in JAX."""
    canonical = import_jax().dtypes.canonicalize_dtype
    leaves = zip(env.observation_leaves, disassemble(env.observation_space, observation), strict=True)
    return {leaf.path: value.astype(canonical(leaf.dtype)) for leaf, value in leaves}
