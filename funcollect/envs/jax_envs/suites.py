"""Look up environments of JAX suites, and adapt those of some suites, and Gymnasium's `FuncEnv`.

The suites are navix (https://github.com/epignatelli/navix), pgx (https://github.com/sotetsuk/pgx) with games of one
player or several, and XLand-MiniGrid (https://github.com/dunnolab/xland-minigrid). Their renderers, for
`funcollect.record`, are imported on first use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from funcollect.envs.base import SUITES, adapter_of, box, import_extra
from funcollect.envs.jax_envs.jax_env import FunctionsEnv, check_functions, jax_env
from funcollect.interop.jax_setup import import_jax, own_generator
from funcollect.protocols import Renderer, Starts, Transition
from funcollect.specs import Space


def _playground(package: Any) -> tuple[Iterable[str], Callable[..., Any]]:
    """MuJoCo Playground's ids and constructor, with MJX's JAX implementation unless the arguments name one."""

    def load(name: str, **kwargs: Any) -> Any:
        if "config" not in kwargs and "impl" in package.registry.get_default_config(name):
            kwargs["config_overrides"] = {"impl": "jax"} | (kwargs.get("config_overrides") or {})
        return package.registry.load(name, **kwargs)

    return package.registry.ALL_ENVS, load


def _craftax(package: Any) -> tuple[Iterable[str], Callable[..., Any]]:
    """Craftax's ids, which the package does not list, and constructor."""
    names = [f"Craftax-{game}{seen}-v1" for game in ("", "Classic-") for seen in ("Pixels", "Symbolic")]
    return names, partial(package.make_craftax_env_from_name, auto_reset=False)


# By the suite's name in ids, adapters and pip: a module, and a function from that to the ids and the constructor.
_SUITES: dict[str, tuple[str, Callable[[Any], tuple[Iterable[str], Callable[..., Any]]]]] = {
    "brax": ("brax.envs", lambda its: (its._envs, its.get_environment)),
    "craftax": ("craftax.craftax_env", _craftax),
    "gymnax": ("gymnax", lambda its: (its.registered_envs, lambda *a, **k: its.make(*a, **k)[0])),
    "jaxmarl": ("jaxmarl", lambda its: (its.registered_envs, its.make)),
    "jumanji": ("jumanji", lambda its: (its.registered_environments(), its.make)),
    "navix": ("navix", lambda its: (its.registry(), its.make)),
    "pgx": ("pgx", lambda its: (its.available_envs(), its.make)),
    "playground": ("mujoco_playground", _playground),
    "xminigrid": ("xminigrid", lambda its: (its.registered_environments(), its.make)),
}
# Not "jax-envs": it wants pygame, whose files overwrite those of Gymnasium's pygame-ce.
_EXTRAS = {"craftax": None, "jaxmarl": "agents"}
_TRUNCATION, _TERMINATION = 1, 2  # navix's step types; 0 is a transition
_MINIGRID_FPS = 10
_NAVIX_SIZE = 256  # pixels of the shorter side, about: navix draws only 8 pixels for a cell


def of_suite(suite: str, env: Any, kwargs: Mapping[str, Any]) -> tuple[str, Any]:
    """The label and the suite's own environment, from an id with keyword arguments, or from an instance."""
    module, find = _SUITES[suite]
    import_jax()
    if isinstance(env, str):
        with own_generator():  # some draw as they are made
            names, make = find(import_extra(module, suite, _EXTRAS.get(suite, "jax-envs")))
            if env not in (known := sorted(names)):
                by_case = {other.casefold(): other for other in known}
                near = [repr(by_case[other]) for other in get_close_matches(env.casefold(), by_case, n=3, cutoff=0.5)]
                guess = f"did you mean {' or '.join(near)}?" if near else "choose one of these"
                raise ValueError(f"{suite} has no environment {env!r}, expected one of {known}: {guess}")
            return f"{suite}/{env}", make(env, **kwargs)
    if kwargs:
        what = f"from_{suite} has no argument {', '.join(kwargs)} for an environment that is made already"
        raise TypeError(f"{what}: pass its id, for which from_{suite} has more arguments, or check the spelling")
    _check_instance(suite, suite, env)
    return f"{suite}/{type(env).__name__}", env


def _check_instance(suite: str, name: str, env: object) -> None:
    """Raise TypeError unless `env` is an instance, not a class, and has the members of a suite's environments."""
    _, members = SUITES[suite]
    made = f"the class {env.__name__}: make an instance" if isinstance(env, type) else type(env).__name__
    if isinstance(env, type) or not all(hasattr(env, name) for name in members):
        mend = "" if isinstance(env, type) else f": {adapter_of(env)}"
        raise TypeError(f"env is {made}, expected an environment of {name}, with {', '.join(members)}{mend}")


