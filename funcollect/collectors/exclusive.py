"""Lets one call at a time use a collector."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, NoReturn, ParamSpec, TypeVar

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_Self = TypeVar("_Self", bound="InUse")


class InUse:
    """Base class of objects whose `exclusive` methods exclude each other, in one thread and between threads."""

    _in_use = False

    def _refuse(self) -> NoReturn:
        """Raise RuntimeError, since an exclusive method is being called that has not returned."""
        raise RuntimeError(
            "the collector is in use by a call that has not returned: use it in one thread at a time, and let a signal "
            "handler or a callback only set a flag, to act on between two batches"
        )


def exclusive(
    method: Callable[Concatenate[_Self, _Arguments], _Result],
) -> Callable[Concatenate[_Self, _Arguments], _Result]:
    """A method that is refused while another exclusive one of the same object is being called."""

    @wraps(method)
    def call(self: _Self, /, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        if self._in_use:
            self._refuse()
        self._in_use = True  # Python changes threads and handles signals at calls, so neither before this nor after it
        try:
            return method(self, *args, **kwargs)
        finally:
            self._in_use = False

    return call
