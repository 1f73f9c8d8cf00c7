"""Progress of a run: `track` shows a bar for its batches, and passes its numbers to loggers such as TensorBoard."""

from __future__ import annotations

import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from os import PathLike, fspath, makedirs
from typing import Any, TextIO

from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from tqdm import TqdmWarning

from funcollect.arguments import check_count, check_function, check_kind, check_positive
from funcollect.messages import shown
from funcollect.trajectories.split import MASK
from funcollect.trajectories.stats import EpisodeStats, stats_and_missing

with warnings.catch_warnings():  # without ipywidgets a notebook shows a plain bar, and tqdm warns
    warnings.simplefilter("ignore", TqdmWarning)
    from tqdm.auto import tqdm

Logger = Callable[[int, Mapping[str, float]], Any]  # called as `track` says


def track(
    batches: Iterable[TensorDict],
    *,
    window: int | EpisodeWindow = 100,
    total: int | None = None,
    disable: bool | None = None,
    file: TextIO | None = None,
    log_dir: str | PathLike[str] | None = None,
    logger: Logger | None = None,
) -> Tracked:
    """Iterate over batches, a collector's or those of a loop of your own, with a progress bar.

    The bar shows frames, frames per second (including the time between batches), episodes, and their mean return and
    length; if batches lack the keys for episodes, only frames. Frames count from the start of the run, like a
    collector's `frames`: with `trajs_per_batch` they include frames that wait for the next batch. With workers, the bar
    also shows which share of the time the reader waited for workers and workers for the reader, how many versions of
    the weights a batch is behind, and the numbers of replaced workers and copied batches. Zeros are omitted.

    A logger gets ``speed/frames_per_second`` for each batch that took new frames, and the means over the episodes that
    ended in the batch: ``episode/return`` (``episode/return/0``, … for several players) and ``episode/length``, all by
    frames. Add your own numbers with `Tracked.log`.

    Args:
        batches: a collector, or any other iterable over TensorDicts, such as a generator that calls `rollout`.
        window: the number of last episodes in the means, or an `EpisodeWindow`, which you can read during the loop.
        total: the number of frames of a full bar; by default the collector's `total_frames`.
        disable: True hides the bar, False always shows it, None shows it on a terminal or in a notebook.
        file: where to draw the bar; by default standard error.
        log_dir: the folder for TensorBoard's event files, created at once; None for no such files.
        logger: called as ``logger(frames, values)`` with the frames so far and floats by name. Its methods
            ``begin(frames)`` and ``close()``, if it has them, are called when a loop begins and ends.

    Raises ImportError if TensorBoard is not installed for `log_dir`, OSError if that cannot be created, TypeError for
    an argument or a batch of another type, and ValueError for a window below 1.

    >>> import funcollect as fc
    >>> env = fc.make_env("CartPole-v1", num_envs=2)
    >>> policy = fc.random_policy(env)
    >>> def batches(count):
    ...     state = fc.init(env, policy, seed=0)
    ...     for _ in range(count):
    ...         state, batch = fc.rollout(env, policy, state, 50)
    ...         yield batch
    >>> sum(batch.numel() for batch in track(batches(3), total=300, disable=True))
    300
    """
    if not isinstance(batches, Iterable) or isinstance(batches, (TensorDictBase, str)):
        raise TypeError(f"batches is {shown(batches)}, expected a collector, or an iterable over batches: pass one")
    if total is not None and (isinstance(total, bool) or not isinstance(total, int)):
        raise TypeError(f"total is {shown(total)}, expected an int: pass for example total=10_000")
    check_kind("disable", disable, (bool, type(None)), "pass True, False or None")
    if file is not None and not hasattr(file, "write"):
        raise TypeError(f"file is {shown(file)}, expected a text file: pass for example sys.stdout")
    if logger is not None:
        check_function("logger", logger, "a function of frames and a dict", 2)
    episodes = window if isinstance(window, EpisodeWindow) else EpisodeWindow(window)
    loggers: list[Logger] = [] if logger is None else [logger]
    if log_dir is not None:
        loggers.insert(0, TensorBoard(log_dir))
    frames = getattr(batches, "total_frames", -1) if total is None else total
    kernel = sys.modules.get("ipykernel.kernelapp")  # that it is imported is not enough: it may start kernels
    if disable is None and kernel is not None and kernel.IPKernelApp.initialized():
        disable = False  # tqdm sees no terminal in a notebook
    style: dict[str, Any] = {"unit": " frames", "unit_scale": True, "dynamic_ncols": True}
    bar = partial(tqdm, total=frames if frames > 0 else None, disable=disable, file=file, **style)
    return Tracked(batches, episodes, bar, loggers)


