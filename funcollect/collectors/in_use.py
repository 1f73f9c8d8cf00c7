"""Lets one call at a time use a collector, or the thread that fills a buffer from it."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from functools import wraps
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

from tensordict import TensorDictBase

from funcollect.errors import ClosedError

_Method = TypeVar("_Method", bound=Callable[..., Any])


def exclusive(method: _Method, *, closed_too: bool = False) -> _Method:
    """Refuse calls of a method while another exclusive one of the object runs; unless `closed_too`, after its end."""

    @wraps(method)
    def call(self: InUse, /, *args: Any, **kwargs: Any) -> Any:
        if self._in_use:
            self._refuse()
        self._in_use = True  # threads switch and signals arrive only at calls, so not since the check above
        try:
            if not closed_too:
                self._check_ready()
            return method(self, *args, **kwargs)
        finally:
            self._in_use = False

    return cast("_Method", call)


def check_extends(name: str, buffer: Any) -> None:
    """Raise TypeError for an object without a method `extend`."""
    if not callable(getattr(buffer, "extend", None)):
        what = f"{name} is {type(buffer).__name__}, expected an object with a method extend(batch)"
        raise TypeError(f"{what}: pass a replay buffer, or a list")


class _Filler:
    """A thread that gives every batch to `extend`. Between two batches it does not keep the collector alive."""

    def __init__(self, collector: InUse, extend: Callable[[Any], object] | None) -> None:
        self._collector, self._extend = weakref.ref(collector), extend  # None if the collector itself extends a buffer
        self.going, self.one_batch = threading.Event(), threading.Lock()  # the thread holds it for one batch
        self.going.set()
        self._stopped = False
        self.paused_in: threading.Thread | None = None
        self.error: BaseException | None = None  # the one that ended the thread, until it is raised
        self.failure: BaseException | None = None  # the same, for good
        self._ended = threading.Event()
        self.thread = threading.Thread(target=self._run, name="funcollect filler", daemon=True)

    def _run(self) -> None:
        try:
            while self.going.wait() and self._fill():
                pass
        except BaseException as error:
            if not self._stopped:
                self.error = self.failure = error
                what = f"the buffer is no longer filled, {type(error).__name__}: {error}"
                warnings.warn(f"{what}; the next call of the collector raises this", RuntimeWarning, stacklevel=2)
        finally:
            self.going.clear()
            self._ended.set()

    @property
    def alive(self) -> bool:
        """Whether the thread was started, and has not ended."""
        return self.thread.ident is not None and not self._ended.is_set()

    def join(self) -> None:
        """Wait for the end. Before Python 3.13, a thread whose `join` was interrupted counts as ended."""
        if self.alive:
            self._ended.wait()
        self.thread.join()

    def _fill(self) -> bool:
        """Add a batch, unless paused meanwhile; return False if the thread has to end."""
        with self.one_batch:
            if self._stopped or (collector := self._collector()) is None:
                return False
            if self.going.is_set():
                try:
                    batch = next(collector)
                except StopIteration:
                    return False
                unwritten = collector._unwritten
                del collector
                if self._extend is not None:
                    unwritten.append(batch)  # if `extend` raises, the next call of the collector returns it
                    self._extend(batch)
                    unwritten.clear()
        return True

    def stop(self) -> None:
        """Begin no other batch, and ignore the collector's exceptions from now on."""
        self._stopped = True
        self.resume()

    def resume(self) -> None:
        """Continue after a pause."""
        self.paused_in = None
        self.going.set()


