"""Exceptions of a child process, as it sends them, and results that it cannot send."""

from __future__ import annotations

import contextlib
import itertools
import re
import traceback
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple, Self

import cloudpickle

from funcollect.errors import EnvError
from funcollect.messages import shown

_MOST_LINES = 40  # of a traceback in a warning
_RESTARTS = itertools.count(1)  # by this process


class UnsentResultError(TypeError):
    """A function has been called in a child process, and its result cannot be sent."""


@contextlib.contextmanager
def sending(what: str, where: str, mend: str) -> Iterator[None]:
    """Raise TypeError in place of the exception of something that cannot be pickled."""
    try:
        yield
    except Exception as error:
        raise TypeError(f"{what} cannot be sent to {where} ({shown(error, 200)}): {mend}") from error


def check_sendable(results: Any) -> None:
    """Raise UnsentResultError for the results of a user's function if they cannot be pickled."""
    try:
        cloudpickle.dumps(results)
    except Exception as error:
        raise UnsentResultError(
            f"the result of function cannot be sent to another process ({shown(error, 200)}), though function has been "
            "called: return numbers, strings or arrays"
        ) from error


class Failure(NamedTuple):
    """An exception in a child process, or in a worker of any kind."""

    message: str
    traceback: str
    lane: int | None  # that an `EnvError` names, counted over all workers
    cause: bytes | None  # the exception itself, pickled, if that is possible

    @classmethod
    def of(cls, error: BaseException, first_lane: int | None = None) -> Self:
        """Pack an exception. `first_lane` is the number of the process's first lane over all workers, if it has any."""
        try:
            cause: bytes | None = cloudpickle.dumps(error)
        except Exception:
            cause = None
        named = re.match(r"lanes? \[?(\d+)", str(error)) if isinstance(error, EnvError) else None
        lane = first_lane + int(named[1]) if named and first_lane is not None else None
        return cls(f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error)), lane, cause)

    def error(self) -> BaseException | None:
        """The exception itself; None if it cannot be pickled or unpickled."""
        try:
            error = cloudpickle.loads(self.cause) if self.cause is not None else None
        except Exception:
            return None
        return error if isinstance(error, BaseException) else None


def warn_of_restart(reason: str, where: str) -> None:
    """Warn that another process takes the place of a lost one. `where` is its traceback or Python stack, if it has one.

    The number of the restart makes the text a new one: by default, Python shows a warning of the same text only once.
    """
    lines = where.rstrip().splitlines()
    if len(lines) > _MOST_LINES:
        lines[_MOST_LINES // 2 : -_MOST_LINES // 2] = ["  …"]
    restart = f"another takes its place, and its lanes begin new episodes (restart {next(_RESTARTS)} by this process)"
    warnings.warn("\n".join([f"{reason}; {restart}", *lines]), RuntimeWarning, stacklevel=3)
