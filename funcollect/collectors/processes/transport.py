"""Workers in processes of their own, forked from a process that has imported everything."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from typing_extensions import override

from funcollect.collectors.processes.channel import pair
from funcollect.collectors.processes.fork_server import STATUS, launch
from funcollect.collectors.processes.slots import SharedWeightStore, SlotAssembler
from funcollect.collectors.processes.worker_process import ProcessSetup
from funcollect.collectors.workers.transport import Answer, Call, Transport, WorkerExited, WorkerGroup, WorkerHandle
from funcollect.collectors.workers.worker import Job, RolloutReport

_TO_CLOSE = 1.0  # seconds that workers have to close their environments: Ctrl-C should end a script within two
_TO_DIE = 5.0  # seconds until a killed process is gone
_TO_REPORT = 1.0  # seconds within which a process shows its Python stack


class ProcessHandle(WorkerHandle):
    """The connection to one worker process.

    The collector's process holds one end of a pipe. Once that end is closed, explicitly or because the collector's
    process has ended, the kernel kills the worker and every process that it has started.
    """

    def __init__(self, setup: ProcessSetup, job: bytes) -> None:
        self._job = job
        self._channel, theirs = pair()
        self._status, reports = os.pipe()
        alive, self._life = os.pipe()
        self._stack = os.memfd_create("stack")
        self._pid = 0
        self._ended: int | None = None  # its wait status; -1 if nobody reports one
        self._owner = os.getpid()
        self._open = True
        _HANDLES.add(self)
        try:
            launch([reports, theirs.fileno(), alive, self._stack])
        finally:
            for fd in (reports, alive):
                os.close(fd)
            theirs.close()
        self._send(setup)

    @property
    def pid(self) -> int:
        """The process id; 0 if none has begun."""
        while not self._pid and self._ended is None:
            self._hear(_TO_DIE)
        return self._pid

    def filenos(self) -> tuple[int, ...]:
        """The descriptors that become readable when the worker has answered or ended."""
        return (self._channel.fileno(), self._status) if self._open else ()

    @override
    def send(self, call: Call) -> None:
        args = (self._job,) if call.name == "describe" else call.args
        self._send((call.number, call.name, args), call.fds, plain=call.name == "collect")

    def _send(self, message: Any, fds: Sequence[int] = (), *, plain: bool = False) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has ended, which `receive` reports
            self._channel.send(message, fds, plain=plain)

    @override
    def receive(self) -> Answer | WorkerExited | None:
        if not self._open:
            return WorkerExited("was ended")
        try:
            message = self._channel.receive(wait=False)
            if message is None and self.ended_by(0):
                message = self._channel.receive(wait=False)  # now the channel holds all that it will ever hold
        except (EOFError, OSError):
            self.ended_by(time.monotonic() + _TO_DIE)
            return WorkerExited(self._how())
        if message is not None:
            number, value, *packed = message[0]
            return Answer(number, (None, RolloutReport.unpacked(*packed)) if packed else value)
        return None if self._ended is None else WorkerExited(self._how())

    def ended_by(self, until: float) -> bool:
        """Whether the process has ended; waits for its end, at most until `time.monotonic()` is `until`."""
        while self._ended is None and self._open and self._hear(max(until - time.monotonic(), 0)):
            pass
        return self._ended is not None

    def _hear(self, timeout: float) -> bool:
        """Read the fork server's next report on the process; False if none comes within `timeout` seconds."""
        readable = select.poll()
        readable.register(self._status, select.POLLIN)
        if not readable.poll(timeout * 1000):
            return False
        report = os.read(self._status, STATUS.size)
        if not report:
            self._ended = -1
        elif not self._pid:
            (self._pid,) = STATUS.unpack(report)
        else:
            (self._ended,) = STATUS.unpack(report)
        return True

    def _how(self) -> str:
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
        try:
            with open(f"/proc/{self._pid}/stat") as file:
                state = file.read().rpartition(")")[2].split()[0]
            if state in "Tt":
                return "(it is stopped, by SIGSTOP or a debugger, so it shows no Python stack)"
            os.kill(self._pid, signal.SIGUSR1)
        except OSError:
            return ""
        return self._dumped()

    def _dumped(self) -> str:
        """The stack that the process writes, once it has stopped growing."""
        until = time.monotonic() + _TO_REPORT
        size = 0
        while time.monotonic() < until:
            self.ended_by(time.monotonic() + 0.02)
            before, size = size, os.fstat(self._stack).st_size
            if before == size > 0:
                break
        return os.pread(self._stack, size, 0).decode(errors="replace") or "(it shows no Python stack)"

    def say_close(self) -> None:
        """Ask it to close its environment and end."""
        if self._open and os.getpid() == self._owner:
            self._send((-1, "close", ()))

    @override
    def kill(self) -> None:
        if not self._open:
            return
        os.close(self._life)
        if os.getpid() == self._owner:
            self.ended_by(time.monotonic() + _TO_DIE)
        self._open = False
        for fd in (self._status, self._stack):
            os.close(fd)
        self._channel.close()


class ProcessTransport(Transport):
    """Starts workers as processes, whose rollouts lie in shared memory. `ProcessSetup` describes the arguments."""

    def __init__(self, *, num_threads: int, accelerators: bool, eager: bool) -> None:
        if not hasattr(os, "memfd_create"):
            raise OSError(
                f"worker processes need Linux's anonymous shared memory, which {sys.platform} lacks: use "
                "SyncDataCollector, or in_process=True"
            )
        self._setup = (num_threads, accelerators, eager)

    @override
    def start(self, job: Job, packed: bytes) -> ProcessHandle:
        return ProcessHandle(ProcessSetup(sys.path.copy(), os.getcwd(), dict(os.environ), *self._setup), packed)

    @override
    def ready(self, handles: Mapping[int, WorkerHandle], timeout: float) -> Iterable[int]:
        if timeout:
            readable = select.poll()
            for handle in handles.values():
                assert isinstance(handle, ProcessHandle)
                for fd in handle.filenos():
                    readable.register(fd, select.POLLIN)
            readable.poll(timeout * 1000)
        return handles  # all of them: looking at each is as cheap as asking which of them has an answer

    @override
    def close(self, handles: Sequence[WorkerHandle]) -> None:
        own = [handle for handle in handles if isinstance(handle, ProcessHandle)]
        for handle in own:
            handle.say_close()
        until = time.monotonic() + _TO_CLOSE
        for handle in own:
            handle.ended_by(until)
        for handle in own:
            handle.kill()

    @override
    def assembler(self, submit: Callable[[Call], Call], group: WorkerGroup) -> SlotAssembler:
        return SlotAssembler(submit, group)

    @override
    def weight_store(self, workers: int) -> SharedWeightStore:
        return SharedWeightStore(workers)


_HANDLES: weakref.WeakSet[ProcessHandle] = weakref.WeakSet()


def _let_go() -> None:
    """Close the handles in a process that was forked from the collector's: only that one keeps the workers alive."""
    for handle in list(_HANDLES):
        handle.kill()


os.register_at_fork(after_in_child=_let_go)
