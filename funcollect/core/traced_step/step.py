"""One traced step of all lanes of a JAX environment: the body of every loop over such environments."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from funcollect.core.batch import NEXT_FLAGS, ROOT_FLAGS
from funcollect.core.env_params import call_in_lanes, map_rows, of_one_lane, recorded_params
from funcollect.core.request import ANOTHER_POLICY, StepOptions, given_starts, outputs_of_random
from funcollect.envs.jax_envs.jax_env import JaxEnvState, differing, reset_lane, step_lane
from funcollect.errors import PolicyError
from funcollect.interop import words
from funcollect.interop.jax_setup import import_jax, without_weak_types
from funcollect.interop.memo import memo_of
from funcollect.keys import Purpose
from funcollect.policies.checks import check_apart
from funcollect.policies.jax_functions import jax_policy
from funcollect.policies.jax_functions.program import TracedCall, drawing
from funcollect.policies.numerics import jax_numerics
from funcollect.protocols import BoundParams, JaxEnv, Policy, Transition
from funcollect.specs import assemble, disassemble
from funcollect.threefry import Pair, hashed_in_jax
from funcollect.tree import Path

Row = dict[Path, Any]  # each [P, ...]
Start = tuple[Any, Any]  # state and observation [P, ...] at the start of an episode
Traced = Any  # a CollectorState of JAX arrays

SPARES = 2  # episodes that a lane can begin in one block of steps, unless starts are made at every step
_COSTLY = {"while", "scan", "cond", "sort", "custom_call", "pure_callback", "io_callback", "ffi_call"}
_MOST_OPERATIONS = 300  # of a reset made at every step; on a GPU they are one kernel with the rest of the step
_MOST_STEPS = 2**31 - 1  # of one trajectory: step counters saturate here
_PURPOSES = (Purpose.NOISE, Purpose.RANDOM_ACTION, Purpose.DYNAMICS, Purpose.RESET)


class RunKeys(NamedTuple):
    """The lanes' keys, which do not change during a run: two words of each purpose and lane."""

    first: Any  # uint32 [4, P], by `_PURPOSES` and lane
    second: Any  # likewise

    def of(self, purpose: Purpose) -> Pair:
        """The lanes' keys [P] for a purpose."""
        at = _PURPOSES.index(purpose)
        return self.first[at], self.second[at]

    def at(self, purpose: Purpose, high: Any, low: Any) -> Any:
        """The lanes' keys [P, 2] for the step or the episodes whose number has these two words."""
        return import_jax().numpy.stack(hashed_in_jax(self.of(purpose), high, low), -1)


def run_keys(key: Any, lane: Any) -> RunKeys:
    """The keys of a run from its key [2] and its lanes [P], by only two hashes, because XLA compiles each one."""
    by_purpose = hashed_in_jax((key[0], key[1]), np.uint32(0), np.array(_PURPOSES, np.uint32)[:, None])
    return RunKeys(*hashed_in_jax(by_purpose, np.uint32(0), lane.astype(np.uint32)))


def where_lanes(mask: Any, chosen: Any, other: Any) -> Any:
    """Return a pytree with the lanes of `mask` [P] taken from `chosen` and the others from `other`."""
    return jax_numerics().select(mask, chosen, other)


def varying(lane: Any, tree: Any) -> Any:
    """Return the pytree with leaves that depend on `lane`: in a `shard_map`, a loop rejects constants."""
    return where_lanes(lane == lane, tree, tree)  # XLA removes this; JAX's own function changes its name


class StepConfig(NamedTuple):
    """The values that are fixed when a loop is compiled."""

    env: JaxEnv
    policy: Policy
    answer: TracedCall  # the policy's traced step, called with `BoundParams`
    options: StepOptions
    branches: bool = True  # whether to branch; on a GPU or TPU each branch waits for the host

    @classmethod
    def of(cls, env: JaxEnv, policy: Policy, num_lanes: int, options: StepOptions, branches: bool = True) -> StepConfig:
        """The configuration for a policy that can be traced."""
        answer = jax_policy.traced_policy(policy, env.action_spec, num_lanes, options.exploration_type)
        return cls(env, policy, answer, options, branches)


