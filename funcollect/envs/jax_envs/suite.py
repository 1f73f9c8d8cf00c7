"""What adapters say when a suite, or an environment of it, is not there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches


def not_installed(suite: str, package: str | None = None) -> ImportError:
    """The error for a suite that cannot be imported."""
    return ImportError(
        f"{suite} is not installed: pip install funcollect[jax-envs], or only it: pip install {package or suite}"
    )


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


def check_no_keywords(suite: str, kwargs: Mapping[str, object]) -> None:
    """Raise TypeError for keyword arguments of a suite's constructor beside an instance."""
    if kwargs:
        raise TypeError(
            f"from_{suite} has no argument {', '.join(kwargs)} for an environment that is made already: pass its id, "
            f"with which {suite} takes more, or check the spelling"
        )


def check_instance(suite: str, env: object, *needed: str) -> None:
    """Raise TypeError unless `env` is an instance that has the functions of a suite's environments."""
    made = f"the class {env.__name__}: make an instance" if isinstance(env, type) else type(env).__name__
    if isinstance(env, type) or not all(hasattr(env, name) for name in needed):
        raise TypeError(f"env is {made}, expected an environment of {suite}, with {', '.join(needed)}")
