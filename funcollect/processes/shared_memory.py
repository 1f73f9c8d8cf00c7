"""Memory that processes share. It is anonymous, so nothing is left behind, and its pages are allocated."""

from __future__ import annotations

import mmap
import os

import numpy as np
import numpy.typing as npt

Memory = npt.NDArray[np.uint8]

_MAPPING = mmap.MAP_SHARED | mmap.MAP_POPULATE  # a page's first touch would cost a fault in every process


def shared_memory(count: int, size: int) -> tuple[int, list[Memory]]:
    """Allocate `count` pieces of `size` bytes each; return the descriptor and the pieces.

    Raises:
        MemoryError: if there is not enough memory. Without the allocation, a process could be killed when it writes.
    """
    fd = os.memfd_create("funcollect")
    try:
        os.posix_fallocate(fd, 0, count * size)
    except OSError as error:
        os.close(fd)
        mebibytes = count * size / 2**20
        raise MemoryError(f"there is no shared memory for {mebibytes:.1f} MiB ({error.strerror})") from error
    return fd, mapped(fd, count, size)


def mapped(fd: int, count: int, size: int) -> list[Memory]:
    """`count` pieces of shared memory of `size` bytes each. The memory stays mapped as long as one of them lives."""
    whole = mmap.mmap(fd, count * size, flags=_MAPPING)
    return [np.frombuffer(whole, np.uint8, size, place * size) for place in range(count)]
