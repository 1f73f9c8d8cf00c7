"""jumanji environments (https://github.com/instadeepai/jumanji)."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
from gymnasium import spaces

from funcollect.arguments import check_keys
from funcollect.envs.base import box, import_extra
from funcollect.envs.jax_envs.jax_env import FunctionsEnv, differing, jax_env
from funcollect.envs.jax_envs.suites import copy_with, of_suite, pixels_of
from funcollect.errors import EnvError
from funcollect.interop.jax_setup import import_jax, own_generator
from funcollect.messages import shown
from funcollect.protocols import Renderer, Starts, Transition
from funcollect.specs import Space

_NUMBERS = (int, float, np.number)
_DPI = 60  # figures are 10 inches wide and high
_FPS = 5  # as jumanji's own animations have


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

    Args:
        env: an id such as ``"Snake-v1"``, or an instance without autoreset.
        info_keys: the keys of the time step's `extras` that a batch records under ``next.info``.
        params: the names of numbers that `set_env_params` changes during a run: attributes of the environment, of its
            generator, or of both, such as ``["total_budget"]`` of Knapsack or ``["time_limit"]`` of many. Whatever else
            jumanji computed from these numbers as it made the environment stays, its bounds of observations too.
        **kwargs: for `jumanji.make`.
        num_envs, one_hot, starts, param_keys: see `from_functions`; the state holds the key, so with
            ``starts="cached"`` everything random in a lane's episode also repeats.

    Raises the errors of `from_gymnax`, TypeError for a spec without a Gymnasium counterpart, and ValueError for a
    name in `params` that is no number, or whose value is needed earlier, such as the size of a grid.

    >>> from_jumanji("Snake-v1", num_envs=64)
    JaxEnv('jumanji/Snake-v1', num_envs=64)
    """
    label, raw = of_suite("jumanji", env, kwargs)
    observed = _space(raw.observation_spec)
    check_keys("params", params, "time_limit")
    numbers = {name: _number(raw, name) for name in params}

    def reset(key: Any, given: Any) -> tuple[Any, Any]:
        state, timestep = _with(raw, given).reset(key)
        return state, _plain(observed, timestep.observation)

    def step(_: Any, env_state: Any, action: Any, given: Any) -> Transition:
        state, timestep = _with(raw, given).step(env_state, action)
        over, ended = timestep.last(), (timestep.discount == 0).all()
        observation = _plain(observed, timestep.observation)
        return Transition(state, observation, timestep.reward, over & ended, over & ~ended, timestep.extras)

    common = (observed, _space(raw.action_spec), num_envs, one_hot, info_keys, starts)
    limited = getattr(raw.unwrapped, "time_limit", None) is not None
    facts: dict[str, Any] = {"default_params": numbers or None, "param_keys": param_keys, "truncates": limited}
    return jax_env(label, reset, step, *common, renderer=partial(_renderer, raw), **facts)


def _plain(space: Space, observation: Any) -> Any:
    """The observation with its named tuples and dataclasses as dicts."""
    if not isinstance(space, spaces.Dict):
        return observation
    part = observation.__getitem__ if isinstance(observation, Mapping) else partial(getattr, observation)
    return {name: _plain(child, part(name)) for name, child in space.spaces.items()}


def _space(spec: Any) -> Space:
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
    raise TypeError(
        f"the spec {shown(spec)} of jumanji has no counterpart in Gymnasium, expected arrays or a Spec of arrays: "
        "adapt it with funcollect.envs.from_functions"
    )


def _generators(env: Any) -> dict[str, Any]:
    """The generator of an environment, if it has one, by the attribute that holds it."""
    names = ("generator", "_generator")
    return {name: vars(env)[name] for name in names if hasattr(vars(env).get(name), "__dict__")}


def _attribute(holder: Any, name: str) -> str | None:
    """The attribute with this name, or with an underscore before it; None if there is none."""
    return next((each for each in (name, f"_{name}") if each in vars(holder)), None)


