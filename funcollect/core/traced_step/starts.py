"""Where lanes get the starts of their next episodes in traced code: kept ones, spare ones, or made at every step."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from funcollect.core.env_params import call_in_lanes, of_one_lane
from funcollect.core.lanes import RunKeys, varying, where_lanes
from funcollect.envs.jax_envs.jax_env import JaxEnvState, differing, reset_lane
from funcollect.interop.jax_setup import import_jax, without_weak_types
from funcollect.interop.memo import memo_of
from funcollect.keys import Purpose
from funcollect.protocols import JaxEnv

Traced = Any  # a CollectorState of JAX arrays
Start = tuple[Any, Any]  # state and observation [P, ...] at the start of an episode

SPARES = 2  # episodes that a lane can begin in one block of steps, unless starts are made at every step
_MOST_OPERATIONS = 300  # of a reset that is made at every step; on a GPU they are one kernel with the rest of the step


class SpareStarts(NamedTuple):
    """The state of all lanes in a block of steps without a branch: see `funcollect.core.loops.blocks`."""

    current: Any  # the environment's own state, a pytree [P, ...]
    spares: tuple[Start, ...]  # of each lane's next episodes, in their order; none if starts are made at every step
    since: Any  # [P] int32, the episodes that the lanes were in when the spares were made


def begin(env: JaxEnv, keys: RunKeys, lane: Any, episode: Any, params: Any) -> Start:
    """Return state and observation [P, ...] at the start of the episodes: a function of key, lane and episode."""
    which = episode if env.starts == "fresh" else episode * 0
    own = keys.at(Purpose.RESET, np.uint32(0), which.astype(np.uint32))
    env_state, observation = call_in_lanes(partial(reset_lane, env), params, own, coming=True)
    begun: Start = varying(lane, (without_weak_types(env_state), observation))
    return begun


def restarted(env: JaxEnv, state: Traced, keys: RunKeys, mask: Any) -> tuple[Any, Any]:
    """Return the environment's state after a reset of the lanes of `mask` [P], and the observations of their starts."""
    lanes = state.env_state
    next_starts = _kept if isinstance(lanes, JaxEnvState) else _spare
    (starts, roots), lanes = next_starts(env, state, keys, mask)
    return lanes._replace(current=where_lanes(mask, starts, lanes.current)), roots


def _kept(env: JaxEnv, state: Traced, keys: RunKeys, mask: Any) -> tuple[Start, JaxEnvState]:
    """Return the kept starts. If a lane needs one that has been used, make those of all lanes again."""
    jax = import_jax()
    lanes: JaxEnvState = state.env_state
    refill = (mask & lanes.next_start_used).any()

    def start_anew() -> Start:
        # The sum belongs inside the branch: outside of it, XLA makes a step of few lanes 1.5 times as long.
        return begin(env, keys, state.lane, state.episode + 1, state.env_params)

    try:
        next_start: Start = jax.lax.cond(refill, start_anew, lambda: lanes.next_start)
    except TypeError as error:
        if difference := differing(lanes.next_start, jax.eval_shape(start_anew)):
            raise ValueError(
                f"the state does not fit the environment as JAX traces it now: {difference}; jax_enable_x64 may have "
                "been set in between: make another state with init"
            ) from error
        raise
    used = (lanes.next_start_used & ~refill) | (mask & (env.starts == "fresh"))
    return next_start, JaxEnvState(lanes.current, next_start, used)


def _spare(env: JaxEnv, state: Traced, keys: RunKeys, _: Any) -> tuple[Start, SpareStarts]:
    lanes: SpareStarts = state.env_state
    if not lanes.spares:
        return begin(env, keys, state.lane, state.episode + 1, state.env_params), lanes
    if len(lanes.spares) == 1:
        return lanes.spares[0], lanes
    return where_lanes(state.episode == lanes.since, *lanes.spares), lanes


def spare_starts(env: JaxEnv, state: Traced, keys: RunKeys) -> tuple[Start, ...]:
    """Return the spares of lanes in this state; one suffices where all episodes of a lane start alike."""
    count = SPARES if env.starts == "fresh" else 1
    return tuple(begin(env, keys, state.lane, state.episode + 1 + i, state.env_params) for i in range(count))


def after_block(env: JaxEnv, before: JaxEnvState, current: Any, begun: Any) -> JaxEnvState:
    """Return the lanes' state after a block: the kept starts of lanes that have `begun` an episode [P] are used."""
    return before._replace(current=current, next_start_used=before.next_start_used | (begun & (env.starts == "fresh")))


def starts_are_cheap(env: JaxEnv, params: Any) -> bool:
    """Whether a start costs about as little as a step: few operations, and no loop, branch or call among them.

    Cached for each environment.
    """
    jax = import_jax()
    memo = memo_of(env)
    if "cheap starts" not in memo:
        key = jax.ShapeDtypeStruct((2,), jax.numpy.uint32)
        names = [*operations(jax.make_jaxpr(partial(reset_lane, env))(key, of_one_lane(params)).jaxpr)]
        memo["cheap starts"] = len(names) <= _MOST_OPERATIONS and not _COSTLY.intersection(names)
    return bool(memo["cheap starts"])


_COSTLY = {"while", "scan", "cond", "sort", "custom_call", "pure_callback", "io_callback", "ffi_call"}


def operations(jaxpr: Any) -> Iterator[str]:
    """Yield the names of all operations, those of inner functions included."""
    for equation in jaxpr.eqns:
        inner = [each for value in equation.params.values() for each in _jaxprs(value)]
        yield equation.primitive.name
        for each in inner:
            yield from operations(each)


def _jaxprs(value: Any) -> list[Any]:
    values = value if isinstance(value, (tuple, list)) else (value,)
    return [getattr(each, "jaxpr", each) for each in values if hasattr(getattr(each, "jaxpr", each), "eqns")]
