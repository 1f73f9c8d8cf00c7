"""Starts worker processes through one fork server, which is started on first use and shared by all collectors."""

from __future__ import annotations

import atexit
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence

from funcollect.collectors.processes.fork_server import program

_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")  # a server with threads could not fork


class _Server:
    """The running server, and the socket for requests to it."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        alive, self._life = os.pipe()
        call = f"main({theirs.fileno()}, {alive})"
        self._process = subprocess.Popen(
            [sys.executable, "-c", program("fork_server", call)],
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(), alive),
            env=os.environ | dict.fromkeys(_THREADS, "1"),
        )
        theirs.close()
        os.close(alive)

    def launch(self, fds: Sequence[int]) -> None:
        socket.send_fds(self._socket, [b"f"], fds)

    def close(self) -> None:
        self._socket.close()
        os.close(self._life)
        if os.getpid() == self.owner:
            self._process.wait()


_LOCK = threading.Lock()
_SERVERS: list[_Server] = []  # none or one


def launch(fds: Sequence[int]) -> None:
    """Start a worker process with these descriptors: one for its status, then those of the worker's `main`."""
    with _LOCK:
        if not _SERVERS:
            _SERVERS.append(_Server())
        try:
            _SERVERS[0].launch(fds)
        except (BrokenPipeError, ConnectionResetError):  # it was killed
            _SERVERS.pop().close()
            _SERVERS.append(_Server())
            _SERVERS[0].launch(fds)


@atexit.register
def _close() -> None:
    while _SERVERS:
        _SERVERS.pop().close()


os.register_at_fork(after_in_child=_close)  # a forked process starts a server of its own
