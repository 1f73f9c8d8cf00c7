"""Profiles a collector whose frames are collected by workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from funcollect.collectors.multi import MultiSyncDataCollector, ProcessCollector
from funcollect.collectors.ray_collector import RayCollector
from funcollect.collectors.runner_timer import RolloutTimes
from funcollect.collectors.worker_collector import WorkerCollector
from funcollect.collectors.workers.gathering import SyncGathering
from funcollect.core.timing.timed_loops import COMPILED
from funcollect.envs.host.lane_workers.advice import cores_here
from funcollect.profiling.advice import FEW_STEPS, Finding, advise, nothing_to_gain
from funcollect.profiling.reading import Reader, Reading, check_read, read
from funcollect.profiling.report import Limit, Profile, Timeline

_BATCHES = 3  # that are timed, at least
_AHEAD = 4  # of each worker whose batches are delivered as they arrive, since two may have been ready before
_FEW_LANES = 4  # of a worker, below which a call of the policy is for few


def profile_workers(collector: WorkerCollector, frames: int, reader: Reader | None) -> Profile:
    """Do what `profile` does for this kind of collector."""
    run = collector.run
    together = isinstance(run.gathering, SyncGathering)
    first = read(collector, reader, batches=1 if together else len(run.workers))
    before = collector.stats()
    run.start_timers()
    try:
        done = read(collector, reader, frames=frames, batches=_BATCHES if together else _AHEAD * len(run.workers))
    except BaseException:
        if not run.closed:
            run.stop_timers()
        raise
    after = collector.stats()
    times = [each for each in run.stop_timers() if each.frames]
    check_read(done, collector)
    if not times:
        raise ValueError(f"{collector!r} has lost every worker meanwhile, expected one to stay: see its stats")
    counts = {name: after[name] - before[name] for name in ("reader_waited", "copies")}
    measured = _WorkerTimes(collector, times, done, counts)
    return Profile(
        subject=repr(collector),
        loop=times[0].loop,
        frames=measured.frames,
        seconds=measured.seconds,
        first_seconds=first.collector + first.reader,
        timelines=measured.timelines,
        limits=(measured.limit(),),
        advice=advise(measured.findings(), measured.total, measured.otherwise()),
        notes=tuple(measured.notes()),
    )


class _WorkerTimes:
    """Times of workers and of this process, and what follows from them.

    Attributes:
        frames: that the workers have collected.
        seconds: the time in which they have.
        total: microseconds of a frame.
        timelines: those of the workers and of this process; one of both if the workers are in this process.
    """

    def __init__(
        self, collector: WorkerCollector, times: list[RolloutTimes], done: Reading, counts: Mapping[str, float]
    ) -> None:
        self._collector, self._times, self._counts = collector, times, counts
        self._workers, self._compiled = len(times), times[0].loop in COMPILED
        self._cores = self._workers if isinstance(collector, RayCollector) else cores_here()
        self.frames = sum(each.frames for each in times)
        self.seconds = sum(each.seconds for each in times) / self._workers
        self.total = self._per_frame(self.seconds)
        self._reader = self._per_frame(min(done.reader, self.seconds))
        here = isinstance(collector, ProcessCollector) and collector.in_process
        self.timelines = (self._one_after_another(),) if here else (self._in_workers(), self._in_reader(done))

    def _per_frame(self, seconds: float) -> float:
        return 1e6 * seconds / self.frames

    def _sums(self) -> dict[str, float]:
        """The parts of rollouts, summed over the workers."""
        sums = Counter[str]()
        for each in self._times:
            sums.update({part: self._per_frame(seconds) for part, seconds in each.parts.items()})
        if "rollout" in sums:
            sums["environment and policy"] = sums.pop("rollout")
        return dict(sums)

    def _in_workers(self) -> Timeline:
        """The mean of the workers. Between rollouts they use a processor to hand one over, and otherwise wait."""
        parts = {part: value / self._workers for part, value in self._sums().items()}
        busy = sum(min(each.busy, each.between) for each in self._times) / self._workers
        parts["hand-over"] = self._per_frame(busy)
        parts["waiting"] = max(self.total - sum(parts.values()), 0.0)
        return Timeline(where=f"in each of {self._workers} workers", parts=parts)

    def _in_reader(self, done: Reading) -> Timeline:
        """This process: it waits for workers, takes batches, and works on them."""
        handed = self._per_frame(max(done.collector - self._counts["reader_waited"], 0.0))
        parts = {"reader": self._reader, "hand-over": min(handed, self.total - self._reader)}
        parts["waiting"] = self.total - sum(parts.values())
        return Timeline(where="in this process", parts={name: value for name, value in parts.items() if value})

    def _one_after_another(self) -> Timeline:
        """Workers that run in this process, and its other work."""
        parts = self._sums() | ({"reader": self._reader} if self._reader else {})
        parts["hand-over"] = max(self.total - sum(parts.values()), 0.0)
        return Timeline(where=f"in this process, with {self._workers} workers", parts=parts)

    def limit(self) -> Limit:
        """What the machine could do if no worker ever waited."""
        sums = self._sums()
        both = sum(sums.get(part, 0.0) for part in ("environment", "policy", "environment and policy"))
        number = max(self._workers, self._cores)
        what = f"environment and policy without anything else, in {number} processes that never wait"
        return Limit.of(both, what, number)

    def notes(self) -> Iterator[str]:
        """How parts were measured, where that is not plain."""
        yield "Frames are those that the workers have collected; in each process the parts add up to the same time."
        if self._compiled:
            yield (
                "Environment and policy are one compiled program, in which nothing can be timed: to tell them apart, "
                "profile the functions, fc.profile(env, policy)."
            )
        if self._workers > self._cores:
            yield f"{self._workers} workers share {self._cores} processors, so their parts hold the time of others."
        if copies := self._counts["copies"]:
            yield f"{copies:.0f} batches were copied, since the reader keeps them: copy or store what you keep."

    def findings(self) -> Iterator[Finding]:
        """What could be changed."""
        parts, collector = self.timelines[0].parts, self._collector
        waiting = parts.get("waiting", 0.0)
        if self._begins_when_asked and self._reader:
            yield Finding(
                min(self._reader, self.total - self._reader),
                f"the workers wait while the reader works, {self._reader / self.total:.0%} of the time: prefetch=True "
                "lets them collect the next batch meanwhile",
            )
        elif self._begins_when_asked:
            yield Finding(
                0.7 * waiting,
                f"the workers wait {waiting / self.total:.0%} of the time, for each other and for the next batch to "
                "begin: take prefetch=True or a larger frames_per_batch",
            )
        reader_waits = self.timelines[-1].parts.get("waiting", 0.0)
        if self._workers < self._cores and len(self.timelines) > 1:
            yield Finding(
                min(reader_waits, self.total * (1 - self._workers / self._cores)),
                f"the reader waits for {self._workers} workers on {self._cores} processors, "
                f"{reader_waits / self.total:.0%} of the time: num_workers={self._cores}",
            )
        batch = sum(parts.get(part, 0.0) for part in ("preparation", "delivery", "hand-over"))
        if (length := collector.run.info.length) < FEW_STEPS:
            yield Finding(
                batch * (1 - length / FEW_STEPS),
                f"preparing, delivering and handing over batches of {length} steps takes {batch / self.total:.0%} of "
                "the time: take a larger frames_per_batch",
            )
        lanes = collector.run.info.num_envs or 1
        if not self._compiled and lanes <= _FEW_LANES:
            yield Finding(
                parts["policy"] / 2,
                f"each worker calls the policy for {lanes} environments, {parts['policy'] / self.total:.0%} of the "
                "time: more of them in each worker (num_envs) share a call",
            )

    @property
    def _begins_when_asked(self) -> bool:
        """Whether the next batch is begun when it is asked for."""
        collector = self._collector
        ahead = isinstance(collector, MultiSyncDataCollector | RayCollector) and collector.prefetch
        return isinstance(collector.run.gathering, SyncGathering) and not ahead and len(self.timelines) > 1

    def otherwise(self) -> str:
        """The advice if nothing can be avoided."""
        parts = self.timelines[0].parts
        waiting = parts.get("waiting", 0.0) / self.total
        if self._reader > self.total / 2 and waiting > 1 / self._workers:
            return (
                f"the reader takes {self._reader / self.total:.0%} of the time and is slower than the workers, which "
                f"wait {waiting:.0%} of it: fewer workers would do"
            )
        busy = {part: value for part, value in parts.items() if part != "waiting"}
        return nothing_to_gain(busy, self.total, "only more processors, or another environment or policy, help")
