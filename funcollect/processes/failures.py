"""Exceptions of workers, packed to be sent, and errors for objects that cannot be sent."""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Iterator
from typing import Any, NamedTuple, Self

import cloudpickle

from funcollect.errors import EnvError, WorkerError
from funcollect.messages import shown


class UnsentResultError(TypeError):
    """A function was called in a child process, but its result cannot be sent."""


@contextlib.contextmanager
def sending(what: str, where: str, mend: str, kind: type[TypeError] = TypeError) -> Iterator[None]:
    """Raise TypeError, or a `kind` of it, if the block's pickling of `what` raises."""
    try:
        yield
    except Exception as error:
        raise kind(f"{what} cannot be sent to {where} ({shown(error, 200)}): {mend}") from error


def check_sendable(results: Any) -> None:
    """Raise UnsentResultError for the results of a user's function if they cannot be pickled."""
    mend = "it has been called; return numbers, strings or arrays"
    with sending("the result of function", "another process", mend, UnsentResultError):
        cloudpickle.dumps(results)


class Failure(NamedTuple):
    """An exception in a worker."""

    message: str
    traceback: str
    lane: int | None  # the lane that the message names, counted over all workers
    cause: bytes  # the pickled exception; empty if it cannot be pickled

    @classmethod
    def of(cls, error: BaseException, first_lane: int | None = None) -> Self:
        """Pack an exception. `first_lane` is the worker's first lane, counted over all workers; None without lanes."""
        cause = b""
        with contextlib.suppress(Exception):
            cause = cloudpickle.dumps(error)
        named = re.match(r"lanes? \[?(\d+)", str(error)) if isinstance(error, EnvError) else None
        lane = error.lane if isinstance(error, WorkerError) else None
        lane = first_lane + int(named[1]) if named and first_lane is not None else lane
        return cls(f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error)), lane, cause)

    def error(self) -> BaseException | None:
        """The exception itself; None if it cannot be pickled or unpickled."""
        error: Any = None
        with contextlib.suppress(Exception):
            error = cloudpickle.loads(self.cause)
        return error if isinstance(error, BaseException) else None
