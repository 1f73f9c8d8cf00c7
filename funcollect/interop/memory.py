"""Memory that both frameworks read without a copy, reports of a lack of it, and reads of numbers on a device."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from funcollect.interop.jax_setup import import_jax

_ALIGNMENT = 64  # bytes: XLA takes such memory without a copy, and Torch computes the same bits from run to run

_Deferred = tuple[Tensor, Callable[[Any], bool], Callable[[], None]]  # the arguments of `complain_if`
_LATER: ContextVar[list[_Deferred] | None] = ContextVar("later", default=None)


def aligned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """A zeroed array whose memory begins at a multiple of 64 bytes."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.zeros(size + _ALIGNMENT, np.uint8)
    offset = -memory.ctypes.data % _ALIGNMENT
    return memory[offset : offset + size].view(dtype).reshape(shape)


def fixed(value: Tensor) -> Tensor:
    """A copy of a tensor; on the CPU its memory is aligned, because Torch's bits depend on the alignment."""
    if value.device.type != "cpu":
        return value.clone()
    return torch.from_numpy(aligned(tuple(value.shape), value.numpy().dtype)).copy_(value)


class memory_for(contextlib.AbstractContextManager[Any]):  # noqa: N801  (a generator function costs a microsecond more)
    """Raise a MemoryError that names the result of `what`, if a framework runs out of memory in the block."""

    def __init__(self, what: Callable[[], str]) -> None:
        self._what = what

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        # RuntimeError is the base of both frameworks' errors.
        if isinstance(error, RuntimeError) and (lacking := memory_error(error, self._what())):
            raise lacking from error


def memory_error(error: RuntimeError, what: str) -> MemoryError | None:
    """A MemoryError that names `what` and the framework that lacks memory; None if the error has another cause."""
    mend = ""
    if isinstance(error, torch.OutOfMemoryError):
        lacking, mend = "Torch", ", or keep JAX from reserving most of the GPU: set XLA_PYTHON_CLIENT_PREALLOCATE=false"
        if os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "true").lower() in ("false", "0"):
            mend = ", or let JAX give back what it frees: set XLA_PYTHON_CLIENT_ALLOCATOR=platform"
        mend += " before JAX starts"
    elif "DefaultCPUAllocator" in str(error):  # Torch has no class for this error
        lacking = "this machine"
    elif "RESOURCE_EXHAUSTED" in str(error):
        lacking = "JAX"
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            mend = ", or give back what Torch keeps and does not use: torch.cuda.empty_cache()"
    else:
        return None
    return MemoryError(f"{lacking} has no memory for {what}{_holders()}: use fewer frames or environments{mend}")


def _holders() -> str:
    """How much of the GPU each framework holds, as far as they report it, as text; empty without a GPU."""
    held = {}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        held["Torch"] = torch.cuda.memory_reserved()
    with_jax = import_jax.cache_info().currsize  # otherwise the question could make JAX reserve memory now
    if with_jax and (stats := import_jax().local_devices()[0].memory_stats()):
        held["JAX"] = stats.get("pool_bytes", stats["bytes_in_use"])
    parts = [f"{name} {size / 2**30:.1f} GiB" for name, size in held.items()]
    return f" (of the GPU, {' and '.join(parts)} are held)" if parts else ""


def complain_if(number: Tensor, is_wrong: Callable[[Any], bool], complain: Callable[[], None]) -> None:
    """Call `complain`, which raises, if a tensor [] holds a wrong number: now, or at the end of `reads_together`."""
    deferred = _LATER.get()
    if deferred is not None:
        deferred.append((number, is_wrong, complain))
    elif is_wrong(number.item()):
        complain()


@contextlib.contextmanager
def reads_together() -> Iterator[None]:
    """Read the numbers of all `complain_if` within the block at its end, by one copy if they are on one device."""
    deferred: list[_Deferred] = []
    token = _LATER.set(deferred)
    try:
        yield
    finally:
        _LATER.reset(token)
    if deferred:
        place = next((number.device for number, *_ in deferred if number.device.type != "cpu"), None)
        numbers = torch.stack([number.to(place, torch.float32) for number, *_ in deferred]).tolist()
        for (_, is_wrong, complain), number in zip(deferred, numbers, strict=True):
            if is_wrong(number):
                complain()
