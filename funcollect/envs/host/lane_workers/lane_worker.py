"""The handle on one worker process of an environment."""

from __future__ import annotations

import os
import select
import time
from typing import Any

from funcollect.envs.host.host_env import ONWARD
from funcollect.envs.host.lane_workers.bells import Bell
from funcollect.envs.host.lane_workers.worker_process import LaneJob
from funcollect.errors import EnvError
from funcollect.processes.child import TO_DIE, ChildProcess, ChildSetup
from funcollect.processes.failures import Failure
from funcollect.processes.life import SIGNS

SLICE = 0.5  # seconds of one wait; if this process was suspended, its workers may also have been
_TO_START = 300.0  # seconds without a sign of life


class LaneWorker:
    """The handle on one worker process."""

    def __init__(self, index: int, lanes: range, cpu: int) -> None:
        self.index, self.lanes, self.cpu = index, lanes, cpu
        self.bell = Bell()
        self._child: ChildProcess | None = None
        self._end: int | None = None  # readable once the process has ended
        self._silence, self._signs = 0.0, 0  # seconds without a sign of life, and how many there were

    def __str__(self) -> str:
        first, last = self.lanes[0], self.lanes[-1]
        lanes = f"lane {first}" if first == last else f"lanes {first} to {last}"
        return f"{lanes} (worker {self.index})"

    def start(self, job: LaneJob, memory: int, answers: Bell) -> None:
        """Start the process, or another one after it was lost; `join` waits for it."""
        self.kill(answers)
        self.bell.heard()
        self._silence, self._signs = 0.0, 0
        self._child = ChildProcess("funcollect.envs.host.lane_workers.worker_process")
        self._child.send((ChildSetup.like_this(), job.pack(str(self))), [memory, *self.bell.fds, *answers.fds])

    def join(self, answers: Bell) -> None:
        """Wait until it has opened its simulators; raise its exception, or EnvError if it ends or hangs."""
        assert self._child is not None
        readable = select.poll()
        for fd in self._child.filenos():
            readable.register(fd, select.POLLIN)
        while (message := self._received()) is None:
            if self._child.ended_by(0):
                raise EnvError(f"{self}: its process {self.how()} as it made its environments: read its output")
            began = time.monotonic()
            readable.poll(SLICE * 1000)
            if self.silent_for(min(time.monotonic() - began, SLICE)) > _TO_START:
                error = EnvError(f"{self}: its process has made no environment in {_TO_START:g} s: look at these")
                error.add_note(f"The Python stack of that process:\n{self.where()}")
                raise error
        if message[0] is not None:
            raise self.raised(message[0])
        try:
            self._end = self._child.open_end()
        except ProcessLookupError as error:
            raise self.ended() from error
        answers.watch(self._end)

    def _received(self) -> Any:
        """The message that has arrived, with its descriptors; None if there is none, or the process has ended."""
        assert self._child is not None
        try:
            return self._child.channel.receive(wait=False)
        except (EOFError, OSError):
            self._child.ended_by(time.monotonic() + TO_DIE)
            return None

    def send(self, message: Any) -> None:
        """Send a message, which is read at the next `CALL`."""
        if self._child is not None:
            self._child.send(message)

    def message(self) -> Any:
        """The next message of the process."""
        assert self._child is not None
        message = self._child.channel.receive()
        assert message is not None
        return message[0]

    def forget_messages(self) -> None:
        """Drop unread messages."""
        while self._child is not None and self._received() is not None:
            pass

    def may_answer(self) -> bool:
        """Whether the process has been joined, lives, and was started by this process."""
        return self._end is not None and self._child is not None and self._child.open and not self.has_ended()

    def has_ended(self) -> bool:
        """Whether the process has ended."""
        if self._end is None:
            return True
        ended = select.poll()
        ended.register(self._end, select.POLLIN)
        return bool(ended.poll(0))

    def how(self) -> str:
        """How the process has ended, in words."""
        assert self._child is not None
        self._child.ended_by(time.monotonic() + TO_DIE)
        return self._child.how()

    def where(self) -> str:
        """The Python stack of the process."""
        assert self._child is not None
        return self._child.where()

    def kill(self, answers: Bell) -> None:
        """End the process at once."""
        if self._child is not None:
            self._child.kill()
            self._child = None
        if self._end is not None:
            answers.unwatch(self._end)
            os.close(self._end)
            self._end = None

    def silent_for(self, seconds: float) -> float:
        """Add so many seconds of waiting; return for how long there has been no sign of life."""
        assert self._child is not None
        before, self._signs = self._signs, self._child.signs()
        if self._signs == before:
            self._silence += seconds
        else:
            self._silence = 0.0
            SIGNS.count[0] += 1  # for a process that awaits this one
        return self._silence

    def raised(self, failure: Failure) -> Exception:
        """The exception that it has sent, its traceback a note; EnvError in place of one that ends a program."""
        error = failure.error()
        if not isinstance(error, Exception):
            error = EnvError(f"{self}: its process raised {failure.message}: {ONWARD}")
        error.add_note(f"The traceback in {self}:\n{failure.traceback}")
        return error

    def hung(self, timeout: float) -> EnvError:
        """The error for a process that has not answered in time, with its Python stack as a note."""
        error = EnvError(f"{self}: its process has not answered for {timeout:g} s (timeout={timeout:g}): {ONWARD}")
        error.add_note(f"The Python stack of that process:\n{self.where()}")
        return error

    def ended(self) -> EnvError:
        """The error for a process that has ended."""
        return EnvError(f"{self}: its process {self.how()}: {ONWARD}")
