"""How often the host waits for the GPU in a rollout of T steps, and how often per further step.

Torch warns of its own waits (`torch.cuda.set_sync_debug_mode`), with the line of Python that caused each. An implicit
copy of JAX to the host is an error (`jax.transfer_guard_device_to_host`). JAX's profiler records calls of the CUDA
driver, by both frameworks, and copies to the host, such as those of a loop's condition. Two lengths separate waits per
step from waits per rollout, among which is the one that ends each run here.
"""

from __future__ import annotations

import re
import tempfile
import time
import warnings
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import jax
import torch

from benchmarks.gpu.pairs import GYMNAX_CARTPOLE, TORCH_CARTPOLE, contestants
from benchmarks.gpu.timing import with_errors
from benchmarks.harness.report import table
from benchmarks.harness.runner import Contestant, Factory, Options, Result

LANES, CPU_LANES, LENGTH = 2048, 32, 32
ROOT = Path(__file__).parents[2]
CALL = re.compile(r"cu(da)?[A-Z]\w*|Memcpy\w*")  # of the driver or the runtime, or a copy on the device
WAIT = re.compile(r"\w*Synchronize\w*|cu(da)?MemcpyD(to|2)H(_v\d+)?")  # an asynchronous copy does not wait
COPY = re.compile(r"MemcpyD(to|2)H\w*")

Counts = Counter[str]


def result(options: Options, deadline: float) -> Result:
    """Waits of every route and every loop by hand over both CartPoles, as far as there is time."""
    counted: dict[str, Any] = {}
    errors: dict[str, str] = {}
    device = options.platform
    lanes = LANES if device == "cuda" else CPU_LANES
    for env_id in (GYMNAX_CARTPOLE, TORCH_CARTPOLE):
        short, long = (contestants(env_id, lanes, length, device) for length in (LENGTH, 2 * LENGTH))
        for name in short:
            label = f"{env_id}: {name}"
            if time.monotonic() > deadline:
                errors[label] = f"{label}: no time was left"
                continue
            facts = with_errors(errors, label, partial(_both, short[name], long[name], device))
            counted |= {} if facts is None else {label: facts}
    rows = [
        (name, *map(_cell, facts["per_rollout"].values(), facts["per_step"].values()))
        for name, facts in counted.items()
    ]
    table_ = table((f"{LENGTH} steps (and per step)", "Torch warns", "driver waits", "copies to host"), rows)
    note = "  not applicable on a CPU" if device == "cpu" else ""
    data = {"applicable": device == "cuda", "length": LENGTH, "lanes": lanes, "counts": counted, "errors": errors}
    return Result(name="waits", table="\n".join([table_, note, *errors.values()]), data=data)


def _both(short: Factory, long: Factory, device: str) -> dict[str, Any]:
    one, two = waits(short(), device), waits(long(), device)
    totals = [
        {kind: counts.total() for kind, counts in each.items() if kind not in ("calls", "guarded")}
        for each in (one, two)
    ]
    per_step = {kind: (totals[1][kind] - totals[0][kind]) / LENGTH for kind in totals[0]}
    return {"per_rollout": totals[0], "per_step": per_step, "where": {kind: dict(each) for kind, each in one.items()}}


def waits(contestant: Contestant, device: str) -> dict[str, Counts]:
    """The waits of one run, after two that compile: by line of Python, by call of the driver, and all calls."""
    try:
        for _ in range(2):
            contestant.run()
        warned = torch_waits(contestant) if device == "cuda" else Counter()
        calls = cuda_calls(contestant)
        guarded = guard(contestant)
    finally:
        contestant.close()
    return {
        "warned": warned,
        "waited": Counter({name: count for name, count in calls.items() if WAIT.fullmatch(name)}),
        "copied": Counter({name: count for name, count in calls.items() if COPY.fullmatch(name)}),
        "calls": calls,
        "guarded": guarded,
    }


def guard(contestant: Contestant) -> Counts:
    """JAX's error for the first implicit copy to the host; empty if a run makes none."""
    try:
        with jax.transfer_guard_device_to_host("disallow"):
            contestant.run()
    except Exception as error:
        return Counter([str(error).splitlines()[0]])
    return Counter()


def torch_waits(contestant: Contestant) -> Counts:
    """How often Torch warned of a wait, by the line that called it."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            contestant.run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    found = [each for each in seen if "synchronizing CUDA operation" in str(each.message)]
    return Counter(f"{_short(each.filename)}:{each.lineno}" for each in found)


def cuda_calls(contestant: Contestant) -> Counts:
    """How often each call of the CUDA driver was made in one run, and each kind of copy."""
    counts: Counts = Counter()
    for plane in profiled(contestant):
        counts.update(event.name for line in plane.lines for event in line.events if CALL.fullmatch(event.name))
    if not counts and jax.default_backend() == "gpu":
        raise RuntimeError("the profiler recorded no call of the CUDA driver: CUPTI may be missing or in use")
    return counts


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


def _cell(total: int, per_step: float) -> str:
    return f"{total} ({per_step:.2f})"
