"""Adapters over gymnax's environments, and over those of other packages that have its interface.

gymnax is at https://github.com/RobertTLange/gymnax, of its releases 1.x and 0.0.x, Craftax at
https://github.com/MichaelTMatthews/Craftax, and JaxMARL, with groups of agents, at https://github.com/FLAIROx/JaxMARL.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from funcollect.arguments import check_flags, check_keys, check_kind
from funcollect.envs import agents
from funcollect.envs.agents import STATE
from funcollect.envs.base import import_extra
from funcollect.envs.by_agents import GroupFunctions
from funcollect.envs.jax_envs.jax_env import FunctionsEnv, check_functions, jax_env
from funcollect.envs.jax_envs.suites import first_observation, of_suite, pixels_of, space_like
from funcollect.envs.plain_spaces import to_gymnasium
from funcollect.errors import EnvError
from funcollect.interop.jax_setup import import_jax, own_generator
from funcollect.protocols import Renderer, Starts, Transition
from funcollect.specs import Space

_GYMNAX_DPI = 100
_CRAFTAX_FPS, _CRAFTAX_PIXELS = 10, 16  # the pixels of a block
# Of JaxMARL:
_ALL = "__all__"  # the key of the flag of a whole lane
_WORLD = "world_state"  # an observation that all agents of SMAX share
_LIMIT = "max_steps"
_LEGAL = ("get_avail_actions", "get_legal_moves")


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
        observed = to_gymnasium(raw.observation_space(own), delivered)
        actions = to_gymnasium(raw.action_space(own))
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


def from_jaxmarl(
    env: Any,
    *,
    groups: Mapping[str, Sequence[str]] | None = None,
    state: bool = False,
    num_envs: int | None = None,
    info_keys: Sequence[str] = (),
    starts: Starts = "fresh",
    **kwargs: Any,
) -> FunctionsEnv:
    """A JAX environment over JaxMARL's, with groups of agents, without its autoreset; `max_steps` truncates.

    An agent that is done before its lane ends has left: its rows are zeros, and its actions are not used, until it is
    back. A lane ends with JaxMARL's ``"__all__"``, or once no agent is left. Where the environment knows which actions
    are legal, as SMAX and Hanabi do, an agent's observation is a dict of ``observation`` and ``action_mask``. In Hanabi
    all agents act at each step, and for all but the one whose turn it is only the last action is legal, which does
    nothing.

    Args:
        env: an id such as ``"MPE_simple_spread_v3"``, with `kwargs` for `jaxmarl.make`, or an instance.
        groups: see `from_pettingzoo`.
        state: whether what all agents see (``"world_state"``) is observed, too, under ``"state"``.
        info_keys: keys of the infos: of those by agent, recorded as ``("next", group, "info", key)``, and of others.

    See `from_gymnax` for the other arguments and the errors; ValueError for `state` without any, and for groups that do
    not hold every agent once, or that mix spaces.

    >>> env = from_jaxmarl("MPE_simple_tag_v3", num_envs=64)
    >>> {name: group.n for name, group in env.groups.items()}
    {'adversary': 3, 'agent': 1}
    """
    label, raw = of_suite("jaxmarl", env, kwargs)
    check_flags(state=state)
    check_keys("info_keys", info_keys, "shaped_reward")
    if groups is not None:
        check_kind("groups", groups, Mapping, "pass a dict")
    names, endless, legal = [*raw.agents], _without_limit(raw), _legal_actions(raw)

    def observed(seen: Any, env_state: Any) -> dict[str, Any]:
        """The observation of each agent and, if it is asked for, the shared state, by name."""
        masks = legal(env_state) if legal else {}
        rows = {
            name: {"observation": seen[name], "action_mask": masks[name].astype(bool)} if legal else seen[name]
            for name in names
        }
        return rows | ({STATE: seen.get(_WORLD)} if state else {})

    def rows_by_group(values: Mapping[str, Any]) -> dict[str, Any]:
        shared = {STATE: values[STATE]} if STATE in values else {}
        return agents.by_group(found, values, import_jax().numpy.stack) | shared

    def reset(key: Any, _: Any) -> tuple[Any, Any]:
        seen, env_state = raw.reset(key)
        return env_state, rows_by_group(observed(seen, env_state))

    def step(key: Any, env_state: Any, actions: Mapping[str, Any], _: Any) -> Transition:
        own = agents.by_agent(found, actions)
        seen, after, reward, done, info = raw.step_env(key, env_state, own)
        # The same step is also traced without the limit, and the compiler merges the two.
        ends = done if endless is None else endless.step_env(key, env_state, own)[3]
        terminated = rows_by_group({name: ends[name] | ends[_ALL] for name in names})
        over = rows_by_group({name: done[name] | done[_ALL] for name in names})
        truncated = {name: flags & ~terminated[name] for name, flags in over.items()}
        infos = {name: {} for name in found} | {key: info[key] for key in info_keys if key not in of_agents}
        for key in of_agents:
            for name, values in rows_by_group(info[key]).items():
                infos[name][key] = values
        rows = rows_by_group(observed(seen, after))
        return Transition(after, rows, rows_by_group(reward), terminated, truncated, infos)

    actions = {name: to_gymnasium(raw.action_space(name)) for name in names}
    seen, infos = _shapes(raw, actions, observed)
    if state and seen[STATE] is None:
        raise ValueError(f"state=True was given for {label}, whose agents share no {_WORLD!r}: leave it out")
    known = {name: (space_like(seen[name]), actions[name]) for name in names}
    found = agents.grouped(known, groups, comes_and_goes=True)
    of_agents = [key for key in info_keys if isinstance(infos.get(key), Mapping) and {*names} <= infos[key].keys()]
    shared = space_like(seen[STATE]) if state else None
    lane = GroupFunctions(label, found, reset, step, state_space=shared, order=names).for_loops()
    recorded = [f"{name}.{key}" for name in found for key in of_agents]
    recorded += [key for key in info_keys if key not in of_agents]
    common = (lane.observation_space, lane.action_spec, num_envs, False, [*lane.info_keys, *recorded], starts)
    return jax_env(label, lane.reset, lane.step, *common, truncates=endless is not None)


def _legal_actions(raw: Any) -> Callable[[Any], Mapping[str, Any]] | None:
    """The function from a state to the masks of legal actions by agent; None if it has none."""
    for name in _LEGAL:
        if (function := getattr(raw, name, None)) is None:
            continue
        with contextlib.suppress(NotImplementedError), own_generator():
            key = import_jax().numpy.zeros(2, np.uint32)
            masks = import_jax().eval_shape(lambda key, legal=function: legal(raw.reset(key)[1]), key)
            if all(masks[agent].shape == (getattr(raw.action_space(agent), "n", None),) for agent in raw.agents):
                return function  # type: ignore[no-any-return]
    return None


def _shapes(raw: Any, actions: Mapping[str, Space], observed: Callable[[Any, Any], Any]) -> tuple[Any, Any]:
    """The shapes and dtypes of a first observation, as `observed` returns it, and of a step's infos."""
    zeros = {name: np.zeros(space.shape or (), space.dtype) for name, space in actions.items()}

    def first(key: Any) -> tuple[Any, Any]:
        seen, env_state = raw.reset(key)
        return observed(seen, env_state), raw.step_env(key, env_state, zeros)[4]

    with own_generator():
        found: tuple[Any, Any] = import_jax().eval_shape(first, import_jax().numpy.zeros(2, np.uint32))
    return found


def _without_limit(raw: Any) -> Any:
    """A copy of an environment that does not end by time; None if it has no limit that can be changed."""
    if not {_LIMIT, "_env"} & vars(raw).keys():
        return None
    copied = object.__new__(type(raw))  # in a wrapper, `copy.copy` would look up missing attributes without an end
    vars(copied).update(vars(raw))
    if _LIMIT in vars(raw):
        setattr(copied, _LIMIT, np.iinfo(np.int32).max)
    if "_env" in vars(raw):  # a wrapper, in which fixed rules play some of the agents
        copied._env = _without_limit(raw._env)
    return copied
