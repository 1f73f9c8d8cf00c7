"""Who uses a collector: one call at a time, or the thread that fills a buffer from it."""

from __future__ import annotations

import contextlib
import threading
import warnings
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any, Concatenate, NoReturn, ParamSpec, TypeVar

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
            if not self._stopped:
                self._error = error
                warnings.warn(
                    f"the buffer is no longer filled, {type(error).__name__}: {error}; the next call of the collector "
                    "raises this",
                    RuntimeWarning,
                    stacklevel=2,
                )
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

    def pause(self) -> contextlib.ExitStack:
        """Block until the batch under way is in the buffer; no other one is begun.

        The end of a block ``with`` what is returned resumes, unless the filler was paused before.
        """
        resuming = contextlib.ExitStack()
        with self._condition:
            if not self._paused:
                resuming.callback(self.resume)
            self._paused = True
            while not self._resting:
                self._condition.wait()
        return resuming

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


class FillsBuffer(Iterator[Any]):
    """The methods with which a collector fills a buffer from a thread."""

    _filler: BufferFiller | None = None

    @abstractmethod
    def _check_open(self) -> None:
        """Raise the exception that ended the thread, if there is one, or ClosedError."""

    def start(self, buffer: Any) -> None:
        """Fill a buffer in a thread, ``buffer.extend(batch)``, until the run ends or the collector is shut down.

        Meanwhile weights may be updated and `stats` read; everything else needs `pause`. An exception in the thread is
        a RuntimeWarning at once, and is raised by the next call of the collector, `shutdown` included.

        Args:
            buffer: a replay buffer, or any object with a method `extend`.

        Raises:
            TypeError: for a buffer without that method.
            RuntimeError: if a buffer is being filled already.

        >>> import funcollect as fc
        >>> batches = []
        >>> collector = fc.MultiaSyncDataCollector(
        ...     ["CartPole-v1"] * 2, None, frames_per_batch=50, total_frames=100, in_process=True
        ... )
        >>> collector.start(batches)
        >>> collector.join()
        >>> sum(rows.numel() for rows in batches)
        100
        """
        self._check_open()
        if self._filler is not None and self._filler.at_work:
            raise RuntimeError("the collector fills a buffer already: shut it down before another start")
        self._filler = BufferFiller(self, buffer)

    def pause(self) -> AbstractContextManager[object]:
        """Block until the batch under way is in the buffer; no other one is added until `resume`.

        Meanwhile every other method may be called. ``with collector.pause():`` resumes at the end of the block.

        Raises:
            RuntimeError: if `start` was not called.
        """
        resuming = self._filling().pause()
        self._check_open()
        return resuming

    def resume(self) -> None:
        """Continue to fill the buffer after `pause`."""
        self._check_open()
        self._filling().resume()

    def join(self) -> None:
        """Wait until the run that `start` began has ended; an exception in its thread is raised."""
        self._filling().join()
        self._filling().raise_error()

    def _filling(self) -> BufferFiller:
        """The filler that `start` has made; RuntimeError if there is none."""
        if self._filler is None:
            raise RuntimeError("no buffer is being filled: call start(buffer) before")
        return self._filler

    def _is_filling(self) -> bool:
        """Whether another thread than the calling one fills a buffer now."""
        return self._filler is not None and self._filler.at_work and not self._filler.own

    @contextlib.contextmanager
    def _filler_ended(self) -> Iterator[None]:
        """After the block, the thread has ended, unless it is the calling one; errors of the block are not its own."""
        filler = self._filler if self._filler is not None and not self._filler.own else None
        if filler is not None:
            filler.stop()
        yield
        if filler is not None:
            filler.join()

    def _check_filler(self) -> None:
        """Raise the exception that ended the thread that fills a buffer, once."""
        if self._filler is not None and not self._filler.own:
            self._filler.raise_error()
