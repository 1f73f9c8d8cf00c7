"""A worker process: its settings, the connection to it, its end, and its stack if it hangs."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import select
import signal
import socket
import sys
import time
import weakref
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from typing_extensions import override

from funcollect.interop.jax_setup import FrameworkSettings
from funcollect.processes.channel import Channel, pair
from funcollect.processes.fork_server import STATUS, die_with_parent, kill_group, launch
from funcollect.processes.pool import Call, Loss, WorkerHandle
from funcollect.processes.system import COUNT_BYTES, PLACE, PORTABLE, SIGNS, anonymous_file, place, run_as_batch_work

_TO_DIE = 5.0  # seconds until a killed process is gone
_TO_REPORT = 1.0  # seconds within which a process shows its Python stack


class ChildSetup(NamedTuple):
    """The settings of a child process or an actor, mostly copied from the process that starts it."""

    path: list[str]
    folder: str
    environ: dict[str, str]
    num_threads: int
    accelerators: bool  # whether JAX may see accelerators
    frameworks: FrameworkSettings
    place: int  # see `system.place`
    authkey: bytes  # with which proxies of `multiprocessing.Manager` connect

    @classmethod
    def like_this(cls, *, num_threads: int = 1, accelerators: bool = False, index: int = 0) -> Self:
        """The settings of the current process, with others for threads and accelerators; `index` is the child's."""
        frameworks = FrameworkSettings.current()
        here = sys.path.copy(), os.getcwd(), dict(os.environ)
        authkey = bytes(multiprocessing.current_process().authkey)
        return cls(*here, num_threads, accelerators, frameworks, place() + index, authkey)

    def apply(self) -> None:
        """Apply the settings; called in the child."""
        sys.path[:] = self.path
        os.chdir(self.folder)
        os.environ.clear()
        os.environ.update(self.environ)
        self.apply_anywhere()
        PLACE[:] = [self.place]
        # Otherwise all children would draw the same numbers, from generators copied in the fork.
        np.random.seed()
        torch.default_generator.seed()

    def apply_anywhere(self) -> None:
        """Apply the settings that do not depend on the machine; called before JAX makes a client."""
        os.environ["OMP_NUM_THREADS"] = os.environ["NPROC"] = str(self.num_threads)  # XLA's CPU client reads the latter
        torch.set_num_threads(self.num_threads)
        if self.num_threads == 1:
            flags = os.environ.get("XLA_FLAGS", "")
            os.environ["XLA_FLAGS"] = f"{flags} --xla_cpu_multi_thread_eigen=false".strip()
        if not self.accelerators:
            os.environ["JAX_PLATFORMS"] = "cpu"
            if "jax" in sys.modules:
                sys.modules["jax"].config.update("jax_platforms", "cpu")
        self.frameworks.apply()
        multiprocessing.current_process().authkey = self.authkey


def enter_child(fds: Sequence[int]) -> Channel:
    """Prepare the current process, a new child that was given these descriptors; return the channel to its parent."""
    channel, alive, stack = fds
    if not PORTABLE:
        die_with_parent(alive)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Jupyter sends it to all processes
    run_as_batch_work(idle=False)  # when its parent wakes it, it does not preempt the parent
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    SIGNS.show(stack)
    return Channel(socket.socket(fileno=channel))


