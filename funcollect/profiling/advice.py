"""One sentence of advice: the largest part of a frame's time that can be avoided."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

FEW_STEPS = 128  # per batch; below this, the work done once per batch may dominate
_WORTH = 0.1  # the share of a frame's time from which on advice is given


class Finding(NamedTuple):
    """Something that could be changed."""

    saved: float  # about as many microseconds of a frame
    text: str


def advise(findings: Iterable[Finding], total: float, otherwise: str) -> str:
    """The finding that saves most of the `total` microseconds of a frame, or `otherwise` if none saves much."""
    most = max(findings, key=lambda finding: finding.saved, default=Finding(0.0, otherwise))
    return most.text if most.saved >= _WORTH * total else otherwise


def nothing_to_gain(parts: Mapping[str, float], total: float, remedy: str) -> str:
    """The sentence for a run in which nothing can be avoided."""
    part = max(parts, key=lambda name: parts[name])
    if part == "reader":
        return f"the reader takes {parts[part] / total:.0%} of the time, and collecting little: only a faster one helps"
    return f"the largest part is the {part}, {parts[part] / total:.0%} of the time, and no setting avoids it: {remedy}"
