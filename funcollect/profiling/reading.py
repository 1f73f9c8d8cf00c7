"""Reads batches of a collector as a training loop does, and times that."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from funcollect.collectors.collector import CollectorBase

Reader = Callable[[Any], Any]


@dataclass
class Reading:
    """What the process that reads batches has done, in seconds.

    Attributes:
        frames: delivered.
        batches: their number.
        collector: the time in the collector.
        reader: the time in the user's function.
    """

    frames: int = 0
    batches: int = 0
    collector: float = 0.0
    reader: float = 0.0


def read(collector: CollectorBase, reader: Reader | None, *, frames: int = 0, batches: int = 1) -> Reading:
    """Read at least so many frames and batches, or all that are left, and pass each batch to `reader`."""
    done, before = Reading(), collector.frames
    while done.frames < frames or done.batches < batches:
        began = time.perf_counter()
        batch = next(collector, None)
        if batch is None:
            break
        given = time.perf_counter()
        done.collector += given - began
        if reader is not None:
            reader(batch)
            if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                torch.cuda.synchronize()  # or its work would count as that of the next batch
            done.reader += time.perf_counter() - given
        done.batches += 1
        done.frames = collector.frames - before
    return done


def check_read(done: Reading, collector: CollectorBase) -> None:
    """Raise ValueError if no batch was left to be timed."""
    if not done.batches:
        raise ValueError(
            f"{collector!r} has no batches left to time, total_frames is {collector.total_frames}: build one with "
            "more, since the first batch is not counted"
        )
