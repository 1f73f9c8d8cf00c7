"""`profile`: where the time of a frame goes, beside the bare environment and the bare policy."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from funcollect.arguments import check_function, check_optional_positive, check_positive
from funcollect.collectors.collector import CollectorBase
from funcollect.collectors.multi import ProcessCollector
from funcollect.collectors.sync import RolloutTimes, SyncDataCollector, timed
from funcollect.collectors.worker_collector import WorkerCollector
from funcollect.envs.host.host_env import SimulatedEnv
from funcollect.messages import shown, table
from funcollect.protocols import Env, is_env

PARTS: tuple[str, ...] = ("environment", "policy", "environment and policy", "recording", "preparation", "delivery")
PARTS += ("hand-over", "reader", "waiting")  # in the order of a frame's way


class Timeline(NamedTuple):
    """How one process, or the mean of several, spends its time while frames are collected."""

    where: str
    parts: Mapping[str, float]  # microseconds per frame of the whole run; together they are the time of a frame


class Limit(NamedTuple):
    """The speed of the same run if it did nothing but `what`."""

    what: str
    frames_per_second: float


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Where the time of a frame goes; `str` is a table.

    >>> import funcollect as fc
    >>> env = fc.make_env("CartPole-v1", num_envs=8)
    >>> profile = fc.profile(env, fc.random_policy(env), frames=1024)
    >>> profile.frames, round(sum(profile.parts.values()) / profile.microseconds)
    (1024, 1)
    """

    subject: str  # the profiled environment, policy or collector
    loop: str  # the name of the loop that ran, as `explain` has it
    frames: int  # that were timed
    seconds: float  # that these frames took
    first_seconds: float  # of the batches before them, not counted because they may compile programs
    timelines: tuple[Timeline, ...]  # first of the processes that collect; with workers, then of the one that reads

    @property
    def frames_per_second(self) -> float:
        """The speed of the whole run."""
        return self.frames / self.seconds

    @property
    def microseconds(self) -> float:
        """The time of a frame."""
        return 1e6 * self.seconds / self.frames

    @property
    def parts(self) -> Mapping[str, float]:
        """Microseconds per frame by part, where frames are collected."""
        return self.timelines[0].parts

    @property
    def limits(self) -> tuple[Limit, ...]:
        """The speed with the bare environment, with the bare policy, and with both of them and nothing else."""
        bare = {part: self.parts[part] for part in PARTS[:3] if part in self.parts}
        bare.setdefault("environment and policy", sum(bare.values()))
        return tuple(Limit(f"bare {part}", 1e6 / value) for part, value in bare.items() if value)

    def share(self, part: str) -> float:
        """The share of the time that a part takes where frames are collected; 0 for a part that does not occur."""
        return self.parts.get(part, 0.0) / self.microseconds

    def __str__(self) -> str:
        speed = f"{self.frames:,} frames in {self.seconds:.3g} s: {self.frames_per_second:,.0f} frames/s"
        first = f"the first batches, not counted, took {self.first_seconds:.3g} s"
        texts = [f"{self.subject}, loop {self.loop}\n{speed}; {first}"]
        for where, parts in self.timelines:
            values = {**parts, "a frame": sum(parts.values())}
            rows = [(part, f"{value:.2f}", f"{value / self.microseconds:.0%}") for part, value in values.items()]
            texts.append(table([(where, "µs/frame", "share"), *rows]))
        limits = [(what, f"{self.frames_per_second / rate:.0%}", f"{rate:,.0f}") for what, rate in self.limits]
        return "\n\n".join([*texts, table([("limit", "reached", "frames/s"), *limits])])

    @property
    def advice(self) -> str:
        """Removed; AttributeError."""
        raise AttributeError("a Profile has no advice any more: compare its parts and limits")


def profile(
    target: CollectorBase | Env,
    policy: Any = None,
    *,
    frames: int = 10_000,
    length: int | None = None,
    reader: Callable[[Any], Any] | None = None,
) -> Profile:
    """Measure where the time of a frame goes. The guide to debugging explains the parts, and how they are timed.

    `target` is a collector, which continues with the same weights from where it is; or an environment, which a new
    collector runs with `policy` (as a collector takes it, None for random actions) in rollouts of `length` steps (None
    for 128). `reader` is a function that is called with each batch, such as a step of training.

    First one batch, or one of each asynchronous worker, is collected and not counted, because it may compile programs.
    Then at least `frames` frames are timed, in whole batches; with workers, in at least three.

    Raises TypeError for another target, ValueError for a policy or a length beside a collector, and ValueError if the
    collector has no batches left.

    >>> import funcollect as fc
    >>> env = fc.make_env("CartPole-v1", num_envs=8)
    >>> profile = fc.profile(env, fc.random_policy(env), frames=2_000)
    >>> profile.loop, list(profile.parts)
    ('host', ['environment', 'policy', 'recording', 'preparation', 'delivery'])
    >>> abs(sum(profile.parts.values()) - profile.microseconds) < 1e-6
    True
    """
    check_positive("frames", frames, example=10_000)
    check_optional_positive("length", length)
    if reader is not None:
        check_function("reader", reader, "a function of a batch", 1)
    if isinstance(target, CollectorBase):
        for name, value, has in (("policy", policy, "has its own"), ("length", length, "has frames_per_batch")):
            if value is not None:
                raise ValueError(f"{name} is {shown(value, 60)}, but target is a collector, which {has}: leave it out")
        return _profiled(target, frames, reader, repr(target))
    if not is_env(target):
        kind = type(target).__name__
        raise TypeError(f"target is {kind}, expected a collector or an Env: make one with funcollect.make_env")
    size = (target.num_envs or 1) * (128 if length is None else length)
    with SyncDataCollector(target, policy, frames_per_batch=size, seed=0) as collector:
        return _profiled(collector, frames, reader, f"{target!r} with {type(collector.policy).__name__}")


