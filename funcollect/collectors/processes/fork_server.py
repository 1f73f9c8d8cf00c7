"""The process from which worker processes are forked: everything heavy is imported here, once.

It is started as a program of its own with a single thread, so forking it is safe, unlike forking the collector's
process. It forks on request, reports the end of its children, and ends with the collector's process.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import struct
import sys
import traceback

from funcollect.collectors.processes.channel import receive_packet
from funcollect.collectors.processes.lifeline import die_with_parent

_SET_CHILD_SUBREAPER = 36  # of prctl(2)
STATUS = struct.Struct("q")  # a report on a process: first its id, later its wait status


def main(control: int, alive: int) -> None:
    """Serve the socket `control` until its other end, or that of the pipe `alive`, is closed."""
    die_with_parent(alive)
    ctypes.CDLL(None).prctl(
        _SET_CHILD_SUBREAPER, 1, 0, 0, 0
    )  # processes that a killed worker had started are reaped here
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    _import_everything()
    sock = socket.socket(fileno=control)
    children: dict[int, int] = {}  # by process id: the descriptor for reports
    waiting = select.poll()
    for fd in (control, woken):
        waiting.register(fd, select.POLLIN)
    while True:
        ready = [fd for fd, _ in waiting.poll()]
        if woken in ready:
            os.read(woken, 1 << 12)
            _reap(children)
        if control in ready:
            asked, fds = receive_packet(sock, 1)
            if not asked:
                return
            _fork(children, fds, (control, alive, woken, wakes))


def _fork(children: dict[int, int], fds: list[int], own: tuple[int, ...]) -> None:
    """Fork a worker. The first descriptor is for reports, the others are the worker's; it closes the server's `own`."""
    status, *others = fds
    pid = os.fork()
    if not pid:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for fd in (*own, status, *children.values()):
            os.close(fd)
        _become_worker(others)
    children[pid] = status
    _report(status, pid)
    for fd in others:
        os.close(fd)


def _report(status: int, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # the collector has closed its end
        os.write(status, STATUS.pack(number))


def _import_everything() -> None:
    from funcollect.interop.jax_setup import import_jax

    import_jax()
    import funcollect.collectors.processes.worker_process  # noqa: F401


def _reap(children: dict[int, int]) -> None:
    """Reap every process that has ended, and report the end of workers."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        if (fd := children.pop(pid, None)) is not None:
            _report(fd, status)
            os.close(fd)


def _become_worker(fds: list[int]) -> None:
    """Become a worker; in a fresh interpreter if an import has started threads, which do not survive a fork."""
    code = 1
    try:
        if len(os.listdir(f"/proc/{os.getppid()}/task")) > 1:
            for fd in fds:
                os.set_inheritable(fd, True)
            os.execv(sys.executable, [sys.executable, "-c", program("worker_process", f"main({fds})")])
        from funcollect.collectors.processes.worker_process import main as work

        work(fds)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def program(module: str, call: str) -> str:
    """Code for ``python -c``: a call of a module in this folder, with this process's import path."""
    return f"import sys; sys.path[:] = {sys.path!r}; from funcollect.collectors.processes.{module} import main; {call}"
