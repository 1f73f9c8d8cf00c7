"""The server of worker processes that this process has: started when it is first needed, shared by all collectors."""

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
    """The running server, and the socket over which it is asked."""

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
    """Have a worker process begin with these descriptors: for its status, then what the worker's `main` takes."""
    with _LOCK:
        if not _SERVERS:
            _SERVERS.append(_Server())
        try:
            _SERVERS[0].launch(fds)
        except (BrokenPipeError, ConnectionResetError):  # somebody has killed it
            _SERVERS.pop().close()
            _SERVERS.append(_Server())
            _SERVERS[0].launch(fds)


@atexit.register
def _close() -> None:
    while _SERVERS:
        _SERVERS.pop().close()


def _forget() -> None:
    """In a process that was forked from the server's owner: it has no server yet."""
    _close()


os.register_at_fork(after_in_child=_forget)
