"""Adapters over gymnax's environments, and over those of other packages that have its interface.

gymnax is at https://github.com/RobertTLange/gymnax, of its releases 1.x and 0.0.x, Craftax at
https://github.com/MichaelTMatthews/Craftax.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
from gymnasium import spaces

from funcollect.envs.base import box, import_extra
from funcollect.envs.jax_envs.jax_env import FunctionsEnv, check_functions, jax_env
from funcollect.envs.jax_envs.suites import first_observation, of_suite, pixels_of
from funcollect.errors import EnvError
from funcollect.interop.jax_setup import import_jax
from funcollect.protocols import Renderer, Starts, Transition
from funcollect.specs import Space

_GYMNAX_DPI = 100
_CRAFTAX_FPS, _CRAFTAX_PIXELS = 10, 16  # the pixels of a block


def from_gymnax(
    env: Any,
    params: Any = None,
    *,
    num_envs: int | None = None,
    one_hot: bool = False,
    info_keys: Sequence[str] = (),
    starts: Starts = "fresh",
    param_keys: Sequence[str] = (),
    **kwargs: Any,
) -> FunctionsEnv:
    """A JAX environment over gymnax's, without its autoreset; its time limit truncates.

    Most of gymnax's environments stop gradients at each step; those that can let them pass do, such as Pendulum of its
    releases 1.x.

    `env` is an id such as ``"CartPole-v1"``, with `kwargs` for `gymnax.make`, or an instance. Its class may be of any
    package, if it has gymnax's functions, and `time` in states and `max_steps_in_episode` in parameters, or, as Craftax
    and Kinetix (https://github.com/FlairOx/Kinetix), `timestep` and `max_timesteps`. `params` replace its
    default parameters, `set_env_params` changes them during a run, and `info_keys` are keys of gymnax's `info`, such as
    ``"discount"``. See `from_functions` for the other arguments.

    Raises ImportError if the suite's package is not installed, ValueError for an unknown id or an option out of range,
    and TypeError for something else as `env`, or an argument that the suite does not take.

    >>> from_gymnax("CartPole-v1", num_envs=64)
    JaxEnv('gymnax/CartPole-v1', num_envs=64)
    """
    _, raw = of_suite("gymnax", env, kwargs)
    if getattr(raw, "supports_transition_gradients", False):
        raw = raw.with_transition_gradients()  # else its steps cut those of `differentiable_rollout` and `jax.grad`
    common = (num_envs, one_hot, info_keys, starts)
    return _over_functions(f"gymnax/{raw.name}", raw, params, _gymnax_renderer, param_keys, common)


def from_craftax(
    env: Any,
    params: Any = None,
    *,
    num_envs: int | None = None,
    one_hot: bool = False,
    info_keys: Sequence[str] = (),
    starts: Starts = "fresh",
    param_keys: Sequence[str] = (),
    **kwargs: Any,
) -> FunctionsEnv:
    """A JAX environment over Craftax's, without its autoreset; `max_timesteps` truncates, death and victory terminate.

    `env` is an id such as ``"Craftax-Symbolic-v1"`` or ``"Craftax-Classic-Pixels-v1"``, or an instance. See
    `from_gymnax` for the other arguments and the errors. Making a world takes long; ``starts="cached"`` makes one for
    each lane.

    >>> from_craftax("Craftax-Classic-Symbolic-v1", num_envs=64)  # doctest: +SKIP
    JaxEnv('craftax/Craftax-Classic-Symbolic-v1', num_envs=64)
    """
    label, raw = of_suite("craftax", env, kwargs)
    common = (num_envs, one_hot, info_keys, starts)
    return _over_functions(label, raw, params, _craftax_renderer, param_keys, common)


def _over_functions(
    label: str, raw: Any, params: Any, renderer: Any, param_keys: Sequence[str], common: Any
) -> FunctionsEnv:
    """Adapt an environment with gymnax's functions; if it is from neither gymnax nor Craftax, they are checked."""
    package = type(raw).__module__.partition(".")[0]
    own = raw.default_params if params is None else params
    later = hasattr(own, "max_timesteps") and not hasattr(own, "max_steps_in_episode")
    clock, limit = ("timestep", "max_timesteps") if later else ("time", "max_steps_in_episode")

    def reset(key: Any, given: Any) -> tuple[Any, Any]:
        observation, env_state = raw.reset_env(key, own if given is None else given, *unused)
        return env_state, observation

    def step(key: Any, env_state: Any, action: Any, given: Any) -> Transition:
        params = own if given is None else given
        observation, after, reward, terminated, info = raw.step_env(key, env_state, action, params)
        if hasattr(raw, "is_truncated") and not later:
            return Transition(after, observation, reward, terminated, raw.is_truncated(after, params), info)
        # All others count the time limit as a termination, and some keep that in their state. So the same step is also
        # traced without the limit, and the compiler merges the two; in Craftax, the state alone shows it.
        endless = params.replace(**{limit: np.iinfo(np.int32).max})
        alone = package == "craftax"
        terminated = raw.is_terminal(after, endless) if alone else raw.step_env(key, env_state, action, endless)[3]
        return Transition(after, observation, reward, terminated, getattr(after, clock) >= getattr(params, limit), info)

    facts = {"default_params": own, "param_keys": param_keys, "renderer": partial(renderer, raw, own)}
    with _like_gymnax(raw):
        parameters = [*inspect.signature(raw.reset_env).parameters.values()]
        unused = [None for each in parameters[2:] if each.default is each.empty]  # Kinetix takes a given start
        delivered = None if package == "craftax" else first_observation(reset)
        observed, actions = gymnax_space(raw.observation_space(own), delivered), gymnax_space(raw.action_space(own))
    if package == "craftax":
        facts["observation_of"] = lambda state, _: raw.get_obs(state)
    elif ".classic_control." in (of := type(raw).__module__) or ".minatar." in of:  # others' draw, or differ
        facts["observation_of"] = lambda state, given: raw.get_obs(state, own if given is None else given)
    made = jax_env(label, reset, step, observed, actions, *common, truncates=True, **facts)
    if package not in ("gymnax", "craftax"):
        with _like_gymnax(raw, TypeError):
            check_functions(made, made.params)
    return made


@contextmanager
def _like_gymnax(raw: Any, *more: type[Exception]) -> Iterator[None]:
    """Turn the errors of an environment that lacks a part of gymnax's interface, and `more`, into one TypeError."""
    foreign: tuple[type[Exception], ...] = (AttributeError, LookupError, NotImplementedError, *more)
    try:
        yield
    except foreign as error:
        what = f"from_gymnax cannot adapt {type(raw).__name__}, which raised {error!r}"
        wanted = "gymnax's interface: state.time, params.max_steps_in_episode, and observations as in their space"
        mend = "pass its reset_env and step_env, in the form of two functions, to funcollect.envs.from_functions"
        raise TypeError(f"{what}, expected {wanted}; {mend}") from error


def gymnax_space(given: Any, delivered: Any = None) -> Space:
    """Gymnasium's space for one of gymnax's; a Box gets the dtype of the `delivered` array, as some declare another."""
    match type(given).__name__:
        case "Discrete":
            return spaces.Discrete(int(given.n))
        case "MultiDiscrete":  # of JaxMARL
            return spaces.MultiDiscrete(np.asarray(given.num_categories))
        case "Box":
            return box(tuple(given.shape), (given if delivered is None else delivered).dtype, given.low, given.high)
        case "Dict":
            children = given.spaces.items()
            return spaces.Dict({name: gymnax_space(child, delivered and delivered[name]) for name, child in children})
        case "Tuple":
            children = enumerate(given.spaces)
            return spaces.Tuple([gymnax_space(child, delivered and delivered[i]) for i, child in children])
    known = "Discrete, Box, Dict, Tuple"
    raise TypeError(f"the space {given!r} of gymnax has no counterpart in Gymnasium: expected {known}")


@contextmanager
def _gymnax_renderer(raw: Any, own: Any) -> Iterator[Renderer]:
    """Draw states of `raw` by gymnax's `Visualizer`, with the parameters `own` where a state has none."""
    pyplot = import_extra("matplotlib.pyplot", "Matplotlib", "viz")
    visualizer: Any = import_extra("gymnax.visualize", "gymnax", "jax-envs").Visualizer(raw, own, {})

    def draw(env_state: Any, params: Any) -> Any:
        visualizer.env_params = own if params is None else params
        step = int(getattr(env_state, "time", 0))
        visualizer.state_seq = {0: env_state, step: env_state}
        pyplot.sca(visualizer.ax)
        visualizer.ax.clear()
        visualizer.init()  # at every picture, since goals differ between episodes and are drawn here only
        if not hasattr(visualizer, "im"):
            known = "an environment that gymnax.visualize.Visualizer draws"
            mend = "film one of these, or plot observations with plots.episode"
            what = f"gymnax has no renderer for {raw.name}, expected {known}"
            raise EnvError(f"{what}, such as those of classic control and MinAtar: {mend}")
        visualizer.update(step)  # also writes the step into the title
        return pixels_of(visualizer.fig, _GYMNAX_DPI)

    try:
        yield Renderer(1000 / visualizer.interval, draw)
    finally:
        pyplot.close(visualizer.fig)


@contextmanager
def _craftax_renderer(raw: Any, _: Any) -> Iterator[Renderer]:
    """Draw states like the pixel observations of the game of `raw`, one of Craftax's two."""
    game = next(base.__module__.split(".")[1] for base in type(raw).__mro__ if base.__module__.startswith("craftax."))
    draws = import_extra(f"craftax.{game}.renderer", "craftax", None).make_craftax_pixel_renderer(_CRAFTAX_PIXELS)
    jitted = import_jax().jit(draws)
    yield Renderer(_CRAFTAX_FPS, lambda state, _: np.asarray(jitted(state)).clip(0, 255).astype(np.uint8))
