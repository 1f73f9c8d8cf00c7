"""JAX and Torch on one device: rates beside loops by hand, pointers across the bridges, waits of the host, memory.

Environments and policies run on every route that they have, beside a `lax.scan` or a Torch loop written by hand with
the same dynamics, network and columns. `set-up` is the time to build and reset, `compile` the first run less the
second. `--only` takes parts of names with commas between them; `goals` are the parts that the goals need, `rest` are
the others. `--platform cpu` is the same code with fewer lanes.
"""

from __future__ import annotations

import faulthandler
import time
import traceback
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from benchmarks.gpu import arms, bridges, cells, machine
from benchmarks.gpu.built import NO_TIME, Builder
from benchmarks.gpu.measures import memory, profiles
from benchmarks.harness.runner import Options, Result


class Part(NamedTuple):
    """A part of the benchmark."""

    group: str
    share: float  # of the time that is left for its group
    run: Callable[[Builder, Options, float], Iterator[Result]]  # until a deadline (monotonic)


def _rates(group: str, share: float, name: str) -> Part:
    return Part(group, share, partial(cells.rates, name))


# In the order of what is needed most. Brax compiles slowest, so it comes last in its group.
PARTS = {
    **{name: _rates("goals", 2, name) for name in cells.GOALS if name != "ant"},
    "memory": Part("goals", 2, memory.result),
    "ant": _rates("goals", 4, "ant"),
    **{name: Part("rest", 6, partial(arms.rates, name)) for name in arms.SAME_SIZE},
    "profiles": Part("rest", 5, profiles.result),
    **{name: _rates("rest", 1, name) for name in cells.CROSSING},
    "bridges": Part("rest", 1, bridges.result),
    **{name: _rates("rest", 3 if name == "inverted pendulum" else 2, name) for name in cells.OTHERS},
}
LATE = 15.0  # seconds after which a run is late; `run.sh` kills it a little later
GROUPS = ("goals", "rest")
USES = {"profiles": cells.PROFILED} | {arm: (cell,) for arm, cell in arms.SAME_SIZE.items()}  # contestants of cells


def results(options: Options) -> Iterator[Result]:
    """Run every part, and yield its result as it grows; the finished one has a table.

    The other parts run after a failure, and then the process ends with an error. Parts for which there is no time are
    listed at the end.
    """
    end = time.monotonic() + options.seconds
    faulthandler.dump_traceback_later(options.seconds + LATE, exit=False)  # shows where a run is that is killed soon
    machine.choose(options.platform)
    yield machine.result(options.platform)
    todo = {name: part for name, part in PARTS.items() if is_chosen(name, options.only)}
    builder = Builder()
    failed, gaps = [], {}
    try:
        while todo:
            name, part = next(iter(todo.items()))
            now = time.monotonic()
            left = sum(each.share for each in todo.values() if each.group == part.group)
            del todo[name]
            if now > end:
                gaps[name] = [NO_TIME]
                continue
            for result in _tried(name, part, builder, options, now + (end - now) * part.share / left):
                yield result
            failed += [name] if result.data.get("error") or result.data.get("errors") else []
            gaps |= {name: found} if (found := [*result.data.get("gaps", ())]) else {}
            builder.close(kept=partial(_is_needed, needed=[*todo], platform=options.platform))
    finally:
        builder.close()
        faulthandler.cancel_dump_traceback_later()
    lines = [f"{name}: {', '.join(missing)}" for name, missing in gaps.items()]
    yield Result(name="gaps", table="\n".join(["not measured:", *(lines or ["nothing"])]), data=gaps)
    if failed:
        raise SystemExit(f"failed, at least in part: {', '.join(failed)}")


def is_chosen(name: str, only: str) -> bool:
    """Whether `--only` names a part: its group, or a piece of its name, among others between commas."""
    return any(each == PARTS[name].group or (each in name and each not in GROUPS) for each in only.split(","))


def _is_needed(key: Hashable, needed: Sequence[str], platform: str) -> bool:
    """Whether a part that is still to come uses the contestant of this key."""
    names = {cell for name in needed for cell in USES.get(name, (name,))}
    return any(key[0] == cells.CELLS[name].size(platform) for name in names & cells.CELLS.keys())  # type: ignore[index]


def _tried(name: str, part: Part, builder: Builder, options: Options, deadline: float) -> Iterator[Result]:
    """The part's results without tables, which are saved in case that the process is killed, then the last one."""
    start = time.monotonic()
    result = Result(name=name, table=name, data={})
    try:
        for result in part.run(builder, options, deadline):
            yield replace(result, table="")
    except Exception:
        error = traceback.format_exc()
        result = replace(result, table=f"{result.table}\n{error}", data={**result.data, "error": error})
    after = {"memory_bytes_afterwards": machine.memory(), "seconds_of_this_part": time.monotonic() - start}
    yield replace(result, data={**result.data, **after})