def step(config: StepConfig, bound: BoundParams, state: Traced, keys: RunKeys) -> tuple[Traced, Row]:
    """Return the next state and the recorded row; `keys` are those of the state's run."""
    env = config.env
    policy_state, outputs = _act(config, bound, state, keys)
    check_apart([(name,) for name in outputs], state.observation)
    moved = _move(config, state, outputs["action"], keys)
    live = state.step < _MOST_STEPS  # the lanes whose step counter is not saturated
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
    after = state.changed(
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
    """Return the policy's next state and its outputs; where an episode begins it acts from its initial state."""
    observation = assemble(config.env.observation_space, state.observation)
    initial = config.policy.init(state.key, state.num_lanes)
    if difference := differing(state.policy_state, initial):
        what = "the state holds the policy state of another policy (first its own, then what this policy wants)"
        raise ValueError(f"{what}: {difference}: {ANOTHER_POLICY}")
    remembered = where_lanes(state.step == 0, initial, state.policy_state)
    draw, seen = drawing(keys.of(Purpose.NOISE), state.steps), observation
    if jax_policy.reads_env_state(config.policy):
        seen = (observation, state.env_state.current)
    policy_state, outputs = config.answer(bound, remembered, seen, draw)
    policy_state = varying(state.lane, without_weak_types(policy_state))
    if difference := differing(remembered, policy_state):
        mend = "a compiled loop wants the same at every step: cast it, or give initial_state as the steps return it"
        raise PolicyError(f"the policy's state changes in a step: {difference}; {mend}")
    if config.options.random_steps:
        outputs = _random_start(config, state, keys, observation, outputs)
    return policy_state, outputs


def _random_start(config: StepConfig, state: Traced, keys: RunKeys, seen: Any, outputs: dict[str, Any]) -> Any:
    """Replace the actions in the first `random_steps` steps. The policy runs all the same, for its other outputs."""
    spec = config.env.action_spec

    def randomly() -> dict[str, Any]:
        draw = drawing(keys.of(Purpose.RANDOM_ACTION), state.steps)
        action, log_prob = jax_policy.traced_random(spec, draw, seen)
        drawn = outputs_of_random(jax_numerics(), config.policy, spec, action, log_prob)
        return outputs | {
            name: jax_policy.like_own(value, outputs[name], is_log_prob=path[-1] == "action_log_prob")
            for path, value in drawn.items()
            if (name := ".".join(path)) in outputs
        }

    early = (state.steps[1] == 0) & (state.steps[0] < np.uint32(config.options.random_steps))
    if not config.branches:
        return {name: import_jax().numpy.where(early, value, outputs[name]) for name, value in randomly().items()}
    return import_jax().lax.cond(early, randomly, lambda: outputs)


def _move(config: StepConfig, state: Traced, action: Any, keys: RunKeys) -> Transition:
    arguments = keys.at(Purpose.DYNAMICS, state.steps[1], state.steps[0]), state.env_state.current, action
    moved: Transition = call_in_lanes(partial(step_lane, config.env), state.env_params, *arguments)
    truncated = moved.truncated
    if (limit := config.options.limit) is not None:
        truncated = truncated | (state.step >= min(limit, _MOST_STEPS) - 1)
    return moved._replace(env_state=without_weak_types(moved.env_state), truncated=truncated)


def _keep(env: JaxEnv, state: Traced, moved: Transition, finished: Any) -> Any:
    """Return the transition in which the `finished` lanes [P] repeat their last state, without reward."""
    held, still = assemble(env.observation_space, state.observation), import_jax().numpy.zeros_like(moved.reward)
    before = Transition(state.env_state.current, held, still, state.terminated, state.truncated, moved.info)
    return where_lanes(finished, before, moved)


def by_path(env: JaxEnv, observation: Any) -> dict[Path, Any]:
    """Return an observation's leaves by their keys in a batch, in the batch's dtypes, or their 32-bit ones in JAX."""
    canonical = import_jax().dtypes.canonicalize_dtype
    leaves = zip(env.observation_leaves, disassemble(env.observation_space, observation), strict=True)
    return {leaf.path: value.astype(canonical(leaf.dtype)) for leaf, value in leaves}


class SpareStarts(NamedTuple):
    """The lanes' `env_state` in a block of steps without a branch: see `funcollect.core.loops.blocks`."""

    current: Any  # the environment's own state, a pytree [P, ...]
    spares: tuple[Start, ...]  # of each lane's next episodes, in order; empty if starts are made at every step
    since: Any  # [P] int32, the episodes that the lanes were in when the spares were made


def restart(env: JaxEnv, state: Traced, keys: RunKeys, mask: Any) -> Traced:
    """Return the state in which the lanes of `mask` [P] begin another episode."""
    jnp, lanes = import_jax().numpy, state.env_state
    if isinstance(lanes, JaxEnvState):
        (starts, roots), lanes = _kept_starts(env, state, keys, mask)
    elif not lanes.spares:
        starts, roots = begin(env, keys, state.lane, state.episode + 1, state.env_params)
    elif len(lanes.spares) == 1:
        starts, roots = lanes.spares[0]
    else:
        starts, roots = where_lanes(state.episode == lanes.since, *lanes.spares)

    begun = partial(where_lanes, mask)
    return state.changed(
        env_state=lanes._replace(current=begun(starts, lanes.current)),
        env_params=map_rows(lambda rows: rows._replace(current=begun(rows.coming, rows.current)), state.env_params),
        observation=begun(by_path(env, roots), dict(state.observation)),
        episode=state.episode + mask.astype(state.episode.dtype),
        step=jnp.where(mask, 0, state.step),
        returns=begun(jnp.zeros_like(state.returns), state.returns),
        terminated=state.terminated & ~mask,
        truncated=state.truncated & ~mask,
    )


def continue_from(env: JaxEnv, state: Traced, mask: Any, to: Any) -> Traced:
    """Return the state in which the lanes of `mask` [P] are at the environment states in `to` (see `given_starts`)."""
    held, params = (state.env_state.current, dict(state.observation)), state.env_params
    given = given_starts(env, held, to, lambda observe, to: call_in_lanes(observe, params, to), differing, by_path)
    current, observation = where_lanes(mask, given, held)
    return state.changed(env_state=state.env_state._replace(current=current), observation=observation)


def _kept_starts(env: JaxEnv, state: Traced, keys: RunKeys, mask: Any) -> tuple[Start, JaxEnvState]:
    """Return the kept starts, and the lanes after using them; if a lane needs a used one, all are made again."""
    jax = import_jax()
    lanes: JaxEnvState = state.env_state
    refill = (mask & lanes.next_start_used).any()

    def start_anew() -> Start:
        # The sum stays inside the branch: outside of it, XLA makes a step of few lanes 1.5 times as long.
        return begin(env, keys, state.lane, state.episode + 1, state.env_params)

    try:
        next_start: Start = jax.lax.cond(refill, start_anew, lambda: lanes.next_start)
    except TypeError as error:
        if difference := differing(lanes.next_start, jax.eval_shape(start_anew)):
            what = f"the state does not fit the environment as JAX traces it now: {difference}"
            raise ValueError(f"{what}; jax_enable_x64 may have been set: make another state with init") from error
        raise
    used = (lanes.next_start_used & ~refill) | (mask & (env.starts == "fresh"))
    return next_start, JaxEnvState(lanes.current, next_start, used)


def begin(env: JaxEnv, keys: RunKeys, lane: Any, episode: Any, params: Any) -> Start:
    """Return states and observations [P, ...] at the start of `episode` [P]: functions of key, lane and episode."""
    number = episode if env.starts == "fresh" else episode * 0
    lane_keys = keys.at(Purpose.RESET, np.uint32(0), number.astype(np.uint32))
    env_state, observation = call_in_lanes(partial(reset_lane, env), params, lane_keys, coming=True)
    begun: Start = varying(lane, (without_weak_types(env_state), observation))
    return begun


def starts_are_cheap(env: JaxEnv, params: Any) -> bool:
    """Whether a start costs about as little as a step: few operations, and no loop, branch or call among them."""
    jax, memo = import_jax(), memo_of(env)
    if "cheap starts" not in memo:
        key = jax.ShapeDtypeStruct((2,), jax.numpy.uint32)
        names = [*operations(jax.make_jaxpr(partial(reset_lane, env))(key, of_one_lane(params)).jaxpr)]
        memo["cheap starts"] = len(names) <= _MOST_OPERATIONS and not _COSTLY.intersection(names)
    return bool(memo["cheap starts"])


def operations(jaxpr: Any) -> Iterator[str]:
    """Yield the names of all operations of a program, including those of inner functions."""
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for value in equation.params.values():
            for part in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(part, "jaxpr", part)
                if hasattr(inner, "eqns"):
                    yield from operations(inner)