def _with(env: Any, numbers: Mapping[str, Any] | None) -> Any:
    """A copy of an environment with other numbers in it, its generator or both; for None the environment itself."""

    def change(copied: Any) -> None:
        own = {name: copy.copy(generator) for name, generator in _generators(copied).items()}
        vars(copied).update(own)
        for holder in (copied, *own.values()):
            for name, value in (numbers or {}).items():
                if attribute := _attribute(holder, name):
                    setattr(holder, attribute, value)

    return env if numbers is None else copy_with(env, "_env", change)


def _number(raw: Any, name: str) -> Any:
    """The value of a number; ValueError if there is none, if environment and generator differ, or if it has to stay."""
    env, holders = raw.unwrapped, [raw.unwrapped, *_generators(raw.unwrapped).values()]
    found = [vars(holder)[attribute] for holder in holders if (attribute := _attribute(holder, name))]
    if not found or not all(isinstance(value, _NUMBERS) for value in found):
        members = [member for holder in holders for member in vars(holder).items()]
        known = sorted({key.lstrip("_") for key, value in members if isinstance(value, _NUMBERS)})
        raise ValueError(
            f"params has {name!r}, expected numbers of {type(env).__name__} or its generator, such as {known}: correct "
            "the name"
        )
    if any(not np.array_equal(value, found[0]) for value in found):
        raise ValueError(
            f"params has {name!r}, which is {found[0]} in {type(env).__name__}, but {found[1]} in its generator, "
            "expected the same: make the environment from the generator"
        )
    if why := _why_fixed(raw, name, found[0]):
        raise ValueError(
            f"params has {name!r}, which cannot change during a run of {type(env).__name__}, since its value is needed "
            f"earlier, for example for a shape ({why}): leave it out, and make an environment for each value"
        )
    return found[0]


def _why_fixed(env: Any, name: str, number: Any) -> str:
    """Why JAX cannot trace a number, whose value jumanji reads while it is traced, or not at all; empty if it can."""
    jax = import_jax()
    key, action = jax.ShapeDtypeStruct((2,), np.uint32), env.action_spec.generate_value()
    value = jax.ShapeDtypeStruct((), jax.numpy.asarray(number).dtype)

    def first_step(key: Any, value: Any) -> Any:
        own = _with(env, None if value is None else {name: value})
        begun = own.reset(key)
        return begun, own.step(begun[0], action)

    with own_generator():
        wanted = jax.eval_shape(lambda key: first_step(key, None), key)
        try:
            traced, shapes = jax.make_jaxpr(first_step, return_shape=True)(key, value)
            read = {id(variable) for step in traced.jaxpr.eqns for variable in step.invars}
            unused = "" if id(traced.jaxpr.invars[-1]) in read else "neither reset nor step reads it"
            return differing(wanted, shapes) or unused
        except Exception as error:
            return str(error).partition("\n")[0]


@contextmanager
def _renderer(raw: Any) -> Iterator[Renderer]:
    """Draw states of `raw` by copies of it and of its viewer, which show no window."""
    pyplot = import_extra("matplotlib.pyplot", "Matplotlib", "viz")
    kind = import_extra("jumanji.viewer", "jumanji", "jax-envs").MatplotlibViewer
    tree = import_jax().tree
    env = copy.copy(raw.unwrapped)
    found = [name for name, member in vars(env).items() if isinstance(member, kind)]
    if len(found) != 1:
        raise EnvError(
            f"jumanji has no renderer for {type(env).__name__}, expected an environment with a viewer that draws with "
            "Matplotlib: pass one as the environment's viewer="
        )
    viewer: Any = copy.copy(getattr(env, found[0]))
    setattr(env, found[0], viewer)
    pictures: list[Any] = []
    viewer._name += " "  # figures are found by name: not one that the user has open
    viewer._get_fig_ax = partial(viewer._get_fig_ax, show=False)
    viewer._display = lambda figure: pictures.append(pixels_of(figure, _DPI))  # some `render` drop its result

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

    yield Renderer(_FPS, draw)
