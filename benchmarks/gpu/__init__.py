"""JAX and Torch on one device: rates beside loops by hand, pointers across the bridges, waits of the host, memory.

Each of the four pairs of environment and policy runs on every route that it has, beside a `lax.scan` or a Torch loop
written by hand with the same dynamics, network and columns. `set-up` is the time to build and reset, `compile` the
first run less the second. `--platform cpu` is the same code with fewer lanes.
"""

from __future__ import annotations

import faulthandler
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from benchmarks.gpu import arms, bridges, machine, timeline, timing, waits
from benchmarks.gpu.pairs import GYMNAX_CARTPOLE, PIXELS, TORCH_CARTPOLE, TORCH_PENDULUM, Size, contestants
from benchmarks.harness.runner import Options, Result

BLOCK = {"cuda": 0.5, "cpu": 0.1}  # seconds that a contestant has per round
SIZES = {
    "cartpole few": {"cuda": Size(GYMNAX_CARTPOLE, 2**11, 256), "cpu": Size(GYMNAX_CARTPOLE, 32, 16)},
    "cartpole many": {"cuda": Size(GYMNAX_CARTPOLE, 2**16, 64), "cpu": Size(GYMNAX_CARTPOLE, 256, 16)},
    "cartpole torch": {"cuda": Size(TORCH_CARTPOLE, 2**16, 64), "cpu": Size(TORCH_CARTPOLE, 256, 16)},
    "pendulum torch": {"cuda": Size(TORCH_PENDULUM, 2**14, 64), "cpu": Size(TORCH_PENDULUM, 64, 16)},
    **{
        f"cartpole 2^{power}": {
            "cuda": Size(GYMNAX_CARTPOLE, 2**power, 64),
            "cpu": Size(GYMNAX_CARTPOLE, 2 ** (power - 8), 16),
        }
        for power in (10, 14, 18)
    },
    "breakout": {"cuda": Size("gymnax/Breakout-MinAtar", 2**14, 64), "cpu": Size("gymnax/Breakout-MinAtar", 16, 8)},
    "pixels": {"cuda": Size(PIXELS, 1024, 32), "cpu": Size(PIXELS, 2, 4)},
    "brax": {"cuda": Size("brax/ant", 4096, 32), "cpu": Size("brax/inverted_pendulum", 4, 4)},
    "brax small": {"cuda": Size("brax/inverted_pendulum", 4096, 32), "cpu": Size("brax/inverted_pendulum", 4, 4)},
}

Part = Callable[[Options, float], Result]  # the argument is the deadline (monotonic)


def rates(name: str, options: Options, deadline: float) -> Result:
    """Frames per second of every contestant of one cell."""
    size = SIZES[name][options.platform]
    timings = timing.measure(
        contestants(*size, options.platform),
        rounds=options.rounds,
        block_seconds=BLOCK[options.platform] * options.scale,
        deadline=deadline,
    )
    return timing.result(name, f"{size.env_id}: {size.lanes:,} lanes, {size.length} steps per batch", timings)


def arm_rates(name: str, options: Options, deadline: float) -> Result:
    """Frames per second of every way to build the fused loop."""
    return arms.rates(name, options, deadline, BLOCK[options.platform] * options.scale)


PARTS: dict[str, tuple[float, Part]] = {  # each with its share of the time; the one that compiles slowest is last
    "bridges": (1, bridges.result),
    "cartpole few": (2, partial(rates, "cartpole few")),
    "cartpole torch": (2, partial(rates, "cartpole torch")),
    "pendulum torch": (1, partial(rates, "pendulum torch")),
    "arms few": (2, partial(arm_rates, "arms few")),
    "arms many": (2, partial(arm_rates, "arms many")),
    "waits": (3, waits.result),
    "timeline": (2, timeline.result),
    "cartpole many": (2, partial(rates, "cartpole many")),
    **{f"cartpole 2^{power}": (1, partial(rates, f"cartpole 2^{power}")) for power in (10, 14, 18)},
    "breakout": (2, partial(rates, "breakout")),
    "pixels": (2, partial(rates, "pixels")),
    "brax small": (2, partial(rates, "brax small")),
    "brax": (4, partial(rates, "brax")),
}


def results(options: Options) -> Iterator[Result]:
    """Run every part. After a failure the others still run, and the process ends with an error."""
    end = time.monotonic() + options.seconds
    faulthandler.dump_traceback_later(options.seconds, exit=False)  # shows the progress of a run that is killed
    machine.choose(options.platform)
    yield machine.result(options.platform)
    parts = {name: part for name, part in PARTS.items() if options.only in name}
    shares = sum(share for share, _ in parts.values())
    failed = []
    for name, (share, part) in parts.items():
        now = time.monotonic()
        result = _tried(name, part, options, now + (end - now) * share / shares)
        shares -= share
        failed += [name] if result.data.get("error") or result.data.get("errors") else []
        yield result
    faulthandler.cancel_dump_traceback_later()
    if failed:
        raise SystemExit(f"failed, at least in part: {', '.join(failed)}")


def _tried(name: str, part: Part, options: Options, deadline: float) -> Result:
    start = time.monotonic()
    try:
        result = part(options, deadline)
    except Exception:
        error = traceback.format_exc()
        result = Result(name=name, table=f"{name}\n{error}", data={"error": error})
    after = {"memory_bytes_afterwards": machine.memory(), "seconds_of_this_part": time.monotonic() - start}
    return replace(result, data={**result.data, **after})
