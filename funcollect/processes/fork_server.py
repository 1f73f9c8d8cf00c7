"""Starts worker processes by forking a server: a program with a single thread and all heavy imports done.

Unlike the user's process, it can be forked safely. It is started on first use, reports the end of its children, and
ends with the process that started it. Where a fork is never safe, as on macOS, it starts programs, and kills them then.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import importlib
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Sequence
from typing import Any

from funcollect.interop.jax_setup import import_jax
from funcollect.processes.channel import Channel, pair
from funcollect.processes.system import PORTABLE

_SET_CHILD_SUBREAPER = 36  # of prctl(2)
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")  # a server with threads could not fork
STATUS = struct.Struct("q")  # a report on a process: the first is its id, the second its wait status


def main(control: int, alive: int) -> None:
    """Serve the socket `control` until its other end, or that of the pipe `alive`, is closed."""
    for fd in (control, alive):
        os.set_inheritable(fd, False)  # in a worker, they would hide the end of this process
    if not PORTABLE:
        die_with_parent(alive)
        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # processes of a killed worker are reaped here
        import_jax()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    channel = Channel(socket.socket(fileno=control))
    children: dict[int, int] = {}  # by process id: the descriptor for reports
    waiting = select.poll()
    for fd in (control, woken):
        waiting.register(fd, select.POLLIN)
    try:
        while True:
            ready = [fd for fd, _ in waiting.poll()]
            if woken in ready:
                os.read(woken, 1 << 12)
                _reap(children)
            if control in ready and (request := channel.receive()) is not None:
                if PORTABLE:
                    channel.send("received", plain=True)
                _start(*request, children, (control, alive, woken, wakes))
    except EOFError:  # the other end is closed
        pass
    finally:
        for pid in children if PORTABLE else ():
            kill_group(pid)


def _start(module: str, fds: list[int], children: dict[int, int], own: tuple[int, ...]) -> None:
    """Start a worker, which calls `main` of a module with all descriptors but the first, which is for reports on it.

    The worker closes the server's `own` descriptors. If it cannot start, all are closed, which shows that it has ended.
    """
    status, *others = fds
    try:
        if PORTABLE:
            for fd in others:
                os.set_inheritable(fd, True)
            pid = os.posix_spawn(sys.executable, program(module, [others]), os.environ, setpgroup=0)
        else:
            importlib.import_module(module)  # in the server, so that later workers have it
            if not (pid := os.fork()):
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for fd in (*own, status, *children.values()):
                    os.close(fd)
                _become_worker(module, others)
        children[pid] = status
        _report(status, pid)
    except OSError:
        traceback.print_exc()
        os.close(status)
    for fd in others:
        os.close(fd)


def _report(status: int, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # nobody reads the reports any more
        os.write(status, STATUS.pack(number))


def _reap(children: dict[int, int]) -> None:
    """Reap all processes that have ended, and report the ends of workers."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            pid, status = ended
            if (fd := children.pop(pid, None)) is not None:
                if PORTABLE:
                    kill_group(pid)
                _report(fd, status)
                os.close(fd)


def kill_group(pid: int) -> None:
    """Kill a worker and all processes that it has started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS refuses if only the ended worker is left
        os.killpg(pid, signal.SIGKILL)


def _become_worker(module: str, fds: list[int]) -> None:
    """Become a worker: in a new interpreter if an import has started threads, which a fork does not copy."""
    code = 1
    try:
        if len(os.listdir(f"/proc/{os.getppid()}/task")) > 1:
            for fd in fds:
                os.set_inheritable(fd, True)
            os.execv(sys.executable, program(module, [fds]))
        importlib.import_module(module).main(fds)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def program(module: str, arguments: Sequence[Any]) -> list[str]:
    """The command that calls the `main` of a module, with this process's import path."""
    code = f"import sys; sys.path[:] = {sys.path!r}; from {module} import main; main(*{arguments!r})"
    return [sys.executable, "-c", code]


def die_with_parent(alive: int) -> None:
    """Let the kernel kill this process, and those that it starts, once the other end of the pipe `alive` is closed.

    This works even if they are stopped, or hang while they hold the GIL. The process leads a group, but stays in its
    session: Linux schedules tasks by session, and `sched_yield` yields only within one.
    """
    os.setpgid(0, 0)
    fcntl.fcntl(alive, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(alive, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(alive, fcntl.F_SETFL, fcntl.fcntl(alive, fcntl.F_GETFL) | os.O_ASYNC)
    closed = select.poll()
    closed.register(alive, select.POLLIN)
    if closed.poll(0):
        os._exit(1)


class _Server:
    def __init__(self) -> None:
        self.owner = os.getpid()
        self._channel, theirs = pair()
        alive, self._life = os.pipe()  # never written to: its end shows that this process has ended
        self._process = subprocess.Popen(
            program(__name__, [theirs.fileno(), alive]),
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(), alive),
            env=os.environ | dict.fromkeys(_THREADS, "1"),
            process_group=0 if PORTABLE else None,  # so that it outlives this process, and kills its children
        )
        theirs.close()
        os.close(alive)

    def launch(self, module: str, fds: Sequence[int]) -> None:
        self._channel.send(module, fds, plain=True)
        if PORTABLE:  # macOS can lose descriptors that are closed before they have been received
            self._channel.receive()

    def close(self) -> None:
        self._channel.close()
        os.close(self._life)
        if os.getpid() == self.owner:
            self._process.wait()


_LOCK = threading.Lock()
_SERVERS: list[_Server] = []  # none or one


def launch(module: str, fds: Sequence[int]) -> None:
    """Start a worker process with these descriptors: one for reports on it, then those for `main` of a module."""
    with _LOCK:
        if _SERVERS:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError, EOFError):  # the server was killed
                _SERVERS[0].launch(module, fds)
                return
            _close()
        _SERVERS.append(_Server())
        _SERVERS[0].launch(module, fds)


def _close() -> None:
    while _SERVERS:
        _SERVERS.pop().close()


weakref.finalize(launch, _close)  # at exit, and after all later finalizers, which ask workers to close environments
os.register_at_fork(after_in_child=_close)  # a forked process starts its own server
