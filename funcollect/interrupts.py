"""Ctrl-C in the midst of what has to be done wholly or not at all."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


class Uninterrupted:
    """A block that Ctrl-C does not break off: it is heard when the block has ended.

    Only the main thread is interrupted by Ctrl-C, so the block means nothing in others.

    >>> try:
    ...     with Uninterrupted():
    ...         signal.raise_signal(signal.SIGINT)
    ...         print("to the end")
    ... except KeyboardInterrupt:
    ...     print("and heard")
    to the end
    and heard
    """

    __slots__ = ("_came", "_handler")

    def __enter__(self) -> None:
        self._came: FrameType | None = None
        self._handler: Callable[[int, FrameType | None], Any] | None = None
        if threading.current_thread() is not threading.main_thread():
            return
        handler = signal.getsignal(signal.SIGINT)
        inside_another = isinstance(getattr(handler, "__self__", None), Uninterrupted)
        if callable(handler) and not inside_another:
            self._handler = handler
            signal.signal(signal.SIGINT, self._hear)

    def _hear(self, _: int, frame: FrameType | None) -> None:
        self._came = frame

    def __exit__(self, *_: object) -> None:
        if self._handler is None:
            return
        signal.signal(signal.SIGINT, self._handler)
        if self._came is not None:
            self._handler(signal.SIGINT, self._came)
