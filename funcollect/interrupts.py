"""Protects steps that must be completed or not begun from Ctrl-C."""

from __future__ import annotations

# `signal` looks for each handler in an enum, which takes longer than most blocks.
import _signal  # type: ignore[import-not-found]
import threading
from types import FrameType
from typing import Any, ClassVar


class Uninterrupted:
    """A block at whose end Ctrl-C is handled, in the main thread, which alone it interrupts; blocks may be nested."""

    __slots__ = ("_handler", "_interrupted_at")
    _outermost: ClassVar[Uninterrupted | None] = None  # the block that the main thread is in

    def __enter__(self) -> None:
        self._interrupted_at: FrameType | None = None  # the frame in which the signal arrived
        self._handler: Any = None
        outermost = Uninterrupted._outermost is None and threading.current_thread() is threading.main_thread()
        if outermost and callable(handler := _signal.getsignal(_signal.SIGINT)):
            self._handler = handler
            _signal.signal(_signal.SIGINT, self._note)
            Uninterrupted._outermost = self

    def _note(self, _: int, frame: FrameType | None) -> None:
        self._interrupted_at = frame

    def __exit__(self, *_: object) -> None:
        if self._handler is None:
            return
        Uninterrupted._outermost = None
        _signal.signal(_signal.SIGINT, self._handler)
        if self._interrupted_at is not None:
            self._handler(_signal.SIGINT, self._interrupted_at)
