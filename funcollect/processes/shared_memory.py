"""Memory that processes share. It is anonymous, so nothing is left behind, and its pages are allocated."""

from __future__ import annotations

import mmap
import os
import secrets
import tempfile

import numpy as np
import numpy.typing as npt

from funcollect.files import allocate
from funcollect.processes.system import PORTABLE

Memory = npt.NDArray[np.uint8]

_MAPPING = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)  # a page's first touch would cost a fault everywhere


def anonymous_file(name: str) -> int:
    """The descriptor of a new file, which is in no folder and ends with its last descriptor. Linux shows its `name`."""
    if not PORTABLE:
        return os.memfd_create(name)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def shared_memory(count: int, size: int) -> tuple[int, list[Memory]]:
    """Allocate `count` pieces of `size` bytes each; return the descriptor and the pieces.

    MemoryError if there is not enough. Without the allocation, a process could be killed when it writes.
    """
    fd = _portable_memory() if PORTABLE else os.memfd_create("funcollect")
    try:
        allocate(fd, count * size)
    except OSError as error:
        os.close(fd)
        mebibytes = count * size / 2**20
        raise MemoryError(f"there is no shared memory for {mebibytes:.1f} MiB ({error.strerror})") from error
    return fd, mapped(fd, count, size)


def _portable_memory() -> int:
    """The descriptor of memory that any process may map, under a name that it has already lost."""
    # `SharedMemory`, which calls the same functions, would start a process to watch over names.
    from _posixshmem import shm_open, shm_unlink  # type: ignore[import-not-found]

    name = f"/fc{secrets.token_hex(12)}"  # macOS takes 31 characters
    fd: int = shm_open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    shm_unlink(name)
    return fd


def mapped(fd: int, count: int, size: int) -> list[Memory]:
    """`count` pieces of shared memory of `size` bytes each. The memory stays mapped as long as one of them lives."""
    whole = mmap.mmap(fd, count * size, flags=_MAPPING)
    return [np.frombuffer(whole, np.uint8, size, place * size) for place in range(count)]
