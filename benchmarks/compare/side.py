"""A process that measures contestants over one revision's package. It is stopped except during a request."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.harness.processes import signal_family
from benchmarks.harness.runner import AbsentError

PATIENCE = 600.0  # seconds that a request may take
TO_CLOSE = 10.0  # seconds that a contestant may take to end its own processes
_CODE = "from benchmarks.compare.served import serve; serve({fd}, {parent}, {tree!r})"


class FailedError(Exception):
    """A contestant that should work here and does not."""


class Side:
    """The process; it imports the package from `tree` and refuses to work with any other.

    It leads a session of its own, so Ctrl-C reaches the command alone, which then ends it.

    Args:
        tree: folder with the package and the benchmarks.
        seed: of the hashes of strings, on which the layout of sets depends.

    Raises:
        AbsentError: from `answer`, if a contestant needs what is not installed.
        FailedError: from `answer`, if a request fails or takes too long.
    """

    def __init__(self, tree: Path, seed: int = 0) -> None:
        own, theirs = socket.socketpair()
        with theirs:
            code = _CODE.format(fd=theirs.fileno(), parent=os.getpid(), tree=str(tree))
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", code],
                cwd=tree,
                env=_environment(tree, seed),
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self._end = Connection(own.detach())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.end()

    def ask(self, name: str, *arguments: Any, patience: float = PATIENCE) -> Any:
        """Resume the process, send one request, stop the process, and return the answer."""
        self.resume()
        try:
            self.request(name, *arguments)
            return self.answer(patience)
        finally:
            self.stop()

    def resume(self) -> None:
        """Resume the process and its descendants."""
        signal_family(self._process.pid, signal.SIGCONT)

    def stop(self) -> None:
        """Stop the process and its descendants, without ending them."""
        signal_family(self._process.pid, signal.SIGSTOP)

    def request(self, name: str, *arguments: Any) -> None:
        """Send a request, whose answer `answer` returns."""
        with contextlib.suppress(BrokenPipeError):  # `answer` reports it
            self._end.send((name, *arguments))

    def answer(self, patience: float = PATIENCE) -> Any:
        """The answer to the last request."""
        if not self._end.poll(patience):
            raise FailedError(f"no answer within {patience:g} s")
        try:
            value, kind, text = self._end.recv()
        except (EOFError, ConnectionResetError) as error:
            raise FailedError("its process has ended") from error
        if kind:
            raise (AbsentError if kind == "absent" else FailedError)(text)
        return value

    def end(self) -> None:
        """Let the contestant end its processes; those that are left are killed."""
        with contextlib.suppress(AbsentError, FailedError):
            self.ask("close", patience=TO_CLOSE)
        signal_family(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._end.close()


def _environment(tree: Path, seed: int) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(tree), os.environ.get("PYTHONPATH")]))
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3"}  # XLA reports a harmless difference for each program that it reloads
    return {**os.environ, **quiet, "PYTHONPATH": path, "PYTHONHASHSEED": str(seed)}
