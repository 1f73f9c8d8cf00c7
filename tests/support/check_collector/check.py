"""The checks of `check_collector`, and what runs them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from funcollect.arguments import check_positive
from funcollect.testing.report import Check, Report, run_checks
from tests.support.check_collector import collector_checks, collector_life
from tests.support.check_collector.collecting import CollectorTrial

CHECKS: tuple[Check[CollectorTrial], ...] = (
    collector_checks.layout,
    collector_checks.counted,
    collector_checks.trajectories,
    collector_checks.total_frames,
    collector_checks.broken_off,
    collector_checks.seeds,
    collector_checks.batch_memory,
    collector_life.weights,
    collector_life.checkpoint,
    collector_life.exception,
    collector_life.postproc,
    collector_life.context,
    collector_life.shutdown,
)


def check_collector(
    make_collector: Callable[..., Any], *, batches: int = 3, lanes: int = 0, run_seed: int = 0, **kwargs: Any
) -> Report:
    """Run every check that a collector has to pass.

    Args:
        make_collector: the class, or a function that builds one. The checks build many, and give it ``seed``,
            ``total_frames``, ``postproc``, ``split_trajs`` and, to see an exception, another ``create_env_fn`` and
            ``policy``; those that need what it does not take do not apply. Each call builds a collector of its own.
        batches: how many batches a run has, at least; at least 2.
        lanes: the lanes that a run of asynchronous workers has to show before it ends.
        run_seed: of the runs, given as ``seed``.
        **kwargs: for `make_collector`; without `reset_when_done` and `split_trajs`.

    Returns:
        What was checked; `print` gives one line for each check.

    Raises:
        CheckError: at the first check that fails, with the place, what was expected, what was got, and the mend.

    >>> import funcollect as fc
    >>> report = check_collector(fc.SyncDataCollector, create_env_fn="CartPole-v1", frames_per_batch=40)
    >>> "checkpoint" in report.passed
    True
    """
    check_positive("batches", batches)
    trial = CollectorTrial(make=make_collector, kwargs=kwargs, batches=max(2, batches), lanes=lanes, seed=run_seed)
    name = getattr(make_collector, "__name__", type(make_collector).__name__)
    return run_checks(name, CHECKS, trial)
