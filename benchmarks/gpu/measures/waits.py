"""How often the host waits for the GPU in one rollout.

Torch warns of its own waits (`torch.cuda.set_sync_debug_mode`), with the line of Python that caused each. An implicit
copy of JAX to the host is an error (`jax.transfer_guard_device_to_host`). JAX's profiler records calls of the CUDA
driver, by both frameworks, and copies to the host, such as those of a loop's condition. A loop that waits at each step
shows at least one wait per step; the one that ends each run here is among them.
"""

from __future__ import annotations

import re
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import torch

from benchmarks.harness.runner import Contestant

ROOT = Path(__file__).parents[3]
CALL = re.compile(r"cu(da)?[A-Z]\w*|Memcpy\w*")  # of the driver or the runtime, or a copy on the device
WAIT = re.compile(r"\w*Synchronize\w*|cu(da)?MemcpyD(to|2)H(_v\d+)?")  # an asynchronous copy does not wait
COPY = re.compile(r"MemcpyD(to|2)H\w*")

Counts = Counter[str]


def guarded(contestant: Contestant) -> str:
    """JAX's error for the first implicit copy to the host, with the line that made it; empty if a run makes none."""
    try:
        with jax.transfer_guard_device_to_host("disallow"):
            contestant.run()
    except Exception as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if ".venv" not in frame.filename]
        inner = next((each for each in reversed(frames) if Path(each.filename).is_relative_to(ROOT)), frames[-1])
        return f"{_short(inner.filename)}:{inner.lineno}: {str(error).splitlines()[0]}"
    return ""


def torch_waits(contestant: Contestant) -> Counts:
    """How often Torch warned of a wait in a run, by the line that called it."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            contestant.run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    found = [each for each in seen if "synchronizing CUDA operation" in str(each.message)]
    return Counter(f"{_short(each.filename)}:{each.lineno}" for each in found)


def cuda_calls(planes: Iterable[Any]) -> Counts:
    """How often each call of the CUDA driver was made, and each kind of copy."""
    events = (event for plane in planes for line in plane.lines for event in line.events)
    return Counter(event.name for event in events if CALL.fullmatch(event.name))


def chosen(calls: Counts, pattern: re.Pattern[str]) -> Counts:
    """The calls whose names match."""
    return Counter({name: count for name, count in calls.items() if pattern.fullmatch(name)})


def profiled(contestant: Contestant) -> list[Any]:
    """What JAX's profiler recorded of one run: a plane for each device, and for the host."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            contestant.run()
        files = [str(path) for path in Path(folder).rglob("*.xplane.pb")]
        return [plane for path in files for plane in jax.profiler.ProfileData.from_file(path).planes]


def _short(filename: str) -> str:
    path = Path(filename)
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else "/".join(path.parts[-3:])