@dataclass(eq=False, repr=False)
class Tracked:
    """The result of `track`: iterate over it to get the batches; after a `break`, iterate again to continue the run.

    The bar and the loggers are closed whenever a loop ends, breaks or raises.
    """

    _batches: Iterable[TensorDict]
    _episodes: EpisodeWindow
    _bar: partial[Any]
    _loggers: Sequence[Logger]
    _frames: int = field(default=0, init=False)  # so far
    _looping: bool = field(default=False, init=False)

    def __iter__(self) -> Iterator[TensorDict]:
        self._frames = getattr(self._batches, "frames", self._frames)  # not 0 if the run was continued
        workers, then = shown_workers(self._batches), time.perf_counter()
        with self._opened(), self._bar(initial=self._frames) as bar:
            for batch in self._batches:
                before, frames = self._frames, self._episodes.add(batch)
                self._frames = getattr(self._batches, "frames", before + frames)  # a collector counts those of the run
                frames = self._frames - before
                bar.set_postfix(self._episodes.summary() | workers(), refresh=False)
                if bar.total is not None:
                    bar.total = max(bar.total, bar.n + frames)  # the last batch may exceed total_frames
                bar.update(frames)
                values, now = _means(self._episodes.last), time.perf_counter()
                if frames:
                    values, then = {"speed/frames_per_second": frames / (now - then), **values}, now
                for logger in self._loggers:
                    logger(self._frames, values)
                yield batch

    @contextmanager
    def _opened(self) -> Iterator[None]:
        with ExitStack() as open_now:
            for logger in self._loggers:
                getattr(logger, "begin", lambda _: None)(self._frames)
                open_now.callback(getattr(logger, "close", lambda: None))
            self._looping = True
            open_now.callback(setattr, self, "_looping", False)
            yield

    def log(self, values: Mapping[str, Any], frames: int | None = None) -> None:
        """Pass numbers to the loggers; without loggers, do nothing.

        `values` are floats, or tensors or arrays of one element, by name, such as ``{"loss/value": loss}``. They belong
        to `frames`, such as the `step` of an evaluation; inside the loop, by default to the current frame.

        Raises RuntimeError outside of the loop if `frames` is not passed, and TypeError or ValueError unless each value
        is a single number, and `frames` an int of at least 0.

        >>> import funcollect as fc
        >>> collector = fc.SyncDataCollector("CartPole-v1", frames_per_batch=100, total_frames=200, seed=0)
        >>> batches = fc.track(collector, logger=lambda frames, values: print(frames, *values), disable=True)
        >>> for batch in batches:
        ...     batches.log({"reward/mean": batch["next", "reward"].mean()})
        100 speed/frames_per_second episode/return episode/length
        100 reward/mean
        200 speed/frames_per_second episode/return episode/length
        200 reward/mean
        """
        if frames is not None:
            check_count("frames", frames)
        elif self._loggers and not self._looping:
            mend = "call it inside the loop, or say where the values belong, frames=…"
            raise RuntimeError(f"log was called outside of the loop, expected a batch in hand: {mend}")
        if not self._loggers:
            return
        check_kind("values", values, Mapping, 'pass numbers by name, such as {"loss": 0.1}')
        found = {}
        for name, value in values.items():
            try:
                found[name] = float(value.detach() if isinstance(value, Tensor) else value)
            except (TypeError, ValueError, RuntimeError) as error:
                raise ValueError(f"{name} is {shown(value)}, expected one number: give its mean, say") from error
        with nullcontext() if self._looping else self._opened():
            for logger in self._loggers:
                logger(self._frames if frames is None else frames, found)


def _means(episodes: EpisodeStats | None) -> dict[str, float]:
    """The means over the episodes that ended in a batch, under the names that loggers get."""
    if episodes is None or not len(episodes):
        return {}
    returns = episodes.returns.mean(0)
    players = {"": returns} if returns.ndim == 0 else {f"/{player}": one for player, one in enumerate(returns)}
    means = {f"episode/return{player}": float(value) for player, value in players.items()}
    return {**means, "episode/length": episodes.mean_length}


