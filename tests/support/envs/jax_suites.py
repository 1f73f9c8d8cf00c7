"""JAX suites, each by our adapter and by its own functions, with limits so short that both kinds of end are seen."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import brax.envs
import gymnasium
import gymnax
import jax
import jax.numpy as jnp
import navix
import numpy as np
import pgx
import xminigrid
from flax import struct
from gymnasium.envs.phys2d.cartpole import CartPoleFunctional
from jumanji.environments import LevelBasedForaging
from jumanji.environments.routing.lbf.generator import RandomGenerator
from mujoco_playground import registry

import funcollect as fc

LANES = 2


class Suite(NamedTuple):
    """One environment: ours, and the raw one's start and step."""

    env: fc.Env
    start: object  # key -> raw state, observation
    step: object  # key, raw state, action -> raw state, observation, reward, terminated, truncated
    limit: int | None = None  # steps after which our adapter truncates, where the suite does not
    ends: tuple = ("terminated", "truncated")
    traces: Sequence = ()  # one entry each time that our step is traced


def gymnax_suite():
    raw, params = gymnax.make("CartPole-v1")
    params = params.replace(max_steps_in_episode=20)

    def step(key, state, action):
        endless = params.replace(max_steps_in_episode=1_000_000)  # gymnax 0.0.x counts the time limit as an end
        terminated = raw.step_env(key, state, action, endless)[3]
        observation, state, reward, *_ = raw.step_env(key, state, action, params)
        return state, observation, reward, terminated, state.time >= 20

    env = fc.envs.from_gymnax("CartPole-v1", params, num_envs=LANES)
    return Suite(env, lambda key: raw.reset(key, params)[::-1], step)


@struct.dataclass
class OldState:
    time: int
    position: int
    terminal: bool


@struct.dataclass
class OldParams:
    max_steps_in_episode: int = 6


class OldWalk:
    """A random walk with the functions of gymnax 0.0.x, where a limit of time is an end, and kept in the state."""

    name = "Walk-old"
    default_params = OldParams()

    def reset_env(self, key, params):
        state = OldState(time=0, position=jax.random.randint(key, (), -1, 2), terminal=False)
        return self.get_obs(state), state

    def step_env(self, key, state, action, params):
        position = state.position + 2 * action - 1 + jax.random.randint(key, (), 0, 2)
        state = OldState(time=state.time + 1, position=position, terminal=False)
        done = self.is_terminal(state, params)
        return self.get_obs(state), state.replace(terminal=done), state.position * 0.5, done, {"discount": 1.0 - done}

    def get_obs(self, state):
        return jnp.array([state.position], jnp.float32)

    def is_terminal(self, state, params):
        return state.terminal | (abs(state.position) > 3) | (state.time >= params.max_steps_in_episode)

    def action_space(self, params):
        return gymnax.environments.spaces.Discrete(2)

    def observation_space(self, params):
        return gymnax.environments.spaces.Box(-8, 8, (1,), jnp.float32)


def _like_gymnax(env, raw, params, ends_of, start=None, **options):
    """Suites with gymnax's functions; `ends_of` returns terminated and truncated of a state, given its `done`."""

    def step(key, state, action):
        observation, state, reward, done, _ = raw.step_env(key, state, action, params)
        return state, observation, reward, *ends_of(state, done)

    return Suite(env, start or (lambda key: raw.reset_env(key, params)[::-1]), step, **options)


def old_gymnax_suite():
    raw = OldWalk()
    env = fc.envs.from_gymnax(raw, num_envs=LANES, info_keys=["discount"])
    return _like_gymnax(env, raw, raw.default_params, lambda at, done: (abs(at.position) > 3, done & (at.time >= 6)))


@struct.dataclass
class LaterState:
    timestep: int
    position: int


@struct.dataclass
class LaterParams:
    max_timesteps: int = 6


