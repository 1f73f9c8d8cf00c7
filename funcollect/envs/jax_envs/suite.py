"""Make an environment of a JAX suite from its id, or check an instance; used by the adapters of all suites."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from funcollect.envs.recognise import import_extra
from funcollect.interop.jax_setup import import_jax, own_generator


@dataclass(frozen=True)
class Suite:
    """A package of JAX environments."""

    name: str  # of the suite, in ids, in the name of its adapter and for pip
    module: str  # imported on first use
    find: Callable[[Any], tuple[Iterable[str], Callable[..., Any]]]  # from the module: the ids, and the constructor
    members: tuple[str, ...]  # attributes that every environment of the suite has

    def make(self, env: Any, kwargs: Mapping[str, Any]) -> tuple[str, Any]:
        """The label and the suite's own environment, from an id with keyword arguments, or from an instance."""
        import_jax()
        if isinstance(env, str):
            with own_generator():  # some draw as they are made
                names, make = self.find(import_extra(self.module, self.name, "jax-envs"))
                check_known(self.name, env, names)
                return f"{self.name}/{env}", make(env, **kwargs)
        if kwargs:
            raise TypeError(
                f"from_{self.name} has no argument {', '.join(kwargs)} for an environment that is made already: pass "
                f"its id, for which from_{self.name} has more arguments, or check the spelling"
            )
        check_instance(self.name, env, *self.members)
        return f"{self.name}/{type(env).__name__}", env


def check_known(suite: str, name: str, known: Iterable[str]) -> None:
    """Raise ValueError unless `name` is among a suite's `known` environments.

    >>> check_known("brax", "Ant", ["ant", "hopper"])
    Traceback (most recent call last):
    ValueError: brax has no environment 'Ant', expected one of ['ant', 'hopper']: did you mean 'ant'?
    """
    known = sorted(known)
    if name in known:
        return
    by_case = {other.casefold(): other for other in known}
    near = [by_case[other] for other in get_close_matches(name.casefold(), by_case, n=3, cutoff=0.5)]
    guess = f": did you mean {' or '.join(map(repr, near))}?" if near else ": choose one of these"
    raise ValueError(f"{suite} has no environment {name!r}, expected one of {known}{guess}")


def check_instance(suite: str, env: object, *members: str) -> None:
    """Raise TypeError unless `env` is an instance, not a class, and has these members of a suite's environments."""
    made = f"the class {env.__name__}: make an instance" if isinstance(env, type) else type(env).__name__
    if isinstance(env, type) or not all(hasattr(env, name) for name in members):
        raise TypeError(f"env is {made}, expected an environment of {suite}, with {', '.join(members)}")


def first_observation(reset: Callable[[Any, Any], tuple[Any, Any]]) -> Any:
    """The shapes and dtypes of the observation that `reset` returns, a pytree."""
    jax = import_jax()
    with own_generator():
        return jax.eval_shape(lambda key: reset(key, None)[1], jax.numpy.zeros(2, "uint32"))
