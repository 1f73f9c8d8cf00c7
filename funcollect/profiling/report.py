"""The result of `profile`, and its table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from textwrap import fill

PARTS = [
    *("environment", "policy", "environment and policy", "recording", "preparation", "delivery", "hand-over"),
    *("reader", "waiting"),
]
_WIDTH = 100  # of text
_LEAST = 1e-3  # microseconds of a frame: less is not measured


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """What one process, or the mean of several, does while frames are collected.

    Attributes:
        where: the process.
        parts: microseconds per frame of the whole run; together they are the time of a frame.
    """

    where: str
    parts: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Limit:
    """What the same machine can do.

    Attributes:
        frames_per_second: as measured in the same run.
        what: what would be as fast as that.
    """

    frames_per_second: float
    what: str

    @classmethod
    def of(cls, microseconds: float, what: str, processes: int = 1) -> Limit:
        """The limit of processes that each take so long for a frame."""
        return cls(frames_per_second=1e6 * processes / max(microseconds, _LEAST), what=what)


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Where the time of a frame goes; `str` is a table.

    Attributes:
        subject: the profiled environment, policy or collector.
        loop: the name of the loop that ran, as `explain` has it.
        frames: the frames that were timed.
        seconds: the time that they took, without what timing itself cost.
        first_seconds: the time of the batches before these, which are not counted since they may compile programs.
        timelines: the parts of a frame's time where frames are collected and, with workers, where batches are read.
        limits: the rates that the same machine can reach.
        advice: one sentence, on the largest part that can be avoided.
        notes: how parts were measured, where that is not plain.

    >>> import funcollect as fc
    >>> env = fc.make_env("CartPole-v1", num_envs=8)
    >>> profile = fc.profile(env, fc.random_policy(env), frames=1024)
    >>> profile.frames, round(sum(profile.parts.values()) / profile.microseconds)
    (1024, 1)
    """

    subject: str
    loop: str
    frames: int
    seconds: float
    first_seconds: float
    timelines: tuple[Timeline, ...]
    limits: tuple[Limit, ...]
    advice: str
    notes: tuple[str, ...] = ()

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

    def share(self, part: str) -> float:
        """The share of the time that a part takes where frames are collected; 0 for one that does not occur."""
        return self.parts.get(part, 0.0) / self.microseconds

    def __str__(self) -> str:
        head = (
            f"{self.subject}, loop {self.loop}\n"
            f"{self.frames:,} frames in {self.seconds:.3g} s: {self.frames_per_second:,.0f} frames/s; the first "
            f"batches, not counted, took {self.first_seconds:.3g} s"
        )
        limits = [("limit", "reached", "frames/s")]
        for limit in self.limits:
            rate = limit.frames_per_second
            limits.append((limit.what, f"{self.frames_per_second / rate:.0%}", f"{rate:,.0f}"))
        tables = [*map(self._rows, self.timelines), limits]
        texts = [fill(text, _WIDTH) for text in (*self.notes, f"advice: {self.advice}")]
        return "\n\n".join([head, *map(_table, tables), *texts])

    def _rows(self, timeline: Timeline) -> list[tuple[str, str, str]]:
        """The table of a timeline: its parts, and their sum."""
        values = {part: timeline.parts[part] for part in ordered(timeline.parts)}
        values["a frame"] = sum(values.values())
        rows = [(part, f"{value:.2f}", f"{value / self.microseconds:.0%}") for part, value in values.items()]
        return [(timeline.where, "µs/frame", "share"), *rows]


def ordered(parts: Mapping[str, float]) -> list[str]:
    """The names of parts in the order of a frame's way."""
    return sorted(parts, key=lambda part: (PARTS.index(part) if part in PARTS else len(PARTS), part))


def _table(rows: Sequence[Sequence[str]]) -> str:
    """The rows as lines of text: the first column is aligned on the left, the others on the right."""
    first, *others = ([*column] for column in zip(*rows, strict=True))
    wide, *widths = (max(map(len, column)) for column in (first, *others))
    lines = []
    for name, *cells in rows:
        lines.append("  ".join([name.ljust(wide), *map(str.rjust, cells, widths)]))
    return "\n".join(lines)
