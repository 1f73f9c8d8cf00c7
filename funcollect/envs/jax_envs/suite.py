"""What the adapters over suites of JAX environments share: finding an environment by its id, and clear errors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from funcollect.interop.jax_setup import import_jax

Load = Callable[[], tuple[Iterable[str], Callable[..., Any]]]


@dataclass(frozen=True)
class Suite:
    """A package of JAX environments.

    Attributes:
        name: of the suite, as ids and `from_…` functions have it.
        load: imports it, and returns the names of its environments and the function that makes one.
        members: what each of its environments has.
        package: what pip installs, if that is not `name`.
    """

    name: str
    load: Load
    members: tuple[str, ...]
    package: str = ""

    def make(self, env: Any, kwargs: Mapping[str, Any]) -> tuple[str, Any]:
        """The label and the suite's own environment, from an id with keyword arguments, or from an instance.

        Raises:
            ImportError: if the suite is not installed.
            ValueError: for an unknown id.
            TypeError: for something that is no environment of the suite, or keywords beside an instance.
        """
        import_jax()
        if not isinstance(env, str):
            self._check_instance(env, kwargs)
            return f"{self.name}/{type(env).__name__}", env
        try:
            names, make = self.load()
        except ImportError as error:
            package = self.package or self.name
            raise ImportError(
                f"{self.name} is not installed: pip install funcollect[jax-envs], or only it: pip install {package}"
            ) from error
        check_known(self.name, env, names)
        return f"{self.name}/{env}", make(env, **kwargs)

    def _check_instance(self, env: Any, kwargs: Mapping[str, Any]) -> None:
        if kwargs:
            raise TypeError(
                f"from_{self.name} has no argument {', '.join(kwargs)} for an environment that is made already: pass "
                f"its id, with which {self.name} takes more, or check the spelling"
            )
        check_instance(self.name, env, *self.members)


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
    """Raise TypeError unless `env` is an instance that has the members of a suite's environments."""
    made = f"the class {env.__name__}: make an instance" if isinstance(env, type) else type(env).__name__
    if isinstance(env, type) or not all(hasattr(env, name) for name in members):
        raise TypeError(f"env is {made}, expected an environment of {suite}, with {', '.join(members)}")


def first_observation(reset: Callable[[Any, Any], tuple[Any, Any]]) -> Any:
    """The shapes and dtypes of the observation that `reset` returns, a pytree."""
    jax = import_jax()
    return jax.eval_shape(lambda key: reset(key, None)[1], jax.numpy.zeros(2, "uint32"))
