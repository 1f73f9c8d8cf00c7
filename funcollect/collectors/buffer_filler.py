"""Fills a buffer from a collector in a thread, while the caller does something else."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from typing import Any


class BufferFiller:
    """Calls ``buffer.extend(batch)`` for every batch, in a thread.

    The thread refers to the collector only while it waits for a batch, so that a collector without other references
    is freed.
    """

    def __init__(self, collector: Iterator[Any], buffer: Any) -> None:
        if not callable(getattr(buffer, "extend", None)):
            raise TypeError(
                f"buffer is {type(buffer).__name__}, expected an object with a method extend(batch): pass a replay "
                "buffer, or a list"
            )
        self._collector = weakref.ref(collector)
        self._extend = buffer.extend
        self._condition = threading.Condition()
        self._paused = self._resting = self._stopped = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="funcollect filler", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while self._may_go_on():
                collector = self._collector()
                if collector is None:
                    return
                batch = next(collector)
                del collector
                self._extend(batch)
                del batch  # its memory should not be held while the next one is collected
        except StopIteration:
            pass
        except BaseException as error:
            self._error = None if self._stopped else error
        finally:
            with self._condition:
                self._resting = True
                self._condition.notify_all()

    def _may_go_on(self) -> bool:
        """Wait while paused; False once the thread has to end."""
        with self._condition:
            while self._paused and not self._stopped:
                self._resting = True
                self._condition.notify_all()
                self._condition.wait()
            self._resting = False
            return not self._stopped

    @property
    def at_work(self) -> bool:
        """Whether the buffer is being filled now."""
        return self._thread.is_alive() and not self._resting

    @property
    def own(self) -> bool:
        """Whether the calling thread is the one that fills the buffer."""
        return threading.current_thread() is self._thread

    def pause(self) -> None:
        """Block until the batch under way is in the buffer; no other one is begun."""
        with self._condition:
            self._paused = True
            while not self._resting:
                self._condition.wait()

    def resume(self) -> None:
        """Continue after `pause`."""
        with self._condition:
            self._paused = False
            self._resting = not self._thread.is_alive()
            self._condition.notify_all()

    def stop(self) -> None:
        """Begin no other batch, and ignore the collector's exceptions from now on."""
        with self._condition:
            self._stopped = True
            self._condition.notify_all()

    def join(self) -> None:
        """Wait for the thread's end."""
        self._thread.join()

    def raise_error(self) -> None:
        """Raise the exception that ended the thread, once."""
        error, self._error = self._error, None
        if error is not None:
            raise error