def _profiled(collector: CollectorBase, frames: int, reader: Callable[[Any], Any] | None, subject: str) -> Profile:
    run = collector.run if isinstance(collector, WorkerCollector) else None
    apart = 0 if run is None or run.together else len(run.workers)  # the workers that make batches of their own
    first = _read(collector, reader, batches=max(apart, 1))
    waited = collector.stats().get("reader_waited", 0.0)
    with _timed(collector) as times:  # each worker apart may have had two batches ready before
        least = 4 * apart or (1 if run is None else 3)
        collecting, reading = _read(collector, reader, frames=frames, batches=least)
    waited = collector.stats().get("reader_waited", 0.0) - waited
    if not collecting:
        what = f"{collector!r} has no batches left to time, total_frames is {collector.total_frames}"
        raise ValueError(f"{what}: build one with more, since the first batch is not counted")
    if not times:
        raise ValueError(f"{collector!r} has lost every worker meanwhile, expected one to stay: see its stats")
    count, workers = sum(one.frames for one in times), len(times)
    whole = sum(one.seconds for one in times) / workers
    sums: dict[str, float] = defaultdict(float)
    for part, spent in (item for one in times for item in one.parts.items()):
        sums["environment and policy" if part == "rollout" else part] += spent

    def timeline(where: str, parts: Mapping[str, float], read: float, rest: str) -> Timeline:
        """Count the time that is neither in `parts` nor the reader's (`read`) as the part `rest`."""
        left = max(whole - sum(parts.values()), 0.0)
        read = min(read, left)
        spent = {**parts, rest: parts.get(rest, 0.0) + left - read, **({"reader": read} if read else {})}
        return Timeline(where, {part: 1e6 * spent[part] / count for part in PARTS if part in spent})

    if isinstance(collector, SyncDataCollector):
        _divide(collector, sums, count)
        timelines = [timeline("in this process", sums, reading, "delivery")]
    elif isinstance(collector, ProcessCollector) and collector.in_process:
        timelines = [timeline(f"in this process, with {workers} workers", sums, reading, "hand-over")]
    else:
        handed = sum(min(one.busy, one.between) for one in times)
        parts = {part: spent / workers for part, spent in {**sums, "hand-over": handed}.items()}
        taken = {"hand-over": min(max(collecting - waited, 0.0), max(whole - reading, 0.0))}
        timelines = [timeline(f"in each of {workers} workers", parts, 0.0, "waiting")]
        timelines.append(timeline("in this process", taken, reading, "waiting"))
    facts: dict[str, Any] = {"subject": subject, "loop": times[0].loop, "frames": count, "seconds": whole}
    return Profile(**facts, first_seconds=sum(first), timelines=tuple(timelines))


def _read(
    collector: CollectorBase, reader: Callable[[Any], Any] | None, *, frames: int = 0, batches: int = 1
) -> tuple[float, float]:
    """Read at least so many frames and batches, or all there are; return the seconds in collector and `reader`."""
    count, collecting, reading, before = 0, 0.0, 0.0, collector.frames
    while collector.frames - before < frames or count < batches:
        began = time.perf_counter()
        batch = next(collector, None)
        if batch is None:
            break
        received = time.perf_counter()
        collecting += received - began
        if reader is not None:
            reader(batch)
            if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                torch.cuda.synchronize()  # or its work would count as that of the next batch
            reading += time.perf_counter() - received
        count += 1
    return collecting, reading


@contextmanager
def _timed(collector: CollectorBase) -> Iterator[list[RolloutTimes]]:
    """Time the rollouts in the block; after it, the yielded list has the times of this process or of each worker."""
    times: list[RolloutTimes] = []
    stop = timed(collector) if isinstance(collector, SyncDataCollector) else None
    run = collector.run if isinstance(collector, WorkerCollector) else None
    if run is not None:
        run.timers(True)
    try:
        yield times
    finally:
        if stop is not None:
            times.append(stop())
        if run is not None and not run.closed:
            times += [one for one in run.timers(False) if one.frames]


def _divide(collector: SyncDataCollector, parts: dict[str, float], frames: int) -> None:
    """Divide the time of parts that the run itself cannot separate, by timing rollouts with random actions."""
    env, length = collector.env, collector.length
    if env.backend == "jax" and (both := parts.pop("environment and policy", 0.0)):
        alone = min(frames * _bare(env, length, collector.max_frames_per_traj), both)
        parts["environment"] += alone  # added, since other loops may have run some rollouts
        parts["policy"] += both - alone
    elif isinstance(env, SimulatedEnv) and env.workers is not None:
        assert env.open_group is not None
        lane = replace(env, num_envs=1, workers=None, opener=env.open_group(0, 1), open_group=None)
        lanes, whole = env.num_envs or 1, parts["environment"]
        most = math.ceil(lanes / env.workers.num_workers)  # lanes of one worker
        parts["environment"] = min(frames / lanes * most * _bare(lane, length, None), whole)
        parts["hand-over"] = whole - parts["environment"]


def _bare(env: Env, length: int, max_frames_per_traj: int | None) -> float:
    """Return the seconds of a frame of an environment with random actions, in a loop of the same kind."""
    size = length * (env.num_envs or 1)
    with SyncDataCollector(env, None, frames_per_batch=size, max_frames_per_traj=max_frames_per_traj, seed=0) as alone:
        next(alone)  # may compile programs
        with _timed(alone) as times:
            until = time.perf_counter() + 0.3
            _read(alone, None, batches=3)
            while time.perf_counter() < until:
                next(alone)
    parts = times[0].parts
    return parts.get("environment", parts.get("rollout", 0.0)) / times[0].frames