class LaterWalk(gymnax.environments.environment.Environment):
    """A random walk with the functions and names of Kinetix, which derives from gymnax's class."""

    default_params = LaterParams()

    def reset_env(self, key, params, override_reset_state):
        assert override_reset_state is None
        state = LaterState(timestep=0, position=jax.random.randint(key, (), -1, 2))
        return self.get_obs(state), state

    def step_env(self, key, state, action, params):
        position = state.position + 2 * action - 1 + jax.random.randint(key, (), 0, 2)
        state = LaterState(timestep=state.timestep + 1, position=position)
        done = (abs(position) > 3) | (state.timestep >= params.max_timesteps)
        return self.get_obs(state), state, position * 0.5, done, {}

    def get_obs(self, state):
        return jnp.array([state.position, state.timestep], jnp.float32)

    def action_space(self, params):
        return gymnax.environments.spaces.Discrete(2)

    def observation_space(self, params):
        return gymnax.environments.spaces.Box(-9, 9, (2,), jnp.float32)


def later_gymnax_suite():
    raw = LaterWalk()
    env, params = fc.make_env(raw, num_envs=LANES), raw.default_params
    start = lambda key: raw.reset_env(key, params, None)[::-1]  # noqa: E731
    return _like_gymnax(env, raw, params, lambda at, _: (abs(at.position) > 3, at.timestep >= 6), start)


def craftax_suite():
    from craftax.craftax_env import make_craftax_env_from_name

    raw = make_craftax_env_from_name("Craftax-Classic-Symbolic-v1", auto_reset=False)
    params = raw.default_params.replace(max_timesteps=11)
    env = fc.envs.from_craftax("Craftax-Classic-Symbolic-v1", params, num_envs=LANES, info_keys=["discount"])
    ends_of = lambda at, done: (at.player_health <= 0, done & (at.timestep >= 11))  # noqa: E731
    return _like_gymnax(env, raw, params, ends_of, ends=("truncated",))


def _whole(env, start, move, ends_of, seen="observation", **options):
    """Suites whose reset and step give one state, or time step, with everything in it."""

    def begin(key):
        state = start(key)
        return state, getattr(state, seen)

    def step(key, state, action):
        state = move(state, action)
        return state, getattr(state, seen), state.reward, *ends_of(state)

    return Suite(env, begin, step, **options)


def _states(raw, env, limit, ends):
    return _whole(env, raw.reset, raw.step, lambda at: (at.done == 1.0, False), "obs", limit=limit, ends=ends)


class Falling(brax.envs.fast.Fast):
    """Compiles in a second, and ends, as no environment of brax does that compiles so soon."""

    def step(self, state, action):
        state = super().step(state, action)
        return state.replace(done=(state.obs[1] > 0.19) * 1.0)


def brax_suite():
    raw = Falling()
    return _states(raw, fc.envs.from_brax(raw, num_envs=LANES, episode_length=20), 20, ("terminated", "truncated"))


def brax_pendulum_suite():
    raw = brax.envs.get_environment("inverted_pendulum", backend="spring")
    env = fc.make_env("brax/inverted_pendulum", num_envs=LANES, backend="spring", episode_length=20)
    return _states(raw, env, 20, ("terminated", "truncated"))


class Privileged:
    """A Playground environment whose observation is a dict, as those of its robots are."""

    def __init__(self, env):
        self.env, self.action_size, self.unwrapped = env, env.action_size, env.unwrapped

    def reset(self, key):
        return self._named(self.env.reset(key))

    def step(self, state, action):
        return self._named(self.env.step(state, action))

    def _named(self, state):
        return state.replace(obs={"state": state.data.qvel, "privileged_state": self.env._get_obs(state.data, {})})


def playground_suite():
    """It ends by truncation only: what it calls done is a simulation gone wrong."""
    overrides = {"impl": "jax", "episode_length": 9}
    raw = Privileged(registry.load("PendulumSwingup", config_overrides=overrides))
    return _states(raw, fc.envs.from_playground(raw, num_envs=LANES), 9, ("truncated",))