def shown_workers(collector: Any) -> Callable[[], dict[str, str]]:
    """A function that returns the bar's entries for a collector's workers, without zeros; waits count from now on."""
    workers = getattr(collector, "num_workers", 0) if hasattr(collector, "stats") else 0
    before, began = collector.stats() if workers else {}, time.monotonic()
    waits = (("reader_waited", "reader_waits", 1), ("workers_waited", "workers_wait", workers))
    counts = {"lag": "policy_lag", "restarts": "restarts", "copies": "copies"}

    def entries() -> dict[str, str]:
        if not workers:
            return {}
        stats, seconds = collector.stats(), time.monotonic() - began
        shares = {name: (stats.get(key, 0.0) - before.get(key, 0.0)) / (seconds * of) for key, name, of in waits}
        shown = {name: f"{share:.0%}" for name, share in shares.items() if share >= 0.005}
        return shown | {name: str(stats[key]) for name, key in counts.items() if stats.get(key)}

    return entries


class TensorBoard:
    """A logger that writes TensorBoard's event files into the folder `log_dir`; errors are those of `track`."""

    def __init__(self, log_dir: str | PathLike[str]) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError("log_dir needs TensorBoard, which is missing: pip install 'funcollect[viz]'") from error
        check_kind("log_dir", log_dir, (str, PathLike), "pass for example log_dir='runs/first'")
        folder = fspath(log_dir)
        self._open: Any = partial(SummaryWriter, folder)
        try:
            if "://" not in folder:  # for example a bucket, which TensorBoard writes to itself
                makedirs(folder, exist_ok=True)
        except OSError as error:
            raise OSError(f"log_dir is {folder!r}, which cannot be made ({error}): name another folder") from error

    def begin(self, frames: int) -> None:
        """Open another file after so many frames of the run; TensorBoard hides values written for later frames."""
        self._writer = self._open(purge_step=frames + 1 if frames else None)

    def __call__(self, frames: int, values: Mapping[str, float]) -> None:
        """Write numbers by name."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, frames)
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


class EpisodeWindow:
    """The means over the last `size` episodes (at least 1) of a stream of batches, and counts since its start.

    Attributes:
        frames: the number of frames so far, without the padding of split trajectories.
        episodes: the number of finished episodes so far.
        last: the statistics of the last batch; None if it lacks the keys for them, for example after a `postproc`.
    """

    def __init__(self, size: int = 100) -> None:
        check_positive("window", size, 100)
        self.frames = self.episodes = 0
        self.last: EpisodeStats | None = None
        self._returns: deque[list[float]] = deque(maxlen=size)  # [players] each
        self._lengths: deque[int] = deque(maxlen=size)

    def add(self, batch: TensorDict) -> int:
        """Add a batch and return the number of its frames; TypeError unless it is a TensorDict."""
        mend = "track batches of a collector or of rollout, and funcollect.deliver(batch, env) of funcollect.traced's"
        check_kind("batch", batch, TensorDictBase, mend)
        mask = batch.get(MASK, None)
        frames = batch.numel() if mask is None else int(mask.sum())
        self.frames += frames
        try:
            self.last, _ = stats_and_missing(batch, self.last)
        except ValueError:  # a postproc may leave any keys and shapes
            self.last = None
            return frames
        self.episodes += len(self.last)
        self._returns.extend(self.last.returns.reshape(len(self.last), -1 if len(self.last) else 1).tolist())
        self._lengths.extend(self.last.lengths.tolist())
        return frames

    @property
    def mean_returns(self) -> list[float]:
        """The mean return of the last episodes, [players]; empty before the first episode."""
        return [sum(one) / len(one) for one in zip(*self._returns, strict=True)]

    @property
    def mean_length(self) -> float:
        """The mean length of the last episodes in frames; nan before the first."""
        return sum(self._lengths) / len(self._lengths) if self._lengths else float("nan")

    def summary(self) -> dict[str, str]:
        """The entries of a progress bar; empty before the first episode."""
        if not self.episodes:
            return {}
        returns = "/".join(f"{value:.4g}" for value in self.mean_returns)
        return {"episodes": str(self.episodes), "return": returns, "length": f"{self.mean_length:.4g}"}
