"""Anonymous shared memory: without a name, so nothing of it is left behind, and with its pages allocated."""

from __future__ import annotations

import mmap
import os

import numpy as np

from funcollect.collectors.workers.batch_layout import Memory

MAPPING = mmap.MAP_SHARED | mmap.MAP_POPULATE  # a page's first touch would cost a fault in every process


def shared_memory(size: int) -> int:
    """The descriptor of `size` bytes whose pages are allocated: otherwise a process could be killed when it writes.

    Raises:
        MemoryError: if there is not enough memory.
    """
    fd = os.memfd_create("funcollect")
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        os.close(fd)
        raise MemoryError(f"there is no shared memory for {size / 2**20:.1f} MiB ({error.strerror})") from error
    return fd


def mapped(fd: int, count: int, size: int) -> list[Memory]:
    """`count` pieces of shared memory of `size` bytes each. The memory stays mapped as long as one of them lives."""
    whole = mmap.mmap(fd, count * size, flags=MAPPING)
    return [np.frombuffer(whole, np.uint8, size, place * size) for place in range(count)]
