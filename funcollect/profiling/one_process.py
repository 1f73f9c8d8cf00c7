"""Profiles a collector that collects in this process."""

from __future__ import annotations

from funcollect.collectors.runner_timer import RunnerTimer
from funcollect.collectors.sync import SyncDataCollector
from funcollect.profiling.advice import advise
from funcollect.profiling.local_advice import findings, otherwise
from funcollect.profiling.local_run import LocalRun
from funcollect.profiling.reading import Reader, check_read, read
from funcollect.profiling.report import Profile, Timeline


def profile_here(collector: SyncDataCollector, frames: int, reader: Reader | None, subject: str) -> Profile:
    """Do what `profile` does for this kind of collector."""
    first = read(collector, reader)
    timer = RunnerTimer(collector)
    try:
        done = read(collector, reader, frames=frames)
    finally:
        times = timer.stop()
    check_read(done, collector)
    run = LocalRun(collector, times, done)
    return Profile(
        subject=subject,
        loop=times.loop,
        frames=times.frames,
        seconds=times.seconds,
        first_seconds=first.collector + first.reader,
        timelines=(Timeline(where="in this process", parts=run.parts),),
        limits=tuple(run.limits()),
        advice=advise(findings(run), run.total, otherwise(run)),
        notes=tuple(run.notes()),
    )
