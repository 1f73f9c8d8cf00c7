"""How much of each test is run, and what tests over Ray need.

FUNCOLLECT_SCALE is 1 for `make test`, which proves every promise once, 2 for an evening (`make test-all`), and 10 for
the full counts (`make soak`). A test marked `evening` is left out at 1; other tests have further cases or counts above.
"""

import itertools
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]  # of the repository; programs that tests start find `tests` and `funcollect` there
SCALE = int(os.environ.get("FUNCOLLECT_SCALE", "1"))

# JAX warns of forks once it has been used. Ray's forks become other programs at once.
FORKS_OF_RAY = pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
# Tests that end workers of collectors on purpose: each replacement warns.
LOSES_WORKERS = pytest.mark.filterwarnings("ignore:worker .* another takes its place:RuntimeWarning")
AN_EVENING_OVER_RAY = (pytest.mark.ray, pytest.mark.evening)  # for a case that asks for the cluster as it runs
RAY = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "RAY_memory_usage_threshold": "0.99"}
RAY |= {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}  # else it warns where CUDA_VISIBLE_DEVICES is empty
RAY |= {"RAY_prestart_worker_first_driver": "0"}  # else each cluster starts eight Python processes for later use
RAY |= {"RAY_worker_niceness": "0"}  # the default of 15 starves actors while other tests run
# However slow the machine is, Ray starts.
_WAITS = ("worker_register_timeout_seconds", "gcs_server_port_wait_time_s", "gcs_server_request_timeout_seconds")
RAY |= {f"RAY_{name}": "3600" for name in _WAITS}
STORE = 300 << 20  # bytes of Ray's object store


def in_soak(cases):
    """Further cases of what `make test` has tested: for an evening."""
    return list(cases) if SCALE > 1 else []


def scaled(count):
    """A count for CI times FUNCOLLECT_SCALE: 1 in CI, 10 for the full counts."""
    return count * SCALE


def once(*choices):
    """Rows with a value of each of `choices`, in which every value occurs; in an evening all rows."""
    choices = [[*values] for values in choices]
    if SCALE > 1:
        return [*itertools.product(*choices)]
    return [tuple(values[n % len(values)] for values in choices) for n in range(max(map(len, choices)))]


def pairwise(*choices):
    """Rows with a value of each of `choices`, in which every pair of values occurs; in an evening all rows."""
    rows = [*itertools.product(*([*enumerate(values)] for values in choices))]
    pairs = [{*itertools.combinations([(place, n) for place, (n, _) in enumerate(row)], 2)} for row in rows]
    left, chosen = set().union(*pairs), [*range(len(rows))] if SCALE > 1 else []
    while left and SCALE == 1:
        chosen.append(max(range(len(rows)), key=lambda row: len(pairs[row] & left)))
        left -= pairs[chosen[-1]]
    return [tuple(value for _, value in rows[row]) for row in chosen]


def entered(call, *arguments):
    """The names of the Python functions that a call enters."""
    names = []
    sys.setprofile(lambda frame, event, _: event == "call" and names.append(frame.f_code.co_qualname))
    try:
        call(*arguments)
    finally:
        sys.setprofile(None)
    return names