def refuse_wrapped(label: str, raw: Any, inner: str, wrappers: tuple[str, ...], mend: str) -> None:
    """Raise ValueError if a wrapper whose name ends in one of `wrappers` is around `raw`, or in it as `inner`."""
    while raw is not None:
        if type(raw).__name__.endswith(wrappers):
            wanted = "an environment of one lane that neither counts its steps nor resets itself"
            raise ValueError(f"{label} is wrapped in {type(raw).__name__}, expected {wanted}: {mend}")
        raw = vars(raw).get(inner)  # the environment that a wrapper wraps


def first_observation(reset: Callable[[Any, Any], tuple[Any, Any]]) -> Any:
    """The shapes and dtypes of the observation that `reset` returns, a pytree."""
    jax = import_jax()
    with own_generator():
        return jax.eval_shape(lambda key: reset(key, None)[1], jax.numpy.zeros(2, "uint32"))


def space_like(array: Any) -> Space:
    """The space of an array, or of a dict of arrays, which may be the results of `jax.eval_shape`."""
    if isinstance(array, Mapping):
        return spaces.Dict({name: space_like(part) for name, part in array.items()})
    return box(array.shape, array.dtype)


def pixels_of(figure: Any, dpi: float) -> npt.NDArray[np.uint8]:
    """Draw a figure of Matplotlib's at `dpi` dots per inch, whatever backend is set: [H, W, 3] uint8."""
    agg = import_extra("matplotlib.backends.backend_agg", "Matplotlib", "viz")
    figure.set_dpi(dpi)
    before, canvas = figure.canvas, agg.FigureCanvasAgg(figure)
    canvas.draw()
    figure.set_canvas(before)  # by which pyplot finds the figure to close it
    picture: npt.NDArray[np.uint8] = np.array(np.asarray(canvas.buffer_rgba())[..., :3], order="C")
    return picture


def from_functional(
    env: Any,
    params: Any = None,
    *,
    num_envs: int | None = None,
    max_episode_steps: int | None = None,
    one_hot: bool = False,
    info_keys: Sequence[str] = (),
    starts: Starts = "fresh",
) -> FunctionsEnv:
    """A JAX environment over a `FuncEnv`, whose `terminal` is a termination; it never truncates by itself.

    As in Gymnasium's own wrapper, one key serves all functions of a step. `params` are the last argument of all
    functions, by default their own; `info_keys` are keys of `transition_info`. See `from_functions` for the other
    arguments and the errors of the functions; TypeError for something that is no `FuncEnv`.

    >>> from gymnasium.envs.phys2d.cartpole import CartPoleFunctional
    >>> from_functional(CartPoleFunctional(), num_envs=64, max_episode_steps=500)
    JaxEnv('CartPoleFunctional', num_envs=64)
    """
    _check_instance("functional", "Gymnasium's FuncEnv", env)
    last = () if params is None else (params,)

    def reset(key: Any, _: Any) -> tuple[Any, Any]:
        state = env.initial(key, *last)
        return state, env.observation(state, key, *last)

    def step(key: Any, env_state: Any, action: Any, _: Any) -> Transition:
        state = env.transition(env_state, action, key, *last)
        observation = env.observation(state, key, *last)
        reward = env.reward(env_state, action, state, key, *last)
        info = env.transition_info(env_state, action, state, *last)
        return Transition(state, observation, reward, env.terminal(state, key, *last), False, info)

    common = (env.observation_space, env.action_space, num_envs, one_hot, info_keys, starts)
    made = jax_env(type(env).__name__, reset, step, *common, max_episode_steps=max_episode_steps)
    check_functions(made, made.params)
    return made


def from_navix(
    env: Any,
    *,
    num_envs: int | None = None,
    one_hot: bool = False,
    info_keys: Sequence[str] = (),
    starts: Starts = "fresh",
    **kwargs: Any,
) -> FunctionsEnv:
    """A JAX environment over navix's, without its autoreset, which would spend a step on each reset.

    `info_keys` are keys of the time step's `info`, such as ``"return"``; `kwargs` are for `navix.make`, such as
    `max_steps`, after which an episode is truncated (default: 100). See `from_gymnax` for the other arguments and the
    errors; with ``starts="cached"`` a lane keeps its grid.

    >>> from_navix("Navix-Empty-8x8-v0", num_envs=64)
    JaxEnv('navix/Navix-Empty-8x8-v0', num_envs=64)
    """
    label, raw = of_suite("navix", env, kwargs)

    def reset(key: Any, _: Any) -> tuple[Any, Any]:
        timestep = raw.reset(key)
        return timestep, timestep.observation

    def step(_: Any, env_state: Any, action: Any, __: Any) -> Transition:
        after = raw._step(env_state, action)
        terminated, truncated = after.step_type == _TERMINATION, after.step_type == _TRUNCATION
        return Transition(after, after.observation, after.reward, terminated, truncated, after.info)

    actions: Space = spaces.Discrete(int(raw.action_space.maximum) + 1)
    common = (space_like(first_observation(reset)), actions, num_envs, one_hot, info_keys, starts)
    facts: dict[str, Any] = {"renderer": _navix_renderer, "observation_of": lambda timestep, _: timestep.observation}
    return jax_env(label, reset, step, *common, truncates=True, **facts)