class InUse(Iterator[TensorDictBase]):
    """Base class of collectors: their `exclusive` methods exclude each other, and a thread may fill a buffer."""

    _in_use = _closed = False
    _filler: _Filler | None = None
    if TYPE_CHECKING:
        replay_buffer: Any
        _unwritten: list[TensorDictBase]

    def _check_open(self) -> None:
        """Raise the exception that ended the thread, if there is one, or ClosedError."""
        self._check_filler()
        if self._closed:
            raise ClosedError(f"{self!r} was shut down: build another collector")

    def _check_ready(self) -> None:
        """Raise an error if no exclusive method may be called now."""
        self._check_open()
        if self._filler is None or (filler := self._other_filler) is None:
            return
        if filler.alive and filler.going.is_set():
            raise RuntimeError("the collector fills a buffer: call pause() before")

    def _refuse(self) -> NoReturn:
        """Raise RuntimeError, since a call of an exclusive method has not returned."""
        self._check_ready()
        what = "the collector is in use by a call that has not returned"
        mend = "let a signal handler or a callback only set a flag, to act on between two batches"
        raise RuntimeError(f"{what}: use it in one thread at a time, and {mend}")

    def start(self, buffer: Any = None) -> None:
        """Fill a buffer in a thread, ``buffer.extend(batch)``, until the run ends or the collector is shut down.

        Without an argument it is the collector's `replay_buffer`. Meanwhile weights may be updated and `stats` read;
        everything else needs `pause`. An exception in the thread is a RuntimeWarning at once, and is raised by the next
        call of the collector, `shutdown` included. TypeError for a buffer without a method `extend`, or none at all;
        RuntimeError if one is being filled already.

        >>> import funcollect as fc
        >>> batches, collector = [], fc.SyncDataCollector("CartPole-v1", frames_per_batch=50, total_frames=100)
        >>> collector.start(batches)
        >>> collector.join()
        >>> sum(rows.numel() for rows in batches)
        100
        """
        self._check_open()
        if self._filler is not None and self._filler.alive:
            raise RuntimeError("the collector fills a buffer already: shut it down before another start")
        if (buffer is None) == (self.replay_buffer is None):
            got = "no buffer" if buffer is None else "a buffer, and the collector a replay_buffer"
            mend = "pass it to start, or to the collector as replay_buffer"
            raise TypeError(f"start has {got}, expected one to fill: {mend}")
        if buffer is not None:
            check_extends("buffer", buffer)
        self._filler = _Filler(self, None if buffer is None else buffer.extend)
        self._filler.thread.start()

    def pause(self) -> AbstractContextManager[object]:
        """Block until the batch under way is in the buffer; no other one is added until `resume`.

        Meanwhile every other method may be called. ``with collector.pause():`` resumes at the end of the block.
        RuntimeError if `start` was not called, or in the thread that fills the buffer.
        """
        filler = self._filling()
        if self._other_filler is None:
            raise RuntimeError("the thread that fills the buffer cannot wait for itself: pause in another one")
        with ExitStack() as resuming:  # also if Ctrl-C ends the wait
            if filler.going.is_set():
                resuming.callback(filler.resume)
            filler.going.clear()
            filler.paused_in = threading.current_thread()
            with filler.one_batch:
                self._check_open()
            return resuming.pop_all()

    def resume(self) -> None:
        """Continue to fill the buffer after `pause`."""
        self._check_open()
        self._filling().resume()

    def join(self) -> None:
        """Wait until the run that `start` began has ended; an exception in its thread is raised, by each call.

        RuntimeError in the thread that has called `pause`.
        """
        filler = self._filling()
        if filler.paused_in is threading.current_thread() and filler.alive:
            raise RuntimeError("the thread that fills the buffer is paused and would not end: call resume() before")
        filler.join()
        self._check_filler()
        if filler.failure is not None:
            raise filler.failure

    def _filling(self) -> _Filler:
        if self._filler is None:
            raise RuntimeError("no buffer is being filled: call start(buffer) before")
        return self._filler

    @property
    def _other_filler(self) -> _Filler | None:
        """The filler, if there is one, unless it calls this in its own thread."""
        filler = self._filler
        return None if filler is None or filler.thread is threading.current_thread() else filler

    def _check_filler(self) -> None:
        """Raise the exception that ended the thread that fills a buffer, once."""
        if self._filler is not None and (filler := self._other_filler) and (error := filler.error):
            filler.error = None
            raise error
