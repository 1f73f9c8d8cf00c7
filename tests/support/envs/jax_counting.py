"""A JAX environment that counts, and a plain Python loop over its two functions.

The observation is the key with which the episode began, which tells lane and episode apart, and the step: integers, so
that a loop compiled otherwise gives the same bits. Key and action decide all else.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces
from jax.extend.random import threefry_2x32

from funcollect.envs import Transition
from funcollect.envs.jax_envs.jax_env import FunctionsEnv
from funcollect.keys import Purpose, key_from_seed
from funcollect.specs import ActionSpec, observation_leaves
from tests.support.plain import row_of, stacked

OBSERVATIONS = spaces.Dict({"start": spaces.Box(-(2**31), 2**31 - 1, (2,), np.int32), "count": spaces.Discrete(99)})


def observe(place):
    start, count = place
    return {"start": jax.lax.bitcast_convert_type(start, jnp.int32), "count": count}


def reset(key, params):
    place = (key, jnp.int32(0))
    return place, observe(place)


def step(key, place, action, params):
    """An episode lasts 2 to 5 steps; every third one or so ends by truncation."""
    start, count = place
    moved = (start, count + 1)
    ended = count + 1 >= 2 + (start[1] % 4).astype(jnp.int32)
    cut = start[0] % 3 == 0
    reward = count + action / 4
    info = {"draw": jax.lax.bitcast_convert_type(key[0], jnp.int32)}
    return Transition(moved, observe(moved), reward, ended & ~cut, ended & cut, info)


def counting(num_envs=None, **changes):
    fields = {"label": "counting", "num_envs": num_envs, "observation_space": OBSERVATIONS} | changes
    fields = {"action_spec": ActionSpec(spaces.Discrete(3)), "reset": reset, "step": step} | fields
    return FunctionsEnv(observation_leaves=observation_leaves(fields["observation_space"]), **fields)


def folded(key, *words):
    """A key hashed with one pair of words after the other."""
    return _hashed(jnp.asarray(key), np.array(words, np.uint32).reshape(-1, 2))


@jax.jit
def _hashed(key, pairs):
    for pair in pairs:
        key = threefry_2x32(tuple(key), pair)
    return key


@functools.cache
def seeded(seed, *words):
    return folded(key_from_seed(seed), *words)


def plain_loop(env, actions, *, seed, lane=0, lanes=1, limit=None, first_step=0):
    """One lane's rows [T, ...] of a batch, by path, given the actions [T, ...] that were taken."""
    start, move = jax.jit(env.reset), jax.jit(env.step)
    episode = step = 0
    place, observation = start(seeded(seed, 0, Purpose.RESET, 0, lane, 0, episode), env.params)
    rows = []
    for t, action in enumerate(actions):
        number = first_step + t
        key = seeded(seed, 0, Purpose.DYNAMICS, 0, lane, number >> 32, number & 0xFFFFFFFF)
        moved = move(key, place, np.asarray(action, np.int32 if action.dtype.kind == "i" else None), env.params)
        truncated = bool(moved.truncated) or step + 1 in (limit, env.max_episode_steps)
        ends = bool(moved.terminated), truncated
        before, after = named(env, observation), named(env, moved.observation)
        row = row_of(before, after, moved.reward, *ends, episode, step, lane, lanes, moved.info)
        rows.append({**row, ("collector", "policy_version"): 0})
        place, observation, step = moved.env_state, moved.observation, step + 1
        if any(ends):
            episode, step = episode + 1, 0
            place, observation = start(seeded(seed, 0, Purpose.RESET, 0, lane, 0, episode), env.params)
    return stacked(rows)


def named(env, observation):
    leaves = observation if isinstance(observation, dict) else {"observation": observation}
    dtypes = {leaf.path: leaf.dtype for leaf in env.observation_leaves}
    return {(name,): np.asarray(value).astype(dtypes[(name,)]) for name, value in leaves.items()}


def counting_policy(head=None):
    """A function of the observation, so that what it answers can be foretold: (start + 2 count + bias) mod 3."""
    import funcollect as fc

    def apply(params, observation):
        return (observation["start"][:, 0] % 3 + 2 * observation["count"] + params) % 3

    return fc.jax_policy(apply, jnp.int32(1), head=head)
