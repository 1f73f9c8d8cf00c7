"""Protects steps that must be completed or not begun from Ctrl-C."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, ClassVar


class Uninterrupted:
    """A block that Ctrl-C does not interrupt: the signal is handled at the end of the block.

    Ctrl-C interrupts only the main thread, so the block does nothing in other threads, nor inside another one.
    """

    __slots__ = ("_handler", "_interrupted_at")
    _outermost: ClassVar[Uninterrupted | None] = None  # the block that the main thread is in

    def __enter__(self) -> None:
        self._interrupted_at: FrameType | None = None  # the frame in which the signal arrived
        self._handler: Callable[[int, FrameType | None], Any] | None = None
        if Uninterrupted._outermost is not None or threading.current_thread() is not threading.main_thread():
            return
        handler = signal.getsignal(signal.SIGINT)
        if callable(handler):
            self._handler = handler
            signal.signal(signal.SIGINT, self._note)
            Uninterrupted._outermost = self

    def _note(self, _: int, frame: FrameType | None) -> None:
        """Record that Ctrl-C was pressed; this is the signal handler inside the block."""
        self._interrupted_at = frame

    def __exit__(self, *_: object) -> None:
        if self._handler is None:
            return
        Uninterrupted._outermost = None
        signal.signal(signal.SIGINT, self._handler)
        if self._interrupted_at is not None:
            self._handler(signal.SIGINT, self._interrupted_at)
