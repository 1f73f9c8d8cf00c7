"""Numbers of jumanji's environments and generators as parameters, which may be traced and change during a run."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from funcollect.envs.jax_envs.checks import differing
from funcollect.interop.jax_setup import import_jax, own_generator

_GENERATORS = ("generator", "_generator")  # the attributes by which environments hold theirs


class NumberParams:
    """The numbers of an environment that have these names.

    A name stands for the attribute of the environment, of its generator, or of both, since environments copy those of
    their generator. A leading underscore is left out.
    """

    def __init__(self, raw: Any, names: Sequence[str]) -> None:
        """Find the numbers; ValueError for one that there is not, or whose value jumanji reads while JAX traces it."""
        self._raw = raw
        self.defaults = {name: _number(raw.unwrapped, name) for name in names}
        for name in names:
            self._check_traceable(name)

    def env(self, params: Mapping[str, Any] | None) -> Any:
        """The environment, or for one trace a copy with these numbers."""
        return self._raw if params is None else _with(self._raw, params)

    def _check_traceable(self, name: str) -> None:
        jax = import_jax()
        key, action = jax.ShapeDtypeStruct((2,), np.uint32), self._raw.action_spec.generate_value()
        value = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), _array(self.defaults[name]))

        def first_step(key: Any, value: Any) -> Any:
            env = self.env(None if value is None else {name: value})
            begun = env.reset(key)
            return begun, env.step(begun[0], action)

        with own_generator():
            wanted = jax.eval_shape(lambda key: first_step(key, None), key)
            try:
                traced, shapes = jax.make_jaxpr(first_step, return_shape=True)(key, value)
                why = differing(wanted, shapes) or _unused(traced.jaxpr)
            except Exception as error:
                why = str(error).partition("\n")[0]
        if why:
            raise ValueError(
                f"params has {name!r}, which cannot change during a run of {_name(self._raw.unwrapped)}, since its "
                f"value is needed earlier, for example for a shape ({why}): leave it out, and make an environment for "
                "each value"
            )


def _unused(program: Any) -> str:
    """Why the last argument of a traced program has no effect; empty if it has one."""
    used = any(variable is program.invars[-1] for step in program.eqns for variable in step.invars)
    return "" if used else "neither reset nor step reads it"


def _holders(env: Any) -> list[Any]:
    """The environment, and its generator if it has one."""
    generators = [vars(env)[name] for name in _GENERATORS if name in vars(env)]
    return [env, *(each for each in generators if hasattr(each, "__dict__"))]


def _attribute(holder: Any, name: str) -> str | None:
    """The attribute with this name, or with an underscore before it; None if there is none."""
    return next((each for each in (name, f"_{name}") if each in vars(holder)), None)


def _number(env: Any, name: str) -> Any:
    """The value of a number; ValueError if there is none, or if environment and generator differ."""
    found = [vars(holder)[attribute] for holder in _holders(env) if (attribute := _attribute(holder, name))]
    if not found or not all(_is_number(value) for value in found):
        members = [member for holder in _holders(env) for member in vars(holder).items()]
        known = sorted({key.lstrip("_") for key, value in members if _is_number(value)})
        raise ValueError(
            f"params has {name!r}, expected numbers of {_name(env)} or its generator, such as {known}: correct the name"
        )
    if any(not np.array_equal(value, found[0]) for value in found):
        raise ValueError(
            f"params has {name!r}, which is {found[0]} in {_name(env)}, but {found[1]} in its generator, expected the "
            "same: make the environment from the generator"
        )
    return found[0]


def _name(env: Any) -> str:
    return type(env).__name__


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.number)


def _array(value: Any) -> Any:
    return import_jax().numpy.asarray(value)


def _with(env: Any, params: Mapping[str, Any]) -> Any:
    """A copy of an environment, under its wrappers, with other numbers in it and in its generator."""
    copied = copy.copy(env)
    if env.unwrapped is not env:
        copied._env = _with(env._env, params)
        return copied
    for name in _GENERATORS:
        if hasattr(vars(copied).get(name), "__dict__"):
            setattr(copied, name, copy.copy(vars(copied)[name]))
    for holder in _holders(copied):
        for name, value in params.items():
            if attribute := _attribute(holder, name):
                setattr(holder, attribute, value)
    return copied