def jumanji_suite():
    generator = RandomGenerator(grid_size=5, num_agents=2, num_food=1, fov=5)
    raw = LevelBasedForaging(generator, time_limit=25)

    def start(key):
        state, timestep = raw.reset(key)
        return state, timestep.observation._asdict()

    def step(key, state, action):
        state, timestep = raw.step(state, action)
        last, going_on = timestep.step_type == 2, timestep.discount[0] != 0
        return state, timestep.observation._asdict(), timestep.reward, last & ~going_on, last & going_on

    return Suite(fc.envs.from_jumanji(raw, num_envs=LANES), start, step)


def _game(name, limit, several):
    raw = pgx.make(name)

    def observe(state):
        player = {"current_player": state.current_player} if several else {}
        return {"observation": state.observation, "action_mask": state.legal_action_mask} | player

    def start(key):
        state = raw.init(key)
        return state, observe(state)

    def step(key, state, action):
        state = raw.step(state, action, key)
        reward = state.rewards if several else state.rewards[0]
        return state, observe(state), reward, state.terminated, state.truncated

    return Suite(fc.make_env(f"pgx/{name}", num_envs=LANES, max_episode_steps=limit), start, step, limit)


def pgx_suite():
    return _game("tic_tac_toe", 7, several=True)


def pgx_one_player_suite():
    return _game("minatar-breakout", 15, several=False)


def navix_suite():
    name, kwargs = "Navix-Empty-Random-5x5-v0", {"max_steps": 15}
    raw, env = navix.make(name, **kwargs), fc.make_env(f"navix/{name}", num_envs=LANES, **kwargs)
    return _whole(env, raw.reset, raw.step, lambda at: (at.is_termination(), at.is_truncation()))


def xminigrid_suite():
    name, kwargs = "MiniGrid-EmptyRandom-5x5", {"max_steps": 15}
    (raw, params), env = xminigrid.make(name, **kwargs), fc.make_env(f"xminigrid/{name}", num_envs=LANES, **kwargs)
    ends_of = lambda at: (at.discount == 0.0, at.last() & (at.discount != 0.0))  # noqa: E731
    return _whole(env, functools.partial(raw.reset, params), functools.partial(raw.step, params), ends_of)


def functional_suite():
    raw = CartPoleFunctional()

    def start(key):
        state = raw.initial(key)
        return state, raw.observation(state, key)

    def step(key, state, action):
        after = raw.transition(state, action, key)
        reward = raw.reward(state, action, after, key)
        return after, raw.observation(after, key), reward, raw.terminal(after, key), False

    env = fc.envs.from_functional(raw, num_envs=LANES, max_episode_steps=20)
    return Suite(env, start, step, 20)


def reset(key, params):
    place = jax.random.uniform(key, (2,), minval=-1.0)
    return {"place": place, "age": jnp.int32(0)}, (place, jnp.int32(0))


def step(key, walk, action, params):
    """A walk that is lost far away, and that old age stops."""
    place = walk["place"] + jnp.stack([action, -action]) + jax.random.normal(key, (2,)) * 0.3
    age = walk["age"] + 1
    far = abs(place).max()
    return {"place": place, "age": age}, (place, age), -far, far > 4, age >= 9, {"far": far}


def functions_suite(**options):
    spaces = gymnasium.spaces
    env = fc.envs.from_functions(
        reset,
        step,
        observation_space=spaces.Tuple([spaces.Box(-np.inf, np.inf, (2,)), spaces.Discrete(10)]),
        action_space=spaces.Discrete(3, start=-1),
        **{"num_envs": LANES, "info_keys": ["far"]} | options,
    )
    return Suite(env, lambda key: reset(key, None), lambda *given: step(*given, None)[:5])


SUITES = {name.removesuffix("_suite"): make for name, make in vars().copy().items() if name.endswith("_suite")}


@functools.cache
def suite_and_policy(name):
    """A suite, the same one for all tests so that each program is compiled once, and random actions."""
    suite, traces = SUITES[name](), []
    given = suite.env.step

    def counted(*arguments):
        traces.append(arguments)
        return given(*arguments)

    suite = suite._replace(env=dataclasses.replace(suite.env, step=counted), traces=traces)
    return suite, fc.random_policy(suite.env)
