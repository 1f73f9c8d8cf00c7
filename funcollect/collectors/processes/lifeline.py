"""Ends a process together with another one, whatever either of them does."""

from __future__ import annotations

import fcntl
import os
import select
import signal


def die_with_parent(alive: int) -> None:
    """Let the kernel kill this process, and those that it starts, once the other end of the pipe `alive` is closed.

    This works even if they are stopped, or hang while they hold the GIL. The process becomes a session leader.
    """
    os.setsid()
    fcntl.fcntl(alive, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(alive, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(alive, fcntl.F_SETFL, fcntl.fcntl(alive, fcntl.F_GETFL) | os.O_ASYNC)
    closed = select.poll()
    closed.register(alive, select.POLLIN)
    if closed.poll(0):
        os._exit(1)
