"""A process that does not outlive another one, whatever either of them does."""

from __future__ import annotations

import fcntl
import os
import select
import signal


def die_with_parent(alive: int) -> None:
    """Have the kernel kill this process, and those that it starts, once the other end of the pipe `alive` is closed.

    It does so even if they are stopped, or hang with the GIL held. The process leads a session of its own from here on.
    """
    os.setsid()
    fcntl.fcntl(alive, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(alive, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(alive, fcntl.F_SETFL, fcntl.fcntl(alive, fcntl.F_GETFL) | os.O_ASYNC)
    closed = select.poll()
    closed.register(alive, select.POLLIN)
    if closed.poll(0):
        os._exit(1)
