"""Adapters over instances that keep their parameters in attributes: brax, MuJoCo Playground and jumanji.

See https://github.com/google/brax, https://github.com/google-deepmind/mujoco_playground and
https://github.com/instadeepai/jumanji. For other parameters, JAX traces the step of a changed copy.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

import numpy as np
from gymnasium import spaces

from funcollect.arguments import check_keys, check_optional_positive, check_positive
from funcollect.envs.base import box, import_extra
from funcollect.envs.jax_envs.jax_env import FunctionsEnv, differing, jax_env
from funcollect.envs.jax_envs.suites import first_observation, of_suite, pixels_of, refuse_wrapped, space_like
from funcollect.errors import EnvError
from funcollect.interop.jax_setup import import_jax, own_generator
from funcollect.messages import shown
from funcollect.protocols import Renderer, Starts, Transition
from funcollect.specs import Space

_TRAINING = ("AutoResetWrapper", "EpisodeWrapper", "EvalWrapper", "VmapWrapper")  # in the suites' names
_CAMERA = "track"  # follows the body in most of MuJoCo's models; without it, the camera is free
_HEIGHT, _WIDTH = 240, 320  # those of brax's own pictures
_NUMBERS = (int, float, np.number)
_JUMANJI_DPI = 60  # figures are 10 inches wide and high
_JUMANJI_FPS = 5  # as jumanji's own animations have


def _copy_with(env: Any, wrapped: str, change: Callable[[Any], None]) -> Any:
    """A copy, for one trace, in which the innermost environment is changed; wrappers hold it as `wrapped`."""
    copied = copy.copy(env)
    if wrapped in vars(env):
        setattr(copied, wrapped, _copy_with(getattr(env, wrapped), wrapped, change))
    else:
        change(copied)
    return copied


def from_brax(
    env: Any,
    *,
    num_envs: int | None = None,
    episode_length: int = 1000,
    info_keys: Sequence[str] = (),
    starts: Starts = "fresh",
    param_keys: Sequence[str] = (),
    **kwargs: Any,
) -> FunctionsEnv:
    """A JAX environment over a raw brax one, without its training wrappers.

    An episode is truncated after `episode_length` steps, `info_keys` are keys of the state's `metrics`, `kwargs` are
    for `brax.envs.get_environment`, such as `backend`, and the parameters are brax's system. See `from_gymnax` for the
    other arguments and the errors; ``starts="cached"`` is what brax's own autoreset does. ValueError for an instance
    with a training wrapper, which batches, counts or resets.

    >>> from_brax("inverted_pendulum", num_envs=64)
    JaxEnv('brax/inverted_pendulum', num_envs=64)
    """
    check_positive("episode_length", episode_length, 1000)
    label, raw = of_suite("brax", env, kwargs)
    given = {"max_episode_steps": episode_length, "info_keys": info_keys, "starts": starts, "param_keys": param_keys}
    return _over_states(label, raw, "sys", "pipeline_state", {"qpos": "q", "qvel": "qd"}, num_envs=num_envs, **given)


def from_playground(
    env: Any,
    *,
    num_envs: int | None = None,
    episode_length: int | None = None,
    info_keys: Sequence[str] = (),
    starts: Starts = "fresh",
    param_keys: Sequence[str] = (),
    **kwargs: Any,
) -> FunctionsEnv:
    """A JAX environment over a raw one of MuJoCo Playground, without its training wrappers.

    The physics are MJX's ``"jax"`` implementation, which runs on every device, unless a `config` or
    ``config_overrides={"impl": …}`` names another. The `action_repeat` of the config is not applied.

    `episode_length` is by default the config's, `kwargs` are for `mujoco_playground.registry.load` (`config`,
    `config_overrides`), and the parameters are MJX's model. Resets are slow here, so ``starts="cached"`` saves much
    time. See `from_brax` for the other arguments and the errors.

    >>> from_playground("CartpoleBalance", num_envs=64)
    JaxEnv('playground/CartpoleBalance', num_envs=64)
    """
    check_optional_positive("episode_length", episode_length)
    label, raw = of_suite("playground", env, kwargs)
    length = raw.unwrapped._config.episode_length if episode_length is None else episode_length
    given = {"max_episode_steps": length, "info_keys": info_keys, "starts": starts, "param_keys": param_keys}
    drawn = {name: name for name in ("qpos", "qvel", "xfrc_applied")}
    return _over_states(label, raw, "_mjx_model", "data", drawn, num_envs=num_envs, **given)


def _over_states(label: str, raw: Any, physics: str, *drawn: Any, **given: Any) -> FunctionsEnv:
    """Adapt an environment whose parameters are its attribute `physics`; `drawn` is for `mujoco_renderer`."""
    refuse_wrapped(label, raw, "env", _TRAINING, "pass env.unwrapped")

    def with_physics(params: Any) -> Any:
        return raw if params is None else _copy_with(raw, "env", lambda inner: setattr(inner, physics, params))

    def reset(key: Any, params: Any) -> tuple[Any, Any]:
        state = with_physics(params).reset(key)
        return state, state.obs

    def step(_: Any, env_state: Any, action: Any, params: Any) -> Transition:
        state = with_physics(params).step(env_state, action)
        return Transition(state, state.obs, state.reward, state.done > 0, False, state.metrics)

    def renderer() -> Any:
        inner = raw.unwrapped
        return mujoco_renderer((inner.sys if physics == "sys" else inner).mj_model, float(inner.dt), *drawn)

    observed, actions = space_like(first_observation(reset)), box((raw.action_size,), "float32", -1.0, 1.0)
    given |= {"default_params": getattr(raw.unwrapped, physics, None), "renderer": renderer}
    return jax_env(label, reset, step, observed, actions, **given, observation_of=lambda state, _: state.obs)


@contextmanager
def mujoco_renderer(model: Any, dt: float, physics: str, names: Mapping[str, str]) -> Iterator[Renderer]:
    """Draw states by MuJoCo; `names` map attributes of `MjData` to those of the state's attribute `physics`."""
    mujoco = import_extra("mujoco", "MuJoCo", "jax-envs")
    windowed = sys.platform == "linux" and os.environ.get("MUJOCO_GL", "").lower() not in ("egl", "osmesa")
    if windowed and not ({"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys()):  # MuJoCo might end the process
        what = "MuJoCo draws in a window unless MUJOCO_GL is set, and there is no display"
        mend = "install one, and set MUJOCO_GL=egl or osmesa before Python starts"
        raise EnvError(f"{what}, expected OpenGL by EGL or OSMesa: {mend}")
    data = mujoco.MjData(model)
    camera = mujoco.mj_name2id(model, mujoco.mjtObj.mjOBJ_CAMERA, _CAMERA)  # -1, the free one, if there is none
    with closing(mujoco.Renderer(model, height=_HEIGHT, width=_WIDTH)) as renderer:

        def draw(env_state: Any, _: Any) -> Any:
            source = getattr(env_state, physics)
            for name, attribute in names.items():
                setattr(data, name, np.asarray(getattr(source, attribute)))
            if data.mocap_pos.size and hasattr(source, "mocap_pos"):  # of bodies that the environment moves, as targets
                data.mocap_pos, data.mocap_quat = np.asarray(source.mocap_pos), np.asarray(source.mocap_quat)
            mujoco.mj_forward(model, data)
            renderer.update_scene(data, camera=camera)
            return np.array(renderer.render())

        yield Renderer(1 / dt, draw)


def from_jumanji(
    env: Any,
    *,
    num_envs: int | None = None,
    one_hot: bool = False,
    info_keys: Sequence[str] = (),
    starts: Starts = "fresh",
    params: Sequence[str] = (),
    param_keys: Sequence[str] = (),
    **kwargs: Any,
) -> FunctionsEnv:
    """A JAX environment over jumanji's; a last step whose discount is not zero is a truncation.

    Named tuples become dicts. The rewards of several agents are ``next.reward`` [*B, T, agents]. Many environments of
    the suite report their own time limit as a termination, and so does the batch.

    `params` are the names of numbers that `set_env_params` changes during a run: attributes of the environment, of its
    generator, or of both, such as ``["total_budget"]`` of Knapsack or ``["time_limit"]`` of many. Whatever else jumanji
    computed from these numbers as it made the environment stays, its bounds of observations too.

    `env` has no autoreset, `info_keys` are keys of the time step's `extras`, and `kwargs` are for `jumanji.make`. See
    `from_gymnax` for the other arguments and the errors. The state holds the key, so with ``starts="cached"``
    everything random in a lane's episode also repeats. TypeError for a spec without a Gymnasium counterpart, ValueError
    for a name in `params` that is no number, or whose value is needed earlier, such as the size of a grid.

    >>> from_jumanji("Snake-v1", num_envs=64)
    JaxEnv('jumanji/Snake-v1', num_envs=64)
    """
    label, raw = of_suite("jumanji", env, kwargs)
    observed = _space(raw.observation_spec)
    check_keys("params", params, "time_limit")
    numbers = {name: _number(raw, name) for name in params}

    def reset(key: Any, given: Any) -> tuple[Any, Any]:
        state, timestep = _with_numbers(raw, given).reset(key)
        return state, _plain(observed, timestep.observation)

    def step(_: Any, env_state: Any, action: Any, given: Any) -> Transition:
        state, timestep = _with_numbers(raw, given).step(env_state, action)
        over, ended = timestep.last(), (timestep.discount == 0).all()
        observation = _plain(observed, timestep.observation)
        return Transition(state, observation, timestep.reward, over & ended, over & ~ended, timestep.extras)

    common = (observed, _space(raw.action_spec), num_envs, one_hot, info_keys, starts)
    limited = getattr(raw.unwrapped, "time_limit", None) is not None
    facts: dict[str, Any] = {"default_params": numbers or None, "param_keys": param_keys, "truncates": limited}
    return jax_env(label, reset, step, *common, renderer=partial(_jumanji_renderer, raw), **facts)


def _plain(space: Space, observation: Any) -> Any:
    """The observation with dicts in place of named tuples and dataclasses."""
    if not isinstance(space, spaces.Dict):
        return observation
    part = observation.__getitem__ if isinstance(observation, Mapping) else partial(getattr, observation)
    return {name: _plain(child, part(name)) for name, child in space.spaces.items()}


def _space(spec: Any) -> Space:
    """The space for one of jumanji's specs; TypeError if there is none."""
    match type(spec).__name__:
        case "DiscreteArray":
            return spaces.Discrete(int(spec.num_values))
        case "MultiDiscreteArray":
            return spaces.MultiDiscrete(np.asarray(spec.num_values))
        case "BoundedArray":
            return box(tuple(spec.shape), spec.dtype, spec.minimum, spec.maximum)
        case "Array":
            return box(tuple(spec.shape), spec.dtype)
    if children := vars(spec).get("_specs"):
        return spaces.Dict({name: _space(child) for name, child in children.items()})
    what = f"the spec {shown(spec)} of jumanji has no counterpart in Gymnasium, expected arrays or a Spec of arrays"
    raise TypeError(f"{what}: adapt it with funcollect.envs.from_functions")


def _generators(env: Any) -> dict[str, Any]:
    """The generator of an environment, if it has one, by the attribute that holds it."""
    names = ("generator", "_generator")
    return {name: vars(env)[name] for name in names if hasattr(vars(env).get(name), "__dict__")}


def _attribute(holder: Any, name: str) -> str | None:
    """The attribute with this name, or with an underscore before it; None if there is none."""
    return next((attribute for attribute in (name, f"_{name}") if attribute in vars(holder)), None)


def _with_numbers(env: Any, numbers: Mapping[str, Any] | None) -> Any:
    """A copy of an environment with other numbers in itself, its generator or both; the environment for None."""

    def change(copied: Any) -> None:
        generators = {name: copy.copy(generator) for name, generator in _generators(copied).items()}
        vars(copied).update(generators)
        for holder in (copied, *generators.values()):
            for name, value in (numbers or {}).items():
                if attribute := _attribute(holder, name):
                    setattr(holder, attribute, value)

    return env if numbers is None else _copy_with(env, "_env", change)


def _number(raw: Any, name: str) -> Any:
    """A number by its name; ValueError if there is none, if it is another in the generator, or if it cannot change."""
    env, holders = raw.unwrapped, [raw.unwrapped, *_generators(raw.unwrapped).values()]
    found = [vars(holder)[attribute] for holder in holders if (attribute := _attribute(holder, name))]
    if not found or not all(isinstance(value, _NUMBERS) for value in found):
        members = [member for holder in holders for member in vars(holder).items()]
        known = sorted({key.lstrip("_") for key, value in members if isinstance(value, _NUMBERS)})
        what = f"params has {name!r}, expected numbers of {type(env).__name__} or its generator, such as {known}"
        raise ValueError(f"{what}: correct the name")
    if any(not np.array_equal(value, found[0]) for value in found):
        what = f"params has {name!r}, which is {found[0]} in {type(env).__name__}, but {found[1]} in its generator"
        raise ValueError(f"{what}, expected the same: make the environment from the generator")
    if why := _why_fixed(raw, name, found[0]):
        what = f"params has {name!r}, which cannot change during a run of {type(env).__name__}"
        reason = f"its value is needed earlier, for example for a shape ({why})"
        raise ValueError(f"{what}, since {reason}: leave it out, and make an environment for each value")
    return found[0]


def _why_fixed(env: Any, name: str, number: Any) -> str:
    """Why a number cannot change: jumanji needs its value while JAX traces, or never reads it. Empty if it can."""
    jax = import_jax()
    key, action = jax.ShapeDtypeStruct((2,), np.uint32), env.action_spec.generate_value()
    value = jax.ShapeDtypeStruct((), jax.numpy.asarray(number).dtype)

    def first_step(key: Any, value: Any) -> Any:
        changed = _with_numbers(env, None if value is None else {name: value})
        begun = changed.reset(key)
        return begun, changed.step(begun[0], action)

    with own_generator():
        wanted = jax.eval_shape(lambda key: first_step(key, None), key)
        try:
            traced, shapes = jax.make_jaxpr(first_step, return_shape=True)(key, value)
            read = {id(variable) for equation in traced.jaxpr.eqns for variable in equation.invars}
            unused = "" if id(traced.jaxpr.invars[-1]) in read else "neither reset nor step reads it"
            return differing(wanted, shapes) or unused
        except Exception as error:
            return str(error).partition("\n")[0]


@contextmanager
def _jumanji_renderer(raw: Any) -> Iterator[Renderer]:
    """Draw states by copies of `raw` and of its viewer, which open no window."""
    pyplot = import_extra("matplotlib.pyplot", "Matplotlib", "viz")
    kind = import_extra("jumanji.viewer", "jumanji", "jax-envs").MatplotlibViewer
    tree = import_jax().tree
    env = copy.copy(raw.unwrapped)
    found = [name for name, member in vars(env).items() if isinstance(member, kind)]
    if len(found) != 1:
        wanted = "an environment with a viewer that draws with Matplotlib: pass one as the environment's viewer="
        raise EnvError(f"jumanji has no renderer for {type(env).__name__}, expected {wanted}")
    viewer: Any = copy.copy(getattr(env, found[0]))
    setattr(env, found[0], viewer)
    pictures: list[Any] = []
    viewer._name += " "  # figures are found by name: not one that the user has open
    viewer._get_fig_ax = partial(viewer._get_fig_ax, show=False)
    viewer._display = lambda figure: pictures.append(pixels_of(figure, _JUMANJI_DPI))  # some `render` drop its result

    def render(env_state: Any) -> Any:
        try:
            with pyplot.ioff():
                env.render(env_state)
        finally:
            pyplot.close(viewer._name)  # some viewers draw over what the figure shows
        return pictures.pop()

    def draw(env_state: Any, _: Any) -> Any:
        try:
            return render(tree.map(np.asarray, env_state))  # many viewers read cell by cell, which is slow in JAX
        except AttributeError:
            return render(env_state)  # some viewers use `.at`, which NumPy's arrays lack

    yield Renderer(_JUMANJI_FPS, draw)