@contextmanager
def _navix_renderer() -> Iterator[Renderer]:
    """Draw the whole grid of a state by navix's sprites, whatever the environment's own observations are."""
    jitted = import_jax().jit(import_extra("navix.observations", "navix", "jax-envs").rgb)

    def draw(timestep: Any, _: Any) -> Any:
        picture = np.asarray(jitted(timestep.state))
        times = max(1, _NAVIX_SIZE // min(picture.shape[:2]))
        return picture.repeat(times, 0).repeat(times, 1)

    yield Renderer(_MINIGRID_FPS, draw)


def from_pgx(
    env: Any, *, num_envs: int | None = None, one_hot: bool = False, max_episode_steps: int | None = None
) -> FunctionsEnv:
    """A JAX environment over a pgx game.

    The observation is what the player whose turn it is sees: a dict of ``observation``, ``action_mask`` (the legal
    actions) and, for several players, ``current_player``. Their rewards are ``next.reward`` [*B, T, players].

    `max_episode_steps` are the steps after which a game is truncated; None for no limit, and some games never end. See
    `from_gymnax` for the other arguments and the errors.

    >>> from_pgx("tic_tac_toe", num_envs=64)
    JaxEnv('pgx/tic_tac_toe', num_envs=64)
    """
    _, raw = of_suite("pgx", env, {})
    several = raw.num_players > 1

    def observe(state: Any, _: Any = None) -> dict[str, Any]:
        player = {"current_player": state.current_player} if several else {}
        return {"observation": state.observation, "action_mask": state.legal_action_mask} | player

    def reset(key: Any, _: Any) -> tuple[Any, Any]:
        state = raw.init(key)
        return state, observe(state)

    def step(key: Any, env_state: Any, action: Any, _: Any) -> Transition:
        state = raw.step(env_state, action, key)
        reward = state.rewards if several else state.rewards[0]
        return Transition(state, observe(state), reward, state.terminated, state.truncated)

    # pgx declares no observation space, so it is derived from the shapes and dtypes
    known: dict[str, Space] = {"current_player": spaces.Discrete(raw.num_players)}
    observed = {name: known.get(name) or space_like(part) for name, part in first_observation(reset).items()}
    with own_generator():  # pgx begins a game to count its actions
        actions: Space = spaces.Discrete(raw.num_actions)
    common = (spaces.Dict(observed), actions, num_envs, one_hot)
    return jax_env(f"pgx/{raw.id}", reset, step, *common, max_episode_steps=max_episode_steps, observation_of=observe)


def from_xminigrid(
    env: Any,
    params: Any = None,
    *,
    num_envs: int | None = None,
    one_hot: bool = False,
    starts: Starts = "fresh",
    param_keys: Sequence[str] = (),
    **kwargs: Any,
) -> FunctionsEnv:
    """A JAX environment over XLand-MiniGrid's, without its autoreset wrappers; `max_steps` truncates.

    `env` is an id such as ``"XLand-MiniGrid-R1-9x9"``, with `kwargs` for the `replace` of its parameters, such as a
    `ruleset` of `xminigrid.load_benchmark`, or an instance. `params` replace its parameters. The ruleset is what
    `set_env_params` changes during a run, for all lanes or for each; other parameters are static. See `from_gymnax` for
    the other arguments and the errors. ValueError for an instance with an autoreset wrapper.

    >>> from_xminigrid("XLand-MiniGrid-R1-9x9", num_envs=64)
    JaxEnv('xminigrid/XLand-MiniGrid-R1-9x9', num_envs=64)
    """
    label, made = of_suite("xminigrid", env, kwargs)
    raw, own = made if isinstance(made, tuple) else (made, None)
    refuse_wrapped(label, raw, "_env", ("AutoResetWrapper",), "pass the environment that it wraps")
    own = params if params is not None else raw.default_params() if own is None else own

    def reset(key: Any, given: Any) -> tuple[Any, Any]:
        timestep = raw.reset(own if given is None else given, key)
        return timestep, timestep.observation

    def step(_: Any, env_state: Any, action: Any, given: Any) -> Transition:
        after = raw.step(own if given is None else given, env_state, action)
        over, ended = after.last(), after.discount == 0
        return Transition(after, after.observation, after.reward, over & ended, over & ~ended)

    @contextmanager
    def renderer() -> Iterator[Renderer]:
        yield Renderer(_MINIGRID_FPS, lambda timestep, given: raw.render(own if given is None else given, timestep))

    actions: Space = spaces.Discrete(int(raw.num_actions(own)))
    common = (space_like(first_observation(reset)), actions, num_envs, one_hot, (), starts)
    facts: dict[str, Any] = {"default_params": own if import_jax().tree.leaves(own) else None, "renderer": renderer}
    facts |= {"param_keys": param_keys, "observation_of": lambda timestep, _: timestep.observation}
    return jax_env(label, reset, step, *common, truncates=True, **facts)
