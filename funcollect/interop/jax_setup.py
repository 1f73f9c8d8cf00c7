"""Imports JAX for the library and sets it up, compiles functions once for each owner, and copies framework settings."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple, Self

import cloudpickle
import torch

from funcollect.faulty_fusions import avoid_faulty_fusions
from funcollect.interop.memo import memo_of

_WAITING: list[Callable[[Any], None]] = []
_JAX_SETTINGS = (  # that change numbers
    *("jax_enable_x64", "jax_threefry_partitionable", "jax_default_prng_impl"),
    *("jax_default_matmul_precision", "jax_numpy_dtype_promotion", "jax_numpy_rank_promotion"),
)


def with_jax(act: Callable[[Any], None]) -> None:
    """Call `act` with JAX as soon as the library imports it, or now if it has."""
    if import_jax.cache_info().currsize:
        act(import_jax())
    else:
        _WAITING.append(act)


def notice_jax() -> None:
    """Make the calls that wait for JAX, if the user has already imported it."""
    if _WAITING and "jax" in sys.modules:
        import_jax()


@cache
def import_jax() -> Any:
    """Import JAX, set up for sharing a machine with Torch.

    Unless JAX has made its client before, it does not preallocate the whole GPU; unless the user has imported it, it
    dispatches synchronously on the CPU, which makes calls of small networks cheaper.
    """
    first = "jax" not in sys.modules
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax

    if note := avoid_faulty_fusions():
        warnings.warn(note, stacklevel=2)
    if first:
        jax.config.update("jax_cpu_enable_async_dispatch", False)  # type: ignore[no-untyped-call]
    while _WAITING:
        _WAITING.pop()(jax)
    return jax


@contextlib.contextmanager
def own_generator() -> Iterator[None]:
    """Use JAX's default generator and raw keys while functions that split keys are traced, whatever is set outside."""
    jax = import_jax()
    with jax.default_prng_impl("threefry2x32"), jax.threefry_partitionable(True), jax.legacy_prng_key("allow"):
        yield


@contextlib.contextmanager
def tracing(function: str) -> Iterator[None]:
    """`own_generator` while a user's function is traced, and the remedy in JAX's error if it cannot be traced."""
    errors = import_jax().errors
    try:
        with own_generator():
            yield
    except (errors.ConcretizationTypeError, errors.TracerArrayConversionError) as error:
        mend = "write jax.numpy.where, or jax.lax.cond, for a branch, and jax.numpy instead of NumPy"
        error.add_note(f"{function} is traced by JAX, so values are not known in it: {mend}")
        raise


def default_device_type() -> str:
    """Torch's name for the type of the device on which JAX computes by default."""
    return {"gpu": "cuda"}.get(import_jax().default_backend(), "cpu")


def dispatch_note() -> str:
    """How JAX dispatches on the CPU, as text for `explain`."""
    if not import_jax().config.values.get("jax_cpu_enable_async_dispatch", True):
        return "synchronous CPU dispatch"
    setting = "jax.config.update('jax_cpu_enable_async_dispatch', False)"
    return f"asynchronous CPU dispatch (JAX's default; {setting} before first use makes small calls cheaper)"


def strong(array: Any) -> Any:
    """The array without a weak type: a function would compile again for a later array with a strong type."""
    weak = getattr(array, "weak_type", False)  # typed keys and NumPy's arrays have no such attribute
    return import_jax().lax.convert_element_type(array, array.dtype) if weak else array


def without_weak_types(tree: Any) -> Any:
    """Return the pytree without weak types, which can differ between a start and a step."""
    return import_jax().tree.map(strong, tree)


def compiled(
    owner: Any, name: Hashable, function: Callable[..., Any], *, place: Any = None, **options: Any
) -> Callable[..., Any]:
    """Return `function` under `jit(**options)`, kept by `name` on its `owner`, an environment or a policy.

    `place` is the sharding of all arguments and results. Without it, JAX compiles once for arrays that are committed to
    a device and once for those that are not; and results computed from a committed array are also committed.
    """
    memo: dict[Hashable, Callable[..., Any]] = memo_of(owner)
    if (name, place) not in memo:
        placed = {} if place is None else {"in_shardings": place, "out_shardings": place}
        memo[name, place] = import_jax().jit(function, **placed, **options)
    return memo[name, place]


class FrameworkSettings(NamedTuple):
    """The settings of JAX and Torch in one process that change numbers, for another process."""

    jax: Mapping[str, Any]  # by name, bool, str or None; empty if JAX is not imported
    default_dtype: torch.dtype
    matmul_precision: str
    deterministic: tuple[bool, bool]  # whether Torch uses deterministic algorithms, and only warns where it has none

    @classmethod
    def current(cls) -> Self:
        """Those of the current process."""
        values = sys.modules["jax"].config.values if "jax" in sys.modules else {}
        return cls(
            {name: getattr(values[name], "value", values[name]) for name in _JAX_SETTINGS if name in values},
            torch.get_default_dtype(),
            torch.get_float32_matmul_precision(),
            (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        )

    def apply(self) -> None:
        """Take them over in the current process. JAX, if it is not imported yet, reads its own from the environment."""
        for name, value in self.jax.items():
            if "jax" in sys.modules:
                sys.modules["jax"].config.update(name, value)
            elif value is not None:
                os.environ[name.upper()] = str(value)
            else:
                os.environ.pop(name.upper(), None)
        torch.set_default_dtype(self.default_dtype)
        torch.set_float32_matmul_precision(self.matmul_precision)
        torch.use_deterministic_algorithms(self.deterministic[0], warn_only=self.deterministic[1])


def send_main_by_value() -> None:
    """Have cloudpickle send by value what a script defines, which a spawned process knows as ``__mp_main__``."""
    if main := sys.modules.get("__mp_main__"):
        cloudpickle.register_pickle_by_value(main)