class ProcessHandle(WorkerHandle):
    """The connection to a process that calls ``main(fds)`` of a module, which has to begin with `enter_child`.

    The current process holds one end of a pipe. Once that end is closed, explicitly or because the current process has
    ended, Linux kills the child and every process that it has started. On other systems `kill` does that, or the fork
    server once the current process has ended.
    """

    def __init__(self, module: str, setup: ChildSetup, urgent: Collection[str]) -> None:
        self._pid, self._owner = 0, os.getpid()
        self._ended: int | None = None  # its wait status; -1 if it ended without a report
        with ExitStack() as given, ExitStack() as kept:  # the child's ends are closed here; ours after a failure only
            self.channel, theirs = pair()
            kept.callback(self.channel.close)
            given.callback(theirs.close)
            (self._status, reports), (alive, self._life) = (_pipe(kept, given), _pipe(given, kept))
            self._stack = anonymous_file("stack")  # the count of signs of life, and after it the Python stack
            kept.callback(os.close, self._stack)
            self._clear_stack()
            launch(module, [reports, theirs.fileno(), alive, self._stack])
            kept.pop_all()
        self.open = True
        _CHILDREN.add(self)
        self.post((setup, urgent))

    @property
    def owned(self) -> bool:
        """Whether the current process started the child, and is not a fork of the process that did."""
        return os.getpid() == self._owner

    @property
    def pid(self) -> int:
        """The process id, for which it waits; 0 if the process could not start."""
        while not self._pid and self._ended is None:
            self._hear(_TO_DIE)
        return self._pid

    def filenos(self) -> tuple[int, ...]:
        """The descriptors that become readable when a message has arrived or the process has ended."""
        return (self.channel.fileno(), self._status) if self.open else ()

    def post(self, message: Any, fds: Sequence[int] = (), *, plain: bool = False) -> None:
        """Send a message (see `Channel.send`), without an error if the process has ended."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.channel.send(message, fds, plain=plain)

    @override
    def send(self, call: Call) -> None:
        self.post((call.number, call.name, call.args, call.plain), call.fds, plain=call.plain)

    @override
    def receive(self) -> tuple[int, Any] | Loss | None:
        if not self.open:
            return Loss("was ended")
        try:
            message = self.channel.receive(wait=False)
            if message is None and self.ended_by(0):
                message = self.channel.receive(wait=False)  # a last message may have arrived before the end
        except (EOFError, OSError):
            self.ended_by(time.monotonic() + _TO_DIE)
            return Loss(self.how())
        if message is not None:
            answer: tuple[int, Any] = message[0]
            return answer
        return Loss(self.how()) if self.ended_by(0) else None

    def ended_by(self, until: float) -> bool:
        """Wait for the end of the process, at most until `time.monotonic()` is `until`; return whether it has ended."""
        while self._ended is None and self.open and self._hear(max(until - time.monotonic(), 0)):
            pass
        return self._ended is not None

    def _hear(self, timeout: float) -> bool:
        """Read the fork server's next report on the process; False if none comes within `timeout` seconds."""
        readable = select.poll()
        readable.register(self._status, select.POLLIN)
        if not readable.poll(timeout * 1000):
            return False
        report = os.read(self._status, STATUS.size)
        if report and not self._pid:
            (self._pid,) = STATUS.unpack(report)
        else:
            (self._ended,) = STATUS.unpack(report) if report else (-1,)
        return True

    def how(self) -> str:
        """How the process has ended, in words."""
        if self._ended is None or self._ended < 0:
            return "has ended, and so has the process that would report why"
        if os.WIFSIGNALED(self._ended):
            name = signal.Signals(os.WTERMSIG(self._ended)).name
            return f"was killed by {name}" + (", perhaps for lack of memory" if name == "SIGKILL" else "")
        return f"ended with exit code {os.WEXITSTATUS(self._ended)}"

    @override
    def where(self) -> str:
        if not self._pid or self.ended_by(0):
            return ""
        with contextlib.suppress(OSError), open(f"/proc/{self._pid}/stat") as file:
            if file.read().rpartition(")")[2].split()[0] in "Tt":
                return "(it is stopped, by SIGSTOP or a debugger, so it shows no Python stack)"
        self._clear_stack()
        try:
            os.kill(self._pid, signal.SIGUSR1)
        except ProcessLookupError:
            return ""
        until, size, before = time.monotonic() + _TO_REPORT, COUNT_BYTES, 0
        while time.monotonic() < until and not before == size > COUNT_BYTES:  # until the file has stopped growing
            self.ended_by(time.monotonic() + 0.02)
            before, size = size, os.fstat(self._stack).st_size
        shown = os.pread(self._stack, size - COUNT_BYTES, COUNT_BYTES)
        return shown.decode(errors="replace") or "(it shows no Python stack)"

    def _clear_stack(self) -> None:
        """Remove an earlier stack, and set the position in the file, which both processes share, to after the count."""
        os.ftruncate(self._stack, COUNT_BYTES)
        os.lseek(self._stack, COUNT_BYTES, os.SEEK_SET)

    @override
    def signs(self) -> int:
        return int.from_bytes(os.pread(self._stack, COUNT_BYTES, 0), sys.byteorder) if self.open else 0

    @override
    def kill(self) -> None:
        if not self.open:
            return
        os.close(self._life)
        if self.owned:
            if PORTABLE and (not self.ended_by(0) or self._ended == -1) and self._pid:  # else the server has
                kill_group(self._pid)
            self.ended_by(time.monotonic() + _TO_DIE)
        self.open = False
        for fd in (self._status, self._stack):
            os.close(fd)
        self.channel.close()


def _pipe(*closing: ExitStack) -> tuple[int, int]:
    """A new pipe's ends for reading and writing; each is closed by one of the two stacks."""
    ends = os.pipe()
    for stack, fd in zip(closing, ends, strict=True):
        stack.callback(os.close, fd)
    return ends


_CHILDREN: weakref.WeakSet[ProcessHandle] = weakref.WeakSet()

# A fork of this process closes its copies of the handles, so that only the owner keeps the children alive.
os.register_at_fork(after_in_child=lambda: [*map(ProcessHandle.kill, [*_CHILDREN])])
