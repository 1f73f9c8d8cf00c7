"""The library's own first import of JAX."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Hashable
from functools import cache
from typing import Any

from funcollect.faulty_fusions import avoid_faulty_fusions

_WAITING: list[Callable[[Any], None]] = []


def with_jax(act: Callable[[Any], None]) -> None:
    """Call `act` with JAX as soon as the library imports it, or now if it has."""
    if import_jax.cache_info().currsize:
        act(import_jax())
    else:
        _WAITING.append(act)


def notice_jax() -> None:
    """Make the calls that wait for JAX, if the user has imported it by now."""
    if _WAITING and "jax" in sys.modules:
        import_jax()


@cache
def import_jax() -> Any:
    """JAX, set up before its first import for sharing a machine with Torch.

    What acts only before JAX makes its client is set here, and only if the user has not imported JAX before:
    no preallocation of the whole GPU, and synchronous dispatch on the CPU, which makes a small network's call cheaper.
    Warns once if the installed jaxlib computes wrong numbers.
    """
    first = "jax" not in sys.modules
    if first:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax

    if note := avoid_faulty_fusions():
        warnings.warn(note, stacklevel=2)
    if first:
        jax.config.update("jax_cpu_enable_async_dispatch", False)  # type: ignore[no-untyped-call]
    while _WAITING:
        _WAITING.pop()(jax)
    return jax


def dispatch_note() -> str:
    """How JAX dispatches on the CPU, in words."""
    if import_jax().config.values.get("jax_cpu_enable_async_dispatch", True):
        return (
            "asynchronous CPU dispatch (JAX's default; "
            "jax.config.update('jax_cpu_enable_async_dispatch', False) before first use makes small calls cheaper)"
        )
    return "synchronous CPU dispatch"


def strong(array: Any) -> Any:
    """The array without a weak type, which would compile a second time where a later one is strong."""
    weak = getattr(array, "weak_type", False)  # which typed keys and NumPy's arrays do not know
    return import_jax().lax.convert_element_type(array, array.dtype) if weak else array


def compiled(
    owner: Any, which: Hashable, function: Callable[..., Any], *, place: Any = None, **options: Any
) -> Callable[..., Any]:
    """`function` under `jit(**options)`, made once for an `owner` (an environment or a policy), with it forgotten.

    `place` is the sharding of all arguments and results. Without it, JAX compiles once for arrays that are committed to
    a device and once for those that are not; and a result that follows from a committed array is committed, too.
    """
    programs: dict[Hashable, Callable[..., Any]] = vars(owner).setdefault("_compiled", {})
    if (which, place) not in programs:
        placed = {} if place is None else {"in_shardings": place, "out_shardings": place}
        programs[which, place] = import_jax().jit(function, **placed, **options)
    return programs[which, place]
